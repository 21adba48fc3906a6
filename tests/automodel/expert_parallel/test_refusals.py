"""What cannot be divided is refused in one sentence, the same on every rank, before anything is changed."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy

from tests.conftest import RunRanks

pytest.importorskip("transformers")

from megatron_fsdp.automodel.expert_parallel import parallelize_experts, shard_experts
from megatron_fsdp.errors import ConfigurationError, ParallelSizeError
from tests.automodel.expert_parallel.training import expert_mesh
from tests.automodel.small_models import build
from tests.support.arrangements import mesh_of

_POLICIES: dict[str, Any] = {
    "mp_policy": MixedPrecisionPolicy(),
    "offload_policy": OffloadPolicy(),
    "reshard_after_forward": True,
}


class Experts(nn.Module):
    """Fused experts that may be divided."""

    def __init__(self) -> None:
        super().__init__()
        self.num_experts: Any = 4
        self.weight = nn.Parameter(torch.zeros(4, 3, 3))

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:  # noqa: ARG002
        return hidden_states


class OtherCall(Experts):
    def forward(self, hidden_states: Tensor) -> Tensor:
        return hidden_states


class OtherOrder(Experts):
    def forward(self, hidden_states: Tensor, top_k_weights: Tensor, top_k_index: Tensor) -> Tensor:  # noqa: ARG002
        return hidden_states


def changed(change: Callable[[Experts], None], kind: type[Experts] = Experts) -> nn.Module:
    model = nn.ModuleDict({"experts": kind()})
    change(model["experts"])  # type: ignore[arg-type]
    return model


def cases() -> dict[str, nn.Module]:
    """Models that are refused, by a part of the message."""

    def norm_inside(part: Experts) -> None:
        part.norm = nn.LayerNorm(3)

    def no_number(part: Experts) -> None:
        del part.num_experts

    def buffer(part: Experts) -> None:
        part.register_buffer("scale", torch.ones(4))

    def other_rows(part: Experts) -> None:
        part.bias = nn.Parameter(torch.zeros(3))

    def flat(part: Experts) -> None:
        part.weight = nn.Parameter(torch.zeros(4, 9))

    return {
        "LlamaForCausalLM has no module called experts": build("llama", num_hidden_layers=1),
        "has weights in modules of its own (norm.weight)": changed(norm_inside),
        "does not say num_experts": changed(no_number),
        "has a buffer (scale)": changed(buffer),
        "has bias of shape (3,), which is not a row for each of its 4 experts": changed(other_rows),
        "has no weight of three dimensions": changed(flat),
        "is called as forward(hidden_states": changed(lambda _: None, OtherCall),
        "top_k_weights: torch.Tensor, top_k_index": changed(lambda _: None, OtherOrder),
        "has no weights": nn.ModuleDict({"experts": nn.Identity()}),
    }


def messages() -> dict[str, str]:
    """What is said, by what is expected."""
    mesh = expert_mesh(2)["ep"]
    found = {}
    for wanted, model in cases().items():
        before = [(name, type(part)) for name, part in model.named_modules()]
        with pytest.raises(ConfigurationError) as caught:
            parallelize_experts(model, mesh)
        assert [(name, type(part)) for name, part in model.named_modules()] == before
        found[wanted] = str(caught.value)
    return found


def later_messages() -> list[str]:
    """Of sizes, meshes, names and repetitions."""
    mesh, found = expert_mesh(2), []
    for kind, changes in (("mixtral", {"num_local_experts": 3}), ("qwen3_moe", {"num_experts": 5})):
        with pytest.raises(ParallelSizeError) as odd:
            parallelize_experts(build(kind, num_hidden_layers=1, **changes), mesh["ep"])
        found.append(str(odd.value))
    model = build("mixtral", num_hidden_layers=1)
    with pytest.raises(ConfigurationError) as wrong_mesh:
        parallelize_experts(model, mesh_of((2,), ("dp_shard",)))
    names = parallelize_experts(model, mesh["ep"])
    with pytest.raises(ConfigurationError) as twice:
        parallelize_experts(model, mesh["ep"])
    with pytest.raises(ConfigurationError) as no_experts:
        shard_experts(model, ["lm_head"], mesh["ep_shard"], gradient_divisor=2, **_POLICIES)
    with pytest.raises(ConfigurationError) as no_divisor:
        shard_experts(model, names, mesh["ep_shard"], gradient_divisor=0, **_POLICIES)
    return [*found, *(str(each.value) for each in (wrong_mesh, twice, no_experts, no_divisor))]


def test_other_interfaces_are_refused_and_left_alone(run_ranks: RunRanks) -> None:
    one, other = run_ranks(2, messages)
    assert one == other
    for wanted, message in one.items():
        assert wanted in message
        assert "\n" not in message


def test_sizes_meshes_and_repetitions_are_refused(run_ranks: RunRanks) -> None:
    one, other = run_ranks(2, later_messages)
    assert one == other
    starts = [
        "model.layers.0.mlp.experts has 3 experts (config.num_local_experts=3), which ep_size=2 does not divide",
        "model.layers.0.mlp.experts has 5 experts (config.num_local_experts=5), which ep_size=2 does not divide",
        "a mesh with the dimensions ('dp_shard',) was given for experts",
        "model.layers.0.mlp.experts (DividedMixtralExperts) has gate_up_proj divided over ranks already",
        "lm_head (Linear) is not divided over ranks",
        "gradient_divisor=0 is no number of ranks",
    ]
    assert len(one) == len(starts)
    for message, start in zip(one, starts, strict=True):
        assert message.startswith(start)
