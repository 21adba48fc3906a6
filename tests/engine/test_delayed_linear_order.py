"""When delayed weight gradients are computed: after the input gradient, under recomputation and on several ranks."""

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, distribute_tensor
from torch.utils.checkpoint import checkpoint

from megatron_fsdp.engine.delayed_linear import WeightGradientQueue, delay_weight_gradients
from tests.conftest import RunRanks
from tests.engine.test_delayed_linear import assert_same_gradients
from tests.support.on_ranks import on_ranks


class Checkpointed(nn.Module):
    """Two blocks that are computed again in backward."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(5, 5), nn.GELU(), nn.Linear(5, 5)) for _ in range(2))
        self.reentrant = reentrant

    def forward(self, tensor: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            tensor = checkpoint(block, tensor, use_reentrant=self.reentrant)
        return tensor


@pytest.mark.parametrize("reentrant", [True, False])
def test_recomputed_blocks_delay_to_the_end_of_the_whole_backward(reentrant: bool) -> None:
    torch.manual_seed(0)
    plain, events = Checkpointed(reentrant), []
    delayed = copy.deepcopy(plain)
    queue = WeightGradientQueue(lambda event, _param: events.append(event))
    assert len(delay_weight_gradients(delayed, queue)) == 4
    inputs = torch.randn(4, 5)
    for model in (plain, delayed):
        leaf = inputs.clone().requires_grad_()
        leaf.register_hook(lambda _grad: events.append("input gradient"))
        model(leaf).pow(2).sum().backward()
    assert_same_gradients(plain, delayed)
    assert events == ["input gradient", *["deferred"] * 8, "input gradient", *["computed", "accumulated"] * 8]


def _stages(events: list[str] | None) -> tuple[nn.Sequential, nn.Sequential]:
    torch.manual_seed(3)
    stages = tuple(nn.Sequential(nn.Linear(5, 6), nn.GELU(), nn.Linear(6, 5)) for _ in range(2))
    if events is not None:
        for stage in stages:
            delay_weight_gradients(stage, WeightGradientQueue(lambda event, _param: events.append(event)))
    return stages


def _run_pipeline() -> tuple[list[str], list[torch.Tensor]]:
    """One step of a pipeline of two stages; returns the events of this rank and the gradients of its stage."""
    events: list[str] = []
    stage = _stages(events)[dist.get_rank()]
    if dist.get_rank() == 0:
        output = stage(torch.arange(20.0).view(4, 5) / 20)
        dist.send(output.detach(), 1)
        grad = torch.empty_like(output)
        dist.recv(grad, 1)
        output.backward(grad)
    else:
        received = torch.empty(4, 5)
        dist.recv(received, 0)
        received.requires_grad_()
        sent: list[Any] = []

        def send(grad: torch.Tensor) -> None:
            sent.append(dist.isend(grad, 0))
            events.append("sent")

        received.register_hook(send)
        stage(received).pow(2).sum().backward()
        sent[0].wait()
    return events, [param.grad for param in stage.parameters() if param.grad is not None]


def test_weight_gradients_are_computed_after_the_input_gradient_was_sent(run_ranks: RunRanks) -> None:
    (first_events, first_grads), (last_events, last_grads) = run_ranks(2, _run_pipeline)
    computed = ["computed", "accumulated"] * 4
    assert first_events == [*["deferred"] * 4, *computed]
    assert last_events == [*["deferred"] * 4, "sent", *computed]
    first, last = _stages(None)
    last(first(torch.arange(20.0).view(4, 5) / 20)).pow(2).sum().backward()
    expected = [param.grad for stage in (first, last) for param in stage.parameters()]
    assert len(expected) == len(first_grads + last_grads)
    for found, wanted in zip(first_grads + last_grads, expected, strict=True):
        assert torch.equal(found, wanted)  # type: ignore[arg-type]


@on_ranks(2)
def test_tensor_parallel_linears_are_left_alone() -> None:
    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 5, bias=False), nn.Linear(5, 5))
    model[0].weight = nn.Parameter(distribute_tensor(model[0].weight.detach(), mesh, [Replicate()]))
    names = delay_weight_gradients(model, WeightGradientQueue())
    # A weight that becomes a DTensor later computes its gradient at once.
    model[1].weight = nn.Parameter(distribute_tensor(model[1].weight.detach(), mesh, [Replicate()]))
    model[1].bias = None
    output = model(distribute_tensor(torch.ones(3, 5), mesh, [Replicate()]))
    output.sum().backward()
    assert (names, model[1].weight.grad is not None) == (["1"], True)
