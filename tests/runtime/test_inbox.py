"""Small gradients wait for each other and are copied together; nobody can tell from the numbers."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

from megatron_fsdp import fully_shard_model
from megatron_fsdp.unit.inbox import WAITING_BYTES, Inbox
from tests.conftest import RunRanks

NUM_SMALL = 5
LARGE = WAITING_BYTES // 4 // 8 + 1
"""Columns with which a float32 weight of 8 rows is above the limit."""


def parameter(value: float) -> nn.Parameter:
    """A parameter whose gradient has just come."""
    param = nn.Parameter(torch.zeros(2))
    param.grad = torch.full((2,), value)
    return param


def test_gradients_wait_until_they_are_copied_together() -> None:
    inbox, passed_on = Inbox(3), []
    hooks = [inbox.hook(index, passed_on.append) for index in range(3)]
    inbox.begin(is_open=True)
    params = [parameter(1.0), parameter(2.0)]
    hooks[2](params[0])
    hooks[0](params[1])
    assert [param.grad for param in params] == [None, None]
    assert (inbox.indices, inbox.filled, passed_on) == ([2, 0], [True, False, True], [])
    places = [torch.zeros(2, dtype=torch.float64) for _ in range(3)]
    arrived = [False] * 3
    inbox.empty_into(places, arrived)
    assert [place.tolist() for place in places] == [[2.0, 2.0], [0.0, 0.0], [1.0, 1.0]]
    assert arrived == [True, False, True]
    assert (inbox.indices, inbox.gradients) == ([], [])
    assert inbox.filled == [True, False, True]  # the bucket holds them now


@pytest.mark.parametrize("reason", ["closed", "filled", "none", "sparse", "graph"])
def test_what_cannot_wait_is_passed_on_untouched(reason: str) -> None:
    inbox, passed_on = Inbox(1), []
    inbox.begin(is_open=reason != "closed")
    param = parameter(1.0)
    if reason == "filled":
        inbox.filled[0] = True
    elif reason == "none":
        param.grad = None
    elif reason == "sparse":
        param.grad = torch.ones(2).to_sparse()
    elif reason == "graph":
        param.grad = torch.ones(2, requires_grad=True) * 2
    before = param.grad
    inbox.hook(0, passed_on.append)(param)
    assert passed_on == [param]
    assert param.grad is before
    assert inbox.indices == []


class Block(nn.Module):
    """Many small parameters and a large one; some are used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.small = nn.ParameterList([nn.Parameter(torch.randn(8)) for _ in range(NUM_SMALL)])
        self.large = nn.Parameter(torch.randn(8, LARGE) / LARGE)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, 8) to the same shape; the parts that are recomputed use the first parameter again."""
        for param in self.small:
            x = torch.tanh(x * param)
        for _ in range(2):
            x = checkpoint(self.part, x, use_reentrant=True)
        return x

    def part(self, x: Tensor) -> Tensor:
        """What is recomputed in the backward."""
        return torch.tanh((x * self.small[0]) @ self.large @ self.large.T)


def reference_gradients(ranks: int) -> dict[str, Tensor]:
    """The mean over the batches of all ranks, in one process."""
    model = make_model()
    for rank in range(ranks):
        (model(batch(rank)).square().sum() / ranks).backward()
    return {name: param.grad for name, param in model.named_parameters() if param.grad is not None}


def make_model() -> nn.Sequential:
    """The same on every rank."""
    torch.manual_seed(5)
    return nn.Sequential(Block(), Block())


def batch(rank: int) -> Tensor:
    """What one rank computes with; it takes a gradient, as recomputation asks."""
    return torch.randn(3, 8, generator=torch.Generator().manual_seed(rank)).requires_grad_()


def train(size: int, watched: bool, strategy: int) -> tuple[dict[str, Tensor], list[int]]:
    """Gradients of one backward, whole, and how many gradients were copied by each call."""
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("dp",))
    model = fully_shard_model(
        make_model(), device_mesh=mesh, dp_shard_dim="dp", fsdp_unit_modules=[Block], zero_dp_strategy=strategy
    )
    if watched:
        model.check_lifetimes()
    copied: list[int] = []
    original = Inbox.empty_into

    def counting(inbox: Inbox, views: list[Tensor], arrived: list[bool]) -> None:
        copied.append(len(inbox.indices))
        original(inbox, views, arrived)

    with patch.object(Inbox, "empty_into", counting):
        model(batch(dist.get_rank())).square().sum().backward()
    return {name: param.grad.full_tensor() for name, param in model.named_parameters()}, copied  # type: ignore[union-attr]


@pytest.mark.parametrize("strategy", [2, 3])
def test_gradients_are_those_of_one_process_waiting_or_not(run_ranks: RunRanks, strategy: int) -> None:
    expected = reference_gradients(2)
    waited = run_ranks(2, train, 2, False, strategy)
    watched = run_ranks(2, train, 2, True, strategy)
    for (found, copied), (others, none) in zip(waited, watched, strict=True):
        for name, wanted in expected.items():
            key = next(key for key in found if key.endswith(name))
            torch.testing.assert_close(found[key], wanted)
            assert torch.equal(found[key], others[key])
        assert max(copied) == NUM_SMALL - 1  # the parameter used in what is recomputed comes earlier, and again
        assert max(none) == 0
