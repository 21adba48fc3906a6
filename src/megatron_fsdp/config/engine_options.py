"""`EngineOptions`: the checked and complete options of the engine: memory, offload, and environment variables too.

They are resolved once, in the public call, and read where they take effect: layout, gradient factors, memory and the
scheduler's configuration in `engine/plans.py`, the rest in `wrap/`, `engine/engine.py` and `megatron_fsdp.py`.
"""

import math
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from enum import Enum
from numbers import Real
from pathlib import Path
from typing import Any

from torch import nn

from megatron_fsdp.config.ddp_config import DistributedDataParallelConfig, ShardingStrategy, resolve_strategy
from megatron_fsdp.config.precision import MixedPrecisionPolicy, weight_formats_of
from megatron_fsdp.errors import ConfigurationError


class WeightAllocator(Enum):
    """Allocators of memory for unsharded weights, which `docs/memory.md` compares."""

    SLOTS = "slots"  # slots as long as the unit in them, persistent from their first use
    RESIZE = "resize"  # every unit has a storage of its own, which is empty while the unit is sharded
    DOUBLE_BUFFER = "double buffer"  # two slots of the most common unit's size, taken at once; other units resize
    PERSISTENT_DOUBLE_BUFFER = "persistent double buffer"  # two slots; other units keep a buffer of their own
    MAX_POOL = "max pool"  # two slots of the largest unit's size, taken at once


DOUBLE_BUFFERS = (WeightAllocator.DOUBLE_BUFFER, WeightAllocator.PERSISTENT_DOUBLE_BUFFER, WeightAllocator.MAX_POOL)
"""The allocators of two fixed slots."""

_SLOTS = 2
_PERSISTENT = "fsdp_db_use_persist_buf_on_alloc_fail"
_LEAST_BUCKET_NUMEL = 40_000_000
_BUCKET_NUMEL_PER_RANK = 1_000_000


def default_bucket_numel(num_ranks: int) -> int:
    """Return the default bucket size; it grows with the ranks, since shards shrink."""
    return max(_LEAST_BUCKET_NUMEL, _BUCKET_NUMEL_PER_RANK * num_ranks)


ALLOCATE_ONLY = "empty"
"""Value of `init_model_with_meta_device`: meta parameters are allocated, and the caller fills them."""

MESSAGE_VARIABLE = "MFSDP_MESSAGE_BYTES"
"""Environment variable: the size in bytes up to which neighbouring units are merged; 0: none are."""


@dataclass(frozen=True)
class UserBufferOptions:
    """Options of communication memory that keeps its addresses and is registered if the back end can."""

    symmetric: bool = True  # symmetric windows are registered where they exist
    manual: bool = False  # `manual_buffer_registration` registers, instead of wrapping


@dataclass(frozen=True)
class MemoryOptions:
    """Options of memory and prefetching."""

    allocator: WeightAllocator = WeightAllocator.SLOTS  # of gathered weights
    slots: int = _SLOTS  # units besides the root that may be gathered at a time (strategy 3)
    may_grow: bool = True  # a larger prefetch size may bring more slots
    forward_prefetch_units: int = 1  # units to gather ahead in forward
    backward_prefetch_units: int = 1
    # elements to communicate at once, to gather ahead and to have in reduction; None: small units together, one unit
    # ahead, two buckets
    communication_unit_numel: int | None = None
    message_bytes: int | None = None  # up to which small neighbours are merged; None: by the number of ranks
    root_group_numel: int | None = None  # elements per group outside of units; None: by the number of ranks
    cuts_root: bool = True  # whether parameters outside of units are divided into groups at all
    fine_grained: bool = False  # the modules inside units become units
    whole_types: tuple[type[nn.Module], ...] = ()  # classes of modules that stay one unit then
    idle: tuple[str, ...] = ()  # for each argument that has no effect a sentence that says so
    user_buffers: UserBufferOptions | None = None  # how communication memory is registered; None: it is not
    # all communication memory is taken at wrap time and keeps its addresses; else it is allocated as it is needed
    is_persistent: bool = False

    def root_group_numel_on(self, num_ranks: int) -> int | None:
        """Return the elements per parameter group of the root on a number of ranks; None: one group."""
        if not self.cuts_root:
            return None
        return self.root_group_numel or default_bucket_numel(num_ranks)

    def check_plan(self, units_besides_root: int) -> None:
        """Raise if an option has no effect on this model."""
        if units_besides_root:
            return
        for name, is_set in (
            ("fsdp_double_buffer", self.allocator in DOUBLE_BUFFERS and self.user_buffers is None),
            ("enable_fine_grained_param_gather", self.fine_grained),
        ):
            if is_set:
                raise ConfigurationError(
                    f"{name}=True has no effect on a model without units besides the root; name the classes of its "
                    "units in fsdp_unit_modules, or leave the option out."
                )


