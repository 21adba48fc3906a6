"""Models whose weights are float8 and have no main weights: codes and scales are saved, and any ranks load them."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._functorch._aot_autograd.subclass_parametrization import unwrap_tensor_subclass_parameters

from megatron_fsdp import MegatronFSDP, fully_shard
from megatron_fsdp.checkpoint import load_checkpoint, save_checkpoint
from megatron_fsdp.cli.main import main
from tests.conftest import RunRanks
from tests.support.arrangements import hybrid_arguments
from tests.support.dcp_contents import contents, same
from tests.support.tensor_extension import Coded

E4M3 = torch.float8_e4m3fn


class Scaled(nn.Module):
    """A linear of frozen codes, which are a parameter beside their scales, and of a bias that is trained."""

    def __init__(self, columns: int, rows: int) -> None:
        super().__init__()
        codes, scale = quantized(torch.randn(rows, columns))
        self.weight = nn.Parameter(codes, requires_grad=False)
        self.weight_scale = nn.Parameter(scale, requires_grad=False)
        self.bias = nn.Parameter(torch.randn(rows))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype) * self.weight_scale, self.bias)


class Layer(nn.Module):
    """A linear and an activation."""

    def __init__(self, linear: nn.Module) -> None:
        super().__init__()
        self.linear = linear

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x))


def quantized(weight: Tensor) -> tuple[Tensor, Tensor]:
    scale = weight.abs().amax(dim=1, keepdim=True) / torch.finfo(E4M3).max
    return (weight / scale).to(E4M3), scale


def build(kind: str, seed: int) -> nn.Module:
    """Build two layers; where a class holds codes and scales, torch takes them out as parameters."""
    torch.manual_seed(seed)
    if kind == "parameters":
        return nn.Sequential(Layer(Scaled(6, 10)), Layer(Scaled(10, 7)))
    model = nn.Sequential(Layer(nn.Linear(6, 10)), Layer(nn.Linear(10, 7)))
    for layer in model:
        layer.linear.weight = nn.Parameter(Coded(*quantized(layer.linear.weight.detach())), requires_grad=False)
    return unwrap_tensor_subclass_parameters(model)


def wrap(kind: str, seed: int, ranks: tuple[int, ...], strategy: int = 3) -> tuple[MegatronFSDP, torch.optim.Optimizer]:
    model = build(kind, seed)
    optimizer = torch.optim.AdamW([param for param in model.parameters() if param.requires_grad])
    places = hybrid_arguments(*ranks) if ranks[1:] else {}
    return fully_shard(model, optimizer, fsdp_unit_modules=[Layer], zero_dp_strategy=strategy, **places)


def seen(model: MegatronFSDP) -> tuple[Tensor, dict[str, Tensor]]:
    """Return what the model computes, and the bytes of all parameters."""
    params = {name: param.full_tensor().detach() for name, param in model.module.named_parameters()}
    with torch.no_grad():
        return model(torch.linspace(-1, 1, 12).view(2, 6)), {
            name: param.contiguous().view(torch.uint8) for name, param in params.items()
        }


def saved(kind: str, ranks: tuple[int, ...], folder: Path) -> Any:
    model, optimizer = wrap(kind, 0, ranks)
    model(torch.ones(2, 6)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    trained = [param for param in model.module.parameters() if param.requires_grad]
    assert model.memory().main_weight_bytes <= sum(param.to_local().nbytes for param in trained)  # of those alone
    save_checkpoint(model, optimizer, folder, iteration=1)
    return seen(model)


def loaded(kind: str, ranks: tuple[int, ...], folder: Path, strategy: int) -> Any:
    model, optimizer = wrap(kind, 1, ranks, strategy)
    load_checkpoint(model, optimizer, folder)
    return seen(model)


@pytest.mark.parametrize("kind", ["parameters", "a class"])
def test_codes_and_scales_are_saved_and_loaded_on_other_ranks(run_ranks: RunRanks, tmp_path: Path, kind: str) -> None:
    wanted, _ = run_ranks(2, saved, kind, (2,), tmp_path)
    frozen = {name: param.detach() for name, param in build(kind, 0).named_parameters() if not param.requires_grad}
    assert len(frozen) == 4
    assert all(torch.equal(wanted[1][name], value.view(torch.uint8)) for name, value in frozen.items())
    for ranks, strategy in (((3,), 3), ((2, 2), 3), ((1,), 3), ((2,), 0), ((2,), 2)):
        for found in run_ranks(math.prod(ranks), loaded, kind, ranks, tmp_path, strategy):
            assert same(found, wanted)
    stored = contents(str(tmp_path / "iter_0000001"))
    for name, value in frozen.items():
        found = stored[f"model.module.{name}"]
        assert (found.dtype, found.shape) == (value.dtype, value.shape)
    assert main(["checkpoint", "verify", str(tmp_path)]) == 0
