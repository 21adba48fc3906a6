"""For options that become something else in the job: words, and what they change there."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from megatron_fsdp.train.options.job import World
from tests.train.options.cases import (
    FLOAT32,
    FSDP2,
    RANKS,
    RUN,
    SHAPE,
    TRANSFORMERS,
    UNITS,
    Case,
    notices,
    of,
    rate,
    resolved,
)

SAMPLES = UNITS.replace("--train-iters 20", "--train-samples 160")  # 8 in a step

OPTION_CASES: Mapping[str, Case] = {
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
        SAMPLES,
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
        of("training", "recompute_num_layers"),
        None,
        f"{UNITS} --recompute-granularity full --recompute-num-layers 1",
    ),
    "lr": Case("--lr 0.02", rate(0), 0.019),
    "min_lr": Case("--min-lr 0.005", rate(19), 0.005),
    "lr_decay_style": Case("--lr-decay-style constant", rate(10), 0.01),
    "lr_decay_iters": Case("--lr-decay-iters 40", rate(19), 0.005),
    "lr_warmup_iters": Case("--lr-warmup-iters 4", rate(0), 0.0025),
    "lr_warmup_fraction": Case("--lr-warmup-fraction 0.5", rate(0), 0.001),
    "lr_decay_samples": Case("--lr-decay-samples 320", rate(19), 0.005, SAMPLES),
    "lr_warmup_samples": Case("--lr-warmup-samples 20", rate(0), 0.004, SAMPLES),
    "lr_warmup_init": Case("--lr-warmup-init 0.006", rate(0), 0.007, f"{UNITS} --lr-warmup-iters 4"),
    "lr_wsd_decay_samples": Case(
        "--lr-wsd-decay-samples 80",
        rate(12),
        0.007,
        f"{SAMPLES} --lr-decay-style WSD --lr-wsd-decay-samples 40",
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
    "ckpt_format": Case("--ckpt-format torch_dist", notices, "--ckpt-format torch_dist is not written or read"),
    "seq_length": Case("--seq-length 32", lambda job: (job.seq_length, job.tokens_per_step), (32, 256)),
}
"""By the name of the option."""
