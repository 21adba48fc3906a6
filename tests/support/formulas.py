"""Bytes that a model holds per rank, borrows during a step and sends, by the formulas of ``docs/memory.md``.

They are written down apart from the engine and the planner, which tests compare with them.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch

from megatron_fsdp.comm.collectives import Traffic
from megatron_fsdp.config.ddp_config import ShardingStrategy
from megatron_fsdp.config.engine_options import WeightAllocator
from megatron_fsdp.engine.plans import (
    BLOCK_ALIGNMENT_BYTES,
    GroupPlan,
    UnitWeights,
    WeightPlan,
    WeightStorage,
    plan_weights,
)
from megatron_fsdp.megatron_fsdp import MegatronFSDP
from megatron_fsdp.sharding.placement import Placement, placements_for
from megatron_fsdp.sharding.units import ROOT_UNIT
from megatron_fsdp.sharding.weight_formats import WeightFormat, encoded_bytes

_SUM_ITEMSIZE = torch.float32.itemsize  # local sums are at least this wide


@dataclass(frozen=True)
class GroupFootprint:
    """The numbers of one parameter group that the formulas need."""

    unit: int  # index of its unit in the order of forward; 0 is the root
    numel: int  # elements of the whole flat buffer, with padding; divides by the shards wherever a buffer is sharded
    num_shards: int  # ranks on the sharding axis, under every strategy
    compute: torch.dtype  # of the weights that forward and backward use
    main_params: torch.dtype  # of the weights that the optimizer updates
    main_grads: torch.dtype  # in which gradients are accumulated
    grad_comm: torch.dtype  # in which gradients travel
    requires_grad: bool
    is_whole: bool = False  # held whole by every rank, as parameters without a dimension are: costs as in `no_shard`
    outer_ranks: int = 1  # on the outer axis of hybrid sharding
    outer_shares: bool = False  # main weights, main gradients and optimizer state are sharded over these, too (HFSDP)
    weight_format: WeightFormat | None = None  # in which compute weights are sharded and gathered; None: their dtype
    is_looked_up: bool = False  # backward reads none of its weights, as of embeddings
    offloaded: frozenset[str] = frozenset()  # the fields of `PersistentBytes` that are not on the device

    @property
    def shard_numel(self) -> int:
        return self.numel // self.num_shards

    @property
    def has_main_copy(self) -> bool:
        """Whether main weights have memory of their own."""
        moved = ("main_weight" in self.offloaded) != ("compute_weight" in self.offloaded)
        return self.weight_format is not None or (self.requires_grad and (moved or self.main_params != self.compute))

    def weight_bytes(self, numel: int) -> int:
        """Bytes of compute weights that are sharded or travel."""
        if self.weight_format is not None and (self.num_shards > 1 or self.weight_format.stays_encoded):
            return encoded_bytes(self.weight_format, numel)
        return numel * self.compute.itemsize

    @property
    def gathered(self) -> tuple[int, torch.dtype]:
        """Elements and dtype of the memory that full compute weights take."""
        stays_encoded = self.weight_format is not None and self.weight_format.stays_encoded
        return (self.weight_bytes(self.numel), torch.uint8) if stays_encoded else (self.numel, self.compute)


def footprints_of(model: MegatronFSDP) -> tuple[GroupFootprint, ...]:
    """The numbers of each parameter group of a wrapped model."""
    return tuple(_footprint_of(group.plan, unit.index) for unit in model._engine.units for group in unit.groups)


def _footprint_of(plan: GroupPlan, unit: int) -> GroupFootprint:
    has_outer, precision = len(plan.axes) > 1, plan.precision
    offload = {
        "compute_weight": plan.offloads_compute,
        "main_weight": plan.offloads_main,
        "main_grad": plan.offload.main_gradients,
        "optimizer": plan.offload.optimizer_state,
    }
    return GroupFootprint(
        unit=unit,
        numel=plan.layout.numel,
        num_shards=plan.axis.num_ranks,
        compute=precision.compute,
        main_params=precision.main_params,
        main_grads=precision.main_grads,
        grad_comm=precision.grad_comm,
        requires_grad=plan.requires_grad,
        is_whole=plan.spec.key.is_scalar or (plan.requires_grad and Placement.SHARD not in plan.placements.main_weight),
        outer_ranks=plan.axes[0].num_ranks if has_outer else 1,
        outer_shares=has_outer and plan.placements.main_weight[0] is Placement.SHARD,
        weight_format=plan.weight_format,
        is_looked_up=plan.is_looked_up,
        offloaded=frozenset(name for name, share in offload.items() if share),
    )


class PersistentBytes(NamedTuple):
    """Bytes that one rank holds when an optimizer steps; between steps the same without gradients."""

    compute_weight: int
    main_weight: int  # where they have memory of their own
    main_grad: int  # from a backward until they are cleared
    optimizer: int

    @property
    def total(self) -> int:
        return sum(self)


class TransientBytes(NamedTuple):
    """Full-size memory that one rank borrows during a step; each part at its own peak."""

    gathered: int  # unsharded compute weights of the units that are gathered at a time
    buckets: int  # unsharded gradients before and in reductions; freed at the end of each backward
    scratch: int  # further memory of the back end; freed likewise

    @property
    def total(self) -> int:
        return sum(self)


class PassingBytes(NamedTuple):
    """Shard-sized tensors that each backward allocates and frees, besides persistent and borrowed memory."""

    local_sum: int  # the sum over what a pairwise exchange received for one group, until it is accumulated
    cast_grads: int  # what `.grad` holds until it is cleared, where main gradients have another dtype than main weights


def persistent_bytes(
    groups: Sequence[GroupFootprint],
    strategy: ShardingStrategy,
    optimizer_states_per_param: int = 2,
    deferred: bool = False,
) -> PersistentBytes:
    """Count the bytes that the engine and the optimizer hold on the device while gradients exist.

    Deferred reductions (``no_sync``) take an unsharded gradient per trainable group under every strategy. State values
    per parameter are 2 for Adam, 1 for momentum, 0 for SGD; those of padding, which no optimizer keeps, are counted.
    """
    compute_weight = main_weight = main_grad = state = 0
    for group in groups:
        main_bytes = _held_bytes(group, strategy, "main_weight", group.main_params)
        if "compute_weight" not in group.offloaded:
            compute_weight += group.weight_bytes(_held_numel(group, strategy, "compute_weight"))
        if group.has_main_copy and "main_weight" not in group.offloaded:
            main_weight += main_bytes
        if group.requires_grad and "main_grad" not in group.offloaded:
            main_grad += _held_bytes(group, strategy, "main_grad", group.main_grads)
        if group.requires_grad and deferred:
            main_grad += group.numel * group.main_grads.itemsize
        if group.requires_grad and "optimizer" not in group.offloaded:
            state += main_bytes
    return PersistentBytes(compute_weight, main_weight, main_grad, optimizer_states_per_param * state)


def transient_bytes(
    groups: Sequence[GroupFootprint],
    strategy: ShardingStrategy,
    slots: int = 2,
    buckets: int = 2,
    scratch_bytes: int = 0,
    allocator: WeightAllocator = WeightAllocator.SLOTS,
) -> TransientBytes:
    """Count the bytes that are borrowed during a step.

    The root has memory for its gathered weights and a bucket of its own; the other units take turns in slots and
    buckets, each as large as the largest of them. Inside one, the groups of a unit start at multiples of
    `BLOCK_ALIGNMENT_BYTES`. `gathered_peak_bytes` has the formulas of other allocators than slots.

    Where a rank holds main gradients whole and in the dtype in which they travel, they are filled and reduced in place,
    without a bucket, unless they hold an earlier gradient; so microbatches that add up take more than is counted here.

    So many `buckets` fill or are in reduction at a time: as many as there are units besides the root where reductions
    wait for the end of backward (``overlap_grad_reduce=False`` under ``no_shard`` and ``optim``).
    """
    gathered = gathered_peak_bytes(plan_weights(allocator, _unit_weights(groups, strategy), slots))
    sizes = _bucket_bytes(groups)
    filled = {group.unit for group in groups if group.requires_grad and not _is_reduced_in_place(group, strategy)}
    sizes = {unit: size for unit, size in sizes.items() if unit in filled}
    in_turn = _largest_in_a_row([sizes[unit] for unit in sorted(sizes.keys() - {ROOT_UNIT})], buckets)
    return TransientBytes(gathered, sizes.get(ROOT_UNIT, 0) + in_turn, scratch_bytes)


def gathered_peak_bytes(plan: WeightPlan) -> int:
    """Count the most that gathered weights take at a time, where units are used in their order.

    Kept buffers (also those kept for a step) and slots that are taken when wrapping count whole. Of the other units, as
    many consecutive ones as there are slots are allocated at a time; the root with all of them.
    """
    of_its_own = (WeightStorage.OWN, WeightStorage.FOR_STEP)
    kept = sum(plan.block_bytes[unit] for storage in of_its_own for unit in plan.units_in(storage))
    passing = {WeightStorage.RESIZED}
    if plan.taken_at_once:
        kept += plan.slots_used * plan.slot_bytes
    else:
        passing.add(WeightStorage.SLOT)
    in_turn = [unit for unit, storage in enumerate(plan.storages) if unit and storage not in of_its_own]
    sizes = [plan.block_bytes[unit] if plan.storages[unit] in passing else 0 for unit in in_turn]
    windows = (sum(sizes[first : first + plan.slots]) for first in range(max(1, len(sizes))))
    root = plan.block_bytes[0] if plan.storages[0] is WeightStorage.RESIZED else 0
    return root + kept + max(windows)


def exchange_scratch_bytes(groups: Sequence[GroupFootprint], strategy: ShardingStrategy, buckets: int = 2) -> int:
    """Count the bytes of the blocks that receive gradients in pairwise exchanges, for back ends that use them (gloo).

    There is one block for each bucket but the one that fills, as large as what its bucket has of exchanged groups;
    between two ranks half of that, since a rank's own half stays where it is. Units take turns, from the last to the
    root. Nothing is exchanged under ``no_shard`` or on one rank.
    """
    exchanged = [group for group in groups if group.requires_grad and _is_exchanged(group, strategy)]
    sizes = _block_bytes(exchanged, lambda group: (group.numel // (2 if group.num_shards == 2 else 1), group.grad_comm))
    return _largest_in_a_row([sizes[unit] for unit in sorted(sizes)], max(1, buckets - 1))


def passing_bytes(groups: Sequence[GroupFootprint], strategy: ShardingStrategy) -> PassingBytes:
    """Bound the shard-sized allocations of every backward, apart from autograd's own tensors.

    A local sum of 16-bit gradients is a new float32 tensor; wider ones are summed where they were received. The native
    reduce-scatter of other back ends leaves its result in the bucket.
    """
    narrow = [group for group in groups if _is_exchanged(group, strategy) and group.grad_comm.itemsize < _SUM_ITEMSIZE]
    sums = [group.shard_numel * _SUM_ITEMSIZE for group in narrow]
    cast = [group for group in groups if group.requires_grad and group.main_grads != group.main_params]
    cast_grads = sum(_held_bytes(group, strategy, "main_grad", group.main_params) for group in cast)
    return PassingBytes(max(sums, default=0), cast_grads)


def step_traffic(
    groups: Sequence[GroupFootprint],
    strategy: ShardingStrategy,
    microbatches: int = 1,
    slots: int = 2,
    allocator: WeightAllocator = WeightAllocator.SLOTS,
) -> Traffic:
    """Count the collectives from one optimizer step to the next, in the steady state.

    Every trainable group is reduced once per microbatch; groups on one rank never communicate, and groups that are held
    whole are never gathered. An optimizer step makes all gathered weights stale. Frozen groups have nothing to gather
    under ``optim`` and ``optim_grads``, where every rank holds them whole. Besides the root, as many units as there are
    slots stay gathered; but weights whose memory the allocator frees after a backward are gathered again by the next
    forward, and a unit that keeps its own buffer is gathered once per step.
    """
    communicating = [group for group in groups if group.num_shards > 1]
    trainable = [group for group in communicating if group.requires_grad]
    cut = [group for group in communicating if not group.is_whole]
    if strategy == ShardingStrategy.optim_grads_params:
        plan = plan_weights(allocator, _unit_weights(groups, strategy), slots)
        reading = {group.unit for group in groups if not group.is_looked_up}
        order = _gathered_units(sorted({group.unit for group in groups} - {ROOT_UNIT}), microbatches, plan, reading)
        gathered = [group for unit in order for group in cut if group.unit == unit]
    else:
        gathered = [] if strategy == ShardingStrategy.no_shard else [group for group in cut if group.requires_grad]
    reduced_bytes = sum(
        _all_but_one(group.numel * group.grad_comm.itemsize, group.num_shards)
        * (1 if _is_sharded(group, strategy, "main_grad") else 2)  # an all-reduce
        for group in trainable
    )
    return Traffic(
        gathers=len(gathered),
        reductions=len(trainable) * microbatches,
        gather_bytes=sum(_all_but_one(group.weight_bytes(group.numel), group.num_shards) for group in gathered),
        reduce_bytes=reduced_bytes * microbatches,
    )


def _gathered_units(
    unit_indices: Sequence[int], microbatches: int, plan: WeightPlan, reading: Collection[int]
) -> list[int]:
    """List the units in the order of their gathers: down the model and back, while the last few used stay gathered.

    Units that take turns in slots keep the slot of their first gather. Without an optimizer step between, the next
    forward finds the last used units, unless their memory was freed. Backward reads weights of the `reading` units.
    """
    in_turn = [unit for unit in unit_indices if plan.storages[unit] is not WeightStorage.OWN]
    slots = {unit: turn % max(1, plan.slots) for turn, unit in enumerate(in_turn)}
    freed = {unit for unit in (ROOT_UNIT, *in_turn) if plan.storages[unit] is WeightStorage.RESIZED}
    order: list[int] = []
    held: dict[int, int] = {}  # the unit in each slot; those that take no turns have a key of their own
    for _ in range(microbatches):
        for unit in (ROOT_UNIT, *unit_indices, *(unit for unit in reversed(in_turn) if unit in reading)):
            slot = slots.get(unit, -1 - unit)
            if held.get(slot) != unit:
                order.append(unit)
            if plan.slots or slot < 0:
                held[slot] = unit
        held = {slot: unit for slot, unit in held.items() if unit not in freed}
    return order


_Buffer = Literal["compute_weight", "main_weight", "main_grad"]


def _is_reduced_in_place(group: GroupFootprint, strategy: ShardingStrategy) -> bool:
    is_whole = group.num_shards == 1 or not _is_sharded(group, strategy, "main_grad")
    stays = "main_grad" not in group.offloaded and group.main_grads == group.grad_comm
    return is_whole and stays and group.outer_ranks == 1


def _is_sharded(group: GroupFootprint, strategy: ShardingStrategy, buffer: _Buffer) -> bool:
    placements = placements_for(strategy)
    held = placements.compute_weight if buffer == "compute_weight" else placements.main_weight
    return not group.is_whole and held == (Placement.SHARD,)


def _is_exchanged(group: GroupFootprint, strategy: ShardingStrategy) -> bool:
    """Whether a group's gradients are reduce-scattered, on more than one rank."""
    return group.requires_grad and group.num_shards > 1 and _is_sharded(group, strategy, "main_grad")


