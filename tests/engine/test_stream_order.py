"""On a device with streams every access is ordered, every wait is needed, and values are those of the host."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from megatron_fsdp import MegatronFSDP, MixedPrecisionPolicy, fully_shard
from megatron_fsdp.comm.lanes import Lane, StreamLane
from megatron_fsdp.engine.executor import Executor
from megatron_fsdp.engine.gradients import GradientBuffers
from megatron_fsdp.engine.reducer import GradientReducer, Stage
from megatron_fsdp.engine.unit import Unit
from tests.conftest import RunRanks
from tests.fuzzing.case import draw_case
from tests.fuzzing.run import Ranks, play_sharded
from tests.support.arrangements import hybrid_arguments
from tests.support.streams import OrderedStream, ordered_lanes
from tests.support.tower import FEATURES, Floor, Tower, tower_loss

PRECISIONS = {
    "fp32": (torch.float32, MixedPrecisionPolicy()),
    "default policy": (torch.bfloat16, MixedPrecisionPolicy()),
    "main gradients alone in fp32": (
        torch.bfloat16,
        MixedPrecisionPolicy(main_params_dtype=None, main_grads_dtype=torch.float32),
    ),
}


def plain(model: MegatronFSDP, x: Tensor) -> None:
    tower_loss(model, x).backward()


def replaced(model: MegatronFSDP, x: Tensor) -> None:
    tower_loss(model, x).backward()
    for param in model.parameters():
        assert param.grad is not None
        param.grad = param.grad * 0.5


def penalty(model: MegatronFSDP) -> Tensor:
    return 1e-3 * torch.stack([param.square().sum() for param in model.parameters()]).sum()


def penalised(model: MegatronFSDP, x: Tensor) -> None:
    loss = tower_loss(model, x)
    (loss + penalty(model)).backward()


def penalised_last(model: MegatronFSDP, x: Tensor) -> None:
    """Autograd goes backwards, so this penalty's gradients come when all units are being reduced."""
    first = penalty(model)
    (first + tower_loss(model, x)).backward()


def changed_between_forwards(model: MegatronFSDP, x: Tensor) -> None:
    """Without a backward, whose outer reductions queue behind the outer gathers."""
    with torch.no_grad():
        for _ in range(2):
            for param in model.parameters():
                param.mul_(0.5)
            model(x)
    tower_loss(model, x).backward()


class ShortTower(Tower):
    """Leaves out its last floor, so that nothing waits for the weights of that to be used."""

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.floors[0](self.first(x)))


FLAT, HYBRID, FULLY_HYBRID, NOTHING_AHEAD = "flat", "hybrid", "fully hybrid", "fully hybrid without prefetch"
MESHES: dict[str, tuple[int, Callable[[], dict[str, Any]]]] = {
    FLAT: (2, dict),
    HYBRID: (2, lambda: hybrid_arguments(2, 1)),
    FULLY_HYBRID: (4, lambda: {**hybrid_arguments(2, 2), "outer_dp_sharding_strategy": 1}),
    NOTHING_AHEAD: (
        4,
        lambda: {**hybrid_arguments(2, 2), "outer_dp_sharding_strategy": 1, "forward_prefetch_units": 0},
    ),
}
"""Ranks, and arguments of `fully_shard`."""


def train(
    way: Callable[[MegatronFSDP, Tensor], None], precision: str, mesh: str, build: type[Tower] = Tower
) -> list[Tensor]:
    """This rank's gradients and weights after two steps of two backwards each."""
    dtype, policy = PRECISIONS[precision]
    torch.manual_seed(0)
    net = build((8, 8)).to(dtype)
    model, optimizer = fully_shard(
        net,
        torch.optim.SGD(net.parameters(), lr=0.1),
        fsdp_unit_modules=[Floor],
        mixed_precision_policy=policy,
        **MESHES[mesh][1](),
    )
    draws = torch.Generator().manual_seed(torch.distributed.get_rank())
    found = []
    for _ in range(2):
        for _ in range(2):
            way(model, torch.randn(4, FEATURES, generator=draws).to(dtype))
        found += [param.grad.to_local().clone() for param in model.parameters() if param.grad is not None]
        optimizer.step()
        optimizer.zero_grad()
    return found + [param.detach().to_local().clone() for param in model.parameters()]


def on_streams_and_on_the_host(way: Callable[[MegatronFSDP, Tensor], None], mesh: str) -> tuple[list[str], list[str]]:
    """What no wait orders, and the precisions in which streams give other bits than the host."""
    findings, wrong = [], []
    for precision in PRECISIONS:
        on_host = train(way, precision, mesh)
        with ordered_lanes() as streams:
            found = train(way, precision, mesh)
        findings += list(streams.findings)
        if len(found) != len(on_host) or not all(map(torch.equal, found, on_host)):
            wrong.append(precision)
    return findings, wrong


@pytest.mark.full(short=["replaced-flat", "penalised_last-hybrid", "plain-fully hybrid"])
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("way", [plain, replaced, penalised, penalised_last])
def test_every_access_is_ordered_and_gradients_are_those_of_the_host(
    run_ranks: RunRanks, way: Callable[[MegatronFSDP, Tensor], None], mesh: str
) -> None:
    ranks = MESHES[mesh][0]
    assert run_ranks(ranks, on_streams_and_on_the_host, way, mesh) == [([], [])] * ranks