@dataclass(frozen=True)
class Offload:
    """The offloaded fraction of each kind of state, 0 to 1 of the elements, in whole units.

    Host memory is pinned where the device is a CUDA device. The rest stays on the device.
    """

    main_weights: float = 0.0  # the parameters that the optimizer updates
    optimizer_state: float = 0.0  # tensors of the optimizer in the parameter's shape
    # the accumulated ones, that `.grad` shows: beside the main weights, as torch wants it
    main_gradients: float = 0.0
    compute_weights: float = 0.0  # this rank's shard of the weights that are gathered; strategy 3 only

    def __bool__(self) -> bool:
        """Return True if anything is offloaded."""
        return any(getattr(self, kind) for kind in KINDS)

    def __str__(self) -> str:
        """Return the offloaded kinds, with fractions other than 1."""
        found = ((kind, getattr(self, kind)) for kind in KINDS)
        parts = [kind if fraction == 1.0 else f"{kind} {fraction:g}" for kind, fraction in found if fraction]
        return ", ".join(parts) or "nothing"


def offload_by_unit(offload: Offload, numels: Sequence[int]) -> list[Offload]:
    """Assign each unit every kind whole, or not at all: the last first, up to the fraction.

    `numels` are the units' elements, the root's first. The last units are offloaded first, since their gradients come
    first.
    """
    later = [sum(numels[index + 1 :]) / max(1, sum(numels)) for index in range(len(numels))]
    return [Offload(**{kind: float(share < getattr(offload, kind)) for kind in KINDS}) for share in later]


