"""Memory of cleared gradients goes back, comes again beneath the same tensors, and stays where somebody kept one."""

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from megatron_fsdp import MegatronFSDP, fully_shard
from megatron_fsdp.engine.gradients import MainGradient
from megatron_fsdp.sharding.layout import Layout, plan_layout
from megatron_fsdp.sharding.placement import Region
from tests.conftest import RunRanks
from tests.support.live_bytes import LiveBytes, comes_and_goes
from tests.support.seams import engine_of, local_of
from tests.support.tower import FEATURES, Floor, Tower, tower_loss

WIDTHS = (8, 16, 8)


def gradient_bytes(model: MegatronFSDP) -> int:
    """What main gradients take now."""
    return sum(group.gradients.main.held_bytes for group in model.parameter_groups() if group.gradients is not None)


def wrap(**options: object) -> tuple[MegatronFSDP, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Tower(WIDTHS)
    return fully_shard(model, torch.optim.AdamW(model.parameters()), fsdp_unit_modules=[Floor], **options)


def backward(model: nn.Module) -> None:
    tower_loss(model, torch.ones(2, FEATURES)).backward()


def clear_by_optimizer(_model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()


def clear_by_model(model: nn.Module, _optimizer: torch.optim.Optimizer) -> None:
    model.zero_grad()


def clear_by_hand(model: nn.Module, _optimizer: torch.optim.Optimizer) -> None:
    for param in model.parameters():
        param.grad = None


WAYS: dict[str, Callable[[nn.Module, torch.optim.Optimizer], None]] = {
    "optimizer": clear_by_optimizer,
    "model": clear_by_model,
    "by hand": clear_by_hand,
}


def bytes_over_steps(way: str, strategy: int) -> list[tuple[int, int, int]]:
    """For each step main gradients' bytes after backward, when a forward after clearing has ended, and their views."""
    model, optimizer = wrap(zero_dp_strategy=strategy)
    found = []
    for _ in range(3):
        backward(model)
        views = sum(id(param.grad) for param in model.parameters())
        held = gradient_bytes(model)
        optimizer.step()
        WAYS[way](model, optimizer)
        with torch.no_grad():
            model(torch.ones(2, FEATURES))
        found.append((held, gradient_bytes(model), views))
    return found


@pytest.mark.parametrize("way", list(WAYS))
@pytest.mark.parametrize("strategy", [0, 3])
def test_cleared_gradients_take_nothing_and_come_back_as_the_same_tensors(
    run_ranks: RunRanks, way: str, strategy: int
) -> None:
    numel = sum(param.numel() for param in Tower(WIDTHS).parameters())
    for found in run_ranks(2, bytes_over_steps, way, strategy):
        held = 4 * numel // (2 if strategy else 1)
        assert [(first, second) for first, second, _ in found] == [(held, 0)] * 3
        assert len({views for *_, views in found}) == 1


def kept(keep: Callable[[torch.Tensor], torch.Tensor]) -> tuple[list[float], list[float], list[float], list[float]]:
    """A gradient that is kept over clearing and another backward, and the gradients of that; each twice."""
    model, optimizer = wrap()
    backward(model)
    param = max(model.parameters(), key=lambda each: each.to_local().numel())
    mine = keep(param.grad)
    before = _values(mine)
    optimizer.zero_grad()
    with torch.no_grad():
        for each in model.parameters():
            each.mul_(2.0)
    backward(model)
    renewed = _values(keep(param.grad))
    optimizer.zero_grad()
    backward(model)
    return before, _values(mine), renewed, _values(keep(param.grad))


def _values(tensor: torch.Tensor) -> list[float]:
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.detach().clone().flatten().tolist()


def whole(grad: torch.Tensor) -> torch.Tensor:
    return grad


def local(grad: torch.Tensor) -> torch.Tensor:
    assert isinstance(grad, DTensor)
    return grad.to_local()


def inner(grad: torch.Tensor) -> torch.Tensor:
    assert isinstance(grad, DTensor)
    return local_of(grad)


def part(grad: torch.Tensor) -> torch.Tensor:
    return local(grad)[:1]


def storage_of(grad: torch.Tensor) -> torch.Tensor:
    """A tensor of another kind over the same memory."""
    flat = local(grad).detach()
    return torch.empty(0).set_(flat.untyped_storage(), flat.storage_offset(), (flat.numel(),))


@pytest.mark.parametrize("keep", [whole, local, inner, part, storage_of])
def test_a_gradient_that_somebody_kept_stays_as_it_was(
    run_ranks: RunRanks, keep: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    for before, after, renewed, again in run_ranks(2, kept, keep):
        assert before == after
        assert any(before)
        assert renewed != before
        assert again == renewed


def kept_by_a_graph() -> tuple[list[float], list[float]]:
    """Weights' gradients of a product with a gradient that only the product's graph refers to."""
    model, optimizer = wrap()
    backward(model)
    param = max(model.parameters(), key=lambda each: each.to_local().numel())
    expected = _values(param.grad)
    factor = param.grad.detach().clone().requires_grad_()
    product = factor * param.grad
    optimizer.zero_grad()
    torch.autograd.backward(product, torch.ones_like(product))
    return expected, _values(factor.grad)


def test_a_gradient_that_a_graph_saved_stays_as_it_was(run_ranks: RunRanks) -> None:
    for expected, found in run_ranks(2, kept_by_a_graph):
        assert any(expected)
        assert found == expected


def gradients_kept_in_part() -> tuple[int, int, list[float], list[float]]:
    """Main gradients' bytes with one gradient left, and that one after clearing the others and a forward."""
    model, _ = wrap()
    backward(model)
    params = list(model.parameters())
    before = _values(params[0].grad)
    for param in params[1:]:
        param.grad = None
    with torch.no_grad():
        model(torch.ones(2, FEATURES))
    group, _ = engine_of(model).positions[id(params[0])]
    return gradient_bytes(model), group.gradients.main.num_bytes, before, _values(params[0].grad)


def test_a_group_keeps_its_memory_while_one_parameter_shows_a_gradient(run_ranks: RunRanks) -> None:
    for held, of_group, before, after in run_ranks(2, gradients_kept_in_part):
        assert held == of_group > 0
        assert before == after


def unsynced_then_cleared() -> tuple[int, int, list[list[float]], list[list[float]]]:
    """Bytes with sums that no parameter shows yet, and the gradients that they become, after a forward in between."""
    found, bytes_between = [], 0
    for looks in (True, False):
        model, _ = wrap()
        model.set_model_auto_sync(False)
        backward(model)
        if looks:
            with torch.no_grad():
                model(torch.ones(2, FEATURES))
            bytes_between = gradient_bytes(model)
        model.set_model_auto_sync(True)
        backward(model)
        found.append([_values(param.grad) for param in model.parameters()])
    return bytes_between, gradient_bytes(model), found[0], found[1]


def test_sums_that_are_not_shown_yet_are_not_given_back(run_ranks: RunRanks) -> None:
    for between, whole_bytes, with_forward, without in run_ranks(2, unsynced_then_cleared):
        assert between == whole_bytes > 0
        assert with_forward == without


def peaks() -> list[int]:
    """The most that is alive in each of eight steps, beyond what was there before it."""
    model, optimizer = wrap()
    found = []
    for _ in range(8):
        with LiveBytes(comes_and_goes(model)) as live:
            backward(model)
            optimizer.step()
            optimizer.zero_grad()
        found.append(live.peak_bytes)
    return found


def test_the_peak_is_the_same_from_the_third_step_on(run_ranks: RunRanks) -> None:
    for found in run_ranks(2, peaks):
        assert found[2:] == [found[2]] * 6
        assert found[2] > 0


# ---- the memory alone ----------------------------------------------------------------------------------------------


def make_memory() -> MainGradient:
    layout: Layout = plan_layout([(2, 3), (4,)], num_shards=1)
    return MainGradient(layout, Region(0, layout.numel), torch.float32, torch.device("cpu"))


def test_nothing_is_taken_before_the_first_use() -> None:
    memory = make_memory()
    assert memory.held_bytes == 0
    memory.release()
    memory.piece(0).fill_(1.0)
    assert memory.held_bytes == memory.num_bytes > 0


def test_released_memory_comes_back_in_one_storage_unless_somebody_holds_a_part() -> None:
    memory = make_memory()
    storage = memory.local.untyped_storage()._cdata
    memory.release()
    assert memory.local.untyped_storage()._cdata == storage
    mine = memory.piece(1)
    mine.fill_(3.0)
    memory.release()
    assert memory.held_bytes == 0
    memory.local.fill_(5.0)
    assert mine.tolist() == [3.0] * 4
