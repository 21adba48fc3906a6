"""Experts and float8 weights in checkpoints: saved by some ranks, loaded by others, bit for bit."""

import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import Tensor, nn
from torch._functorch._aot_autograd.subclass_parametrization import unwrap_tensor_subclass_parameters

from megatron_fsdp import MegatronFSDP, fully_shard
from megatron_fsdp.checkpoint import load_checkpoint, save_checkpoint
from megatron_fsdp.cli.main import main
from megatron_fsdp.errors import CheckpointError, ConfigurationError
from tests.checkpoint.test_reshard import trained, write
from tests.conftest import RunRanks
from tests.support.arrangements import Arrangement, hybrid_arguments
from tests.support.case import Run, Setting
from tests.support.dcp_contents import assert_same_contents, contents, load_state, same, state_of
from tests.support.experts import Experts, ListedExperts, Sizes, build_with_experts, experts_of
from tests.support.on_ranks import assert_equal_tensors, of_ranks, on_ranks
from tests.support.tensor_extension import Coded
from tests.support.zoo import Holder, ModelCase, token_case

KINDS = {"stacked": Experts, "listed": ListedExperts}


def sizes(ep: int, dp: int) -> Sizes:
    return (("ep", ep), ("dp_shard", dp))


def case_of(kind: str) -> ModelCase:
    return token_case(partial(build_with_experts, 2, "experts", KINDS[kind]))


Strategy = int | tuple[int, int]
"""Of all parameters, or of dense ones and of experts."""


def setting_of(arrangement: Arrangement, strategy: Strategy, outer: int = 0) -> Setting:
    inner, *apart = (strategy,) if isinstance(strategy, int) else strategy
    options = tuple(("zero_dp_strategy_experts", each) for each in apart)
    return Setting(inner, outer_strategy=outer, arrangement=arrangement, options=options)


def run_of(kind: str, setting: Setting, *batches: int) -> Run:
    return trained(case_of(kind), setting, *batches, num_groups=1 if kind == "stacked" else 2)


def named(run: Run) -> dict[str, Tensor]:
    """Whole weights of this rank's experts and of everything else, by their names over all ranks."""
    assert run.sharded is not None
    return {run.sharded.checkpoint_names.saved(name): value for name, value in run.sharded.full_parameters().items()}


def save(kind: str, setting: Setting, folder: str) -> dict[str, Tensor]:
    run = run_of(kind, setting, 0, 1)
    write(run, folder)
    return named(run)


def load_and_save(kind: str, setting: Setting, source: str, target: str) -> dict[str, str]:
    """Load by plain calls into a job that has stepped, and by the library into fresh ones; save again, and go on."""
    told = {}
    for what in ("by calls", "own", "plain"):
        run = run_of(kind, setting, *([5] if what == "by calls" else []))
        if what == "by calls":
            load_state(run.model, run.optimizer, f"{source}/plain")
        else:
            report = load_checkpoint(run.model, run.optimizer, f"{source}/{what}", with_rng=False)
            told[what] = "" if report.is_complete else str(report)
        dcp.save(state_of(run.model, run.optimizer), checkpoint_id=f"{target}/{what}")
        run.train(7)
    return told


def check_loaded(told: list[dict[str, str]], source: str, target: str) -> None:
    assert all(each == {"own": "", "plain": ""} for each in told)
    found = contents(f"{source}/plain")
    for what in ("by calls", "own", "plain"):
        assert_same_contents(contents(f"{target}/{what}"), found)


def merged(by_rank: list[dict[str, Tensor]], parts: int) -> dict[str, Tensor]:
    """The whole model: numbered experts by name, stacked ones of `parts` consecutive blocks of ranks."""
    found = {name: value for each in by_rank for name, value in each.items()}
    for name in found:
        if name.endswith(("experts.up", "experts.down", "experts.shift")):
            every = len(by_rank) // parts
            found[name] = torch.cat([by_rank[rank][name] for rank in range(0, len(by_rank), every)])
    return found


Way = tuple[str, tuple[int, int, Strategy], tuple[int, int, Strategy]]
WAYS: dict[str, Way] = {
    "EP 2 on 4 ranks to EP 1 on 2": ("stacked", (2, 2, 3), (1, 2, 2)),
    "EP 1 to EP 4": ("stacked", (1, 2, 1), (4, 1, 3)),
    "ZeRO-1 and 3 to 3 and 2": ("listed", (2, 1, (1, 3)), (1, 2, (3, 2))),
    "EP 2 to EP 4": ("listed", (2, 1, 0), (4, 1, 2)),
}


@pytest.mark.full(short=["EP 2 to EP 4"])
@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_experts_load_into_another_number_of_expert_parallel_ranks(
    run_ranks: RunRanks, tmp_path: Path, way: Way
) -> None:
    kind, (ep, dp, strategy), (to_ep, to_dp, to_strategy) = way
    source, target = str(tmp_path / "source"), str(tmp_path / "target")
    weights = merged(run_ranks(ep * dp, save, kind, setting_of(experts_of(sizes(ep, dp)), strategy), source), ep)
    found = contents(f"{source}/plain")
    assert_equal_tensors(
        {key.removeprefix("model.module."): value for key, value in found.items() if key.startswith("model.")}, weights
    )
    moments = [value for key, value in found.items() if key.endswith("exp_avg") and value.dim() > 1]
    assert len({value.double().sum().item() for value in moments}) == len(moments)
    to = setting_of(experts_of(sizes(to_ep, to_dp)), to_strategy)
    check_loaded(run_ranks(to_ep * to_dp, load_and_save, kind, to, source, target), source, target)


