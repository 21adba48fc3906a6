"""Copies of offloaded state on a device with streams: random programs, ordered, with the resident run's bits."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from megatron_fsdp import MixedPrecisionPolicy
from megatron_fsdp.comm.collectives import ChainedWork, CommStream, CudaCommStream, Launch, Work
from megatron_fsdp.engine import gradients
from megatron_fsdp.engine.executor import Executor
from megatron_fsdp.engine.unit import Unit
from megatron_fsdp.optim import local_step
from tests.conftest import RunRanks
from tests.support.arrangements import FLAT, hybrid
from tests.support.case import adamw_above_noise as adamw
from tests.support.case import momentum, shard
from tests.support.ordered_streams import (
    Fault,
    OrderedStream,
    nothing,
    ordered_comm_streams,
    same_bits,
    without_order_between_streams,
    without_works,
)
from tests.support.zoo import TOWER_FEATURES, PlannedError, tower_case, tower_loss

pytestmark = pytest.mark.unmerged

# ---- random programs -------------------------------------------------------------------------------------------------

POLICIES = {
    "float32": MixedPrecisionPolicy(),
    "bfloat16": MixedPrecisionPolicy(torch.float32, torch.float32),
    "bfloat16, shared": MixedPrecisionPolicy(None, None),
    "fp8": MixedPrecisionPolicy(weight_format="fp8"),
}
SAMPLES = 32  # of a rank


class Program:
    """A small tower that is sharded as a seed says, and what is done with it, in the order that the seed says."""

    def __init__(self, seed: int, offloads: bool) -> None:
        """Shard it; without `offloads` all state is on the device."""
        draws = random.Random(seed)
        self.is_flat = draws.random() < 0.8
        strategy = draws.choice([0, 1, 2, 3, 3, 3]) if self.is_flat else 3
        policy = draws.choice(list(POLICIES)[: None if strategy == 3 else 3])
        where = offload_of(draws, strategy)
        options: dict[str, Any] = {**(FLAT if self.is_flat else hybrid(2, 1)).arguments()}
        if strategy == 3:
            options["weight_allocator"] = draws.choice(["slots", "resize"])
            options["backward_prefetch_units"] = draws.choice([0, 1, 2])
        optimizer = draws.choice([momentum, adamw])
        self.dtype = torch.float32 if policy == "float32" else torch.bfloat16
        self.model, self.optimizer = shard(
            tower_case((8, 8, 8), self.dtype),
            optimizer,
            zero_dp_strategy=strategy,
            mixed_precision_policy=POLICIES[policy],
            offload=where if offloads else None,
            **options,
        )
        self.actions = [draws.choice(ACTIONS) for _ in range(draws.randint(4, 9))] + [stepped]
        self.inputs = torch.Generator().manual_seed(seed + dist.get_rank())
        self.noted: list[Tensor | None] = []
        self.told = f"{strategy=} {policy=} {where=} {options} {[action.__name__ for action in self.actions]}"

    def loss(self) -> Tensor:
        """Run a forward; its loss is noted, and read at the end: until then the host waits for nothing."""
        x = torch.randn(SAMPLES, TOWER_FEATURES, generator=self.inputs).to(self.dtype)
        loss = tower_loss(self.model, x)
        self.noted.append(loss.detach().clone())
        return loss

    def play(self) -> list[Tensor | None]:
        """Run everything; return what was noted."""
        for action in self.actions:
            action(self)
        return self.noted


def offload_of(draws: random.Random, strategy: int) -> dict[str, Any]:
    """Draw kinds and fractions; at least one kind is offloaded."""
    half = 0.5
    where: dict[str, Any] = {}
    while not where:
        kind = draws.choice(["main_weights", "main_weights", "optimizer_state", "neither"])
        if kind != "neither":
            where[kind] = draws.choice([1.0, 1.0, half])
        if strategy == 3 and draws.random() < 0.6:
            where["compute_weights"] = draws.choice([1.0, 1.0, half])
    return where


def backward(program: Program) -> None:
    program.loss().backward()


def deferred(program: Program) -> None:
    with program.model.no_sync():
        program.loss().backward()
    program.loss().backward()


def two_forwards(program: Program) -> None:
    first, second = program.loss(), program.loss()
    second.backward()
    first.backward()


def left(program: Program) -> None:
    program.loss()


def evaluated(program: Program) -> None:
    with torch.no_grad():
        program.loss()


def fail(*_: object) -> None:
    raise PlannedError


def failed(program: Program) -> None:
    """The second of four backwards of units fails, when what the next one needs is on its way."""
    handle = program.model.module.floors[1].register_full_backward_hook(fail)
    loss = program.loss()
    with pytest.raises(PlannedError):
        loss.backward()
    handle.remove()
    program.model.reset()


def failed_forward(program: Program) -> None:
    handle = program.model.module.floors[1].up.register_forward_hook(fail)
    with pytest.raises(PlannedError):
        program.loss()
    handle.remove()
    program.model.reset()


def stepped(program: Program) -> None:
    program.loss().backward()
    program.optimizer.step()
    program.optimizer.zero_grad()


def clipped(program: Program) -> None:
    program.loss().backward()
    program.model.clip_grad_norm_(0.05)
    program.optimizer.step()
    program.optimizer.zero_grad()


def kept(program: Program) -> None:
    """Without clearing gradients."""
    program.loss().backward()
    program.optimizer.step()


def scaled(program: Program) -> None:
    program.model.scale_gradients(0.5)


def replaced(program: Program) -> None:
    for param in program.model.parameters():
        if param.grad is not None:
            param.grad = param.grad * 0.5


def changed(program: Program) -> None:
    with torch.no_grad():
        for param in program.model.parameters():
            param.mul_(0.5)


def looked(program: Program) -> None:
    """Also at the state of the optimizer, where it rests."""
    program.noted += program.model.full_gradients().values()
    program.noted += program.model.full_parameters().values()
    for state in program.optimizer.state.values():
        program.noted += [value.to_local().clone() for value in state.values() if isinstance(value, DTensor)]


def loaded(program: Program) -> None:
    program.optimizer.load_state_dict(program.optimizer.state_dict())


ACTIONS: tuple[Callable[[Program], None], ...] = (
    backward,
    deferred,
    two_forwards,
    left,
    evaluated,
    failed,
    failed_forward,
    stepped,
    stepped,
    clipped,
    kept,
    scaled,
    replaced,
    changed,
    looked,
    loaded,
)


def problems(seeds: range, plant: Fault = nullcontext) -> list[str]:
    """Return what is wrong with the programs of some seeds: what no wait orders, or other bits than the resident."""
    found = []
    for seed in seeds:
        resident = Program(seed, offloads=False).play()
        with ordered_comm_streams() as streams, plant():
            program = Program(seed, offloads=True)
            noted = program.play()
        if not same_bits(resident, noted):
            streams.findings["other bits"] = None
        found += [f"{seed}: {program.told}: {each}" for each in streams.findings]
    return found


@pytest.mark.full(short=["0"])
@pytest.mark.parametrize("first", range(0, 40, 5))
def test_random_programs_are_ordered_and_give_the_bits_of_the_resident_run(run_ranks: RunRanks, first: int) -> None:
    assert run_ranks(2, problems, range(first, first + 5)) == [[], []]


def buckets_are_lent_again_too_early() -> AbstractContextManager[Any]:
    return patch.object(ChainedWork, "wait", lambda relay: relay._first.wait())


def main_gradients_are_offloaded_before_they_are_reduced() -> AbstractContextManager[Any]:
    def unordered(stream: CommStream, launch: Launch, then: CommStream, finish: Callable[[], None]) -> Work:
        stream.submit(launch)
        return then.submit(lambda _async_op: finish())

    return patch.object(gradients, "ChainedWork", unordered)


def the_host_waits_for_one_direction(of: str) -> AbstractContextManager[Any]:
    settle = CudaCommStream.settle
    return patch.object(CudaCommStream, "settle", lambda stream: settle(stream) if stream._name == of else None)


FAULTS: Mapping[str, Fault] = {
    "streams run ahead of compute": partial(patch.object, OrderedStream, "wait_stream", nothing),
    "shards are gathered before they are fetched": without_order_between_streams,
    "compute reads weights before they are gathered": partial(without_works, Unit, "wait_for_unshard"),
    "main gradients are offloaded before they are reduced": main_gradients_are_offloaded_before_they_are_reduced,
    "buckets are lent again before the main gradient is on the host": buckets_are_lent_again_too_early,
    "the host does not wait for copies": partial(patch.object, Executor, "settle_offload", nothing),
    "the host does not wait for what goes": partial(the_host_waits_for_one_direction, "comes"),
    "the host does not wait for what comes": partial(the_host_waits_for_one_direction, "goes"),
    "a unit steps before its state has come": partial(without_works, local_step._StepChunk, "receive"),
    "memory of state is taken again before it has left": partial(without_works, local_step._StepChunks, "_let_go"),
    "the host does not wait for state": partial(patch.object, local_step, "finish_stream", nothing),
}
"""What is left out or done too early."""


def seed_that_finds(fault: str) -> int | None:
    """Return the first seed whose program shows a fault on some rank."""
    for seed in range(60):
        found = torch.tensor(len(problems(range(seed, seed + 1), FAULTS[fault])))
        dist.all_reduce(found)
        if found:
            return seed
    return None


@pytest.mark.full(short=["the host does not wait for copies"])
@pytest.mark.parametrize("fault", FAULTS)
def test_each_wait_is_needed(run_ranks: RunRanks, fault: str) -> None:
    assert None not in run_ranks(2, seed_that_finds, fault)
