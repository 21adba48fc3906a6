"""The switches for memory and scheduling: what the caller gave, checked and with nothing left open. Pure."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import nn

from megatron_fsdp.config.ddp_config import DistributedDataParallelConfig
from megatron_fsdp.config.strategy import ShardingStrategy, resolve_strategy
from megatron_fsdp.errors import ConfigurationError

# Where gathered weights live: the choice of an allocator turned into a place for every unit.


class WeightAllocator(Enum):
    """How memory for gathered weights is taken and given back; `docs/memory.md` compares them."""

    SLOTS = "slots"  # slots of the largest unit's size, taken at their first use and kept
    RESIZE = "resize"  # every unit has a storage of its own, which is empty while the unit is not gathered
    DOUBLE_BUFFER = "double buffer"  # two slots of the most common unit's size, taken at once; other units resize
    PERSISTENT_DOUBLE_BUFFER = "persistent double buffer"  # the same, and other units keep a buffer of their own
    MAX_POOL = "max pool"  # two slots of the largest unit's size, taken at once


DOUBLE_BUFFERS = (
    WeightAllocator.DOUBLE_BUFFER,
    WeightAllocator.PERSISTENT_DOUBLE_BUFFER,
    WeightAllocator.MAX_POOL,
)
"""The allocators with two fixed slots."""


class Place(Enum):
    """Where one unit's gathered weights live."""

    SLOT = "slot"  # in numbered slots, in turn with other units
    OWN = "own"  # in memory of its own that is kept
    FOR_STEP = "for a step"  # in memory of its own, from its first use to the last backward before weights change
    RESIZED = "resized"  # in memory of its own that is there only while the unit is gathered


_KEPT = (Place.OWN, Place.FOR_STEP)


@dataclass(frozen=True)
class UnitWeights:
    """The gathered weights of one unit.

    Attributes:
        gathered_bytes: Bytes of the block that holds them; 0 where every rank has them whole anyway.
        shape: Elements and dtype of each parameter group among them; units of equal shape fit one another's memory.
    """

    gathered_bytes: int
    shape: tuple[tuple[int, torch.dtype], ...] = ()


@dataclass(frozen=True)
class WeightPlan:
    """A place for every unit, the root first.

    Attributes:
        places: For each unit.
        gathered_bytes: For each unit, what its block takes.
        slots: How many units besides the root, of those that give way to others, are gathered at a time.
        taken_at_once: Whether slots and kept buffers are taken at wrap time, else at their first use.
    """

    places: tuple[Place, ...]
    gathered_bytes: tuple[int, ...]
    slots: int
    taken_at_once: bool = False

    def units_in(self, place: Place) -> tuple[int, ...]:
        """The units that live in some kind of place, the root included."""
        return tuple(unit for unit, found in enumerate(self.places) if found is place)

    @property
    def slot_bytes(self) -> int:
        """Bytes of each slot: the largest unit that lives in slots."""
        return max((self.gathered_bytes[unit] for unit in self.units_in(Place.SLOT)), default=0)

    @property
    def slots_used(self) -> int:
        """Slots that are ever taken: not more than there are units to put into them."""
        return min(self.slots, sum(self.gathered_bytes[unit] > 0 for unit in self.units_in(Place.SLOT)))

    @property
    def peak_bytes(self) -> int:
        """The most that gathered weights take at a time, where units are used in their order.

        Slots and buffers that are kept, be it for a step, count whole. Of the units that resize, as many as there are
        slots are there at a time, and they follow one another; the root is there with all of them.
        """
        kept = sum(self.gathered_bytes[unit] for place in _KEPT for unit in self.units_in(place))
        in_turn = [unit for unit, place in enumerate(self.places) if unit and place not in _KEPT]
        resized = [self.gathered_bytes[unit] if self.places[unit] is Place.RESIZED else 0 for unit in in_turn]
        windows = (sum(resized[first : first + self.slots]) for first in range(max(1, len(resized))))
        root = self.gathered_bytes[0] if self.places[0] is Place.RESIZED else 0
        return root + kept + self.slots_used * self.slot_bytes + max(windows)


