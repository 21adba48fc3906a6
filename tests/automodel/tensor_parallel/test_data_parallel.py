"""Tensor parallelism times data parallelism, 2 x 2: torch's FSDP2 and this library's sharding equal one process."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

import megatron_fsdp
from megatron_fsdp.automodel.architecture import find_layers
from megatron_fsdp.automodel.tensor_parallel import parallelize_tensors
from tests.automodel.small_models import build
from tests.automodel.tensor_parallel.training import adamw, differences, train
from tests.conftest import RunRanks
from tests.support.arrangements import mesh_of

SIZES = {"num_hidden_layers": 2}


def by_torch(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    for layer in find_layers(model).modules():
        fully_shard(layer, mesh=mesh["dp"])
    return fully_shard(model, mesh=mesh["dp"])


def by_this_library(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    return megatron_fsdp.fully_shard_model(
        model,
        fsdp_unit_modules=[type(find_layers(model).modules()[0])],
        device_mesh=mesh,
        dp_shard_dim="dp",
        tp_dim="tp",
        zero_dp_strategy=3,
    )


def sharded_adamw(model: nn.Module) -> torch.optim.Optimizer:
    return megatron_fsdp.fully_shard_optimizer(torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3))


BY_TORCH, BY_THIS_LIBRARY = (by_torch, adamw), (by_this_library, sharded_adamw)
MIXED = [(BY_TORCH, False), (BY_THIS_LIBRARY, True)]
"""How a model is sharded, and whether tensor-parallel ranks split tokens."""
THE_REST = [(BY_TORCH, True), (BY_THIS_LIBRARY, False)]


def on_a_square(kind: str, changes: dict[str, int], ways: list[Any]) -> list[str]:
    wrong = []
    mesh = mesh_of((2, 2), ("dp", "tp"))
    expected = train(build(kind, **SIZES, **changes))
    for (shard, optimizer_of), splits_tokens in ways:
        model = build(kind, **SIZES, **changes)
        parallelize_tensors(model, mesh["tp"], sequence_parallel=splits_tokens)
        found = train(shard(model, mesh), rank=mesh["dp"].get_local_rank(), ranks=2, optimizer_of=optimizer_of)
        case = f"{shard.__name__}, sequence_parallel={splits_tokens}"
        wrong += [f"{case}: {text}" for text in differences(found, expected, only_sums=True)]
    return wrong


@pytest.mark.full(short=["mixed-llama_tied-changes0"])
@pytest.mark.parametrize(
    ("kind", "changes"),
    [("llama_tied", {"vocab_size": 97}), ("qwen3", {}), ("gemma3", {}), ("qwen3_moe", {})],
)
@pytest.mark.parametrize("ways", [MIXED, THE_REST], ids=["mixed", "the rest"])
def test_sharded_tensor_parallel_models_equal_one_process(
    run_ranks: RunRanks, kind: str, changes: dict[str, int], ways: list[Any]
) -> None:
    assert run_ranks(4, on_a_square, kind, changes, ways) == [[]] * 4


def norm_of_all_gradients() -> tuple[float, float]:
    """Clipped by torch, with tensor parallelism alone, and on one process."""
    norms = []
    mesh = mesh_of((2,), ("tp",))
    for divided in (True, False):
        model = build("qwen3_moe", **SIZES)
        if divided:
            parallelize_tensors(model, mesh, sequence_parallel=True)
        train(model, steps=1)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        norms.append(float(norm.full_tensor() if divided else norm))
    return norms[0], norms[1]


def test_gradients_are_clipped_by_torch_as_on_one_process(run_ranks: RunRanks) -> None:
    for found, expected in run_ranks(2, norm_of_all_gradients):
        assert found == pytest.approx(expected, rel=1e-5)
