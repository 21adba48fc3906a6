"""The padding table keeps what it promises."""

from itertools import product

from megatron_fsdp.sharding.layout import plan_layout
from tools.padding_table import BF16_ALIGNMENT_NUMEL, RANK_COUNTS, groups, lcm_rule_numel

GROUPS = {group.name: group for group in groups()}


def test_real_layers_waste_at_most_one_percent() -> None:
    for (name, group), num_shards in product(GROUPS.items(), RANK_COUNTS):
        layout = plan_layout(group.shapes, num_shards, alignment_numel=BF16_ALIGNMENT_NUMEL)
        assert layout.padding_fraction <= 0.01, name
        # Alignment aside, the least common multiple is never better.
        assert layout.numel <= lcm_rule_numel(group.shapes, num_shards) + num_shards * BF16_ALIGNMENT_NUMEL, name