def plan_weights(allocator: WeightAllocator, units: Sequence[UnitWeights], slots: int) -> WeightPlan:
    """Choose a place for every unit.

    Args:
        allocator: What the caller chose.
        units: All units, root first.
        slots: How many units besides the root may be gathered at a time.

    Returns:
        The plan. The root, whose forward surrounds all others, never lives in a slot. Its memory goes back where the
        caller has not asked for memory that is taken at once and kept.
    """
    root = _ROOT_PLACES.get(allocator, Place.OWN)
    return WeightPlan(
        places=(root, *_places_of_others(allocator, units[1:])),
        gathered_bytes=tuple(unit.gathered_bytes for unit in units),
        slots=slots,
        taken_at_once=allocator in DOUBLE_BUFFERS,
    )


_ROOT_PLACES = {WeightAllocator.RESIZE: Place.RESIZED, WeightAllocator.SLOTS: Place.FOR_STEP}


def _places_of_others(allocator: WeightAllocator, units: Sequence[UnitWeights]) -> list[Place]:
    if allocator is WeightAllocator.RESIZE:
        return [Place.RESIZED] * len(units)
    if allocator in (WeightAllocator.SLOTS, WeightAllocator.MAX_POOL):
        return [Place.SLOT] * len(units)
    common = most_common_shape(units)
    odd = Place.RESIZED if allocator is WeightAllocator.DOUBLE_BUFFER else Place.OWN
    return [Place.SLOT if unit.shape == common else odd for unit in units]


def most_common_shape(units: Sequence[UnitWeights]) -> tuple[tuple[int, torch.dtype], ...]:
    """The shape that most units share; of several the one that takes most bytes, then the first."""
    sizes = {unit.shape: unit.gathered_bytes for unit in units if unit.gathered_bytes}
    counts = Counter(unit.shape for unit in units if unit.gathered_bytes)
    return max(counts, key=lambda shape: (counts[shape], sizes[shape]), default=())


def prefetch_depth(numel: int, unit_numels: Sequence[int]) -> int:
    """How many units may be gathered ahead within a number of elements.

    Args:
        numel: 0 for none; anything else for at least one.
        unit_numels: Elements of each unit besides the root.

    Returns:
        The largest count such that any that many units fit, at most all of them.

    Raises:
        ConfigurationError: `numel` is negative.
    """
    if numel < 0:
        raise ConfigurationError(f"{numel} elements cannot be gathered ahead; give 0 (none) or more.")
    count, total = 0, 0
    for size in sorted(unit_numels, reverse=True):
        total += size
        if total > numel:
            break
        count += 1
    return min(len(unit_numels), max(count, int(numel > 0)))


_SLOTS = 2
_LEAST_BUCKET_NUMEL = 40_000_000
_BUCKET_NUMEL_PER_RANK = 1_000_000


@dataclass(frozen=True)
class MemoryOptions:
    """What was decided before the model is looked at.

    Attributes:
        allocator: How memory for gathered weights is taken.
        slots: How many units besides the root may be gathered at a time (strategy 3).
        may_grow: Whether a larger prefetch size may bring more slots.
        forward_depth: How many units to gather ahead in forward.
        backward_depth: How many units to gather ahead in backward.
        communication_unit_numel: Elements to gather ahead and to have in reduction; None: one unit ahead, two buckets.
        bucket_numel: Where parameters outside of units are cut into groups, in elements; None: by the number of ranks.
        is_bucketed: Whether they are cut at all.
        fine_grained: Whether the modules inside units become units.
        whole_types: Classes of modules that are then taken whole.
        idle: Names of the arguments that were given and have no effect under the strategy.
    """

    allocator: WeightAllocator = WeightAllocator.SLOTS
    slots: int = _SLOTS
    may_grow: bool = True
    forward_depth: int = 1
    backward_depth: int = 1
    communication_unit_numel: int | None = None
    bucket_numel: int | None = None
    is_bucketed: bool = True
    fine_grained: bool = False
    whole_types: tuple[type[nn.Module], ...] = ()
    idle: tuple[str, ...] = ()

    def bucket_numel_on(self, num_ranks: int) -> int | None:
        """Where parameters outside of units are cut on that many ranks; None: never."""
        if not self.is_bucketed:
            return None
        return self.bucket_numel or max(_LEAST_BUCKET_NUMEL, _BUCKET_NUMEL_PER_RANK * num_ranks)

    def check_plan(self, units_besides_root: int) -> None:
        """Refuse what this model leaves without effect.

        Raises:
            ConfigurationError: Double buffers or fine-grained gathers for a model without units besides the root.
        """
        if units_besides_root:
            return
        for name, is_set in (
            ("fsdp_double_buffer", self.allocator in DOUBLE_BUFFERS),
            ("enable_fine_grained_param_gather", self.fine_grained),
        ):
            if is_set:
                raise ConfigurationError(
                    f"{name}=True has no effect on a model without units besides the root; name the classes of its "
                    "units in fsdp_unit_modules, or leave the option out."
                )


