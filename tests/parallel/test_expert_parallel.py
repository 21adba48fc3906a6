"""EP 2 x FSDP 2 on a mixture of experts equals one process that holds all experts."""

import pytest
from torch import nn

from tests.conftest import RunRanks
from tests.support.by_hand import average_over, run_by_hand
from tests.support.expert_meshes import expert_mesh, experts_of
from tests.support.models import ModelCase
from tests.support.parallel_transformer import (
    ParallelBlock,
    build_top1_experts,
    build_top2_experts,
    make_tokens,
    mean_loss,
)
from tests.support.sharded_run import FP32, Run, Scenario, assert_parity, reference

TOP1 = ModelCase(build_top1_experts, make_tokens, mean_loss, (ParallelBlock,))
TOP2 = ModelCase(build_top2_experts, make_tokens, mean_loss, (ParallelBlock,))


def three_steps(run: Run) -> None:
    run.train(0, 1, 2)


def average(model: nn.Module) -> None:
    """The factor of an expert is that of the dense parameters: its gradient already has other ranks' tokens in it."""
    average_over(model, expert_mesh(1, 2, 2)["dp_shard"].get_group(), 4, among=".experts.")
    for name, module in model.named_modules():
        if not name.endswith((".experts", ".mlp")) and list(module.parameters(recurse=False)):
            average_over(module, None, 4)


@pytest.mark.parametrize("case", [TOP1, TOP2])
def test_the_model_divided_without_sharding_equals_one_process(run_ranks: RunRanks, case: ModelCase) -> None:
    scenario = Scenario(three_steps, case)
    outcomes = run_ranks(4, run_by_hand, scenario, experts_of(1, 2, 2), average)
    assert_parity(outcomes, reference(scenario), FP32)
