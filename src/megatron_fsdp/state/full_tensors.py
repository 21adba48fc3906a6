"""Iterators over full tensors, all-gathered from the shards in buckets of bounded size.

A group whose flat buffer fits into a bucket is one all-gather. A larger one is cut between tensors, and each bucket is
filled by one broadcast from every rank that owns a part of it: a rank's part of a range is a slice of the bucket, so
every element is sent once and nothing is copied. With B buckets and N ranks a group takes at most B + N - 1 broadcasts.
Tensors that are cut over more than the sharding axis (by the outer axis or by tensor parallelism) come one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import groupby

import torch
import torch.distributed as dist
from torch import nn

from megatron_fsdp.comm.agreement import all_agree, raise_together
from megatron_fsdp.comm.axis import address_of, broadcast
from megatron_fsdp.comm.fingerprint import differing_tensors
from megatron_fsdp.engine.engine import Engine
from megatron_fsdp.engine.group_plan import local_part
from megatron_fsdp.engine.memory import full_view
from megatron_fsdp.engine.observer import Phase
from megatron_fsdp.engine.param_group import ParameterGroup
from megatron_fsdp.engine.unit import Unit
from megatron_fsdp.errors import ConfigurationError, MegatronFSDPError, ScheduleError
from megatron_fsdp.sharding.placement import Placement
from megatron_fsdp.sharding.units import ROOT_UNIT


def full_parameters(engine: Engine) -> dict[str, torch.Tensor]:
    """All-gather main weights by canonical name; copies, in their main dtype, the same on every rank. Collective."""
    found = {name: full.clone() for name, full in iter_parameters(engine, DEFAULT_BUCKET_BYTES)}
    return {name: found[name] for group in engine.groups() for name in group.names}


def full_gradients(engine: Engine) -> dict[str, torch.Tensor | None]:
    """All-gather the gradient of every trainable parameter by canonical name; None if it is None. Collective."""
    trainable = (name for group, _ in engine.groups_with_gradients() for name in group.names)
    found: dict[str, torch.Tensor | None] = dict.fromkeys(trainable)
    found.update((name, full.clone()) for name, full in iter_gradients(engine, DEFAULT_BUCKET_BYTES))
    return found


def _whole_main_weights(group: ParameterGroup) -> torch.Tensor:
    """Return the main weights of a group (numel,): gathered if sharded, else the local tensor."""
    local = group.weights.main.local
    for axis, placement in zip(group.plan.axes, group.plan.placements.main_weight, strict=True):
        if placement is Placement.SHARD and axis.num_ranks > 1:  # outermost first: it was cut last
            full = torch.empty(axis.num_ranks * local.numel(), dtype=local.dtype, device=local.device)
            axis.all_gather(full, local, async_op=False)
            local = full
    return local


_Copies = dict[int, list[list[nn.Parameter]]]
"""Full parameters by index of the unit, then by group, then by parameter."""


@contextmanager
def shown_in_full(engine: Engine, module: nn.Module | None, writeback: bool, compute_dtype: bool) -> Iterator[None]:
    """Put full, plain copies of the main weights of some units into their modules. Collective.

    Args:
        engine: Engine of the model.
        module: Of the units that own parameters of it; None: of all.
        writeback: Copy what the copies hold at the end into main and compute weights. Every rank has to hold the same.
        compute_dtype: Copies in the dtype the model computes in, cast from the main weights; else in the main dtype.

    Raises:
        ScheduleError: A forward or a backward is running, or some unit shows its copies already.
        ConfigurationError: Copies in another dtype cannot be written back; a copy was replaced, or ranks wrote
            different values (nothing is written back then).
    """
    with all_agree("full_parameters_context", engine.sharding.reaching_all) as facts:
        inside = None if module is None else {id(part) for part in module.modules()}
        units = [unit for unit in engine.units if inside is None or unit.has_parameters_in(inside)]
        if not units:
            raise ConfigurationError(
                f"a {type(module).__name__} owns no parameter of this model; give one of its modules, or None for all"
            )
        _check(engine, units, writeback, compute_dtype)
        facts |= {"units": ", ".join(unit.label for unit in units), "writeback": str(writeback)}
        facts["compute_dtype"] = str(compute_dtype)
    if compute_dtype:
        engine.refresh_weights()  # weight formats round by the amaxes of the weights as they were last installed
    with engine.observers.during(Phase.WHOLE, ROOT_UNIT):
        copies: _Copies = {unit.index: [_copies_of(group, compute_dtype) for group in unit.groups] for unit in units}
    try:
        for unit in units:
            unit.show_copies(copies[unit.index])
            engine.full_units.add(unit.index)
        yield
    except BaseException as error:
        if writeback and not isinstance(error, GeneratorExit):
            # Tell the ranks that go on, which would wait otherwise.
            with suppress(MegatronFSDPError), engine.observers.during(Phase.AGREE, ROOT_UNIT):
                raise_together(error, "full_parameters_context", engine.sharding.reaching_all)
        raise
    else:
        if writeback:
            engine.refuse_open_pass("full_parameters_context was left")
            _take_in(engine, units, copies)
    finally:
        for unit in units:
            engine.full_units.discard(unit.index)
            unit.to_sharded()


def _check_between_steps(engine: Engine, what: str) -> None:
    engine.refuse_open_pass(what)
    if engine.scheduler.in_forward or engine.scheduler.in_backward:
        raise ScheduleError(
            f"{what} inside a forward or backward (or after one that failed); do so between steps, and call reset() on "
            "the model after an exception"
        )


def _check(engine: Engine, units: Sequence[Unit], writeback: bool, compute_dtype: bool) -> None:
    _check_between_steps(engine, "full_parameters_context was entered")
    open_already = [unit.label for unit in units if unit.index in engine.full_units]
    if open_already:
        raise ScheduleError(
            f"unit {open_already[0]} shows its full parameters already; leave that full_parameters_context first"
        )
    if writeback and compute_dtype:
        raise ConfigurationError(
            "writeback=True with compute_dtype=True would round main weights to the compute dtype; leave one out"
        )


def _copies_of(group: ParameterGroup, compute_dtype: bool) -> list[nn.Parameter]:
    """Copy a group's weights: views of one new buffer, which take no gradient, since it would be lost."""
    full = _whole_main_weights(group)
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
        with all_agree("writing back full parameters", engine.sharding.reaching_all):
            _check_copies(units, copies)
        _compare(engine, units, copies)
    with torch.no_grad():
        for group, params in _of_groups(units, copies):
            for index, param in enumerate(params):
                group.weights.main.store(index, local_part(param))
    engine.install_main_weights()


