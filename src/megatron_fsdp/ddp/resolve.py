"""Resolution of the configuration of `DistributedDataParallel`, with no field ignored. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace

import torch

from megatron_fsdp.config.ddp_config import DistributedDataParallelConfig, ShardingStrategy, resolve_strategy
from megatron_fsdp.config.engine_options import configured_strategies, default_bucket_numel, with_weight_format
from megatron_fsdp.config.precision import MixedPrecisionPolicy
from megatron_fsdp.ddp.buckets import GatherMode
from megatron_fsdp.errors import ConfigurationError

HIGH_BANDWIDTH_MULTIPLE = 2**16

_UNITS_ONLY = (
    "data_parallel_sharding_strategy",
    "data_parallel_sharding_strategy_experts",
    "outer_dp_sharding_strategy",
    "suggested_communication_unit_size",
    "fsdp_double_buffer",
    "fsdp_db_use_persist_buf_on_alloc_fail",
    "fsdp_all_gather_in_start_param_sync",
    "megatron_fsdp_enable_fine_grained_param_gather",
    "megatron_fsdp_max_pool_double_buffer",
    "fsdp_manual_registration",
    "megatron_fsdp_cuda_graph_mode",
    "megatron_fsdp_version",
)
"""Fields without effect on buckets."""

_BUCKETS_ONLY = (
    "num_buckets",
    "pad_buckets_for_high_nccl_busbw",
    "align_param_gather",
)
"""Fields without effect on units."""

_SET_OR_NOT = "set that or leave it out"


@dataclass(frozen=True)
class ResolvedDDP:
    """The resolved configuration of `DistributedDataParallel`."""

    config: DistributedDataParallelConfig  # the caller's, a checked copy
    strategy: ShardingStrategy  # on the sharding axis
    outer_strategy: ShardingStrategy  # on the axis over the instances of the distributed optimizer
    policy: MixedPrecisionPolicy
    bucket_numel: int | None  # that close a bucket; None: one bucket per kind (or, with units, the engine's default)
    numel_multiple: int  # buckets are padded to a multiple of this many elements
    gather_mode: GatherMode  # when changed weights are gathered
    engine_config: DistributedDataParallelConfig  # the same configuration as far as `MegatronFSDP` knows its fields
    notes: tuple[str, ...]  # what was adjusted or derived, and why, in words


def resolve_ddp(
    config: DistributedDataParallelConfig, num_ranks: int, num_parameters: int, disable_bucketing: bool = False
) -> ResolvedDDP:
    """Check and resolve a configuration for a number of ranks; the caller's object is not changed."""
    config = config.checked_copy()
    strategy = _strategy(config)
    _refuse_without_effect(config, strategy)
    instances = config.num_distributed_optimizer_instances
    if num_ranks % instances:
        raise ConfigurationError(
            f"num_distributed_optimizer_instances={instances} does not divide the {num_ranks} data-parallel ranks; "
            f"give one of {', '.join(str(n) for n in range(1, num_ranks + 1) if num_ranks % n == 0)}"
        )
    bucket_numel, bucket_note = _bucket_numel(config, num_ranks, num_parameters, disable_bucketing)
    policy = with_weight_format(_policy(config), config)
    gather_mode = GatherMode.TOGETHER if config.align_param_gather else GatherMode.IN_TURN
    return ResolvedDDP(
        config=config,
        strategy=strategy,
        outer_strategy=resolve_strategy(config.outer_dp_sharding_strategy, "outer_dp_sharding_strategy"),
        policy=policy,
        bucket_numel=bucket_numel,
        numel_multiple=HIGH_BANDWIDTH_MULTIPLE if config.pad_buckets_for_high_nccl_busbw else 1,
        gather_mode=gather_mode if config.overlap_param_gather else GatherMode.AT_ONCE,
        engine_config=_engine_config(config, strategy, policy),
        notes=tuple(_notes(config, strategy, bucket_note)),
    )