# ---- random configurations -------------------------------------------------------------------------------------------


def on_streams(seed: int) -> tuple[list[str], list[str]]:
    """What no wait orders in a case of the fuzzer, and the entries that streams give other bits of than the host."""
    case = draw_case(seed)
    on_host = play_sharded(Ranks(case))
    with ordered_lanes() as streams:
        found = play_sharded(Ranks(case))
    assert streams.num_accesses > 1000
    wrong = [
        f"{label} {name}"
        for (label, values), (_, others) in zip(on_host.entries, found.entries, strict=True)
        for (name, one), other in zip(values.items(), others.values(), strict=True)
        if (one is None) != (other is None) or (one is not None and other is not None and not torch.equal(one, other))
    ]
    return list(streams.findings), wrong


@pytest.mark.full(short=["46"])
@pytest.mark.parametrize("seed", range(48))
def test_a_random_case_is_ordered_and_gives_the_bits_of_the_host(run_ranks: RunRanks, seed: int) -> None:
    assert run_ranks(draw_case(seed).mesh.num_ranks, on_streams, seed) == [([], [])] * draw_case(seed).mesh.num_ranks


# ---- each wait is needed ---------------------------------------------------------------------------------------------

Fault = Callable[[], AbstractContextManager[Any]]


def _nothing(*_: object, **__: object) -> None:
    """Stand in for a wait."""


def _without_tickets(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method whose waits for events order nothing."""

    def run(*args: Any) -> Any:
        with patch.object(OrderedStream, "wait_event", _nothing):
            return method(*args)

    return run


def lanes_run_ahead_of_compute() -> AbstractContextManager[Any]:
    return patch.object(OrderedStream, "wait_stream", _nothing)


def compute_reads_weights_before_they_are_gathered() -> AbstractContextManager[Any]:
    return patch.object(Unit, "wait_for_unshard", _without_tickets(Unit.wait_for_unshard))


def gathers_read_weights_before_the_outer_gather() -> AbstractContextManager[Any]:
    submit = StreamLane.submit
    return patch.object(StreamLane, "submit", lambda self, launch, finish=None, **_: submit(self, launch, finish))


def weights_are_installed_during_the_outer_gather() -> AbstractContextManager[Any]:
    return patch.object(Unit, "wait_for_outer", _nothing)


def buckets_are_filled_while_they_are_reduced() -> AbstractContextManager[Any]:
    return patch.object(Executor, "_retire_oldest", _without_tickets(Executor._retire_oldest))


def gradients_are_shown_before_the_outer_reduction() -> AbstractContextManager[Any]:
    return patch.object(Executor, "_finish_crossing", _without_tickets(Executor._finish_crossing))


def memory_of_the_outer_reduction_is_let_go_of() -> AbstractContextManager[Any]:
    across = GradientReducer.across

    def forgetful(self: GradientReducer, wire: Tensor) -> Stage:
        return across(self, wire)._replace(memory=())

    return patch.object(GradientReducer, "across", forgetful)


def shown_gradients_are_taken_back_by_the_lane() -> AbstractContextManager[Any]:
    take_back, reduce = GradientBuffers._take_back, GradientBuffers.reduce

    def reduce_late(self: GradientBuffers, lane: Lane, bucket: Tensor, scratch: Tensor | None, params: Any) -> Any:
        def launch_late(launch: Callable[[bool], Any], async_op: bool) -> Any:
            take_back(self, params)
            return launch(async_op)

        class Late:
            def submit(self, launch: Any, finish: Any) -> Any:
                return lane.submit(lambda async_op: launch_late(launch, async_op), finish)

        with patch.object(GradientBuffers, "_take_back", _nothing):
            return reduce(self, Late(), bucket, scratch, params)

    return patch.object(GradientBuffers, "reduce", reduce_late)


FAULTS: dict[Fault, str] = {
    lanes_run_ahead_of_compute: FLAT,
    compute_reads_weights_before_they_are_gathered: FLAT,
    gathers_read_weights_before_the_outer_gather: FULLY_HYBRID,
    weights_are_installed_during_the_outer_gather: NOTHING_AHEAD,
    buckets_are_filled_while_they_are_reduced: FLAT,
    gradients_are_shown_before_the_outer_reduction: FULLY_HYBRID,
    memory_of_the_outer_reduction_is_let_go_of: FULLY_HYBRID,
    shown_gradients_are_taken_back_by_the_lane: FLAT,
}


def findings_with(fault: Fault, mesh: str) -> list[str]:
    ahead = mesh != NOTHING_AHEAD
    way, build = (plain, Tower) if ahead else (changed_between_forwards, ShortTower)
    with ordered_lanes() as streams, fault():
        train(way, "default policy", mesh, build)
    return list(streams.findings)


@pytest.mark.full(short=["lanes_run_ahead_of_compute", "buckets_are_filled_while_they_are_reduced"])
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_each_wait_is_needed(run_ranks: RunRanks, fault: Fault) -> None:
    for findings in run_ranks(MESHES[FAULTS[fault]][0], findings_with, fault, FAULTS[fault]):
        assert findings