def _of_groups(units: Sequence[Unit], copies: _Copies) -> Iterator[tuple[ParameterGroup, list[nn.Parameter]]]:
    for unit in units:
        yield from zip(unit.groups, copies[unit.index], strict=True)


def _check_copies(units: Sequence[Unit], copies: _Copies) -> None:
    for unit in units:
        for group_index, group in enumerate(unit.groups):
            for index, copy in enumerate(copies[unit.index][group_index]):
                shape = group.plan.layout.shapes[index]
                if not unit.holds_copy(group_index, index, copy) or tuple(local_part(copy).shape) != shape:
                    raise ConfigurationError(
                        f"{group.names[index]} was replaced inside full_parameters_context, or its shape {shape} was "
                        "changed; write into it instead, by copy_() or an init function"
                    )


def _compare(engine: Engine, units: Sequence[Unit], copies: _Copies) -> None:
    """Raise if values differ between ranks, each of which would keep its own shard of them."""
    named: dict[dist.ProcessGroup, dict[str, torch.Tensor]] = {}
    for group, params in _of_groups(units, copies):
        ranks = engine.sharding.rank_mesh(group.plan.is_expert).group
        if ranks is not None:
            parts = zip(group.names, (local_part(param.detach()) for param in params), strict=True)
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


@dataclass(frozen=True)
class _Entry:
    """One tensor to gather: its place, its local shard, and the shard's version when the iteration began."""

    group: ParameterGroup
    index: int
    tensor: torch.Tensor  # sharded
    version: int

    @property
    def shard(self) -> torch.Tensor:
        return local_part(self.tensor).detach()

    @property
    def name(self) -> str:
        return self.group.names[self.index]

    @property
    def is_cut_further(self) -> bool:
        """True if it is sharded over more than the sharding axis."""
        plan = self.group.plan
        part = plan.parts[self.index]
        return plan.num_shards > plan.axis.num_ranks or (part is not None and part.is_cut)


def iter_parameters(engine: Engine, bucket_bytes: int) -> Iterator[tuple[str, torch.Tensor]]:
    """Iterate over full main weights, in their main dtype, by canonical name."""
    with open_pass(engine, "iter_full_tensors"):
        entries = _entries(engine, lambda group, index: group.sharded[index])
        yield from _watched(engine, _stream(engine, entries, bucket_bytes))


def iter_gradients(engine: Engine, bucket_bytes: int) -> Iterator[tuple[str, torch.Tensor]]:
    """Iterate over the full gradients of trainable parameters, by canonical name, without those that are None."""
    with open_pass(engine, "iter_full_tensors"):
        found = {id(group): group.grads() for group in engine.groups()}
        entries = _entries(engine, lambda group, index: found[id(group)][index])
        # Ranks need the same tensors: for one that a rank lacks, the others would wait.
        engine.compare_facts((entry.group, entry.name, entry.shard.dtype) for entry in entries)
        yield from _watched(engine, _stream(engine, entries, bucket_bytes))


