"""Show full parameters in the module tree for a while, and take changes of them into the shards."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

import torch
import torch.distributed as dist
from torch import nn

from megatron_fsdp.buffer.flat_buffer import full_view
from megatron_fsdp.buffer.real_values import address_of
from megatron_fsdp.errors import ConfigurationError, ScheduleError
from megatron_fsdp.runtime.agreement import agree_over
from megatron_fsdp.runtime.engine import Engine
from megatron_fsdp.runtime.inspect import gather_buffer
from megatron_fsdp.runtime.match_ranks import differing_tensors
from megatron_fsdp.runtime.observer import Phase
from megatron_fsdp.runtime.schedule import ROOT
from megatron_fsdp.unit.param_group import ParameterGroup
from megatron_fsdp.unit.tensor_parallel import local_part
from megatron_fsdp.unit.unit import Unit

_Copies = dict[int, list[list[nn.Parameter]]]
"""For each unit by index, for each of its groups, one full parameter per parameter."""


@contextmanager
def shown_in_full(engine: Engine, units: Sequence[Unit], writeback: bool, compute_dtype: bool) -> Iterator[None]:
    """Let the modules of some units hold full, plain copies of their main weights. Collective.

    Args:
        engine: Of the model.
        units: Whose parameters.
        writeback: Take what the copies hold at the end into main and compute weights. Every rank has to hold the same.
        compute_dtype: Copies in the dtype the model computes in, cast from the main weights; else in the main dtype.

    Raises:
        ScheduleError: A forward or a backward is under way, or some unit shows its copies already.
        ConfigurationError: Copies in another dtype cannot be taken back; a copy was replaced, or ranks wrote
            different values (nothing is taken in then).
    """
    _check(engine, units, writeback, compute_dtype)
    with engine.observers.during(Phase.WHOLE, ROOT):
        copies: _Copies = {unit.index: [_copies_of(group, compute_dtype) for group in unit.groups] for unit in units}
    try:
        for unit in units:
            unit.install_copies(copies[unit.index])
            engine.opened.add(unit.index)
        yield
    except Exception as error:
        if writeback:
            # So that ranks that go on hear of it instead of waiting.
            with suppress(ConfigurationError), engine.observers.during(Phase.AGREE, ROOT):
                agree_over(engine.reaching_all, error)
        raise
    else:
        if writeback:
            _take_in(engine, units, copies)
    finally:
        for unit in units:
            engine.opened.discard(unit.index)
            unit.install_sharded()


def _check(engine: Engine, units: Sequence[Unit], writeback: bool, compute_dtype: bool) -> None:
    if engine.scheduler.in_forward or engine.scheduler.in_backward:
        raise ScheduleError(
            "full_parameters_context was entered inside a forward or backward (or after one that failed); enter it "
            "between steps, and call reset() on the model after an exception"
        )
    open_already = [unit.label for unit in units if unit.index in engine.opened]
    if open_already:
        raise ScheduleError(
            f"unit {open_already[0]} shows its full parameters already; leave that full_parameters_context first"
        )
    if writeback and compute_dtype:
        raise ConfigurationError(
            "writeback=True with compute_dtype=True would round main weights to the compute dtype; leave one out"
        )


def _copies_of(group: ParameterGroup, compute_dtype: bool) -> list[nn.Parameter]:
    """Views of one new buffer. They take no gradient: it would go nowhere."""
    main = group.weights.main
    full = gather_buffer(group, main)
    if compute_dtype:
        full = full.to(group.plan.precision.compute)
    if address_of(full) == address_of(main.local):
        full = full.clone()
    copies = []
    for index, param in enumerate(group.full):
        view, part = full_view(group.plan.layout, full, index).detach(), group.plan.parts[index]
        copy = nn.Parameter(view if part is None else part.wrap(view), requires_grad=False)
        copy.__dict__.update(param.__dict__)
        copies.append(copy)
    return copies


def _take_in(engine: Engine, units: Sequence[Unit], copies: _Copies) -> None:
    problem = None
    try:
        _check_copies(units, copies)
    except ConfigurationError as error:
        problem = error
    with engine.observers.during(Phase.AGREE, ROOT):
        agree_over(engine.reaching_all, problem)
        _compare(engine, units, copies)
    with torch.no_grad():
        for unit in units:
            for group, params in zip(unit.groups, copies[unit.index], strict=True):
                for index, param in enumerate(params):
                    group.weights.main.store(index, local_part(param))
    engine.install_main_weights()


def _check_copies(units: Sequence[Unit], copies: _Copies) -> None:
    for unit in units:
        for position, group in enumerate(unit.groups):
            for index, copy in enumerate(copies[unit.index][position]):
                shape = group.plan.layout.shapes[index]
                if not unit.holds_copy(position, index, copy) or tuple(local_part(copy).shape) != shape:
                    raise ConfigurationError(
                        f"{group.names[index]} was replaced inside full_parameters_context, or its shape {shape} was "
                        "changed; write into it instead, by copy_() or an init function"
                    )


def _compare(engine: Engine, units: Sequence[Unit], copies: _Copies) -> None:
    """Refuse values that differ between ranks, each of which would keep its own part of them."""
    named: dict[dist.ProcessGroup, dict[str, torch.Tensor]] = {}
    devices: dict[dist.ProcessGroup, torch.device] = {}
    for unit in units:
        for group, params in zip(unit.groups, copies[unit.index], strict=True):
            ranks = engine.domain_of(group).group
            if ranks is None:
                continue
            devices[ranks] = group.plan.device
            tensors = named.setdefault(ranks, {})
            parts = {name: local_part(p.detach()) for name, p in zip(group.names, params, strict=True)}
            tensors.update({name: part for name, part in parts.items() if part.numel()})
    for ranks, tensors in named.items():
        differing = differing_tensors(tensors, ranks, devices[ranks]) if tensors else ()
        if differing:
            raise ConfigurationError(
                f"ranks wrote different values into {len(differing)} parameters (first: {differing[0]}) inside "
                "full_parameters_context, so nothing was taken in; write the same on every rank (seed them alike, or "
                "broadcast first)"
            )
