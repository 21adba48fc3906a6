"""Several optimizers of different parameters as one: the bits of each alone, one state dict and one checkpoint."""

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from megatron_fsdp import AdamW8bit, ChainedOptimizer, fully_shard, fully_shard_model, fully_shard_optimizer
from megatron_fsdp.errors import ConfigurationError
from tests.conftest import RunRanks
from tests.support.on_ranks import fixed_seed, on_ranks
from tests.support.optimizer_twins import Make, Matrices, Twins, drawn, flat, hybrid, three_steps


class Mixed(Matrices):
    """Matrices and vectors."""

    def __init__(self) -> None:
        super().__init__()
        self.vector = nn.Parameter(torch.randn(7))
        self.norm = nn.LayerNorm(5)


def mixed() -> nn.Module:
    with fixed_seed(3):
        return Mixed()


def chain(params: Sequence[Any]) -> ChainedOptimizer:
    muon = torch.optim.Muon([param for param in params if param.dim() == 2], lr=0.1)
    others = [param for param in params if param.dim() != 2]
    return ChainedOptimizer(muon, torch.optim.AdamW(others[:1], lr=0.2), AdamW8bit(others[1:], lr=0.02))


def chain_of_sgd(params: Sequence[Any]) -> ChainedOptimizer:
    """One whose blank momentum must not be loaded, one whose state is there before the first step, one without any."""
    return ChainedOptimizer(
        torch.optim.SGD(params[:3], lr=0.1, momentum=0.9, dampening=0.5),
        torch.optim.Adagrad(params[3:5], lr=0.1),
        torch.optim.SGD(params[5:], lr=0.1),
    )


CHAINS: dict[str, Make] = {"muon": chain, "sgd": chain_of_sgd}


@pytest.mark.full(cover=1)
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
@pytest.mark.parametrize("strategy", [0, 1, 3])
@pytest.mark.parametrize("kind", CHAINS)
@on_ranks()
def test_every_strategy_steps_as_one_process(kind: str, strategy: int) -> None:
    three_steps(mixed(), CHAINS[kind], flat(strategy), without=2)


@on_ranks(4)
def test_hybrid_sharding_steps_as_one_process() -> None:
    three_steps(mixed(), chain, hybrid(3, "optim"), without=2)


def test_a_chain_steps_as_its_optimizers_one_after_another() -> None:
    params, copies = ([nn.Parameter(drawn(torch.Size(s), 0, 0)) for s in ((4, 4), (3,), (2,))] for _ in range(2))
    chained, alone = copy.deepcopy(chain(params)), chain(copies).optimizers
    params = [param for group in chained.param_groups for param in group["params"]]
    assert [group["lr"] for group in chained.param_groups] == [0.1, 0.2, 0.02]
    for group in chained.param_groups:
        group["lr"] = group["lr"] / 2
    for optimizer in alone:
        optimizer.param_groups[0]["lr"] /= 2

    def closure() -> str:
        for step, many in enumerate((params, copies)):
            for param in many:
                param.grad = drawn(param.shape, 1, len(param.shape)) + 0 * step
        return "loss"

    assert chained.step(closure) == "loss"
    for optimizer in alone:
        optimizer.step()
    assert all(map(torch.equal, params, copies))
    assert set(chained.state) == set(params)


# ---- checkpoints -----------------------------------------------------------------------------------------------------


def twins_of(kind: str, steps: int) -> Twins:
    twins = Twins(mixed(), CHAINS[kind], flat(3))
    for step in range(steps):
        twins.step(step)
    return twins


def save(kind: str, folder: Path) -> None:
    twins_of(kind, 2).save(folder)


def go_on(kind: str, folder: Path) -> list[str]:
    return [each for form in ("ours", "torch") for each in twins_of(kind, 0).goes_on(twins_of(kind, 2), folder / form)]


