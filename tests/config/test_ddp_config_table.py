"""The published table of the configuration: it is complete."""

import dataclasses
from pathlib import Path

from megatron_fsdp.distributed_data_parallel_config import DistributedDataParallelConfig
from tools.ddp_config_table import rules_of

PAGE = Path(__file__).parents[2] / "docs" / "ddp.md"


def test_every_field_has_one_row_with_a_default_a_flag_and_a_meaning() -> None:
    table = PAGE.read_text().partition("### Fields")[2]
    rows = [line.strip("| ").split(" | ") for line in table.splitlines() if line.startswith("| `")]
    assert [row[0] for row in rows] == [
        f"`{field.name}`" for field in dataclasses.fields(DistributedDataParallelConfig)
    ]
    for row in rows:
        assert all(row[1:4])
        assert row[2].startswith("`--")


def test_rules_are_told_at_both_fields() -> None:
    assert rules_of("bucket_size") == ["not with `num_buckets`"]
    assert rules_of("num_buckets") == ["not with `bucket_size`"]
    assert rules_of("reuse_grad_buf_for_mxfp8_param_ag") == ["needs `fp8_param_gather`"]
    assert rules_of("fsdp_manual_registration") == ["idle without `nccl_ub`, `use_megatron_fsdp`"]
    assert rules_of("nccl_ub") == ["sets `fsdp_double_buffer`"]
    assert rules_of("outer_dp_sharding_strategy") == ["one of `no_shard`, `optim`"]
    assert rules_of("fsdp_double_buffer") == ["set by `nccl_ub`", "set by `megatron_fsdp_max_pool_double_buffer`"]