@dataclass(frozen=True)
class EngineOptions:
    """The checked options of one model, named like the arguments and configuration fields that set them.

    What has no comment means what the argument of `fully_shard_model`, or else the field of
    `DistributedDataParallelConfig`, of that name does.
    """

    strategy: ShardingStrategy = ShardingStrategy.optim_grads_params  # on the sharding axis
    outer_strategy: ShardingStrategy = ShardingStrategy.no_shard  # on the outer axis, where there is one
    policy: MixedPrecisionPolicy = MixedPrecisionPolicy()  # noqa: RUF009 (frozen)
    memory: MemoryOptions = field(default_factory=MemoryOptions)
    numel_multiple: int = 1  # every trainable group is padded to a multiple of this many elements
    own_groups: bool = False  # communicate over process groups that the model's own collectives do not use
    verify_ranks_s: float = 0.0  # seconds to wait for each rank where ranks are compared; 0.0: they are not
    overlap_grad_reduce: bool = True
    overlap_param_gather: bool = True
    average_in_collective: bool = False
    gradient_reduce_div_fusion: bool = True  # scale gradients after the reduction, not before
    reduce_scatter_with_fp32_accumulation: bool = False
    param_name_patterns_for_fp32_local_accumulation: tuple[str, ...] = ()
    report_nan_in_param_grad: bool = False
    check_for_large_grads: bool = False
    delay_wgrad_compute: bool = False  # those of linears, to the end of backward, where all units are reduced then
    keep_fp8_transpose_cache: bool = False
    calculate_per_token_loss: bool = False
    init_model_with_meta_device: bool | str = False
    find_unused_parameters: bool = False
    deterministic: str | None = None
    megatron_fsdp_use_decoupled_grad: bool = False
    megatron_fsdp_cuda_graph_mode: bool = False
    offload: Offload = Offload()
    strategy_experts: ShardingStrategy | None = None  # of experts, on the sharding axis; None: that of all parameters
    # Paths of the units that ranks may skip, in the order of their calls; empty: in the order of registration; None:
    # ranks may not skip units.
    skip_order: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        switches = {
            "cuda_graph_mode": self.megatron_fsdp_cuda_graph_mode,
            "verify_ranks (or MFSDP_VERIFY_RANKS)": bool(self.verify_ranks_s),
        }
        found = [name for name, is_on in switches.items() if is_on and self.skip_order is not None]
        if found:
            raise ConfigurationError(
                f"ranks_may_skip_units and {' and '.join(found)} contradict each other, since ranks agree on each pass "
                "on the host, and come to a unit by ways of their own; leave one of them out"
            )

    @property
    def strategies(self) -> tuple[ShardingStrategy, ...]:
        """The strategies of dense parameters and of experts, where these have one of their own."""
        return (self.strategy,) if self.strategy_experts is None else (self.strategy, self.strategy_experts)

    @property
    def reduces_early(self) -> bool:
        """True if units are reduced during backward, and not all at its end."""
        return not self.delay_wgrad_compute and (
            self.overlap_grad_reduce or any(each.shards_gradients for each in self.strategies)
        )

    @property
    def always_agrees_on_usage(self) -> bool:
        """True if ranks agree at every sync on the parameters that any of them used."""
        return self.find_unused_parameters or self.skip_order is not None  # a step may use a unit on no rank at all

    def check_capture(self) -> None:
        """Raise if `cuda_graph_mode` is on with an option that copies tensors to the host in every step."""
        reads = {
            "report_nan_in_param_grad": self.report_nan_in_param_grad,
            "check_for_large_grads": self.check_for_large_grads,
            "find_unused_parameters": self.find_unused_parameters,
            "verify_ranks": bool(self.verify_ranks_s),
            "weight_format": self.policy.weight_format is not None,
            "offload": self.offload,
        }
        found = [name for name, is_on in reads.items() if is_on and self.megatron_fsdp_cuda_graph_mode]
        if found:
            raise ConfigurationError(
                f"cuda_graph_mode=True and {' and '.join(found)} contradict each other, since what a step reads on the "
                "host cannot be captured; leave one of them out."
            )


def with_weight_format(policy: MixedPrecisionPolicy, config: DistributedDataParallelConfig) -> MixedPrecisionPolicy:
    """Return the policy with the configuration's weight format, unless it has one itself.

    With `fp8_param_gather`, two further fields choose among float8 formats: `keep_fp8_transpose_cache` means
    `fp8_compute`, the one with transposed weights, and `reuse_grad_buf_for_mxfp8_param_ag` means `mxfp8`.

    Raises:
        ConfigurationError: Both fields are set.
    """
    if config.keep_fp8_transpose_cache and config.reuse_grad_buf_for_mxfp8_param_ag:
        raise ConfigurationError(
            "keep_fp8_transpose_cache=True and reuse_grad_buf_for_mxfp8_param_ag=True name two formats of weights "
            "(fp8_compute, mxfp8); give only one of them."
        )
    mxfp8 = config.reuse_grad_buf_for_mxfp8_param_ag
    float8 = "mxfp8" if mxfp8 else "fp8_compute" if config.keep_fp8_transpose_cache else "fp8"
    switched = float8 if config.fp8_param_gather else "nvfp4" if config.fp4_param_gather else None
    chosen = switched or weight_formats_of(config.megatron_fsdp_weight_format)
    return policy if chosen is None or policy.weight_format is not None else replace(policy, weight_format=chosen)


def configured_strategies(config: DistributedDataParallelConfig) -> tuple[ShardingStrategy, ...]:
    """Return the strategies of dense parameters and of experts, where these have one of their own."""
    names = ("data_parallel_sharding_strategy", "data_parallel_sharding_strategy_experts")
    given = [(getattr(config, name), name) for name in names]
    return tuple(resolve_strategy(value, name) for value, name in given if value is not None)