def _strategy(config: DistributedDataParallelConfig) -> ShardingStrategy:
    if not config.use_megatron_fsdp:
        return ShardingStrategy.optim if config.use_distributed_optimizer else ShardingStrategy.no_shard
    strategy = resolve_strategy(config.data_parallel_sharding_strategy, "data_parallel_sharding_strategy")
    if config.use_distributed_optimizer and strategy is ShardingStrategy.no_shard:
        raise ConfigurationError(
            'use_distributed_optimizer=True contradicts data_parallel_sharding_strategy="no_shard" (its default) with '
            'use_megatron_fsdp=True; give the strategy: "optim", "optim_grads" or "optim_grads_params"'
        )
    return strategy


def _refuse_without_effect(config: DistributedDataParallelConfig, strategy: ShardingStrategy) -> None:
    """Raise if a field is set that has no effect beside the others."""
    units, shards = config.use_megatron_fsdp, strategy.shards_main_weights
    gathers_shards = all(each.shards_compute_weights for each in (strategy, *configured_strategies(config)[1:]))
    how = "without a sharding strategy" if units else "without use_distributed_optimizer=True"
    few_bits = (
        "without sharded weights, which alone are gathered in few bits; set use_megatron_fsdp=True and "
        'data_parallel_sharding_strategy="optim_grads_params", or leave it out'
    )
    if units:
        by_engine = dict.fromkeys(_BUCKETS_ONLY, "with use_megatron_fsdp=True; leave it out")
    else:
        without = "without use_megatron_fsdp=True; set "
        by_engine = dict.fromkeys(_UNITS_ONLY, without + "use_megatron_fsdp=True or leave it out")
        if config.data_parallel_sharding_strategy == ShardingStrategy.optim.name:
            instead = without + "use_distributed_optimizer=True, which shards the optimizer, or use_megatron_fsdp=True"
            by_engine["data_parallel_sharding_strategy"] = instead
        if config.nccl_ub:
            del by_engine["fsdp_double_buffer"]  # implied
    beside_others = {
        "overlap_param_gather": not shards
        and f"{how}, since every rank holds and updates whole weights; {_SET_OR_NOT}",
        "reduce_scatter_with_fp32_accumulation": not shards
        and f"{how}, since gradients are all-reduced; {_SET_OR_NOT}",
        "num_distributed_optimizer_instances": not (shards or units)
        and f"{how}, since no optimizer is sharded; {_SET_OR_NOT}",
        "fp8_param_gather": not gathers_shards and few_bits,
        "fp4_param_gather": not gathers_shards and few_bits,
        "megatron_fsdp_weight_format": not gathers_shards and few_bits,
        "align_param_gather": not config.overlap_param_gather
        and "without overlap_param_gather=True, where all weights are gathered before the forward; set both or neither",
        "gradient_reduce_div_fusion": config.average_in_collective
        and "with average_in_collective=True, where the collective divides; give only one of them",
        "fsdp_all_gather_in_start_param_sync": not shards
        and 'with data_parallel_sharding_strategy="no_shard", where nothing is gathered; leave it out',
        "outer_dp_sharding_strategy": config.num_distributed_optimizer_instances == 1
        and "with num_distributed_optimizer_instances=1, where there is no outer axis; give 2 or more, or leave it out",
    }
    defaults = {field.name: field.default for field in fields(config)}
    for name, reason in (*by_engine.items(), *beside_others.items()):
        if reason and getattr(config, name) != defaults[name]:
            raise ConfigurationError(f"{name}={getattr(config, name)!r} has no effect {reason}")


def idle_in_megatron(config: DistributedDataParallelConfig) -> dict[str, str]:
    """Return the fields that Megatron-LM always sets and that have no effect beside the others, with the reason."""
    set_always = {"align_param_gather": "without overlap_param_gather=True"}
    if config.use_megatron_fsdp:
        idle = dict.fromkeys(_BUCKETS_ONLY, "with use_megatron_fsdp=True")
    else:
        idle = dict.fromkeys(_UNITS_ONLY, "without use_megatron_fsdp=True")
        idle |= {} if config.overlap_param_gather else set_always
    defaults = {field.name: field.default for field in fields(config)}
    return {name: reason for name, reason in idle.items() if getattr(config, name) != defaults[name]}


