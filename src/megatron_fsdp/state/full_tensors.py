"""Full tensors: copies of all of them, shown in modules, or one after another with bounded memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import groupby

import torch
import torch.distributed as dist
from torch import nn

from megatron_fsdp.comm.agreement import Groups, all_agree, raise_together
from megatron_fsdp.comm.collectives import address_of, broadcast
from megatron_fsdp.comm.fingerprint import differing_tensors
from megatron_fsdp.dtensor.shard_spec import local_tensor
from megatron_fsdp.engine.engine import Engine
from megatron_fsdp.engine.memory import full_view, on_device
from megatron_fsdp.engine.observer import Phase
from megatron_fsdp.engine.param_group import ParameterGroup
from megatron_fsdp.engine.unit import Unit
from megatron_fsdp.errors import ConfigurationError, MegatronFSDPError, ScheduleError
from megatron_fsdp.sharding.placement import Placement
from megatron_fsdp.sharding.units import ROOT_UNIT
from megatron_fsdp.state.gathers import Entry, cut_into_buckets, gather, parts_of
from megatron_fsdp.state.statistics import calling_together


def full_parameters(engine: Engine) -> dict[str, torch.Tensor]:
    """All-gather main weights by canonical name; copies, in their main dtype, the same on every rank. Collective."""
    with all_agree("full_parameters", calling_together(engine)):
        found = {name: full.clone() for name, full in iter_parameters(engine, DEFAULT_BUCKET_BYTES)}
    return {name: found[name] for group in engine.groups() for name in group.names}


def full_gradients(engine: Engine) -> dict[str, torch.Tensor | None]:
    """All-gather the gradient of every trainable parameter by canonical name; None if it is None. Collective."""
    trainable = (name for group, _ in engine.groups_with_gradients() for name in group.names)
    found: dict[str, torch.Tensor | None] = dict.fromkeys(trainable)
    with all_agree("full_gradients", calling_together(engine)):
        found.update((name, full.clone()) for name, full in iter_gradients(engine, DEFAULT_BUCKET_BYTES))
    return found


def _whole_main_weights(group: ParameterGroup, ranks: Groups) -> torch.Tensor:
    """Return the main weights of a group (numel,): gathered if sharded, else the local tensor.

    Ranks agree that each has memory before they gather.
    """
    local = group.weights.main.local
    for axis, placement in zip(group.plan.axes, group.plan.placements.main_weight, strict=True):
        if placement is Placement.SHARD and axis.num_ranks > 1:  # outermost first: it was cut last
            with all_agree("allocating full tensors", ranks):
                full = torch.empty(axis.num_ranks * local.numel(), dtype=local.dtype, device=local.device)
            axis.all_gather(full, local, async_op=False)
            local = full
    return local


_Copies = dict[int, list[list[nn.Parameter]]]
"""Full parameters by index of the unit, then by group, then by parameter."""


@contextmanager
def shown_in_full(engine: Engine, module: nn.Module | None, writeback: bool, compute_dtype: bool) -> Iterator[None]:
    """Put full, plain copies of the main weights of some units into their modules. Collective.

    Arguments and errors are those of `full_parameters_context`.
    """
    with all_agree("full_parameters_context", engine.reaching_all) as facts:
        inside = None if module is None else set(module.modules())
        units = [unit for unit in engine.units if inside is None or not inside.isdisjoint(unit.owning_modules())]
        if not units:
            raise ConfigurationError(
                f"a {type(module).__name__} owns no parameter of this model; give one of its modules, or None for all"
            )
        _check(engine, units, writeback, compute_dtype)
        facts |= {"units": ", ".join(unit.label for unit in units), "writeback": str(writeback)}
        facts["compute_dtype"] = str(compute_dtype)
    if compute_dtype:
        engine.refresh_weights()  # weight formats round by the amaxes of the weights as they were last installed
    with engine.observers.during(Phase.WHOLE, ROOT_UNIT), all_agree("full_parameters_context", engine.reaching_all):
        copies: _Copies = {
            unit.index: [_copies_of(group, engine.reaching_all, compute_dtype) for group in unit.groups]
            for unit in units
        }
    try:
        for unit in units:
            unit.show_copies(copies[unit.index])
            engine.units_in_full_context.add(unit.index)
        yield
    except BaseException as error:
        if writeback and not isinstance(error, GeneratorExit):
            # Tell the ranks that go on, which would wait otherwise.
            with suppress(MegatronFSDPError), engine.observers.during(Phase.AGREE, ROOT_UNIT):
                raise_together(error, "full_parameters_context", engine.reaching_all)
        raise
    else:
        if writeback:
            engine.refuse_open_iteration("full_parameters_context was left")
            _take_in(engine, units, copies)
    finally:
        for unit in units:
            engine.units_in_full_context.discard(unit.index)
            unit.to_sharded()


def broadcast_whole_weights(engine: Engine) -> None:
    """Broadcast main weights that every rank holds whole from the first rank. Collective."""
    for group in engine.groups():
        for axis, placement in zip(group.plan.axes, group.plan.placements.main_weight, strict=True):
            if axis.group is not None and placement is not Placement.SHARD:
                with engine.observers.during(Phase.WHOLE, ROOT_UNIT):
                    # Offloaded weights go through the device: NCCL sends nothing else.
                    whole = on_device(group.weights.main.local, engine.device)
                    broadcast(whole, axis.group)
                    if whole is not group.weights.main.local:
                        group.weights.main.local.copy_(whole)
    engine.install_main_weights()


def check_between_steps(engine: Engine, what: str) -> None:
    """Raise a ScheduleError inside a forward or backward, and while an iteration over full tensors is open."""
    engine.refuse_open_iteration(what)
    if engine.scheduler.in_forward or engine.scheduler.in_backward:
        raise ScheduleError(
            f"{what} inside a forward or backward (or after one that failed); do so between steps, and call "
            f"{engine.remedies.reset} after an exception"
        )


def _check(engine: Engine, units: Sequence[Unit], writeback: bool, compute_dtype: bool) -> None:
    check_between_steps(engine, "full_parameters_context was entered")
    open_already = [unit.label for unit in units if unit.index in engine.units_in_full_context]
    if open_already:
        raise ScheduleError(
            f"unit {open_already[0]} shows its full parameters already; leave that full_parameters_context first"
        )
    if writeback and compute_dtype:
        raise ConfigurationError(
            "writeback=True with compute_dtype=True would round main weights to the compute dtype; leave one out"
        )


def _copies_of(group: ParameterGroup, ranks: Groups, compute_dtype: bool) -> list[nn.Parameter]:
    """Copy a group's weights: views of one new buffer, which take no gradient, since it would be lost."""
    full = _whole_main_weights(group, ranks)
    if compute_dtype:
        full = group.weights.as_computed(full)
    if address_of(full) == address_of(group.weights.main.local):
        full = full.clone()
    copies = []
    for index, param in enumerate(group.full):
        view, part = full_view(group.plan.layout, full, index).detach(), group.plan.parts[index]
        copy = nn.Parameter(view if part is None else part.wrap(view), requires_grad=False)
        copy.__dict__.update(param.__dict__)
        del copy.set_  # a copy takes whatever it is given
        copies.append(copy)
    return copies