def engine_options_of(config: DistributedDataParallelConfig, policy: MixedPrecisionPolicy) -> EngineOptions:
    """Build EngineOptions from a config alone."""
    strategy, *of_experts = configured_strategies(config)
    return EngineOptions(
        strategy=strategy,
        strategy_experts=of_experts[0] if of_experts else None,
        outer_strategy=resolve_strategy(config.outer_dp_sharding_strategy, "outer_dp_sharding_strategy"),
        policy=policy,
        memory=MemoryOptions(user_buffers=_user_buffers(config), is_persistent=_is_persistent(config)),
        overlap_grad_reduce=config.overlap_grad_reduce,
        overlap_param_gather=config.overlap_param_gather,
        average_in_collective=config.average_in_collective,
        gradient_reduce_div_fusion=config.gradient_reduce_div_fusion,
        reduce_scatter_with_fp32_accumulation=config.reduce_scatter_with_fp32_accumulation,
        param_name_patterns_for_fp32_local_accumulation=config.param_name_patterns_for_fp32_local_accumulation,
        report_nan_in_param_grad=config.check_for_nan_in_grad,
        check_for_large_grads=config.check_for_large_grads,
        delay_wgrad_compute=config.delay_wgrad_compute,
        keep_fp8_transpose_cache=config.keep_fp8_transpose_cache,
        megatron_fsdp_use_decoupled_grad=config.megatron_fsdp_use_decoupled_grad,
        megatron_fsdp_cuda_graph_mode=config.megatron_fsdp_cuda_graph_mode,
    )


def resolve_skip_order(given: object, model: nn.Module) -> tuple[str, ...] | None:
    """Resolve the argument `ranks_may_skip_units` into paths of modules of a model.

    Raises:
        ConfigurationError: It is neither a bool nor a sequence of modules of the model.
    """
    if isinstance(given, bool):
        return () if given else None
    paths = {id(module): path for path, module in model.named_modules()}
    modules: list[object] = list(given) if isinstance(given, Sequence | nn.ModuleList) else [given]
    for module in modules or [given]:  # an empty sequence is no order either
        if id(module) not in paths:
            raise ConfigurationError(
                f"ranks_may_skip_units has a {type(module).__name__} that is no module of the model; give True, or the "
                "modules that are units in the order in which forwards call them"
            )
    return tuple(paths[id(module)] for module in modules)


def checked_deterministic(given: str | None) -> str | None:
    """Check the argument `deterministic`, and return it."""
    if given not in (None, "world"):
        raise ConfigurationError(
            f'deterministic={given!r} does not exist; give "world" for the same bits on any number of ranks, or None'
        )
    return given


def _user_buffers(config: DistributedDataParallelConfig) -> UserBufferOptions | None:
    if config.nccl_ub:
        return UserBufferOptions(not config.disable_symmetric_registration, config.fsdp_manual_registration)
    if config.fsdp_manual_registration:
        raise ConfigurationError(
            "fsdp_manual_registration=True has no effect without nccl_ub=True; set both or neither."
        )
    return None


@dataclass(frozen=True, kw_only=True)
class MemoryArguments:
    """The arguments about memory and prefetching, as documented by `fully_shard_model`."""

    disable_bucketing: bool = False
    fsdp_double_buffer: bool = False
    fsdp_db_use_persist_buf_on_alloc_fail: bool = False
    enable_fine_grained_param_gather_hook: bool = False
    enable_fine_grained_param_gather_backward_hook: bool = False
    fine_grained_recurse_module_types: Sequence[type[nn.Module]] | None = None
    weight_allocator: str = "slots"
    max_gathered_units: int | None = None
    forward_prefetch_units: int | None = None
    backward_prefetch_units: int | None = None


def resolve_memory_options(given: MemoryArguments, config: DistributedDataParallelConfig) -> MemoryOptions:
    """Check the memory arguments and the configuration together, and build the memory options."""
    strategy = max(configured_strategies(config))
    allocator, idle = _allocator(given, config, strategy)
    if config.disable_symmetric_registration and not config.nccl_ub:
        idle += ("disable_symmetric_registration=True has no effect without nccl_ub=True; set both or neither",)
    forward, backward, slots = _depths(given, config, strategy, allocator)
    fine_grained, whole_types = _fine_grained(given, config, strategy)
    if given.disable_bucketing and config.bucket_size is not None:
        raise ConfigurationError(
            f"disable_bucketing=True and bucket_size={config.bucket_size} contradict each other; give only one of them."
        )
    return MemoryOptions(
        allocator=allocator,
        slots=slots,
        may_grow=given.max_gathered_units is None and allocator not in DOUBLE_BUFFERS,
        forward_prefetch_units=forward,
        backward_prefetch_units=backward,
        communication_unit_numel=config.suggested_communication_unit_size,
        message_bytes=_message_bytes(allocator),
        root_group_numel=config.bucket_size,
        cuts_root=not given.disable_bucketing,
        fine_grained=fine_grained,
        whole_types=whole_types,
        idle=idle,
        user_buffers=_user_buffers(config),
        is_persistent=_is_persistent(config),
    )