@pytest.mark.full
def test_an_outer_axis_and_a_mesh_in_another_order(run_ranks: RunRanks, tmp_path: Path) -> None:
    hybrid: Sizes = (("dp_outer", 2), ("ep", 2), ("dp_shard", 1))
    source, target = str(tmp_path / "source"), str(tmp_path / "target")
    run_ranks(4, save, "stacked", setting_of(experts_of(hybrid), 3, outer=1), source)
    to = setting_of(experts_of(sizes(2, 1)), 3)
    check_loaded(run_ranks(2, load_and_save, "stacked", to, source, target), source, target)


# ---- state dicts -----------------------------------------------------------------------------------------------------


def whole_dict(kind: str, seed: int) -> dict[str, Tensor]:
    torch.manual_seed(seed)
    return {f"module.{name}": value for name, value in case_of(kind).build().state_dict().items()}


@pytest.mark.parametrize("kind", KINDS)
@on_ranks(2)
def test_a_state_dict_is_that_of_all_experts_and_a_whole_one_loads(tmp_path: Path, kind: str) -> None:
    run = run_of(kind, setting_of(experts_of(sizes(2, 1)), 3), 0)
    whole, first = whole_dict(kind, 3), 2 * dist.get_rank()
    assert run.sharded is not None
    before = named(run)
    run.model.load_state_dict(run.model.state_dict())
    run.optimizer.load_state_dict(run.optimizer.state_dict())
    assert_equal_tensors(named(run), before)
    mine = (f".experts.{first}.", f".experts.{first + 1}.")
    shapes = {key: value.shape for key, value in whole.items()}
    assert {key: value.shape for key, value in run.model.state_dict().items()} == {
        key: shape
        for key, shape in shapes.items()
        if kind == "stacked" or ".experts." not in key or any(part in key for part in mine)
    }
    groups = run.optimizer.state_dict()["param_groups"]
    assert sorted(number for group in groups for number in group["params"]) == list(range(len(whole)))
    run.model.load_state_dict(whole)
    loaded = named(run)
    expected = {key.removeprefix("module."): value for key, value in whole.items()}
    assert_equal_tensors(merged(of_ranks(loaded), 2), expected)
    with pytest.raises(CheckpointError, match="Missing key"):
        run.model.load_state_dict({key: value for key, value in whole_dict(kind, 4).items() if "experts" not in key})
    assert_equal_tensors(named(run), loaded)
    with pytest.raises(dcp.CheckpointException, match=r"save model\.state_dict\(\)"):
        dcp.save(dict(run.sharded.module.named_parameters()), checkpoint_id=tmp_path)


@on_ranks(2)
def test_experts_that_cannot_be_told_apart_are_refused_in_words(tmp_path: Path) -> None:
    """Tensors that do not say where one expert ends."""
    model: Any = Holder(experts=Holder(up=torch.randn(4, 6), down=torch.randn(6, 4)))
    model.forward = lambda x: x @ model.experts.up @ model.experts.down
    wrapped, optimizer = fully_shard(
        model, torch.optim.AdamW(model.parameters()), **experts_of(sizes(2, 1)).arguments()
    )
    wrapped(torch.randn(2, 4)).sum().backward()
    optimizer.step()
    for what in (wrapped.state_dict(), optimizer.state_dict()):
        with pytest.raises(dcp.CheckpointException, match="first dimensions of experts differ") as raised:
            dcp.save({"state": what}, checkpoint_id=tmp_path / "never")
        assert "name experts by their index over all ranks" in str(raised.value)
    with pytest.raises(ConfigurationError, match="another expert"):
        wrapped.state_dict()["module.experts.up"].__create_chunk_list__()


# ---- models whose weights are float8 and have no main weights --------------------------------------------------------


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


@pytest.mark.full(short=["a class"])
@pytest.mark.parametrize("kind", ["parameters", "a class"])
def test_codes_and_scales_are_saved_and_loaded_on_other_ranks(run_ranks: RunRanks, tmp_path: Path, kind: str) -> None:
    wanted, _ = run_ranks(2, saved, kind, (2,), tmp_path)
    frozen = {name: param.detach() for name, param in build(kind, 0).named_parameters() if not param.requires_grad}
    assert len(frozen) == 4
    assert all(torch.equal(wanted[1][name], value.view(torch.uint8)) for name, value in frozen.items())
    for ranks, strategy in (((3,), 3), ((2, 2), 3), ((2,), 0)):
        for found in run_ranks(math.prod(ranks), loaded, kind, ranks, tmp_path, strategy):
            assert same(found, wanted)
    stored = contents(str(tmp_path / "iter_0000001"))
    for name, value in frozen.items():
        found = stored[f"model.module.{name}"]
        assert (found.dtype, found.shape) == (value.dtype, value.shape)
    assert main(["checkpoint", "verify", str(tmp_path)]) == 0