def _take_in(engine: Engine, units: Sequence[Unit], copies: _Copies) -> None:
    with engine.observers.during(Phase.AGREE, ROOT_UNIT):
        with all_agree("writing back full parameters", engine.reaching_all):
            _check_copies(units, copies)
        _compare(engine, units, copies)
    with torch.no_grad():
        for group, params in _of_groups(units, copies):
            for index, param in enumerate(params):
                group.weights.main.store(index, local_tensor(param))
    engine.install_main_weights()


def _of_groups(units: Sequence[Unit], copies: _Copies) -> Iterator[tuple[ParameterGroup, list[nn.Parameter]]]:
    for unit in units:
        yield from zip(unit.groups, copies[unit.index], strict=True)


def _check_copies(units: Sequence[Unit], copies: _Copies) -> None:
    for unit in units:
        for group_index, group in enumerate(unit.groups):
            for index, copy in enumerate(copies[unit.index][group_index]):
                shape = group.plan.layout.shapes[index]
                held = [owner.parameters.get(owner.attribute) for owner in unit.owners[group_index][index]]
                if any(each is not copy for each in held) or tuple(local_tensor(copy).shape) != shape:
                    raise ConfigurationError(
                        f"{group.names[index]} was replaced inside full_parameters_context, or its shape {shape} was "
                        "changed; write into it instead, by copy_() or an init function"
                    )


