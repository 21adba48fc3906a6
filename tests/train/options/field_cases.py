"""For every field of `DistributedDataParallelConfig`: words, and what they change in the job."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from megatron_fsdp.config.strategy import ShardingStrategy
from megatron_fsdp.ddp.bucket_schedule import GatherMode
from tests.train.options.cases import BUCKETS, UNITS, Case, engine, notices, resolved

_DOUBLED = "gathered weights lie in two buffers that are kept, as with --fsdp-double-buffer"
_UNREGISTERED = "buffers are not registered with NCCL by this version"
_FLOAT32_ANYWAY = (
    "--accumulate-allreduce-grads-in-fp32 has no effect of its own: gradients travel and accumulate in float32, unless "
    "--grad-reduce-in-bf16 or the flags of dtypes say something else"
)
_NCCL = f"--use-nccl-ub: {_UNREGISTERED}; {_DOUBLED}"

FIELD_CASES: Mapping[str, Case] = {
    "grad_reduce_in_fp32": Case(
        "--accumulate-allreduce-grads-in-fp32",
        notices,
        (_FLOAT32_ANYWAY,),
    ),
    "overlap_grad_reduce": Case(
        "--overlap-grad-reduce", lambda job: resolved(job).bucket_numel, 40_000_000, start=BUCKETS
    ),
    "overlap_param_gather": Case(
        "--overlap-param-gather",
        lambda job: resolved(job).gather_mode,
        GatherMode.IN_TURN,
        f"{BUCKETS} --use-distributed-optimizer",
    ),
    "align_param_gather": Case(
        "--align-param-gather",
        lambda job: resolved(job).gather_mode,
        GatherMode.TOGETHER,
        f"{BUCKETS} --use-distributed-optimizer --overlap-param-gather",
    ),
    "use_distributed_optimizer": Case(
        "--use-distributed-optimizer", lambda job: resolved(job).strategy, ShardingStrategy.optim, BUCKETS
    ),
    "num_distributed_optimizer_instances": Case(
        "--num-distributed-optimizer-instances 2", lambda job: resolved(job).num_instances, 2
    ),
    "check_for_nan_in_grad": Case("--check-for-nan-in-loss-and-grad", engine("check_for_nan_in_grad"), True),
    "check_for_large_grads": Case("--check-for-large-grads", engine("check_for_large_grads"), True),
    "bucket_size": Case("--ddp-bucket-size 100", lambda job: resolved(job).bucket_numel, 100, BUCKETS),
    "num_buckets": Case("--ddp-num-buckets 4", lambda job: resolved(job).bucket_numel, 250, BUCKETS),
    "pad_buckets_for_high_nccl_busbw": Case(
        "--ddp-pad-buckets-for-high-nccl-busbw", lambda job: resolved(job).numel_multiple, 65536, BUCKETS
    ),
    "reduce_scatter_with_fp32_accumulation": Case(
        "--ddp-reduce-scatter-with-fp32-accumulation",
        engine("reduce_scatter_with_fp32_accumulation"),
        True,
        f"{UNITS} --grad-reduce-in-bf16",
    ),
    "param_name_patterns_for_fp32_local_accumulation": Case(
        "--ddp-param-name-patterns-for-fp32-local-accumulation *norm* *bias",
        engine("param_name_patterns_for_fp32_local_accumulation"),
        ("*norm*", "*bias"),
    ),
    "average_in_collective": Case("--ddp-average-in-collective", engine("average_in_collective"), True),
    "fp8_param_gather": Case("--fp8-param-gather", notices, "--fp8-param-gather is not supported yet"),
    "fp4_param_gather": Case("--fp4-param-gather", notices, "--fp4-param-gather is not supported yet"),
    "reuse_grad_buf_for_mxfp8_param_ag": Case(
        "--reuse-grad-buf-for-mxfp8-param-ag", notices, "--reuse-grad-buf-for-mxfp8-param-ag needs --fp8-param-gather"
    ),
    "keep_fp8_transpose_cache": Case(
        "--keep-fp8-transpose-cache", notices, "--keep-fp8-transpose-cache has no effect without --fp8-param-gather"
    ),
    "use_megatron_fsdp": Case("--use-megatron-fsdp", lambda job: job.engine, "megatron_fsdp", BUCKETS),
    "megatron_fsdp_version": Case("--megatron-fsdp-version 2", notices, "--megatron-fsdp-version 2 is not supported"),
    "use_custom_fsdp": Case(
        "--use-custom-fsdp",
        lambda job: (job.engine, resolved(job).strategy.name, *job.notices),
        (
            "megatron_fsdp",
            "optim_grads_params",
            "--use-custom-fsdp: the former name of --use-megatron-fsdp, and taken as such",
        ),
        BUCKETS,
    ),
    "data_parallel_sharding_strategy": Case(
        "--data-parallel-sharding-strategy 1", lambda job: resolved(job).strategy, ShardingStrategy.optim
    ),
    "outer_dp_sharding_strategy": Case(
        "--outer-dp-sharding-strategy optim",
        lambda job: resolved(job).outer_strategy,
        ShardingStrategy.optim,
        f"{UNITS} --num-distributed-optimizer-instances 2",
    ),
    "gradient_reduce_div_fusion": Case("--no-gradient-reduce-div-fusion", engine("gradient_reduce_div_fusion"), False),
    "suggested_communication_unit_size": Case(
        "--suggested-communication-unit-size 5000", engine("suggested_communication_unit_size"), 5000
    ),
    "nccl_ub": Case("--use-nccl-ub", lambda job: (engine("fsdp_double_buffer")(job), *job.notices), (True, _NCCL)),
    "fsdp_double_buffer": Case("--fsdp-double-buffer", engine("fsdp_double_buffer"), True),
    "fsdp_db_use_persist_buf_on_alloc_fail": Case(
        "--fsdp-db-use-persist-buf-on-alloc-fail",
        engine("fsdp_db_use_persist_buf_on_alloc_fail"),
        True,
        f"{UNITS} --fsdp-double-buffer",
    ),
    "fsdp_all_gather_in_start_param_sync": Case(
        "--no-fsdp-all-gather-in-start-param-sync", engine("fsdp_all_gather_in_start_param_sync"), False
    ),
    "disable_symmetric_registration": Case(
        "--disable-symmetric-registration",
        notices,
        (_NCCL, f"--disable-symmetric-registration has no effect: {_UNREGISTERED}"),
        f"{UNITS} --use-nccl-ub",
    ),
    "fsdp_manual_registration": Case(
        "--fsdp-manual-registration",
        notices,
        (_NCCL, f"--fsdp-manual-registration has no effect: {_UNREGISTERED}"),
        f"{UNITS} --use-nccl-ub",
    ),
    "delay_wgrad_compute": Case(
        "--delay-wgrad-compute", lambda job: resolved(job).config.delay_wgrad_compute, True, BUCKETS
    ),
    "gradient_accumulation_fusion": Case(
        "--gradient-accumulation-fusion", lambda job: resolved(job).engine_config.gradient_accumulation_fusion, True
    ),
    "megatron_fsdp_main_params_dtype": Case(
        "--megatron-fsdp-main-params-dtype bf16", lambda job: resolved(job).policy.main_params_dtype, torch.bfloat16
    ),
    "megatron_fsdp_main_grads_dtype": Case(
        "--megatron-fsdp-main-grads-dtype bf16", lambda job: resolved(job).policy.main_grads_dtype, torch.bfloat16
    ),
    "megatron_fsdp_grad_comm_dtype": Case(
        "--megatron-fsdp-grad-comm-dtype bf16", lambda job: resolved(job).policy.grad_comm_dtype, torch.bfloat16
    ),
    "megatron_fsdp_use_decoupled_grad": Case(
        "--megatron-fsdp-use-decoupled-grad", notices, "--megatron-fsdp-use-decoupled-grad puts gradients where"
    ),
    "megatron_fsdp_cuda_graph_mode": Case(
        "--megatron-fsdp-cuda-graph-mode", notices, "--megatron-fsdp-cuda-graph-mode is not supported yet"
    ),
    "megatron_fsdp_enable_fine_grained_param_gather": Case(
        "--megatron-fsdp-enable-fine-grained-param-gather",
        engine("megatron_fsdp_enable_fine_grained_param_gather"),
        True,
    ),
    "megatron_fsdp_max_pool_double_buffer": Case(
        "--megatron-fsdp-max-pool-double-buffer",
        lambda job: (
            resolved(job).engine_config.megatron_fsdp_max_pool_double_buffer,
            resolved(job).engine_config.fsdp_double_buffer,
        ),
        (True, True),
    ),
}
"""By the name of the field. The engine's own tests show what each does to a step; here it is shown to arrive."""
