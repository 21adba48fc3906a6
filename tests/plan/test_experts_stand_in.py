"""Experts without values against the experts of transformers with balanced tokens, alone and divided over ranks."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from tests.conftest import RunRanks

pytest.importorskip("transformers")

from megatron_fsdp.automodel.expert_parallel import parallelize_experts
from megatron_fsdp.errors import ConfigurationError, ParallelSizeError
from megatron_fsdp.plan.activations import profile_compute
from megatron_fsdp.plan.compute_profile import ComputeProfile
from megatron_fsdp.plan.experts_stand_in import balanced_experts, fused_experts
from tests.support.measured_compute import measured_peak, on_meta, token_batch
from tests.support.small_language_models import build_small, unit_names

HIDDEN, INNER, EXPERTS, CHOSEN, TOKENS = 32, 48, 4, 2, 64
RANKS = 2


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


def tokens(count: int = TOKENS) -> Tensor:
    return torch.linspace(-1, 1, count * HIDDEN).view(count, HIDDEN)


def profile(implementation: str, ranks: int = 1, count: int = TOKENS) -> ComputeProfile:
    with torch.device("meta"):
        model = Routed(implementation)
    return profile_compute(
        model, on_meta(tokens(count)), unit_names=[""], loss_fn=total, kernels="cpu", expert_ranks=ranks
    )


@pytest.mark.parametrize("implementation", ["grouped_mm", "eager", "batched_mm"])
def test_balanced_experts_need_what_those_of_transformers_need(implementation: str) -> None:
    found = profile(implementation)
    assert found.peak_bytes == measured_peak(Routed(implementation), tokens(), total)
    rows = TOKENS * CHOSEN
    gate = 2 * TOKENS * HIDDEN * CHOSEN
    assert found.forward_flops == rows * 2 * (HIDDEN * 2 * INNER + INNER * HIDDEN) + gate


@pytest.mark.parametrize("count", [1, 5])
def test_the_loop_gives_the_rest_to_the_first_experts(count: int) -> None:
    """Of 10 rows, 4 experts get 3, 3, 2 and 2; of 2 rows, two get one each and two are left out."""
    assert profile("eager", count=count).peak_bytes == measured_peak(Routed("eager"), tokens(count), total)


def measure_divided() -> int:
    model = Routed("grouped_mm")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("ep",))
    parallelize_experts(model, mesh)
    # gloo's thread may let go of what it sent a moment late, which only ever adds.
    return min(measured_peak(model, tokens(), total) for _ in range(3))


def test_divided_experts_need_what_those_of_a_rank_need(run_ranks: RunRanks) -> None:
    found = profile("grouped_mm", RANKS)
    assert run_ranks(RANKS, measure_divided) == [found.peak_bytes] * RANKS
    assert found.forward_flops == profile("grouped_mm").forward_flops  # as many rows come as go


def test_gradients_of_divided_experts_are_those_of_the_share() -> None:
    whole, half = profile("grouped_mm"), profile("grouped_mm", RANKS)
    assert half.segments[-2].gradients == whole.segments[-2].gradients
    assert half.peak_bytes < whole.peak_bytes + 4 * TOKENS * CHOSEN * HIDDEN * 4


def test_experts_are_put_back_as_they_were() -> None:
    with torch.device("meta"):
        model: Any = build_small("mixtral", experts_implementation="eager")
    experts = fused_experts(model)
    assert list(experts) == [f"model.layers.{layer}.mlp.experts" for layer in range(3)]
    before = [(part.num_experts, dict(part._parameters)) for part in experts.values()]
    with balanced_experts(model, RANKS):
        assert [part.gate_up_proj.shape for part in experts.values()] == [(EXPERTS // RANKS, 2 * INNER, HIDDEN)] * 3
    assert [(part.num_experts, dict(part._parameters)) for part in experts.values()] == before
    assert all("forward" not in part.__dict__ for part in experts.values())
    assert model.config._experts_implementation == "eager"


def test_experts_that_cannot_be_shared_are_refused() -> None:
    with torch.device("meta"):
        dense, mixture = build_small("llama"), build_small("mixtral")
    with pytest.raises(ConfigurationError, match="LlamaForCausalLM has no fused experts"), balanced_experts(dense, 2):
        pass
    words = r"mlp.experts has 4 experts, which 3 ranks cannot share equally"
    with pytest.raises(ParallelSizeError, match=words), balanced_experts(mixture, 3):
        pass


@pytest.mark.parametrize("name", ["mixtral", "qwen3-moe", "deepseek-v3"])
def test_families_are_profiled_with_experts_divided(name: str) -> None:
    """Weights of experts are smaller, and what travels is added: two exchanges and two sorts of rows per layer."""
    with torch.device("meta"):
        model = build_small(name)
    batch = on_meta(token_batch())
    whole = profile_compute(model, batch, unit_names=unit_names(name), kernels="cpu")
    divided = profile_compute(model, batch, unit_names=unit_names(name), kernels="cpu", expert_ranks=2)
    assert divided.events == whole.events
    assert divided.forward_flops == whole.forward_flops
    assert divided.kept_bytes > whole.kept_bytes