def _compare(engine: Engine, units: Sequence[Unit], copies: _Copies) -> None:
    """Raise if values differ between ranks, each of which would keep its own shard of them."""
    named: dict[dist.ProcessGroup, dict[str, torch.Tensor]] = {}
    for group, params in _of_groups(units, copies):
        ranks = group.plan.rank_mesh.group
        if ranks is not None:
            parts = zip(group.names, (local_tensor(param.detach()) for param in params), strict=True)
            named.setdefault(ranks, {}).update((name, part) for name, part in parts if part.numel())
    for ranks, tensors in named.items():
        differing = differing_tensors(tensors, ranks, engine.device) if tensors else ()
        if differing:
            raise ConfigurationError(
                f"ranks wrote different values into {len(differing)} parameters (first: {differing[0]}) inside "
                "full_parameters_context, so nothing was taken in; write the same on every rank (seed them alike, or "
                "broadcast first)"
            )


DEFAULT_BUCKET_BYTES = 2**28

_Named = tuple[str, torch.Tensor]


def iter_parameters(engine: Engine, bucket_bytes: int) -> Iterator[tuple[str, torch.Tensor]]:
    """Iterate over full main weights, in their main dtype, by canonical name."""
    with open_iteration(engine, "iter_full_tensors"):
        entries = _entries(engine, lambda group, index: group.sharded[index])
        yield from _watched(engine, _stream(engine, entries, bucket_bytes))


def iter_gradients(engine: Engine, bucket_bytes: int) -> Iterator[tuple[str, torch.Tensor]]:
    """Iterate over the full gradients of trainable parameters, by canonical name, without those that are None."""
    with open_iteration(engine, "iter_full_tensors"):
        found = {id(group): group.grads() for group in engine.groups()}
        entries = _entries(engine, lambda group, index: found[id(group)][index])
        # Ranks need the same tensors: for one that a rank lacks, the others would wait.
        engine.compare_facts((entry.group, entry.name, entry.shard.dtype) for entry in entries)
        yield from _watched(engine, _stream(engine, entries, bucket_bytes))


@contextmanager
def open_iteration(engine: Engine, what: str) -> Iterator[None]:
    """Keep the engine from changing the tensors, and from other collectives, until a generator ends."""
    check_between_steps(engine, "full tensors were asked for")
    engine.open_iteration = what
    try:
        yield
    finally:
        engine.open_iteration = ""


def _entries(engine: Engine, tensor_of: Callable[[ParameterGroup, int], torch.Tensor | None]) -> list[Entry]:
    """List all tensors, group after group, in the order of the flat buffers."""
    return [
        Entry(group, index, tensor, parts_of(group, index), local_tensor(tensor)._version)
        for group in engine.groups()
        for index in sorted(range(len(group.names)), key=group.plan.layout.tensor_range)
        if (tensor := tensor_of(group, index)) is not None
    ]


def _watched(engine: Engine, stream: Iterator[_Named]) -> Iterator[_Named]:
    """Iterate, and report a phase to observers while the next tensor is gathered, not while the caller uses it."""
    while True:
        with engine.observers.during(Phase.WHOLE, ROOT_UNIT):
            found = next(stream, None)
        if found is None:
            return
        yield found
        del found


def _stream(engine: Engine, entries: Sequence[Entry], bucket_bytes: int) -> Iterator[_Named]:
    """Iterate over every tensor as a view of its bucket.

    A caller holds a tensor of the last bucket while the next one is made, so each takes half of what is allowed.
    """
    alike = groupby(entries, lambda entry: (id(entry.group), entry.shard.dtype, entry.parts is not None))
    for (_, dtype, _), run in alike:
        for bucket in cut_into_buckets(run, bucket_bytes // 2, dtype):
            for entry in bucket:  # as by `param.data.mul_()` or clipping
                if local_tensor(entry.tensor)._version != entry.version:
                    engine.refuse_open_iteration(f"{entry.name} was written to")
            full = gather(bucket, dtype, bucket_bytes // 2, agreeing=engine.reaching_all)
            assert full is not None
            full.reverse()
            for entry in bucket:
                yield entry.name, full.pop()[0]


def check_bucket_bytes(bucket_bytes: object) -> None:
    """Raise a ConfigurationError if a size is not a positive number."""
    if not isinstance(bucket_bytes, int) or bucket_bytes < 1:
        raise ConfigurationError(
            f"bucket_bytes={bucket_bytes!r} leaves no room; give the bytes that may be used, 1 or more"
        )