@pytest.mark.full(short=["muon-3-2", "sgd-2-1"])
@pytest.mark.parametrize(("before", "after"), [(3, 2), (2, 4), (2, 1)])
@pytest.mark.parametrize("kind", CHAINS)
def test_training_goes_on_with_another_number_of_ranks(
    run_ranks: RunRanks, tmp_path: Path, kind: str, before: int, after: int
) -> None:
    run_ranks(before, save, kind, tmp_path)
    assert run_ranks(after, go_on, kind, tmp_path) == [[]] * after


def test_each_optimizer_loads_its_own_part_as_it_does_alone() -> None:
    shapes = ((4, 4), (3,), (600,))
    first, second = ([nn.Parameter(drawn(torch.Size(s), 0, 0).bfloat16()) for s in shapes] for _ in range(2))
    saved, loaded = chain(first), chain(second)
    for param in first:
        param.grad = torch.ones_like(param)
    saved.step()
    saved.optimizers[1].param_groups[0]["lr"] = 0.7
    loaded.load_state_dict(saved.state_dict())
    assert loaded.param_groups[1]["lr"] == 0.7
    for ours, theirs in zip(first, second, strict=True):
        for key, value in saved.state[ours].items():
            assert torch.equal(loaded.state[theirs][key], value)
            assert loaded.state[theirs][key].dtype == value.dtype
    with pytest.raises(ValueError, match="different number of parameter groups"):
        loaded.load_state_dict(saved.optimizers[0].state_dict())


# ---- through the public functions ------------------------------------------------------------------------------------


@on_ranks(2)
def test_each_optimizer_of_a_chain_is_described() -> None:
    model = mixed()
    sharded, optimizer = fully_shard(model, chain(list(model.parameters())), fsdp_unit_modules=[nn.Linear], **flat(3))
    assert {each.class_name: (each.step, each.parts) for each in sharded.describe().optimizers} == {
        "Muon": ("on shards and whole matrices (Muon)", ("matrices 5",)),
        "AdamW": ("on local tensors", ("vectors 1",)),
        "AdamW8bit": ("on shards, in blocks of 256 elements of whole tensors", ("norms 2",)),
    }
    for param in sharded.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    held = [getattr(value, "_local_tensor", value) for state in optimizer.state.values() for value in state.values()]
    assert sharded.describe().memory.optimizer_bytes == sum(value.nbytes for value in held)


@on_ranks(2)
def test_what_a_chain_cannot_do_is_refused_on_all_ranks() -> None:
    model = fully_shard_model(mixed(), fsdp_unit_modules=[nn.Linear], **flat(3))
    params = list(model.parameters())
    whole = ChainedOptimizer(torch.optim.Adafactor(params[:2]), torch.optim.AdamW(params[2:]))
    with pytest.raises(ConfigurationError, match="Adafactor steps whole tensors, which a ChainedOptimizer does not"):
        fully_shard_optimizer(whole)
    vectors = torch.optim.Muon(params[:1])
    vectors.add_param_group({"params": [param for param in params if param.dim() == 1]})
    with pytest.raises(ConfigurationError, match="Muon was given a parameter of shape"):
        fully_shard_optimizer(ChainedOptimizer(vectors))


def test_what_is_no_chain_is_refused() -> None:
    params = [nn.Parameter(torch.ones(2, 2)) for _ in range(3)]
    first, second = (torch.optim.SGD([param]) for param in params[:2])
    for given, told in (
        ((), "nothing"),
        (([first, second],), "list"),
        ((ChainedOptimizer(first),), "ChainedOptimizer"),
    ):
        with pytest.raises(ConfigurationError, match=f"ChainedOptimizer was given {told}; give optimizers of torch"):
            ChainedOptimizer(*given)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match=r"a parameter of shape \(2, 2\) twice"):
        ChainedOptimizer(first, torch.optim.SGD([params[0]]))
    later = ChainedOptimizer(first, torch.optim.SGD([params[1]]))
    later.optimizers[1].add_param_group({"params": [params[0]]})
    with pytest.raises(ConfigurationError, match=r"a parameter of shape \(2, 2\) twice"):
        later.step()
    with pytest.raises(ConfigurationError, match="was given a group with params, and not told"):
        ChainedOptimizer(first, second).add_param_group({"params": [params[2]]})
