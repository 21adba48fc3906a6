"""Experts without values against the experts of transformers with balanced tokens."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("transformers")

from megatron_fsdp.plan.activations import profile_compute
from megatron_fsdp.plan.compute_profile import ComputeProfile
from megatron_fsdp.plan.models import balanced_experts
from tests.support.counting import measured_peak, on_meta
from tests.support.language_models import build_small

HIDDEN, INNER, EXPERTS, CHOSEN, TOKENS = 32, 48, 4, 2, 64


class Routed(nn.Module):
    """Experts of a small Mixtral; every expert gets as many tokens as any other, with weights that are learnt."""

    def __init__(self, implementation: str) -> None:
        super().__init__()
        model: Any = build_small("mixtral", experts_implementation=implementation)
        self.experts = model.model.layers[0].mlp.experts
        self.config = model.config
        for param in self.experts.parameters():
            param.data.normal_(std=0.02)
        self.gate = nn.Linear(HIDDEN, CHOSEN)

    def forward(self, tokens: Tensor) -> Tensor:
        first = torch.arange(tokens.shape[0], device=tokens.device) % EXPERTS
        index = torch.stack([first, (first + 1) % EXPERTS], dim=-1)
        weights = self.gate(tokens).sigmoid()
        routed: Tensor = self.experts(tokens, index, weights)
        return routed


def total(output: Tensor) -> Tensor:
    return output.square().sum()


def tokens() -> Tensor:
    return torch.linspace(-1, 1, TOKENS * HIDDEN).view(TOKENS, HIDDEN)


def profile(implementation: str) -> ComputeProfile:
    with torch.device("meta"):
        model = Routed(implementation)
    return profile_compute(model, on_meta(tokens()), unit_names=[""], loss_fn=total, kernels="cpu")


@pytest.mark.parametrize("implementation", ["grouped_mm", "batched_mm"])
def test_balanced_experts_need_what_those_of_transformers_need(implementation: str) -> None:
    found = profile(implementation)
    assert found.peak_bytes == measured_peak(Routed(implementation), tokens(), total)
    rows = TOKENS * CHOSEN
    gate = 2 * TOKENS * HIDDEN * CHOSEN
    assert found.forward_flops == rows * 2 * (HIDDEN * 2 * INNER + INNER * HIDDEN) + gate


def test_loops_are_planned_as_grouped_products_inside_of_the_block_only() -> None:
    assert profile("eager").peak_bytes == profile("grouped_mm").peak_bytes
    with torch.device("meta"):
        model: Any = build_small("mixtral", experts_implementation="eager")
    with balanced_experts(model):
        assert model.config._experts_implementation == "grouped_mm"
    assert model.config._experts_implementation == "eager"
