"""Configurations in YAML files: what is read, and what is refused in words. Round trips are with the class's tests."""

import re
from functools import partial
from pathlib import Path

import pytest

from megatron_fsdp.distributed_data_parallel_config import DistributedDataParallelConfig
from megatron_fsdp.errors import ConfigurationError
from tests.support.on_ranks import refusal

refused = partial(refusal, DistributedDataParallelConfig.from_yaml, error=ConfigurationError)
NO_FIELD = "is not a field of DistributedDataParallelConfig;"
PUT_RIGHT = "; put it right there."
TAG = f"'tag:yaml.org,2002:python/name:os.getcwd' on line 1, column 10{PUT_RIGHT}"


def test_yaml_may_come_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "ddp.yaml"
    path.write_text(
        "# larger buckets\nbucket_size: 80_000_000\noverlap_grad_reduce: on\n"
        "megatron_fsdp_main_params_dtype: auto\nouter_dp_sharding_strategy: 1\n"
        "param_name_patterns_for_fp32_local_accumulation: ['*norm*']\n"
    )
    assert DistributedDataParallelConfig.from_yaml(path) == DistributedDataParallelConfig(
        bucket_size=80_000_000,
        overlap_grad_reduce=True,
        megatron_fsdp_main_params_dtype=None,
        outer_dp_sharding_strategy="optim",
        param_name_patterns_for_fp32_local_accumulation=("*norm*",),
    )
    assert DistributedDataParallelConfig.from_yaml("# nothing set\n") == DistributedDataParallelConfig()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("bucket_size: 1e6", "bucket_size='1e6' is not a positive whole number; give 1 or more."),
        ("overlap_param_gater: true", f"'overlap_param_gater' {NO_FIELD} did you mean 'overlap_param_gather'?"),
        ("ddp:\n  bucket_size: 3\n", f"'ddp' {NO_FIELD} give only the mapping below it."),
        ("nccl_ub: on\nnccl_ub: on", f"not YAML: 'nccl_ub' is there twice on line 2, column 1{PUT_RIGHT}"),
        ("- bucket_size", "the YAML is a list; give a mapping of fields to values."),
        ("ddp.yaml", "the YAML is a str; give a mapping of fields to values; give a path as a pathlib.Path."),
        ("a: [3", f"not YAML: expected ',' or ']', but got '<stream end>' on line 1, column 6{PUT_RIGHT}"),
        ("bucket_size: 2001-99-99", "not YAML: month must be in 1..12"),
        ("nccl_ub: !!python/name:os.getcwd []", f"not YAML: could not determine a constructor for the tag {TAG}"),
    ],
)
def test_yaml_that_is_no_config_is_refused(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    assert refused(text) == message
    assert refused(path) == f"{path}: {message.replace('; give a path as a pathlib.Path', '')}"


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    for make, reason in ((path.touch, "invalid start byte"), (path.unlink, "No such file or directory")):
        make()
        if path.exists():
            path.write_bytes(b"\xff\xfe")
        assert refused(path) == f"{path} cannot be read: {reason}; give the path of a YAML file."
    assert "cannot be read: embedded null byte; give the path" in refused(Path("a\x00b"))
    assert re.match(r"3 cannot be read: .*; give the path of a YAML file", refused(3))


def test_what_stands_for_any_size_is_refused_at_once() -> None:
    tens = [",".join([f"*a{place}"] * 10) for place in range(12)]
    aliases = "a0: &a0 [x]\n" + "".join(f"a{n + 1}: &a{n + 1} [{tens[n]}]\n" for n in range(11))
    merges = "a0: &a0 {x: 1}\n" + "".join(f"a{n + 1}: &a{n + 1}\n  <<: [{tens[n]}]\n" for n in range(11))
    for text in (aliases, merges, "a: &a [*a]\n", "bucket_size: " + "[" * 100_000):
        assert refused(text).startswith("not YAML: ")


def test_whole_numbers_are_decimal() -> None:
    for word in ("010", "1:30", "0x10", "0b11", "-010", "0_1"):
        told = f"bucket_size='{word}' is not a positive whole number; give 1"
        assert refused(f"bucket_size: {word}").startswith(told)
    for text, number in (("7", 7), ("+7", 7), ("1_000", 1000), (str(2**63 - 1), 2**63 - 1)):
        assert DistributedDataParallelConfig.from_yaml(f"bucket_size: {text}").bucket_size == number