def _bucket_numel(
    config: DistributedDataParallelConfig, num_ranks: int, num_parameters: int, disable_bucketing: bool
) -> tuple[int | None, str]:
    """Return the bucket size in elements, and a sentence about its origin."""
    if disable_bucketing:
        for name in ("bucket_size", "num_buckets"):
            if (given := getattr(config, name)) is not None:
                raise ConfigurationError(f"disable_bucketing=True contradicts {name}={given}; give only one of them")
        return None, "one bucket for each kind of parameter: disable_bucketing"
    if config.bucket_size is not None:
        return config.bucket_size, ""
    if config.use_megatron_fsdp:
        return None, ""
    if config.num_buckets is not None:
        numel = max(1, math.ceil(num_parameters / config.num_buckets))
        return numel, f"buckets close at {numel:,} parameters: {num_parameters:,} in num_buckets={config.num_buckets}"
    if not config.overlap_grad_reduce:
        return None, "one bucket for each kind of parameter: overlap_grad_reduce is off and no bucket_size is given"
    numel = default_bucket_numel(num_ranks)
    return numel, f"buckets close at {numel:,} parameters: the default for {num_ranks} ranks"


def _policy(config: DistributedDataParallelConfig) -> MixedPrecisionPolicy:
    main_grads, grad_comm = config.megatron_fsdp_main_grads_dtype, config.megatron_fsdp_grad_comm_dtype
    if config.grad_reduce_in_fp32:
        for name, dtype in (("main_grads", main_grads), ("grad_comm", grad_comm)):
            if dtype not in (None, torch.float32):
                raise ConfigurationError(
                    f"grad_reduce_in_fp32=True contradicts megatron_fsdp_{name}_dtype={dtype}; give only one of them"
                )
        main_grads = grad_comm = torch.float32
    return MixedPrecisionPolicy(config.megatron_fsdp_main_params_dtype, main_grads, grad_comm)


def _engine_config(
    config: DistributedDataParallelConfig, strategy: ShardingStrategy, policy: MixedPrecisionPolicy
) -> DistributedDataParallelConfig:
    """Return the configuration for `MegatronFSDP`, without the fields that are passed as arguments."""
    return replace(
        config,
        grad_reduce_in_fp32=False,
        align_param_gather=False,
        use_distributed_optimizer=False,
        num_distributed_optimizer_instances=1,
        bucket_size=config.bucket_size if config.use_megatron_fsdp else None,
        num_buckets=None,
        pad_buckets_for_high_nccl_busbw=False,
        data_parallel_sharding_strategy=strategy.name,
        megatron_fsdp_main_params_dtype=policy.main_params_dtype,
        megatron_fsdp_main_grads_dtype=policy.main_grads_dtype,
        megatron_fsdp_grad_comm_dtype=policy.grad_comm_dtype,
    )


def _notes(config: DistributedDataParallelConfig, strategy: ShardingStrategy, bucket_note: str) -> Iterator[str]:
    if bucket_note:
        yield bucket_note
    if config.use_megatron_fsdp and config.use_distributed_optimizer:
        yield f"use_distributed_optimizer: implied by data_parallel_sharding_strategy={strategy.name!r}"
    if config.keep_fp8_transpose_cache and config.fp8_param_gather:
        yield "linears multiply float8 weights (weight_format='fp8_compute'): keep_fp8_transpose_cache"
    if config.grad_reduce_in_fp32:
        yield "gradients accumulate and are reduced in torch.float32: grad_reduce_in_fp32"
    if config.use_megatron_fsdp and strategy.shards_gradients and not config.overlap_grad_reduce:
        yield f"overlap_grad_reduce is always on with {strategy.name}"
