"""Command-line flags of the configuration: their names and what they parse to."""

import argparse
import dataclasses
from typing import Any

import pytest
import torch

from megatron_fsdp.config.ddp_config_flags import (
    MEGATRON_DEFAULTS,
    add_flags,
    config_from_flags,
    destination_of,
    field_meanings,
    flag_of,
    in_flags,
    off_flag_of,
)
from megatron_fsdp.distributed_data_parallel_config import DistributedDataParallelConfig

FIELDS = dataclasses.fields(DistributedDataParallelConfig)


TAKEN: dict[Any, tuple[list[str], Any]] = {
    int: (["2"], 2),
    int | None: (["1"], 1),
    tuple[str, ...]: (["a", "*b"], ("a", "*b")),
    torch.dtype | None: (["fp16"], torch.float16),
    str: (["optim"], "optim"),
    str | None: (["2"], "optim_grads"),
    "megatron_fsdp_weight_format": (["*.head=none", "fp8"], ("*.head=none", "fp8")),
}
"""What stands after a flag and what is stored, by the type of its field, or its name where the type does not say."""


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="train", allow_abbrev=False, exit_on_error=False)
    add_flags(made)
    return made


def parse(*flags: str) -> DistributedDataParallelConfig:
    return config_from_flags(parser().parse_args(flags))


def alone(name: str, value: Any) -> DistributedDataParallelConfig:
    """A configuration with one field set, and what it cannot be without."""
    needs = {"fp8_param_gather": True} if value and name == "reuse_grad_buf_for_mxfp8_param_ag" else {}
    return DistributedDataParallelConfig(**{name: value, **needs})


def test_every_field_has_a_flag_of_its_own_and_help() -> None:
    actions = {action.dest: action for action in parser()._actions}
    assert len({destination_of(field.name) for field in FIELDS}) == len(FIELDS)
    for field in FIELDS:
        action = actions.pop(destination_of(field.name))
        assert action.option_strings[0] == flag_of(field.name)
        assert str(action.help).startswith(field_meanings()[field.name].replace("``", ""))
    assert set(actions) == {"help"}


def test_no_flags_give_the_default_of_the_class() -> None:
    assert parse() == config_from_flags(argparse.Namespace()) == DistributedDataParallelConfig()
    defaults = vars(DistributedDataParallelConfig())
    assert [name for name, value in MEGATRON_DEFAULTS.items() if defaults[name] == value] == []


@pytest.mark.parametrize("field", FIELDS, ids=lambda field: field.name)
def test_every_switch_turns_on_and_off_and_every_other_flag_takes_a_value(field: dataclasses.Field[Any]) -> None:
    if field.type is not bool:
        words, stored = TAKEN.get(field.name) or TAKEN[field.type]
        assert parse(flag_of(field.name), *words) == alone(field.name, stored)
        return
    if field.name == "use_custom_fsdp":
        with pytest.warns(DeprecationWarning, match="use_custom_fsdp"):
            assert parse(flag_of(field.name)) == DistributedDataParallelConfig(use_megatron_fsdp=True)
    else:
        needed = ["--fp8-param-gather"] if field.name == "reuse_grad_buf_for_mxfp8_param_ag" else []
        assert parse(flag_of(field.name), *needed) == alone(field.name, True)
    assert parse(off_flag_of(field.name)) == alone(field.name, False)
    assert parse(flag_of(field.name), off_flag_of(field.name)) == alone(field.name, False)


def test_a_command_line_of_megatron_lm_is_read() -> None:
    line = (
        "--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads --overlap-grad-reduce "
        "--no-gradient-reduce-div-fusion --no-align-param-gather --ddp-bucket-size 1000 "
        "--accumulate-allreduce-grads-in-fp32 --no-check-for-nan-in-loss-and-grad "
        "--use-nccl-ub --megatron-fsdp-main-params-dtype auto --megatron-fsdp-grad-comm-dtype bf16"
    )
    assert parse(*line.split()) == DistributedDataParallelConfig(
        use_megatron_fsdp=True,
        data_parallel_sharding_strategy="optim_grads",
        overlap_grad_reduce=True,
        gradient_reduce_div_fusion=False,
        bucket_size=1000,
        grad_reduce_in_fp32=True,
        nccl_ub=True,
        fsdp_double_buffer=True,
        megatron_fsdp_main_params_dtype=None,
        megatron_fsdp_grad_comm_dtype=torch.bfloat16,
    )


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--ddp-bucket-size 0", "argument --ddp-bucket-size: '0' is not a positive whole number; give 1 or more"),
        ("--ddp-num-buckets 1e6", "argument --ddp-num-buckets: '1e6' is not a positive whole number; give 1 or more"),
        ("--megatron-fsdp-version 3", "argument --megatron-fsdp-version: invalid choice: 3 (choose from "),
        ("--outer-dp-sharding-strategy 2", "argument --outer-dp-sharding-strategy: invalid choice: 'optim_grads' ("),
        ("--data-parallel-sharding-strategy zero3", "sharding-strategy: invalid choice: 'zero3' (choose from "),
        ("--megatron-fsdp-main-grads-dtype bf61", "-main-grads-dtype: invalid choice: 'bf61' (choose from "),
    ],
)
def test_a_value_that_is_none_is_refused_by_the_parser(line: str, message: str) -> None:
    with pytest.raises(argparse.ArgumentError) as caught:
        parse(*line.split())
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ("nccl_ub=True has no effect", "--use-nccl-ub has no effect"),
        ("give overlap_grad_reduce=False", "give --no-overlap-grad-reduce"),
        ('data_parallel_sharding_strategy="no_shard" is', "--data-parallel-sharding-strategy no_shard is"),
        ("bucket_size=12; or", "--ddp-bucket-size 12; or"),
        ("megatron_fsdp_grad_comm_dtype=torch.float32, and", "--megatron-fsdp-grad-comm-dtype float32, and"),
        ("nothing of the sort", "nothing of the sort"),
    ],
)
def test_messages_about_fields_speak_of_flags(message: str, expected: str) -> None:
    assert in_flags(message) == expected