def default_memory_options() -> MemoryOptions:
    """Return default memory options, with MFSDP_MESSAGE_BYTES applied."""
    return MemoryOptions(message_bytes=_message_bytes(MemoryOptions().allocator))


def _message_bytes(allocator: WeightAllocator) -> int | None:
    """Read MFSDP_MESSAGE_BYTES; None: by the number of ranks."""
    given = os.environ.get(MESSAGE_VARIABLE)
    if given is not None and not given.isdecimal():
        raise ConfigurationError(
            f"{MESSAGE_VARIABLE}={given} is not a number of bytes; set it to 0 to merge no units, or leave it unset"
        )
    if allocator in DOUBLE_BUFFERS:  # which want units of one size
        return 0
    return None if given is None else int(given)


def _is_persistent(config: DistributedDataParallelConfig) -> bool:
    return config.nccl_ub or config.megatron_fsdp_cuda_graph_mode


def _allocator(
    given: MemoryArguments, config: DistributedDataParallelConfig, strategy: ShardingStrategy
) -> tuple[WeightAllocator, tuple[str, ...]]:
    """Return the allocator, and a sentence for each allocator argument without effect."""
    name = given.weight_allocator
    if name not in ("slots", "resize"):
        raise ConfigurationError(f'weight_allocator={name!r} does not exist; give "slots" or "resize".')
    max_pool = config.megatron_fsdp_max_pool_double_buffer
    doubled = given.fsdp_double_buffer or config.fsdp_double_buffer or max_pool
    persistent = given.fsdp_db_use_persist_buf_on_alloc_fail or config.fsdp_db_use_persist_buf_on_alloc_fail
    idle: tuple[str, ...] = ()
    if persistent and (not doubled or max_pool):
        reason = "with a pool that every unit fits" if max_pool else "without fsdp_double_buffer=True"
        persistent, idle = False, (f"{_PERSISTENT}=True has no effect {reason}; leave it out",)
    if name == "resize":
        _needs_sharded_weights('weight_allocator="resize"', strategy)
    if not doubled:
        return WeightAllocator(name), idle
    option = "maxpool_double_buffer" if max_pool else "fsdp_double_buffer"
    if not strategy.shards_compute_weights:  # accepted there, as in the published package
        if config.nccl_ub and not persistent and not max_pool:
            return WeightAllocator.SLOTS, ()  # only implied
        reason = f"under {strategy.name}, where every rank holds whole weights; leave it out, or use optim_grads_params"
        found = (option, *([_PERSISTENT] if persistent else []))
        return WeightAllocator.SLOTS, (*idle, *(f"{each}=True has no effect {reason} (3)" for each in found))
    if name == "resize":
        raise ConfigurationError(
            f'{option}=True and weight_allocator="resize" are two ways to hold gathered weights; give only one of them.'
        )
    if max_pool:
        return WeightAllocator.MAX_POOL, idle
    return WeightAllocator.PERSISTENT_DOUBLE_BUFFER if persistent else WeightAllocator.DOUBLE_BUFFER, ()


