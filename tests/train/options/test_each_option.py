"""Each option and each field of the engine's configuration changes something that can be seen in the job."""

import re
from pathlib import Path

import pytest

from megatron_fsdp.ddp.resolve import resolve_ddp
from megatron_fsdp.errors import ConfigurationError
from megatron_fsdp.train.options import OPTIONS
from megatron_fsdp.train.options.command_line import parse_options
from megatron_fsdp.train.options.job import Job
from tests.support.on_ranks import refusal
from tests.support.train_program import job_of_words

RANKS = 8
RUN = "--seq-length 64 --micro-batch-size 1 --train-iters 20 --lr 0.01"
SHAPE = "--num-layers 2 --hidden-size 64 --num-attention-heads 4"
UNITS = f"{RUN} {SHAPE} --bf16 --use-megatron-fsdp"

CONTEXT = (
    "--transformer-impl transformers --position-embedding-type rope --normalization RMSNorm --swiglu "
    "--disable-bias-linear --context-parallel-size 4"
)
LEVELS = "--hierarchical-context-parallel-sizes"


def job_of(words: str) -> Job:
    return job_of_words(f"{UNITS} {words}", RANKS, "cuda")


@pytest.mark.parametrize(
    ("words", "formats"),
    [
        ("--fp8-param-gather --fp8-format hybrid", "fp8"),
        ("--fp8-param-gather --fp8-format e4m3 --fp8-recipe mxfp8", "mxfp8"),
        ("--fp8-param-gather --fp8-recipe mxfp8 --reuse-grad-buf-for-mxfp8-param-ag", "mxfp8"),
        ("--fp4-param-gather --fp4-format e2m1 --fp4-recipe nvfp4", "nvfp4"),
    ],
)
def test_a_recipe_chooses_the_weight_format(words: str, formats: str) -> None:
    job = job_of(words)
    assert resolve_ddp(job.ddp, RANKS, 1000).policy.weight_formats == {"*": formats}
    assert job.notes == ()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--fp8-recipe blockwise --fp8-param-gather", "invalid --fp8-recipe blockwise: give one of tensorwise, mxfp8"),
        ("--fp8-format e4m3 --fp8-recipe mxfp8", "--fp8-format and --fp8-recipe would do nothing: .*weight-format fp8"),
        ("--fp4-format e2m1", "--fp4-format would do nothing: .* --fp4-param-gather too"),
        ("--fp8-param-gather --fp8-recipe mxfp8 --keep-fp8-transpose-cache", "--keep-fp8-transpose-cache would do no"),
        ("--recompute-modules core_attn", "--recompute-modules does nothing without --recompute-granularity selective"),
        ("--recompute-granularity selective --recompute-modules mlp", "this package recomputes core_attn only"),
        ("--recompute-granularity selective --recompute-modules mpl", "invalid --recompute-modules mpl: give one of"),
        (f"{CONTEXT} --cp-comm-type p2p a2a", "--cp-comm-type p2p a2a: all layers communicate alike here; give one"),
        (f"{CONTEXT} --cp-comm-type a2a+p2p", r"sizes \(not given\): give two numbers, .* --context-parallel-size 4"),
        (f"{CONTEXT} --cp-comm-type a2a+p2p {LEVELS} 2 4", "-parallel-sizes 2 4: give two numbers, of ranks that exch"),
        (f"{CONTEXT} --cp-comm-type a2a {LEVELS} 2 2", f"{LEVELS} does nothing without --cp-comm-type a2a.p2p"),
        ("--reuse-grad-buf-for-mxfp8-param-ag", "^--reuse-grad-buf-for-mxfp8-param-ag needs --fp8-param-gather"),
        ("--keep-fp8-transpose-cache", "^--keep-fp8-transpose-cache has no effect without --fp8-param-gather"),
        ("--megatron-fsdp-use-decoupled-grad", "^--megatron-fsdp-use-decoupled-grad puts gradients where"),
        ("--megatron-fsdp-cuda-graph-mode", "^--megatron-fsdp-cuda-graph-mode keeps memory for CUDA graphs"),
    ],
)
def test_recipes_and_fields_that_mean_nothing_are_refused(words: str, message: str) -> None:
    assert re.search(message, refusal(job_of, words, error=ConfigurationError))


@pytest.mark.parametrize(
    ("words", "degree"), [("", 1), ("p2p", 1), ("all_gather all_gather", 1), ("a2a", 4), (f"a2a+p2p {LEVELS} 2 2", 2)]
)
def test_a_kind_of_communication_chooses_how_many_ranks_exchange_heads(words: str, degree: int) -> None:
    job = job_of(f"{CONTEXT} --cp-comm-type {words}" if words else CONTEXT)
    assert (job.options.parallel.ulysses_degree, job.notes) == (degree, ())
    (note,) = job_of("--cp-comm-type a2a").notes
    assert note == "--cp-comm-type has no effect: --context-parallel-size 1 leaves sequences whole"


def test_a_lenient_strictness_loads_what_fits() -> None:
    for word, is_strict in (("assume_ok_unexpected", True), ("raise_all", True), ("log_all", False)):
        job = job_of(f"--load c --dist-ckpt-strictness {word}")
        assert job.options.checkpoint.is_strict == is_strict
    told = job_of("--dist-ckpt-strictness log_all").notes
    assert told == ("--dist-ckpt-strictness has no effect: nothing is loaded without --load",)


SAMPLES = {int: ("7", 7), float: ("0.5", 0.5), str: ("word", "word"), Path: ("place", Path("place"))}


def test_every_flag_sets_its_option() -> None:
    words, expected = list[str](), {}
    for name, option in OPTIONS.items():
        if option.is_switch:
            words.append(option.off_flags[0] if option.default else option.flag)
            expected[name] = not option.default
        elif option.choices:
            one = option.choices[-1] if option.choices[-1] != option.default else option.choices[0]
            expected[name] = (one, option.choices[0]) if option.is_list else one
            words += [option.flag, *(expected[name] if option.is_list else [one])]
        else:
            text, value = SAMPLES[option.kind]
            expected[name] = (value,) if option.is_list else value
            words += [option.flag, text]
    options = parse_options(words)
    assert {name: options.value(name) for name in OPTIONS} == expected
    assert [name for name, option in OPTIONS.items() if option.default == expected[name]] == ["ckpt_format"]
    assert options.origins == dict.fromkeys(OPTIONS, "command line")


def test_the_engine_gets_the_fields_of_the_command_line() -> None:
    words = "--fsdp-double-buffer --no-gradient-reduce-div-fusion --suggested-communication-unit-size 5000"
    found = job_of(words).ddp
    assert (found.fsdp_double_buffer, found.gradient_reduce_div_fusion) == (True, False)
    assert found.suggested_communication_unit_size == 5000
