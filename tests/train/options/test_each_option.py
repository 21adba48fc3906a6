"""Each option and each field of the engine's configuration changes something that can be seen in the job."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_fsdp.config.strategy import ShardingStrategy
from megatron_fsdp.ddp.bucket_schedule import GatherMode
from megatron_fsdp.ddp.resolve import ResolvedDDP, resolve_ddp
from megatron_fsdp.distributed_data_parallel_config import DistributedDataParallelConfig
from megatron_fsdp.errors import ConfigurationError
from megatron_fsdp.train.options.command_line import parse_options
from megatron_fsdp.train.options.job import Job, World
from megatron_fsdp.train.options.options import OPTIONS
from megatron_fsdp.train.options.resolve import resolve

RANKS = 8
NUMEL = 1000
RUN = "--seq-length 64 --micro-batch-size 1 --train-iters 20 --lr 0.01"
SHAPE = "--num-layers 2 --hidden-size 64 --num-attention-heads 4"
UNITS = f"{RUN} {SHAPE} --bf16 --use-megatron-fsdp"
SHARDED = f"{UNITS} --data-parallel-sharding-strategy optim_grads_params"
BUCKETS = f"{RUN} {SHAPE} --bf16"
FLOAT32 = f"{RUN} {SHAPE} --use-megatron-fsdp"
LLAMA = "--position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear"
TRANSFORMERS = f"{UNITS} {LLAMA} --transformer-impl transformers"
FSDP2 = f"{RUN} {SHAPE} {LLAMA} --bf16 --use-torch-fsdp2 --transformer-impl transformers"


@dataclass(frozen=True)
class Case:
    """Words that, added to `start`, make what is `seen` in the job `expected`; without them it is something else."""

    words: str
    seen: Callable[[Job], Any]
    expected: Any
    start: str = UNITS
    world: World = field(default_factory=lambda: World(RANKS, "cuda"))


def resolved(job: Job) -> ResolvedDDP:
    """What the engine makes of the configuration."""
    return resolve_ddp(job.ddp, job.sizes.data * job.sizes.context, NUMEL)


def engine(name: str) -> Callable[[Job], Any]:
    """A field of the configuration that units and buffers get."""
    return lambda job: getattr(resolved(job).engine_config, name)


def rate(step: int) -> Callable[[Job], float]:
    """The learning rate of a step."""
    return lambda job: round(job.schedule.rate(step), 9)


def notices(job: Job) -> tuple[str, ...]:
    """What is told."""
    return job.notices


IN_SAMPLES = UNITS.replace("--train-iters 20", "--train-samples 160")  # 8 in a step

OPTION_CASES: dict[str, Case] = {
    "tensor_model_parallel_size": Case(
        "--tensor-model-parallel-size 2", lambda job: (job.sizes.tensor, job.sizes.data), (2, 4), TRANSFORMERS
    ),
    "pipeline_model_parallel_size": Case(
        "--pipeline-model-parallel-size 2", lambda job: (job.sizes.pipeline, job.sizes.data), (2, 4), FSDP2
    ),
    "context_parallel_size": Case(
        "--context-parallel-size 2", lambda job: (job.sizes.context, job.sizes.data), (2, 4), TRANSFORMERS
    ),
    "expert_model_parallel_size": Case(
        "--expert-model-parallel-size 2",
        lambda job: (job.sizes.expert, job.sizes.data),
        (2, 8),
        f"{FSDP2} --num-experts 8",
    ),
    "use_torch_fsdp2": Case("--use-torch-fsdp2", lambda job: job.engine, "torch_fsdp2", f"{RUN} {SHAPE}"),
    "nproc": Case("--nproc 4", notices, ("--nproc 4 has no effect: 8 ranks were started",)),
    "micro_batch_size": Case("--micro-batch-size 2", lambda job: (job.batch.micro, job.batch.total), (2, 16)),
    "global_batch_size": Case("--global-batch-size 24", lambda job: (job.batch.total, job.batch.microbatches), (24, 3)),
    "train_iters": Case("--train-iters 30", lambda job: (job.train_iters, job.schedule.decay_steps), (30, 30)),
    "train_samples": Case(
        "--train-samples 100",
        lambda job: (job.train_iters, job.schedule.decay_steps),
        (12, 12.5),
        IN_SAMPLES,
    ),
    "bf16": Case("--bf16", lambda job: job.dtype, torch.bfloat16, FLOAT32),
    "fp16": Case("--fp16", lambda job: job.dtype, torch.float16, FLOAT32),
    "grad_reduce_in_bf16": Case(
        "--grad-reduce-in-bf16",
        lambda job: (resolved(job).policy.grad_comm_dtype, resolved(job).policy.main_grads_dtype),
        (torch.bfloat16, torch.float32),
    ),
    "recompute_method": Case(
        "--recompute-method uniform",
        lambda job: job.options.training.recompute_num_layers,
        None,
        f"{UNITS} --recompute-granularity full --recompute-num-layers 1",
    ),
    "lr": Case("--lr 0.02", rate(0), 0.019),
    "min_lr": Case("--min-lr 0.005", rate(19), 0.005),
    "lr_decay_style": Case("--lr-decay-style constant", rate(10), 0.01),
    "lr_decay_iters": Case("--lr-decay-iters 40", rate(19), 0.005),
    "lr_warmup_iters": Case("--lr-warmup-iters 4", rate(0), 0.0025),
    "lr_warmup_fraction": Case("--lr-warmup-fraction 0.5", rate(0), 0.001),
    "lr_decay_samples": Case("--lr-decay-samples 320", rate(19), 0.005, IN_SAMPLES),
    "lr_warmup_samples": Case("--lr-warmup-samples 20", rate(0), 0.004, IN_SAMPLES),
    "lr_warmup_init": Case("--lr-warmup-init 0.006", rate(0), 0.007, f"{UNITS} --lr-warmup-iters 4"),
    "lr_wsd_decay_samples": Case(
        "--lr-wsd-decay-samples 80",
        rate(12),
        0.007,
        f"{IN_SAMPLES} --lr-decay-style WSD --lr-wsd-decay-samples 40",
    ),
    "lr_wsd_decay_iters": Case(
        "--lr-wsd-decay-iters 10", rate(12), 0.007, f"{UNITS} --lr-decay-style WSD --lr-wsd-decay-iters 5"
    ),
    "save": Case(
        "--save c",
        lambda job: (job.options.checkpoint.save, job.load_is_optional),
        (Path("c"), True),
        world=World(RANKS, "cuda", restarts=1),
    ),
    "load": Case(
        "--load c",
        lambda job: (job.options.checkpoint.load, job.load_is_optional),
        (Path("c"), True),
        f"{UNITS} --save c",
    ),
    "seq_length": Case("--seq-length 32", lambda job: (job.seq_length, job.tokens_per_step), (32, 256)),
}
"""By the name of the option: those that become something else in the job."""

_FLOAT32_ANYWAY = (
    "--accumulate-allreduce-grads-in-fp32 has no effect of its own: gradients travel and accumulate in float32, unless "
    "--grad-reduce-in-bf16 or the flags of dtypes say something else"
)

IN_ENGINE: dict[str, tuple[str, Any, str]] = {
    "check_for_nan_in_grad": ("--check-for-nan-in-loss-and-grad", True, UNITS),
    "check_for_large_grads": ("--check-for-large-grads", True, UNITS),
    "reduce_scatter_with_fp32_accumulation": (
        "--ddp-reduce-scatter-with-fp32-accumulation",
        True,
        f"{UNITS} --grad-reduce-in-bf16",
    ),
    "param_name_patterns_for_fp32_local_accumulation": (
        "--ddp-param-name-patterns-for-fp32-local-accumulation *norm* *bias",
        ("*norm*", "*bias"),
        UNITS,
    ),
    "average_in_collective": ("--ddp-average-in-collective", True, UNITS),
    "gradient_reduce_div_fusion": ("--no-gradient-reduce-div-fusion", False, UNITS),
    "suggested_communication_unit_size": ("--suggested-communication-unit-size 5000", 5000, UNITS),
    "fsdp_double_buffer": ("--fsdp-double-buffer", True, UNITS),
    "fsdp_db_use_persist_buf_on_alloc_fail": (
        "--fsdp-db-use-persist-buf-on-alloc-fail",
        True,
        f"{UNITS} --fsdp-double-buffer",
    ),
    "fsdp_all_gather_in_start_param_sync": ("--no-fsdp-all-gather-in-start-param-sync", False, UNITS),
    "megatron_fsdp_enable_fine_grained_param_gather": ("--megatron-fsdp-enable-fine-grained-param-gather", True, UNITS),
}
"""Fields that units and buckets get: words, the value, and the command line without them."""

FIELD_CASES: dict[str, Case] = {
    **{name: Case(words, engine(name), value, start) for name, (words, value, start) in IN_ENGINE.items()},
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
        "--num-distributed-optimizer-instances 2",
        lambda job: resolved(job).config.num_distributed_optimizer_instances,
        2,
    ),
    "bucket_size": Case("--ddp-bucket-size 100", lambda job: resolved(job).bucket_numel, 100, BUCKETS),
    "num_buckets": Case("--ddp-num-buckets 4", lambda job: resolved(job).bucket_numel, 250, BUCKETS),
    "pad_buckets_for_high_nccl_busbw": Case(
        "--ddp-pad-buckets-for-high-nccl-busbw", lambda job: resolved(job).numel_multiple, 65536, BUCKETS
    ),
    "use_megatron_fsdp": Case("--use-megatron-fsdp", lambda job: job.engine, "megatron_fsdp", BUCKETS),
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
    "nccl_ub": Case(
        "--use-nccl-ub",
        lambda job: tuple(engine(name)(job) for name in ("nccl_ub", "fsdp_double_buffer")),
        (True, True),
    ),
    **{
        name: Case(f"--{name.replace('_', '-')}", engine(name), True, f"{UNITS} --use-nccl-ub")
        for name in ("disable_symmetric_registration", "fsdp_manual_registration")
    },
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
    "fp8_param_gather": Case("--fp8-param-gather", lambda job: resolved(job).policy.weight_format, "fp8", SHARDED),
    "fp4_param_gather": Case("--fp4-param-gather", lambda job: resolved(job).policy.weight_format, "nvfp4", SHARDED),
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

REFUSED_FIELDS = {
    "reuse_grad_buf_for_mxfp8_param_ag": ("--reuse-grad-buf-for-mxfp8-param-ag", "needs --fp8-param-gather"),
    "keep_fp8_transpose_cache": ("--keep-fp8-transpose-cache", "has no effect without --fp8-param-gather"),
    "megatron_fsdp_version": ("--megatron-fsdp-version 2", "is not supported"),
    "megatron_fsdp_use_decoupled_grad": ("--megatron-fsdp-use-decoupled-grad", "puts gradients where"),
    "megatron_fsdp_cuda_graph_mode": ("--megatron-fsdp-cuda-graph-mode", "keeps memory for CUDA graphs"),
}
"""Fields that this version does not take: words, and what the error says of them."""

CASES = {**OPTION_CASES, **FIELD_CASES}


def job_of(words: str, world: World) -> Job:
    return resolve(parse_options(words.split()), world)


@pytest.mark.parametrize("name", CASES)
def test_an_option_changes_what_it_is_said_to(name: str) -> None:
    case: Case = CASES[name]
    before = case.seen(job_of(case.start, case.world))
    after = case.seen(job_of(f"{case.start} {case.words}", case.world))
    assert after == case.expected
    assert after != before


@pytest.mark.parametrize("name", REFUSED_FIELDS)
def test_a_field_that_is_not_taken_is_refused(name: str) -> None:
    words, message = REFUSED_FIELDS[name]
    with pytest.raises(ConfigurationError) as caught:
        job_of(f"{UNITS} {words}", World(RANKS, "cuda"))
    assert str(caught.value).startswith(f"{words} {message}")


SAMPLES = {int: ("7", 7), float: ("0.5", 0.5), str: ("word", "word"), Path: ("place", Path("place"))}


def test_every_flag_sets_its_option() -> None:
    words, expected = list[str](), {}
    for name, option in OPTIONS.items():
        if option.is_switch:
            words.append(option.off_flags[0] if option.default else option.flag)
            expected[name] = not option.default
        elif option.choices:
            expected[name] = next(choice for choice in option.choices if choice != option.default)
            words += [option.flag, expected[name]]
        else:
            text, expected[name] = SAMPLES[option.kind]
            words += [option.flag, text]
    options = parse_options(words)
    assert {name: options.value(name) for name in OPTIONS} == expected
    assert [name for name, option in OPTIONS.items() if option.default == expected[name]] == []
    assert options.origins == dict.fromkeys(OPTIONS, "command line")


def test_no_field_lacks_a_case() -> None:
    assert {*FIELD_CASES, *REFUSED_FIELDS} == set(DistributedDataParallelConfig.__dataclass_fields__)