def _held_numel(group: GroupFootprint, strategy: ShardingStrategy, buffer: _Buffer) -> int:
    numel = group.shard_numel if _is_sharded(group, strategy, buffer) else group.numel
    if buffer != "compute_weight" and group.outer_shares and not group.is_whole:
        numel //= group.outer_ranks
    return numel


def _held_bytes(group: GroupFootprint, strategy: ShardingStrategy, buffer: _Buffer, dtype: torch.dtype) -> int:
    return _held_numel(group, strategy, buffer) * dtype.itemsize


def _block_bytes(
    groups: Iterable[GroupFootprint], memory_of: Callable[[GroupFootprint], tuple[int, torch.dtype]]
) -> dict[int, int]:
    """Count the bytes of the block that holds the unsharded buffers of each unit."""
    totals: dict[int, int] = {}
    for group in groups:
        numel, dtype = memory_of(group)
        blocks = -(-numel * dtype.itemsize // BLOCK_ALIGNMENT_BYTES)
        totals[group.unit] = totals.get(group.unit, 0) + blocks * BLOCK_ALIGNMENT_BYTES
    return totals


def _unit_weights(groups: Sequence[GroupFootprint], strategy: ShardingStrategy) -> list[UnitWeights]:
    """List the weights that each unit gathers into borrowed memory, root first."""
    cut = [group for group in groups if _is_sharded(group, strategy, "compute_weight")]
    cut = [group for group in cut if group.num_shards > 1 or "compute_weight" in group.offloaded]
    gathered = _block_bytes(cut, lambda group: group.gathered)
    return [
        UnitWeights(gathered.get(unit, 0), tuple(g.gathered for g in cut if g.unit == unit))
        for unit in range(1 + max((group.unit for group in groups), default=ROOT_UNIT))
    ]


def _bucket_bytes(groups: Iterable[GroupFootprint]) -> dict[int, int]:
    """Count the bytes of the bucket of each unit with trainable groups."""
    trainable = (group for group in groups if group.requires_grad)
    return _block_bytes(trainable, lambda group: (group.numel, group.grad_comm))


def _largest_in_a_row(sizes: Sequence[int], count: int) -> int:
    """The largest sum over `count` neighbours, or over all where there are fewer; 0 for none.

    Neighbours that together take more than so many of the most common size, of several the largest, have their turns
    one after another.
    """
    counts = Counter(sizes)
    usual = max(sizes, key=lambda size: (counts[size], size), default=0)
    runs = [sizes[first : first + length] for length in range(1, count + 1) for first in range(len(sizes))]
    return max(
        (sum(run) for run in runs if len(run) == 1 or count >= len(sizes) or sum(run) <= count * usual), default=0
    )


def _all_but_one(whole_bytes: int, parts: int) -> int:
    """What one rank sends in an all-gather or reduce-scatter of so many parts."""
    return whole_bytes - whole_bytes // parts


# Costs of the outer axis of hybrid sharding, once per optimizer step; derivations in ``docs/memory.md``.


def outer_step_traffic(groups: Sequence[GroupFootprint], strategy: ShardingStrategy) -> Traffic:
    """Count the collectives over the outer axis from one optimizer step to the next.

    An inner rank's part of each trainable group (all of it under ``no_shard``) is reduced over the outer axis once per
    gradient sync: by an all-reduce, or by a reduce-scatter where main weights are sharded over the outer ranks. In that
    case the new weights are all-gathered over the outer axis, once per optimizer step.
    """
    trainable = [group for group in groups if group.requires_grad and group.outer_ranks > 1]
    shared = [group for group in trainable if group.outer_shares and not group.is_whole]

    def part_numel(group: GroupFootprint) -> int:
        """Elements of a group's gradient that one inner rank has after the inner reduction."""
        is_cut = not group.is_whole and strategy is not ShardingStrategy.no_shard
        return group.shard_numel if is_cut else group.numel

    gathers = [_all_but_one(group.weight_bytes(part_numel(group)), group.outer_ranks) for group in shared]
    reductions = [
        _all_but_one(part_numel(group) * group.grad_comm.itemsize, group.outer_ranks) * (1 if group in shared else 2)
        for group in trainable
    ]
    return Traffic(len(gathers), len(reductions), sum(gathers), sum(reductions))
