"""The padding table keeps what it promises."""

import math
from itertools import product

import pytest

from megatron_fsdp.sharding.layout import plan_layout
from tools.padding_table import BF16_ALIGNMENT_NUMEL, RANK_COUNTS, groups, lcm_rule_numel

GROUPS = {group.name: group for group in groups()}


def test_real_layers_waste_at_most_one_percent() -> None:
    for (name, group), num_shards in product(GROUPS.items(), RANK_COUNTS):
        layout = plan_layout(group.shapes, num_shards, alignment_numel=BF16_ALIGNMENT_NUMEL)
        assert layout.padding_fraction <= 0.01, name
        # Alignment aside, the least common multiple is never better.
        assert layout.numel <= lcm_rule_numel(group.shapes, num_shards) + num_shards * BF16_ALIGNMENT_NUMEL, name


@pytest.mark.parametrize(
    ("name", "num_shards", "percent"),
    [
        ("Llama-2-7B, block", 1024, 78),
        ("Qwen2.5-0.5B, block", 1024, 134),
        ("DeepSeek-V3, whole MoE layer with 16 local experts", 64, 501),
        ("DeepSeek-V3, whole MoE layer with 16 local experts", 1024, 9519),
    ],
)
def test_the_least_common_multiple_wastes_what_is_known_of_it(name: str, num_shards: int, percent: int) -> None:
    shapes = GROUPS[name].shapes
    payload_numel = sum(math.prod(shape) for shape in shapes)
    assert round(100 * (lcm_rule_numel(shapes, num_shards) / payload_numel - 1)) == percent


def test_the_least_common_multiple_leaves_out_tensors_smaller_than_it() -> None:
    # Rows of 6 and 4 have 12 in common; (3,) is smaller than that, and (1, 5) would make it 60.
    assert lcm_rule_numel(((5, 4), (2, 6), (3,), (1, 5)), 2) == 48