def _depths(
    given: MemoryArguments,
    config: DistributedDataParallelConfig,
    strategy: ShardingStrategy,
    allocator: WeightAllocator,
) -> tuple[int, int, int]:
    """Return the units to prefetch in forward and in backward, and the most that may be unsharded at a time."""
    limit = given.max_gathered_units
    if limit is not None:
        _check_count("max_gathered_units", limit, 1)
        _needs_sharded_weights(f"max_gathered_units={limit}", strategy)
        if allocator in DOUBLE_BUFFERS and limit != _SLOTS:
            raise ConfigurationError(
                f"max_gathered_units={limit} contradicts a double buffer, which holds {_SLOTS} units; leave it out."
            )
    most = _SLOTS if allocator in DOUBLE_BUFFERS else limit
    prefetches = config.overlap_param_gather or strategy.shards_compute_weights
    depths = []
    for name, depth in (
        ("forward_prefetch_units", given.forward_prefetch_units),
        ("backward_prefetch_units", given.backward_prefetch_units),
    ):
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
    given: MemoryArguments, config: DistributedDataParallelConfig, strategy: ShardingStrategy
) -> tuple[bool, tuple[type[nn.Module], ...]]:
    on = bool(given.enable_fine_grained_param_gather_hook or config.megatron_fsdp_enable_fine_grained_param_gather)
    types = given.fine_grained_recurse_module_types
    for name, value in (
        ("enable_fine_grained_param_gather_backward_hook", given.enable_fine_grained_param_gather_backward_hook),
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
    entries: tuple[Any, ...] = tuple(types or ())
    for entry in entries:
        if not (isinstance(entry, type) and issubclass(entry, nn.Module)):
            raise TypeError(
                f"fine_grained_recurse_module_types has the entry {entry!r}, which is not a subclass of "
                "torch.nn.Module; give classes."
            )
    return on, entries


def _needs_sharded_weights(option: str, strategy: ShardingStrategy) -> None:
    if not strategy.shards_compute_weights:
        raise ConfigurationError(
            f"{option} has no effect under {strategy.name}, where every rank holds whole weights; leave it out or use "
            "optim_grads_params (3)."
        )


def _check_count(name: str, value: object, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ConfigurationError(f"{name}={value!r} is not a whole number of units; give {least} or more.")


# ---- offload ---------------------------------------------------------------------------------------------------------

KINDS = tuple(field.name for field in fields(Offload))
OffloadArgument = Any
"""Type of `fully_shard(offload=...)`: None, "all", torch's policies, a sequence of kinds, or kinds with fractions."""


def offload_of(words: Sequence[str]) -> dict[str, float]:
    """Parse the words of a flag, "KIND" or "KIND=FRACTION", into an argument of `resolve_offload`.

    Raises:
        ConfigurationError: A fraction is no number.
    """
    pairs = [word.partition("=") for word in words]
    try:
        return {kind: float(fraction) if equals else 1.0 for kind, equals, fraction in pairs}
    except ValueError:
        raise ConfigurationError(
            f"offload {' '.join(words)}: give kinds of {', '.join(KINDS)}, each alone or as KIND=FRACTION"
        ) from None


def resolve_offload(given: OffloadArgument, strategy: ShardingStrategy) -> Offload:
    """Resolve the argument `offload`.

    Args:
        given: A sequence of kinds, or a mapping of kind to fraction (0 to 1). "all", or torch's `CPUOffloadPolicy()`:
            every kind. State of the optimizer and gradients follow the main weights unless they are named.
        strategy: The strategy on the sharding axis.

    Raises:
        ConfigurationError: There is no such kind, a fraction is out of range, or kinds exclude each other.
    """
    kind_given = type(given).__name__  # torch's policies come from a package that takes long to import
    if given is None or kind_given == "OffloadPolicy":
        return Offload()
    if kind_given == "CPUOffloadPolicy" or given == "all":
        given = ("main_weights", "compute_weights") if strategy.shards_compute_weights else ("main_weights",)
    is_listed = isinstance(given, Mapping | Sequence) and not isinstance(given, str | bytes)
    if not is_listed or not all(isinstance(kind, str) for kind in given):
        raise ConfigurationError(
            f'offload={given!r} is none of: "all", CPUOffloadPolicy(), a sequence of kinds such as '
            '["optimizer_state"], and a mapping of kinds to fractions such as {"main_weights": 0.5}'
        )
    asked = given if isinstance(given, Mapping) else dict.fromkeys(given, 1.0)
    for kind, fraction in asked.items():
        if kind not in KINDS:
            raise ConfigurationError(f"offload has {kind!r}; the kinds of state are {', '.join(KINDS)}")
        if isinstance(fraction, bool) or not isinstance(fraction, Real) or not 0 <= float(fraction) <= 1:
            raise ConfigurationError(f"offload[{kind!r}] is {fraction!r}; give a fraction, a number from 0 to 1")
    main = float(asked.get("main_weights", 0.0))
    found = {kind: float(fraction) for kind, fraction in asked.items()}
    offload = Offload(**{"optimizer_state": main, "main_gradients": main, **found})
    _check_offload(offload, strategy)
    return offload


def _check_offload(offload: Offload, strategy: ShardingStrategy) -> None:
    """Reject offload combinations that the strategy cannot support."""
    main = offload.main_weights
    if main != offload.main_gradients:
        raise ConfigurationError(
            f"offload has the fraction {offload.main_gradients:g} for main_gradients and {main:g} for main_weights; "
            "torch wants a gradient beside its parameter, so give both the same or leave main_gradients out"
        )
    if main and main != offload.optimizer_state:
        raise ConfigurationError(
            f"offload has the fraction {offload.optimizer_state:g} for optimizer_state and {main:g} for main_weights; "
            "the optimizer steps where the main weights rest and keeps its state there, so give both the same or "
            "leave optimizer_state out"
        )
    if offload.compute_weights and not strategy.shards_compute_weights:
        raise ConfigurationError(
            f"offload has compute_weights, and strategy {strategy.name} computes with whole weights that are there "
            "all the time; use zero_dp_strategy 3, or leave compute_weights out"
        )


# ---- environment variables of the hang logs and the debug tools ------------------------------------------------------

LIFETIMES_VARIABLE = "MFSDP_CHECK_LIFETIMES"
VERIFY_VARIABLE = "MFSDP_VERIFY_RANKS"
FOLDER_VARIABLE = "MFSDP_HANG_LOG"
TIMEOUT_VARIABLE = "MFSDP_HANG_TIMEOUT"
VERIFY_TIMEOUT_S = 300.0
"""Default timeout of the comparison of ranks."""
_SWITCH = {"": False, "0": False, "1": True}


@dataclass(frozen=True)
class HangSettings:
    """Settings of the log for hangs."""

    folder: Path  # where the ranks keep their logs; one that all of them see, where there is one
    # report when a phase has taken this many seconds without news; None: only when asked
    timeout_s: float | None = None


def checked_timeout(given: float | str, name: str = "timeout_s") -> float:
    """Check a time in seconds, and return it."""
    with suppress(ValueError):
        if 0.0 < (seconds := float(given)) < math.inf:
            return seconds
    raise ConfigurationError(f"{name}={given!r} is not a time to wait; give seconds, more than 0")


def resolve_hang_log(environment: Mapping[str, str] = os.environ) -> HangSettings | None:
    """Read the settings of the log for hangs from the environment; None: no log."""
    folder, seconds = environment.get(FOLDER_VARIABLE, ""), environment.get(TIMEOUT_VARIABLE, "")
    if seconds and not folder:
        raise ConfigurationError(
            f"{TIMEOUT_VARIABLE}={seconds} has no effect without {FOLDER_VARIABLE}; name a folder for the logs too"
        )
    if not folder:
        return None
    return HangSettings(Path(folder), checked_timeout(seconds, TIMEOUT_VARIABLE) if seconds else None)


def resolve_check_lifetimes(environment: Mapping[str, str] = os.environ) -> bool:
    """Return True if the environment asks for lifetime checks from the start."""
    value = environment.get(LIFETIMES_VARIABLE, "")
    if value not in _SWITCH:
        raise ConfigurationError(f"{LIFETIMES_VARIABLE}={value!r} is not a switch; give 1 or 0")
    return _SWITCH[value]


def resolve_verify_ranks(verify_ranks: bool | float | str | None, environment: Mapping[str, str] = os.environ) -> float:
    """Return the timeout of the comparison of ranks in seconds; 0.0: ranks are not compared."""
    where, value = "verify_ranks", verify_ranks
    if value is None:
        where, given = VERIFY_VARIABLE, environment.get(VERIFY_VARIABLE, "")
        value = _SWITCH.get(given, given)
    if isinstance(value, bool):
        return VERIFY_TIMEOUT_S if value else 0.0
    with suppress(ValueError):
        if 0.0 < (seconds := float(str(value))) < math.inf:
            return seconds
    raise ConfigurationError(f"{where}={value!r} is neither a switch nor a time; give 1, 0 or seconds to wait")
