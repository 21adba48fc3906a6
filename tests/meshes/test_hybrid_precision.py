"""Precision on both axes of hybrid sharding: policies hold, and sums do not leave the range of float16."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megatron_fsdp import MixedPrecisionPolicy, fully_shard_model
from tests.conftest import RunRanks
from tests.support.arrangements import hybrid, hybrid_arguments
from tests.support.case import FP32, Run, Scenario, Setting, Tolerance, check_strategies
from tests.support.on_ranks import on_ranks
from tests.support.zoo import MODEL_CASES

STRATEGIES = ((0, 0), (1, 0), (2, 0), (3, 0), (1, 1), (2, 1), (3, 1))
"""Inner, outer."""

_BF16 = Tolerance(rtol=2**-5, atol=2**-6)
"""bfloat16 has 8 bits; slices of a batch and three updates each round."""

POLICIES = (
    MixedPrecisionPolicy(grad_comm_dtype=torch.bfloat16),
    MixedPrecisionPolicy(grad_comm_dtype=torch.float16),
    MixedPrecisionPolicy(main_grads_dtype=torch.bfloat16),
    MixedPrecisionPolicy(main_params_dtype=torch.float64, main_grads_dtype=torch.float64),
)


def weights_of_three_steps(run: Run) -> None:
    """Three steps of two microbatches; notes weights in float32."""
    for step in range(3):
        for microbatch in range(2):
            (run.loss(2 * step + microbatch) / 2).backward()
        run.optimizer.step()
        values = run.sharded.full_parameters() if run.sharded is not None else dict(run.model.named_parameters())
        run.note("weights", {name: value.float() for name, value in values.items()})
        run.optimizer.zero_grad()


@pytest.mark.full(short=["policy0"])
@pytest.mark.parametrize("policy", POLICIES)
def test_policies_hold_over_both_axes(run_ranks: RunRanks, policy: MixedPrecisionPolicy) -> None:
    """Narrow dtypes of gradients round them; wide ones change nothing."""
    strategies = ((0, 0), (3, 0), (3, 1))
    settings = [Setting(inner, policy, outer_strategy=outer, arrangement=hybrid(2, 2)) for inner, outer in strategies]
    is_narrow = {torch.bfloat16, torch.float16} & {policy.grad_comm_dtype, policy.main_grads_dtype}
    scenario = Scenario(weights_of_three_steps, MODEL_CASES["odd_shapes"])
    check_strategies(run_ranks, 4, scenario, settings, _BF16 if is_narrow else FP32)


LARGE = 40_000.0
"""Two of these are more than float16 can hold (65504)."""


@on_ranks(4)
def test_a_mean_that_fits_into_float16_is_not_lost_on_the_way() -> None:
    found = {}
    for inner, outer in STRATEGIES:
        model = fully_shard_model(
            nn.Linear(4, 4, bias=False),
            zero_dp_strategy=inner,
            outer_dp_sharding_strategy=outer,
            fsdp_unit_modules=[],
            mixed_precision_policy=MixedPrecisionPolicy(grad_comm_dtype=torch.float16),
            average_in_collective=True,
            **hybrid_arguments(2, dist.get_world_size() // 2),
        )
        (LARGE * model(torch.ones(1, 4)).sum()).backward()
        (gradient,) = model.full_gradients().values()
        assert gradient is not None
        found[inner, outer] = gradient.mean().item()
    assert found == pytest.approx(dict.fromkeys(STRATEGIES, LARGE), rel=1e-3)