@contextmanager
def open_pass(engine: Engine, what: str) -> Iterator[None]:
    """Keep the engine from changing the tensors, and from other collectives, until a generator ends."""
    _check_between_steps(engine, "full tensors were asked for")
    engine.open_pass = what
    try:
        yield
    finally:
        engine.open_pass = ""


def _entries(engine: Engine, tensor_of: Callable[[ParameterGroup, int], torch.Tensor | None]) -> list[_Entry]:
    """List all tensors, group after group, in the order of the flat buffers."""
    return [
        _Entry(group, index, tensor, local_part(tensor)._version)
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


def _stream(engine: Engine, entries: Sequence[_Entry], bucket_bytes: int) -> Iterator[_Named]:
    """Iterate over every tensor as a view of its bucket.

    A caller holds a tensor of the last bucket while the next one is made, so each takes half of what is allowed.
    """
    alike = groupby(entries, lambda entry: (id(entry.group), entry.shard.dtype, entry.is_cut_further))
    for (_, _, is_cut_further), run in alike:
        if is_cut_further:
            for entry in run:
                _check_unwritten(engine, [entry])
                yield entry.name, entry.group.describe_shard(entry.index, entry.shard).full_tensor()
        else:
            for bucket, start, stop in _buckets(run, bucket_bytes // 2):
                _check_unwritten(engine, bucket)
                yield from _gathered(bucket, start, stop)


def _check_unwritten(engine: Engine, entries: Sequence[_Entry]) -> None:
    """Raise if tensors were written to since the iteration began, as by `param.data.mul_()` or clipping."""
    if any(entry.shard._version != entry.version for entry in entries):
        engine.refuse_open_pass(f"{entries[0].name} or a tensor after it was written to")


def _buckets(entries: Iterable[_Entry], limit_bytes: int) -> Iterator[tuple[list[_Entry], int, int]]:
    """Cut entries of one group and dtype into buckets that are no larger than the limit, or one tensor.

    With each comes the range of the group's flat buffer to gather: all of it where that fits, since that is one
    collective.
    """
    taken: list[_Entry] = []
    start = stop = 0
    for entry in entries:
        layout = entry.group.plan.layout
        limit = limit_bytes // entry.shard.dtype.itemsize
        low, high = (0, layout.numel) if layout.numel <= limit else layout.tensor_range(entry.index)
        if taken and high - start > limit:
            yield taken, start, stop
            taken = []
        if not taken:
            start = low
        taken.append(entry)
        stop = high
    if taken:
        yield taken, start, stop


def _gathered(bucket: Sequence[_Entry], start: int, stop: int) -> Iterator[_Named]:
    """All-gather the elements [start, stop) of a group's flat buffer, and iterate over the tensors of their bucket."""
    group = bucket[0].group
    layout, rank = group.plan.layout, group.plan.axis.rank
    is_sharded = not group.weights.main.is_whole
    full = torch.empty(stop - start, dtype=bucket[0].shard.dtype, device=group.plan.device)
    for entry in bucket:
        first = layout.local_range(entry.index, rank)[0] if is_sharded else 0
        offset = layout.offsets[entry.index] - start + first
        full[offset : offset + entry.shard.numel()].copy_(entry.shard.reshape(-1))
    if is_sharded:
        _gather_range(group, full, start, stop)
    for entry in bucket:
        low, high = layout.tensor_range(entry.index)
        yield entry.name, full[low - start : high - start].view(layout.shapes[entry.index])


def _gather_range(group: ParameterGroup, full: torch.Tensor, start: int, stop: int) -> None:
    """All-gather the elements [start, stop) of a group's flat buffer into `full`, which holds this rank's shard."""
    layout, axis = group.plan.layout, group.plan.axis
    if stop - start == layout.numel:
        axis.all_gather(full, full[slice(*layout.shard_range(axis.rank))], async_op=False)
        return
    works = []
    for rank in range(axis.num_ranks):
        low, high = layout.shard_range(rank)
        part = full[max(low, start) - start : max(min(high, stop) - start, 0)]
        if part.numel():
            works.append(broadcast(part, axis.group, rank, async_op=True))
    for work in works:
        if work is not None:
            work.wait()


def check_bucket_bytes(bucket_bytes: object) -> None:
    """Raise if a size is not positive.

    Raises:
        ConfigurationError: It is not a positive number.
    """
    if not isinstance(bucket_bytes, int) or bucket_bytes < 1:
        raise ConfigurationError(
            f"bucket_bytes={bucket_bytes!r} leaves no room; give the bytes that may be used, 1 or more"
        )
