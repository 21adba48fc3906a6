"""Variables of the environment that the user guide warns of."""

from collections.abc import Mapping

import pytest

from megatron_fsdp.errors import ConfigurationError
from megatron_fsdp.train.options.command_line import parse_options
from megatron_fsdp.train.options.job import Job, World, check_environment, resolve

CUDA, CPU = World(4, "cuda"), World(4, "cpu")
UNITS, BUCKETS = "--preset tiny", "--preset tiny --no-use-megatron-fsdp"
FSDP2, REGISTERED = "--preset tiny --use-torch-fsdp2", "--preset tiny --use-nccl-ub"
ROTARY = "--position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear"
TENSOR = f"--preset tiny {ROTARY} --transformer-impl transformers --tensor-model-parallel-size 2"
ONE = {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
GROWING = {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:128, expandable_segments:True"}


def job_of(words: str, world: World = CUDA) -> Job:
    return resolve(parse_options(words.split()), world)


@pytest.mark.parametrize(
    ("environment", "words", "world"),
    [
        ({}, UNITS, CUDA),
        ({}, TENSOR, CUDA),
        ({"CUDA_DEVICE_MAX_CONNECTIONS": "8"}, UNITS, CUDA),
        (ONE, BUCKETS, CUDA),
        (GROWING, REGISTERED, CUDA),  # nothing is registered
    ],
)
def test_what_is_right_is_not_mentioned(environment: Mapping[str, str], words: str, world: World) -> None:
    assert check_environment(environment, job_of(words, world), world) == ()
    assert check_environment(ONE, job_of(UNITS, CPU), CPU) == ("CUDA_DEVICE_MAX_CONNECTIONS=1 has no effect on cpu",)


@pytest.mark.parametrize(("words", "flag"), [(UNITS, "--use-megatron-fsdp"), (FSDP2, "--use-torch-fsdp2")])
def test_one_connection_is_refused_with_full_sharding(words: str, flag: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        check_environment(ONE, job_of(words), CUDA)
    assert str(caught.value) == (
        "CUDA_DEVICE_MAX_CONNECTIONS=1 puts all kernels into one queue, where gathers and reductions of "
        f"{flag} wait behind compute: `unset CUDA_DEVICE_MAX_CONNECTIONS`, or give 8 or more"
    )
