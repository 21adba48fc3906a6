"""Every field of `DistributedDataParallelConfig`: what effect it has on a live model. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from megatron_fsdp.option_facts import Effect, Judge, Option, OptionFacts, has, none
from megatron_fsdp.option_table import (
    COMMON,
    FULLY_SHARD,
    MESH,
    averages,
    fuses,
    gathers_ahead,
    grad_comm,
    main_params,
    reduces_early,
    sums_in_fp32,
)

_OF_FULLY_SHARD: Mapping[str, Judge] = {option.name: option.judge for option in FULLY_SHARD}


def _not_yet(_facts: OptionFacts) -> Effect:
    return none("not supported yet; only the default is accepted")


def _idle(told: str) -> Judge:
    return lambda _: none(told)


def _units_only(judge: Judge) -> Judge:
    return lambda f: none("concerns units, and these are buckets") if f.uses_buckets else judge(f)


def _buckets_only(judge: Judge) -> Judge:
    return lambda f: judge(f) if f.uses_buckets else none("concerns buckets, and these are units")


def _optimizer(facts: OptionFacts) -> Effect:
    if not facts.uses_buckets:
        return none("the sharding strategy says so")
    if facts.num_ranks == 1:
        return none("one rank, nothing is sharded")
    return has("optimizer state is sharded" if facts.strategy else "every rank updates everything")


def _instances(facts: OptionFacts) -> Effect:
    if not facts.outer_ranks:
        return none("all ranks share one optimizer")
    return has(f"{facts.outer_ranks} groups of ranks with a whole optimizer each")


def _bucket_size(facts: OptionFacts) -> Effect:
    if facts.bucket_numel is None:
        return none("parameters are not cut by size")
    if not facts.cut_groups:
        return none(f"all fit into one bucket of {facts.bucket_numel:,} elements")
    return has(f"buckets close at {facts.bucket_numel:,} elements")


def _accumulates(facts: OptionFacts) -> Effect:
    return has("gradients accumulate and travel in float32" if not facts.narrow else "gradients may do so in 16 bits")


def _division(facts: OptionFacts) -> Effect:
    if facts.num_ranks == 1 or facts.per_token:
        return none("gradients are not divided")
    if facts.averages:
        return none("the collective divides")
    return has(f"gradients are divided {'before they travel' if facts.scales_first else 'after they were added up'}")


def _aligned(facts: OptionFacts) -> Effect:
    if not facts.gathers:
        return none("nothing is gathered")
    return has(f"weights are gathered {facts.gather_mode}")


def _padding(facts: OptionFacts) -> Effect:
    if facts.numel_multiple > 1:
        return has(f"buckets are multiples of {facts.numel_multiple:,} elements")
    return has("buckets are padded for their shards only")


def _unit_size(facts: OptionFacts) -> Effect:
    if facts.communication_numel is None:
        return none("one unit is gathered ahead and two buckets are used")
    return has(f"{facts.forward_depth} units are gathered ahead, and there are {facts.buckets} buckets")


def _patterns(facts: OptionFacts) -> Effect:
    return has("their gradients accumulate in float32") if facts.fp32_patterns else none("no parameter is named")


EFFECTS: Mapping[str, Judge] = {
    "grad_reduce_in_fp32": _accumulates,
    "overlap_grad_reduce": reduces_early,
    "overlap_param_gather": gathers_ahead,
    "align_param_gather": _buckets_only(_aligned),
    "use_distributed_optimizer": _optimizer,
    "num_distributed_optimizer_instances": _instances,
    "check_for_nan_in_grad": _OF_FULLY_SHARD["report_nan_in_param_grad"],
    "check_for_large_grads": lambda f: has(f"large gradients are {'' if f.checks_large else 'not '}looked for"),
    "bucket_size": _bucket_size,
    "num_buckets": _buckets_only(_bucket_size),
    "pad_buckets_for_high_nccl_busbw": _buckets_only(_padding),
    "reduce_scatter_with_fp32_accumulation": sums_in_fp32,
    "param_name_patterns_for_fp32_local_accumulation": _patterns,
    "average_in_collective": averages,
    "use_megatron_fsdp": lambda f: has(f"{f.units} {'buckets by size' if f.uses_buckets else 'units'}"),
    "megatron_fsdp_version": _idle("there is one engine"),
    "use_custom_fsdp": _idle("former name of use_megatron_fsdp"),
    "data_parallel_sharding_strategy": _units_only(_OF_FULLY_SHARD["zero_dp_strategy"]),
    "outer_dp_sharding_strategy": _units_only(_OF_FULLY_SHARD["outer_dp_sharding_strategy"]),
    "gradient_reduce_div_fusion": _division,
    "suggested_communication_unit_size": _units_only(_unit_size),
    "fsdp_double_buffer": _units_only(_OF_FULLY_SHARD["fsdp_double_buffer"]),
    "fsdp_db_use_persist_buf_on_alloc_fail": _units_only(_OF_FULLY_SHARD["fsdp_db_use_persist_buf_on_alloc_fail"]),
    "fsdp_all_gather_in_start_param_sync": _units_only(
        lambda f: (
            has("start_param_sync " + ("only starts gathers" if f.gathers_at_once else "waits for each gather"))
            if f.gathers
            else none("nothing is gathered")
        )
    ),
    "delay_wgrad_compute": lambda f: has(
        f"weight gradients are computed {'at the end of' if f.delays_weights else 'during'} backward"
    ),
    "megatron_fsdp_main_params_dtype": main_params,
    "megatron_fsdp_main_grads_dtype": _OF_FULLY_SHARD["main_grads_dtype"],
    "megatron_fsdp_grad_comm_dtype": grad_comm,
    "megatron_fsdp_use_decoupled_grad": _OF_FULLY_SHARD["use_decoupled_grad"],
    "megatron_fsdp_enable_fine_grained_param_gather": _units_only(_OF_FULLY_SHARD["enable_fine_grained_param_gather"]),
    "megatron_fsdp_max_pool_double_buffer": _units_only(_OF_FULLY_SHARD["maxpool_double_buffer"]),
    "gradient_accumulation_fusion": fuses,
    **dict.fromkeys(
        (
            "fp8_param_gather",
            "fp4_param_gather",
            "reuse_grad_buf_for_mxfp8_param_ag",
            "keep_fp8_transpose_cache",
            "nccl_ub",
            "disable_symmetric_registration",
            "fsdp_manual_registration",
            "megatron_fsdp_cuda_graph_mode",
        ),
        _not_yet,
    ),
}
"""By name of the field."""

ENGINE_FIELDS = (
    "bucket_size",
    "suggested_communication_unit_size",
    "gradient_reduce_div_fusion",
    "param_name_patterns_for_fp32_local_accumulation",
    "check_for_large_grads",
    "delay_wgrad_compute",
    "fsdp_all_gather_in_start_param_sync",
)
"""Fields that `MegatronFSDP` honours and `fully_shard` has no argument for."""

BUCKETS: tuple[Option, ...] = (
    *MESH,
    *COMMON,
    *(option for option in FULLY_SHARD if option.name in ("disable_bucketing", "fsdp_unit_modules")),
)
"""Arguments of `DistributedDataParallel` beside its configuration (`dp_shard_dim` is called `dp_dim` there)."""
