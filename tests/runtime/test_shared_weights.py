"""Weights of strategy 3 that are there once for all ranks of a machine: nobody changes them while another computes."""

import time

import pytest
import torch
import torch.distributed as dist
from megatron_fsdp.shm.futex import has_futex
from torch import nn

from megatron_fsdp import MegatronFSDP, fully_shard_model, fully_shard_optimizer
from megatron_fsdp.engine.memory import pack_bytes
from tests.conftest import RunRanks

pytestmark = pytest.mark.skipif(not has_futex(), reason="needs Linux on x86-64")
FEATURES, BLOCKS = 6, 3
LATE_S = 0.4


class Block(nn.Module):
    """A linear layer that a rank may be late in, in both directions."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(FEATURES, FEATURES)
        self.late_s = 0.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(self.late_s)
        y = torch.tanh(self.linear(x))
        if y.requires_grad and self.late_s:
            y.register_hook(self._sleep)
        return y

    def _sleep(self, _: torch.Tensor) -> None:
        time.sleep(self.late_s)


def build() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(*(Block() for _ in range(BLOCKS)))


def data(rank: int) -> torch.Tensor:
    return torch.randn(4, FEATURES, generator=torch.Generator().manual_seed(rank))


def wrap(late_rank: int) -> MegatronFSDP:
    """The model; `late_rank` computes with weights long after the others have."""
    module = build()
    for block in module:
        block.late_s = LATE_S if dist.get_rank() == late_rank else 0.0
    return fully_shard_model(module, fsdp_unit_modules=[Block])


def spoil(model: nn.Module) -> None:
    """Change this rank's weights, as an optimizer would."""
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(-3.0)


def alone(rank: int) -> list[torch.Tensor]:
    """Output, and gradients of the sum of squares, of one process."""
    model = build()
    out = model(data(rank))
    out.square().sum().backward()
    return [out.detach(), *(param.grad for param in model.parameters())]


def _forward_then_change(late_rank: int, has_graph: bool) -> float:
    model, rank = wrap(late_rank), dist.get_rank()
    with torch.set_grad_enabled(has_graph):
        out = model(data(rank))
    spoil(model)
    return (out.detach() - alone(rank)[0]).abs().max().item()


@pytest.mark.full(short=["0-True"])
@pytest.mark.parametrize("has_graph", [False, True])
@pytest.mark.parametrize("late_rank", [0, 1])
def test_weights_may_be_changed_after_a_forward(run_ranks: RunRanks, late_rank: int, has_graph: bool) -> None:
    assert max(run_ranks(2, _forward_then_change, late_rank, has_graph)) < 1e-6


def _deferred_then_change(late_rank: int) -> float:
    """No reduction holds ranks together in this backward; every rank's own sum must be of the old weights."""
    model, rank = wrap(late_rank), dist.get_rank()
    with model.no_sync():
        model(data(rank)).square().sum().backward()
    spoil(model)
    model.finish_grad_sync()
    expected = [sum(pair) / 2 for pair in zip(*(alone(each)[1:] for each in (0, 1)), strict=True)]
    found = [param.grad.full_tensor() for param in model.parameters()]
    return max((a - b).abs().max().item() for a, b in zip(found, expected, strict=True))


@pytest.mark.full(short=["1"])
@pytest.mark.parametrize("late_rank", [0, 1])
def test_weights_may_be_changed_after_a_backward(run_ranks: RunRanks, late_rank: int) -> None:
    assert max(run_ranks(2, _deferred_then_change, late_rank)) < 1e-6


def _by_hand(late_rank: int) -> float:
    """Weights gathered on request, used outside of any forward."""
    model, rank = wrap(late_rank), dist.get_rank()
    block = model.module[1]
    model.all_gather_and_wait_parameters_ready(list(block.parameters()))
    unit = model._engine.units[2]
    time.sleep(LATE_S if rank == late_rank else 0.0)
    found = [param.detach().clone() for group in unit.groups for param in group.full]
    model.finish_grad_sync()
    spoil(model)
    return max((a - b).abs().max().item() for a, b in zip(found, build()[1].parameters(), strict=True))


@pytest.mark.parametrize("late_rank", [0, 1])
def test_weights_gathered_by_hand_stay_until_the_next_sync(run_ranks: RunRanks, late_rank: int) -> None:
    assert max(run_ranks(2, _by_hand, late_rank)) == 0.0


def _memory() -> list[int]:
    """Bytes of a step: own shards and buckets, no gathered weights, no scratch, no copies."""
    model = wrap(-1)
    memory = model.memory()
    before = [memory.compute_weight_bytes, memory.gathered_bytes, memory.shared_bytes, memory.copied_bytes]
    for _ in range(2):
        model(data(dist.get_rank())).square().sum().backward()
    memory = model.memory()
    return [*before, memory.transient_peak_bytes, memory.gathered_bytes, memory.shared_bytes, memory.copied_bytes]


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_a_step_takes_shards_and_buckets_and_nothing_else(run_ranks: RunRanks, num_ranks: int) -> None:
    for found in run_ranks(num_ranks, _memory):
        weights, gathered, shared, copied, transient, *after = found
        assert (gathered, copied) == (0, 0)
        assert shared == weights  # nothing else lies there between steps
        _, aligned = pack_bytes([weights * num_ranks // BLOCKS])
        assert transient == 2 * aligned
        assert after == [0, weights + aligned, 0]  # the first bucket of each backward stays


def _one_memory() -> list[bool]:
    """All ranks see the same bytes, so a change by one of them is there for the others after a barrier."""
    model, rank = wrap(-1), dist.get_rank()
    whole = [group.weights.whole for unit in model._engine.units for group in unit.groups]
    first = whole[0]
    assert first is not None
    dist.barrier()
    if rank == 0:
        first[-1] = 77.0
    dist.barrier()
    return [each is not None for each in whole] + [first[-1].item() == 77.0]


def test_the_weights_of_all_ranks_are_one_memory(run_ranks: RunRanks) -> None:
    assert run_ranks(2, _one_memory) == [[True] * (BLOCKS + 1)] * 2


def _skip_a_step() -> str:
    """Rank 1 leaves the second step out; what the next forward says."""
    model = wrap(-1)
    optimizer = fully_shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    for skips in (False, dist.get_rank() == 1):
        model(data(dist.get_rank())).square().sum().backward()
        if not skips:
            optimizer.step()
        optimizer.zero_grad()
    with pytest.raises(dist.DistBackendError) as raised:
        model(data(dist.get_rank()))
    return str(raised.value)


def test_a_step_that_one_rank_skips_is_seen_in_the_next_forward(run_ranks: RunRanks) -> None:
    for message in run_ranks(2, _skip_a_step):
        assert "takes part with the beginning of a pass (optimizer steps so far: " in message
        assert message.count("optimizer steps so far: 1") == message.count("optimizer steps so far: 2") == 1
        assert "and to step its optimizer as often" in message