def resolve_memory_options(given: Mapping[str, Any], config: DistributedDataParallelConfig) -> MemoryOptions:
    """Check the options of `MegatronFSDP` and of its configuration together.

    Args:
        given: The arguments of `MegatronFSDP` by name; those that do not concern memory are not looked at.
        config: Its configuration.

    Raises:
        ConfigurationError: A value is not possible, two options contradict each other, or one cannot take effect.
        TypeError: `fine_grained_recurse_module_types` does not hold classes of modules.
    """
    strategy = resolve_strategy(config.data_parallel_sharding_strategy, "data_parallel_sharding_strategy")
    allocator, idle = _allocator(given, config, strategy)
    forward, backward, slots = _depths(given, config, strategy, allocator)
    fine_grained, whole_types = _fine_grained(given, config, strategy)
    if given["disable_bucketing"] and config.bucket_size is not None:
        raise ConfigurationError(
            f"disable_bucketing=True and bucket_size={config.bucket_size} contradict each other; give only one of them."
        )
    return MemoryOptions(
        allocator=allocator,
        slots=slots,
        may_grow=given["max_gathered_units"] is None and allocator not in DOUBLE_BUFFERS,
        forward_depth=forward,
        backward_depth=backward,
        communication_unit_numel=config.suggested_communication_unit_size,
        bucket_numel=config.bucket_size,
        is_bucketed=not given["disable_bucketing"],
        fine_grained=fine_grained,
        whole_types=whole_types,
        idle=idle,
    )


def _allocator(
    given: Mapping[str, Any], config: DistributedDataParallelConfig, strategy: ShardingStrategy
) -> tuple[WeightAllocator, tuple[str, ...]]:
    """The allocator, and which of the arguments that name one have no effect."""
    name = given["weight_allocator"]
    if name not in ("slots", "resize"):
        raise ConfigurationError(f'weight_allocator={name!r} does not exist; give "slots" or "resize".')
    max_pool = config.megatron_fsdp_max_pool_double_buffer
    doubled = given["fsdp_double_buffer"] or config.fsdp_double_buffer or max_pool
    persistent = given["fsdp_db_use_persist_buf_on_alloc_fail"] or config.fsdp_db_use_persist_buf_on_alloc_fail
    if persistent and (not doubled or max_pool):
        reason = "with a pool that every unit fits" if max_pool else "without fsdp_double_buffer=True"
        raise ConfigurationError(f"fsdp_db_use_persist_buf_on_alloc_fail=True has no effect {reason}; leave it out.")
    if name == "resize":
        _needs_sharded_weights('weight_allocator="resize"', strategy)
    if not doubled:
        return WeightAllocator(name), ()
    option = "maxpool_double_buffer" if max_pool else "fsdp_double_buffer"
    if strategy != ShardingStrategy.optim_grads_params:  # accepted there, as in the published package
        return WeightAllocator.SLOTS, (option, *(["fsdp_db_use_persist_buf_on_alloc_fail"] if persistent else []))
    if name == "resize":
        raise ConfigurationError(
            f'{option}=True and weight_allocator="resize" are two ways to hold gathered weights; give only one of them.'
        )
    if max_pool:
        return WeightAllocator.MAX_POOL, ()
    return WeightAllocator.PERSISTENT_DOUBLE_BUFFER if persistent else WeightAllocator.DOUBLE_BUFFER, ()


