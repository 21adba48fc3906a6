"""Optimizers that do not step element by element: the bits of one process, on other ranks after a checkpoint, too."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from megatron_fsdp import fully_shard_model, fully_shard_optimizer
from megatron_fsdp.dtensor.tensor import UnevenDTensor
from tests.conftest import RunRanks
from tests.optim.full_tensor.test_step import Factored
from tests.optim.test_adamw8bit import blocks, eight_bits
from tests.optim.test_chained import chain, chain_of_sgd, chain_of_whole_tensors, mixed
from tests.support.arrangements import divide_tensors, tensor_parallel
from tests.support.on_ranks import on_ranks
from tests.support.optimizer_reference import Make, ReferencePair, drawn, flat, hybrid, matrices, three_steps
from tests.support.zoo import Block, build_dense

KINDS: dict[str, tuple[Callable[[], nn.Module], Make]] = {
    "adafactor": (matrices, lambda params: torch.optim.Adafactor(params, lr=0.1, weight_decay=0.01)),
    "adafactor foreach": (matrices, lambda params: torch.optim.Adafactor(params, lr=0.1, foreach=True)),
    "own": (matrices, lambda params: Factored([{"params": params[:2], "lr": 0.2}, {"params": params[2:]}])),
    "muon": (matrices, lambda params: torch.optim.Muon(params, lr=0.1)),
    "muon with options": (
        matrices,
        lambda params: torch.optim.Muon(
            params, lr=torch.tensor(0.1), weight_decay=0.0, momentum=0.3, nesterov=False, adjust_lr_fn="match_rms_adamw"
        ),
    ),
    "muon in groups": (
        matrices,
        lambda params: torch.optim.Muon(
            [{"params": params[:2], "lr": 0.2}, {"params": params[2:], "ns_steps": 3}], lr=0.1
        ),
    ),
    "8 bit": (blocks, eight_bits),
    "chain": (mixed, chain),
    "chain of SGD": (mixed, chain_of_sgd),
    "chain of whole tensors": (mixed, chain_of_whole_tensors),
}


def check_three_steps(kind: str, arguments: dict[str, Any]) -> None:
    build, make = KINDS[kind]
    pair = three_steps(build(), make, arguments, without=2)
    options, wanted = (
        [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
        for optimizer in (pair.optimizer, pair.reference)
    )
    assert options == wanted


IN_SHORT = ["adafactor foreach-2-3", "own-1-1", "muon-2-4", "muon with options-3-3", "8 bit-3-3", "chain of SGD-1-2"]


@pytest.mark.full(short=[*IN_SHORT, "chain of whole tensors-0-2"])
@pytest.mark.parametrize(
    ("kind", "strategy", "num_ranks"),
    [
        ("adafactor", 3, 2),
        ("adafactor foreach", 2, 3),
        ("own", 1, 1),
        ("muon", 0, 2),
        ("muon", 2, 4),
        ("muon with options", 3, 3),
        ("muon in groups", 1, 2),
        ("8 bit", 0, 2),
        ("8 bit", 3, 3),
        ("chain", 3, 3),
        ("chain of SGD", 1, 2),
        ("chain of whole tensors", 0, 2),
    ],
)
@on_ranks()
def test_every_strategy_steps_as_one_process(kind: str, strategy: int) -> None:
    check_three_steps(kind, flat(strategy))


@pytest.mark.full(short=["own-optim"])
@pytest.mark.parametrize(
    ("kind", "outer"),
    [
        ("own", "optim"),
        ("muon", "no_shard"),
        ("8 bit", "optim"),
        ("chain", "optim"),
        ("chain of whole tensors", "no_shard"),
    ],
)
@on_ranks(4)
def test_hybrid_sharding_steps_as_one_process(kind: str, outer: str) -> None:
    check_three_steps(kind, hybrid(3, outer))


@on_ranks(4)
def test_tensor_parallel_parts_step_as_one_process() -> None:
    """Muon's are among its own tests."""
    arrangement, model = tensor_parallel(divide_tensors), build_dense()
    arrangement.place(model)
    sharding = {"zero_dp_strategy": 3, "fsdp_unit_modules": [Block]}
    three_steps(model, KINDS["adafactor"][1], {**arrangement.arguments(), **sharding}, without=2)


@pytest.mark.parametrize(("strategy", "num_ranks"), [(1, 2), (3, 3)])
@on_ranks()
def test_two_optimizers_side_by_side_step_on_clipped_gradients_as_one_process(strategy: int) -> None:
    """Muon and AdamW, each connected by itself; the norm is that of all gradients."""
    model = fully_shard_model(mixed(), fsdp_unit_modules=[nn.Linear], **flat(strategy))
    params: list[Any] = list(model.parameters())
    copies = [nn.Parameter(param.full_tensor().detach().clone()) for param in params]
    ours = [fully_shard_optimizer(each) for each in muon_and_adamw(params)]
    theirs = muon_and_adamw(copies)
    for step in range(3):
        for index, (param, whole) in enumerate(zip(params, copies, strict=True)):
            grad = drawn(whole.shape, step, index)
            param.grad = UnevenDTensor.wrap(param.shard_spec.take(grad).clone(), param.shard_spec)
            whole.grad = grad
        norm = torch.nn.utils.get_total_norm([whole.grad for whole in copies if whole.grad is not None])
        torch.testing.assert_close(float(model.clip_grad_norm_(0.5)), float(norm), rtol=1e-6, atol=0.0)
        for param, whole in zip(params, copies, strict=True):
            torch.testing.assert_close(param.grad.full_tensor(), whole.grad * (0.5 / norm), rtol=1e-5, atol=1e-7)
            whole.grad = param.grad.full_tensor()  # how a norm is added up decides its last bit
        for optimizer in (*ours, *theirs):
            optimizer.step()
        assert [torch.equal(p.full_tensor(), w) for p, w in zip(params, copies, strict=True)] == [True] * len(params)


def muon_and_adamw(params: list[Any]) -> list[torch.optim.Optimizer]:
    muon = torch.optim.Muon([param for param in params if param.dim() == 2], lr=0.1)
    return [muon, torch.optim.AdamW([param for param in params if param.dim() != 2], lr=0.2)]


def after(kind: str, steps: int) -> ReferencePair:
    build, make = KINDS[kind]
    pair = ReferencePair(build(), make, flat(3))
    for step in range(steps):
        pair.step(step)
    return pair


def save(kind: str, folder: Path) -> None:
    after(kind, 2).save(folder)


def go_on(kind: str, folder: Path) -> list[str]:
    """Load what two steps have made into a new optimizer, make the third and compare with three in one process."""
    forms = (
        ["ours"] if kind in ("own", "chain of whole tensors") else ["ours", "torch"]
    )  # torch has nothing to load into before a step of "own"
    return [each for form in forms for each in after(kind, 0).goes_on(after(kind, 2), folder / form)]


@pytest.mark.full(short=["own-3-2", "chain of SGD-2-1"])
@pytest.mark.parametrize(
    ("kind", "before", "later"),
    [
        ("own", 3, 2),
        ("muon", 1, 4),
        ("8 bit", 3, 2),
        ("chain", 3, 2),
        ("chain of SGD", 2, 1),
        ("chain of whole tensors", 1, 4),
    ],
)
def test_training_goes_on_with_another_number_of_ranks(
    run_ranks: RunRanks, tmp_path: Path, kind: str, before: int, later: int
) -> None:
    run_ranks(before, save, kind, tmp_path)
    assert run_ranks(later, go_on, kind, tmp_path) == [[]] * later
