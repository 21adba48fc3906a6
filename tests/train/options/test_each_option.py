"""Each option and each field of the engine's configuration changes something that can be seen in the job."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_fsdp.ddp.resolve import ResolvedDDP, resolve_ddp
from megatron_fsdp.errors import ConfigurationError
from megatron_fsdp.train.options import OPTIONS
from megatron_fsdp.train.options.command_line import parse_options
from megatron_fsdp.train.options.job import Job, World, resolve

RANKS = 8
NUMEL = 1000
RUN = "--seq-length 64 --micro-batch-size 1 --train-iters 20 --lr 0.01"
SHAPE = "--num-layers 2 --hidden-size 64 --num-attention-heads 4"
UNITS = f"{RUN} {SHAPE} --bf16 --use-megatron-fsdp"
BUCKETS = f"{RUN} {SHAPE} --bf16"
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


def notes(job: Job) -> tuple[str, ...]:
    """What is told."""
    return job.notes


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
    "nproc": Case("--nproc 4", notes, ("--nproc 4 has no effect: 8 ranks were started",)),
    "micro_batch_size": Case("--micro-batch-size 2", lambda job: (job.batch.micro, job.batch.total), (2, 16)),
    "global_batch_size": Case("--global-batch-size 24", lambda job: (job.batch.total, job.batch.microbatches), (24, 3)),
    "train_iters": Case("--train-iters 30", lambda job: (job.train_iters, job.schedule.decay_steps), (30, 30)),
    "train_samples": Case(
        "--train-samples 100", lambda job: (job.train_iters, job.schedule.decay_steps), (12, 12.5), IN_SAMPLES
    ),
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

FIELD_CASES: dict[str, Case] = {
    "accumulate_allreduce_grads_in_fp32": Case(
        "--accumulate-allreduce-grads-in-fp32",
        lambda job: [note.partition(":")[0] for note in job.notes],
        ["--accumulate-allreduce-grads-in-fp32 has no effect of its own"],
    ),
    "megatron_fsdp_version": Case(
        "--megatron-fsdp-version 2", lambda job: resolved(job).engine_config.megatron_fsdp_version, 2
    ),
    "use_custom_fsdp": Case(
        "--use-custom-fsdp",
        lambda job: (job.engine, resolved(job).strategy.name, *job.notes),
        (
            "megatron_fsdp",
            "optim_grads_params",
            "--use-custom-fsdp: the former name of --use-megatron-fsdp, and taken as such",
        ),
        BUCKETS,
    ),
}
"""Fields of the configuration of which the trainer makes something; tests/config shows that each flag sets its own."""

REFUSED_FIELDS = {
    "reuse_grad_buf_for_mxfp8_param_ag": ("--reuse-grad-buf-for-mxfp8-param-ag", "needs --fp8-param-gather"),
    "keep_fp8_transpose_cache": ("--keep-fp8-transpose-cache", "has no effect without --fp8-param-gather"),
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
            expected[name] = option.choices[-1] if option.choices[-1] != option.default else option.choices[0]
            words += [option.flag, expected[name]]
        else:
            text, expected[name] = SAMPLES[option.kind]
            words += [option.flag, text]
    options = parse_options(words)
    assert {name: options.value(name) for name in OPTIONS} == expected
    assert [name for name, option in OPTIONS.items() if option.default == expected[name]] == ["ckpt_format"]
    assert options.origins == dict.fromkeys(OPTIONS, "command line")


def test_the_engine_gets_the_fields_of_the_command_line() -> None:
    words = f"{UNITS} --fsdp-double-buffer --no-gradient-reduce-div-fusion --suggested-communication-unit-size 5000"
    found = job_of(words, World(RANKS, "cuda")).ddp
    assert (found.fsdp_double_buffer, found.gradient_reduce_div_fusion) == (True, False)
    assert found.suggested_communication_unit_size == 5000