def _depths(
    given: Mapping[str, Any],
    config: DistributedDataParallelConfig,
    strategy: ShardingStrategy,
    allocator: WeightAllocator,
) -> tuple[int, int, int]:
    """How far to gather ahead in forward and backward, and how many units may be gathered at a time."""
    limit = given["max_gathered_units"]
    if limit is not None:
        _check_count("max_gathered_units", limit, 1)
        _needs_sharded_weights(f"max_gathered_units={limit}", strategy)
        if allocator in DOUBLE_BUFFERS and limit != _SLOTS:
            raise ConfigurationError(
                f"max_gathered_units={limit} contradicts a double buffer, which holds {_SLOTS} units; leave it out."
            )
    most = _SLOTS if allocator in DOUBLE_BUFFERS else limit
    prefetches = config.overlap_param_gather or strategy == ShardingStrategy.optim_grads_params
    depths = []
    for name in ("forward_prefetch_units", "backward_prefetch_units"):
        depth = given[name]
        if depth is None:
            depths.append(int(prefetches) if most is None else min(int(prefetches), most - 1))
            continue
        _check_depth(name, depth, most, prefetches, config)
        if strategy == ShardingStrategy.no_shard:
            raise ConfigurationError(
                f"{name}={depth} has no effect under no_shard, which gathers nothing; leave it out."
            )
        depths.append(depth)
    return depths[0], depths[1], most or max(_SLOTS, 1 + max(depths))


def _check_depth(
    name: str, depth: object, most: int | None, prefetches: bool, config: DistributedDataParallelConfig
) -> None:
    _check_count(name, depth, 0)
    assert isinstance(depth, int)
    if most is not None and depth >= most:
        raise ConfigurationError(
            f"{name}={depth} needs {depth + 1} units gathered at a time, and {most} are allowed; give at most "
            f"{most - 1} or raise max_gathered_units."
        )
    if depth and not prefetches:
        raise ConfigurationError(
            f"{name}={depth} has no effect with overlap_param_gather=False; turn that on or leave {name} out."
        )
    if config.suggested_communication_unit_size is not None:
        raise ConfigurationError(
            f"{name}={depth} and suggested_communication_unit_size={config.suggested_communication_unit_size} both say "
            "how far to gather ahead; give only one of them."
        )


def _fine_grained(
    given: Mapping[str, Any], config: DistributedDataParallelConfig, strategy: ShardingStrategy
) -> tuple[bool, tuple[type[nn.Module], ...]]:
    on = bool(given["enable_fine_grained_param_gather_hook"] or config.megatron_fsdp_enable_fine_grained_param_gather)
    types = given["fine_grained_recurse_module_types"]
    for name, value in (
        ("enable_fine_grained_param_gather_backward_hook", given["enable_fine_grained_param_gather_backward_hook"]),
        ("fine_grained_recurse_module_types", types),
    ):
        if value and not on:
            raise ConfigurationError(
                f"{name}={value!r} needs enable_fine_grained_param_gather_hook=True, since modules are gathered alike "
                "in both directions; set both or neither."
            )
    if on and strategy == ShardingStrategy.no_shard:
        raise ConfigurationError(
            "enable_fine_grained_param_gather=True has no effect under no_shard, which gathers nothing; leave it out."
        )
    types = tuple(types or ())
    for entry in types:
        if not (isinstance(entry, type) and issubclass(entry, nn.Module)):
            raise TypeError(
                f"fine_grained_recurse_module_types has the entry {entry!r}, which is not a subclass of "
                "torch.nn.Module; give classes."
            )
    return on, types


def _needs_sharded_weights(option: str, strategy: ShardingStrategy) -> None:
    if strategy != ShardingStrategy.optim_grads_params:
        raise ConfigurationError(
            f"{option} has no effect under {strategy.name}, where every rank holds whole weights; leave it out or use "
            "optim_grads_params (3)."
        )


def _check_count(name: str, value: object, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ConfigurationError(f"{name}={value!r} is not a whole number of units; give {least} or more.")
