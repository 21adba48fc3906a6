"""On a device with streams every access is ordered, the values are the host's, and every wait is needed."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_fsdp import MixedPrecisionPolicy
from megatron_fsdp.checkpoint.background import StagingBuffers
from megatron_fsdp.checkpoint.checkpointer import Checkpointer
from megatron_fsdp.comm.collectives import CommStream
from megatron_fsdp.engine.executor import Executor
from megatron_fsdp.engine.gradients import GradientBuffers, GradientReducer, Stage
from megatron_fsdp.engine.memory import BlockPool
from megatron_fsdp.engine.observer import Observer
from megatron_fsdp.engine.unit import Unit
from megatron_fsdp.errors import CheckpointError
from tests.conftest import RunRanks
from tests.engine import test_parity_accumulation as accumulation
from tests.engine import test_parity_recovery as recovery
from tests.engine import test_parity_usage as usage
from tests.support.arrangements import FLAT, hybrid
from tests.support.case import (
    DdpSetting,
    LocalShard,
    Run,
    Scenario,
    Setting,
    clip_by_model,
    clip_by_torch,
    ddp,
    defer_two_of_three,
    three_steps,
    train_and_accumulate,
)
from tests.support.on_ranks import engine_of
from tests.support.ordered_streams import (
    Fault,
    OrderedStream,
    OrderedStreams,
    nothing,
    ordered_comm_streams,
    same_bits,
    without_order_between_streams,
    without_works,
)
from tests.support.zoo import (
    MODEL_CASES,
    Ordered,
    Penalised,
    Recomputed,
    Tower,
    tower_case,
    vector_case,
)

# ---- models ----------------------------------------------------------------------------------------------------------


class ShortTower(Tower):
    """Leaves out its last floor, so that nothing waits for the weights of that to be used."""

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.floors[0](self.first(x)))


# ---- scripts ---------------------------------------------------------------------------------------------------------


def four_backwards(run: Run) -> None:
    for step in range(2):
        for microbatch in range(4):
            run.loss(4 * step + microbatch).backward()
        run.step()


def replaced(run: Run) -> None:
    for step in range(2):
        for microbatch in range(2):
            run.loss(2 * step + microbatch).backward()
            for param in run.parameters().values():
                if param.grad is not None:
                    param.grad = param.grad * 0.5
        run.step()


def penalty(run: Run) -> Tensor:
    return 1e-3 * torch.stack([param.square().sum() for param in run.parameters().values()]).sum()


def penalised(run: Run) -> None:
    for step in range(2):
        for microbatch in range(2):
            (run.loss(2 * step + microbatch) + penalty(run)).backward()
        run.step()


def penalised_last(run: Run) -> None:
    """Autograd goes backwards, so this penalty's gradients come when all units are being reduced."""
    for step in range(2):
        for microbatch in range(2):
            first = penalty(run)
            (first + run.loss(2 * step + microbatch)).backward()
        run.step()


def changed_between_forwards(run: Run) -> None:
    """Without a backward, whose outer reductions queue behind the outer gathers."""
    with torch.no_grad():
        for index in range(2):
            for param in run.parameters().values():
                param.mul_(0.5)
            run.loss(index)
    run.train(2)


def observed(run: Run) -> None:
    """Collectives are asynchronous on the streams, so that an observer may have their handles."""
    assert run.sharded is not None
    engine_of(run.sharded).observers.add(Observer())
    train_and_accumulate(run)


def saved(in_background: bool, run: Run) -> None:
    """Saves between steps and between backwards, and goes back to them."""
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder)
    assert folder[0] is not None
    with Checkpointer(folder[0], in_background=in_background) as checkpoints:
        run.train(0)
        checkpoints.save(1, run.model, run.optimizer)
        run.loss(1).backward()
        checkpoints.save(2, run.model, run.optimizer)
        run.train(2)
        checkpoints.save(3, run.model, run.optimizer)
        for iteration in (2, 1, 3):
            checkpoints.load(run.model, run.optimizer, iteration=iteration)
            run.note_parameters()
            run.train(3)
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder[0])


BF16 = tower_case((8, 8), torch.bfloat16)
ODD, ORDERED, FRAGILE = MODEL_CASES["odd_shapes"], vector_case(Ordered), recovery.FAILING
SCRIPTS: Mapping[str, Scenario] = {
    "plain": Scenario(train_and_accumulate, BF16),
    "observed": Scenario(observed, BF16),
    "four backwards": Scenario(four_backwards, BF16),
    "gradients replaced": Scenario(replaced, BF16),
    "penalised": Scenario(penalised, BF16),
    "penalised last": Scenario(penalised_last, BF16),
    "penalised inside": Scenario(three_steps, vector_case(Penalised)),
    "deferred": Scenario(defer_two_of_three, MODEL_CASES["unused"]),
    "deferred on visible gradients": Scenario(accumulation.defer_on_top_of_visible_gradients, BF16),
    "deferred and cleared": Scenario(accumulation.clear_deferred_by_optimizer, ODD),
    "gradients scaled": Scenario(accumulation.scale_between_microbatches, BF16),
    "two optimizers": Scenario(accumulation.train_with_two_optimizers, ODD, accumulation.first_block),
    "deferred with two optimizers": Scenario(accumulation.defer_with_two_optimizers, ODD, accumulation.first_block),
    "clipped by the model": Scenario(clip_by_model, ODD),
    "clipped by torch": Scenario(clip_by_torch, ODD),
    "recomputed": Scenario(train_and_accumulate, vector_case(partial(Recomputed, "units", False))),
    "recomputed reentrantly": Scenario(train_and_accumulate, vector_case(partial(Recomputed, "pairs", True))),
    "backward twice": Scenario(usage.backward_twice, ORDERED),
    "two forwards": Scenario(usage.two_forwards_two_backwards_reversed, ORDERED),
    "another order": Scenario(usage.change_order, ORDERED),
    "evaluated": Scenario(recovery.evaluate_between_forward_and_backward, ORDERED),
    "inferred": Scenario(recovery.infer_first, ORDERED),
    "weights changed": Scenario(changed_between_forwards, BF16),
    "units left out": Scenario(changed_between_forwards, tower_case((8, 8), torch.bfloat16, ShortTower)),
    "units left out in float32": Scenario(changed_between_forwards, tower_case((8, 8), tower=ShortTower)),
    "weights loaded": Scenario(recovery.load_state_between_steps, ORDERED),
    "forward fails": Scenario(recovery.fail_in_forward_between_microbatches, FRAGILE),
    "microbatches fail": Scenario(recovery.fail_in_the_second_microbatch, FRAGILE),
    "saved": Scenario(partial(saved, False), ODD),
    "saved in the background": Scenario(partial(saved, True), ODD),
    "deferred backward fails": Scenario(recovery.fail_in_a_deferred_backward, FRAGILE),
}

# ---- settings --------------------------------------------------------------------------------------------------------


def sharded(
    strategy: int = 3,
    policy: MixedPrecisionPolicy | None = None,
    ranks: tuple[int, int] | None = None,
    outer: int = 0,
    **options: Any,
) -> Setting:
    """`ranks`: outer and inner ones, `outer`: their strategy."""
    policy = MixedPrecisionPolicy() if policy is None else policy
    arrangement = FLAT if ranks is None else hybrid(*ranks)
    return Setting(strategy, policy, False, False, True, outer, False, arrangement, tuple(options.items()))


WIDE_GRADS = MixedPrecisionPolicy(main_params_dtype=None, main_grads_dtype=torch.float32)
SHARDED_DDP: dict[str, Any] = {
    "use_distributed_optimizer": True,
    "overlap_grad_reduce": True,
    "overlap_param_gather": True,
}
SETTINGS: Mapping[str, tuple[int, Setting | DdpSetting]] = {
    "flat": (2, sharded()),
    "resized": (2, sharded(weight_allocator="resize")),
    "double buffer": (2, sharded(fsdp_double_buffer=True)),
    "far ahead": (2, sharded(max_gathered_units=4, forward_prefetch_units=2, backward_prefetch_units=3)),
    "wide gradients": (2, sharded(2, WIDE_GRADS)),
    "optim": (2, sharded(1)),
    "without overlap": (2, sharded(1, overlap_grad_reduce=False, overlap_param_gather=False)),
    "whole": (2, sharded(0)),
    "hybrid": (2, sharded(ranks=(2, 1))),
    "fully hybrid": (4, sharded(ranks=(2, 2), outer=1)),
    "fully hybrid, whole inside": (2, sharded(ranks=(2, 1), outer=1)),
    "fully hybrid without prefetch": (4, sharded(ranks=(2, 2), outer=1, forward_prefetch_units=0)),
    "ddp": (2, ddp(overlap_grad_reduce=True, bucket_size=40)),
    "ddp without overlap": (2, ddp(use_distributed_optimizer=True)),
    "ddp in turn": (2, ddp(**SHARDED_DDP, bucket_size=40)),
    "ddp together": (2, ddp(**SHARDED_DDP, align_param_gather=True, bucket_size=90)),
    "deterministic": (2, replace(sharded(0, deterministic="world"), per_token=True)),
}


def play(script: str, setting: str) -> list[Tensor | None]:
    """What a script noted, in order."""
    run = Run(SCRIPTS[script], SETTINGS[setting][1])
    SCRIPTS[script].script(run)
    recording = run.recording
    noted = [
        value.values if isinstance(value, LocalShard) else value
        for _, found in recording.notes
        for value in found.values()
    ]
    return [torch.tensor(recording.losses), *noted]


def script_on_streams(script: str, setting: str) -> tuple[list[str], bool]:
    """What no wait orders, and whether the values have the same bits as on the host."""
    on_host = play(script, setting)
    with ordered_comm_streams() as streams:
        same = same_bits(on_host, play(script, setting))
    assert streams.num_accesses > 100
    return list(streams.findings), same


SHORT = {
    ("penalised last", "hybrid"),
    ("recomputed reentrantly", "double buffer"),
    ("microbatches fail", "ddp in turn"),
    ("four backwards", "deterministic"),
}
EXTRA = SHORT | {
    ("observed", "flat"),
    ("two forwards", "flat"),
    ("microbatches fail", "optim"),
    ("saved", "wide gradients"),
    ("saved in the background", "far ahead"),
}
# Every script in a setting or two, every setting with a script or more: the whole product takes 16 minutes.
# A deterministic model refuses some of them, such as those that defer.
CASES = [
    (script, setting)
    for row, script in enumerate(SCRIPTS)
    for column, setting in enumerate(SETTINGS)
    if (script, setting) in EXTRA or ((row + column) % len(SETTINGS) == 0 and setting != "deterministic")
]


@pytest.mark.full(short=[f"{script}-{setting}" for script, setting in sorted(SHORT)])
@pytest.mark.parametrize(("script", "setting"), CASES)
def test_a_script_is_ordered_and_gives_the_bits_of_the_host(run_ranks: RunRanks, script: str, setting: str) -> None:
    assert run_ranks(SETTINGS[setting][0], script_on_streams, script, setting) == [([], True)] * SETTINGS[setting][0]


# ---- each wait is needed ---------------------------------------------------------------------------------------------


def streams_run_ahead_of_compute() -> AbstractContextManager[Any]:
    return patch.object(OrderedStream, "wait_stream", nothing)


def weights_are_waited_for_without_the_outer_gather() -> AbstractContextManager[Any]:
    wait = Unit.wait_for_unshard

    def wait_for_inner(self: Unit) -> None:
        self._outer_works.clear()
        wait(self)

    return patch.object(Unit, "wait_for_unshard", wait_for_inner)


def memory_of_a_reduction_is_let_go_of(name: str, kept: slice) -> AbstractContextManager[Any]:
    reduce = getattr(GradientReducer, name)

    def forgetful(self: Any, *given: Any) -> Stage:
        stage: Stage = reduce(self, *given)
        return stage._replace(memory=stage.memory[kept])

    return patch.object(GradientReducer, name, forgetful)


def shown_gradients_are_taken_back_by_the_stream() -> AbstractContextManager[Any]:
    take_back, reduce = GradientBuffers._take_back, GradientBuffers.reduce

    def reduce_late(
        self: GradientBuffers,
        stream: CommStream,
        bucket: Tensor,
        scratch: Tensor | None,
        params: Any,
        home_lane: CommStream,
    ) -> Any:
        def launch_late(launch: Callable[[bool], Any], async_op: bool) -> Any:
            take_back(self, params)
            return launch(async_op)

        class Late:
            def submit(self, launch: Any, finish: Any) -> Any:
                return stream.submit(lambda async_op: launch_late(launch, async_op), finish)

        with patch.object(GradientBuffers, "_take_back", nothing):
            return reduce(self, Late(), bucket, scratch, params, home_lane)

    return patch.object(GradientBuffers, "reduce", reduce_late)


FAULTS: Mapping[str, tuple[Fault, str, str]] = {
    "streams run ahead of compute": (streams_run_ahead_of_compute, "plain", "flat"),
    "streams run ahead of the back end": (
        partial(patch.object, OrderedStreams, "wait_for_collectives", nothing),
        "observed",
        "flat",
    ),
    "compute reads weights before they are gathered": (
        partial(without_works, Unit, "wait_for_unshard"),
        "plain",
        "flat",
    ),
    "gathers read weights before the outer gather": (without_order_between_streams, "plain", "fully hybrid"),
    "compute reads weights during the outer gather": (
        weights_are_waited_for_without_the_outer_gather,
        "plain",
        "fully hybrid, whole inside",
    ),
    "weights are installed during the outer gather": (
        partial(patch.object, Unit, "wait_for_outer", nothing),
        "units left out",
        "fully hybrid without prefetch",
    ),
    "weights are changed during the outer gather": (
        partial(patch.object, Executor, "wait_for_outer", nothing),
        "units left out in float32",
        "fully hybrid without prefetch",
    ),
    "buckets are filled while they are reduced": (partial(without_works, BlockPool, "borrow"), "two forwards", "flat"),
    "gradients are shown before they are reduced": (partial(without_works, Executor, "retire_all"), "plain", "flat"),
    "gradients are shown before the outer reduction": (
        partial(without_works, Executor, "_retire_outer"),
        "plain",
        "fully hybrid",
    ),
    "memory is taken back in spite of a reduction": (
        partial(without_works, Executor, "abandon"),
        "microbatches fail",
        "flat",
    ),
    "what the outer reduction sends is let go of": (
        partial(memory_of_a_reduction_is_let_go_of, "reduce_outer", slice(1, 2)),
        "plain",
        "fully hybrid",
    ),
    "what the outer reduction receives is let go of": (
        partial(memory_of_a_reduction_is_let_go_of, "reduce_outer", slice(1)),
        "plain",
        "fully hybrid",
    ),
    "rows of all ranks are let go of": (
        partial(memory_of_a_reduction_is_let_go_of, "reduce_inner", slice(0)),
        "four backwards",
        "deterministic",
    ),
    "shown gradients are taken back by the stream": (
        shown_gradients_are_taken_back_by_the_stream,
        "four backwards",
        "flat",
    ),
    "a copy is saved before it has arrived": (
        partial(patch.object, StagingBuffers, "wait_until_copied", nothing),
        "saved in the background",
        "flat",
    ),
}
"""What is left out or done too early, and a script and a setting that show it."""


def is_found(fault: str) -> bool:
    plant, script, setting = FAULTS[fault]
    on_host = play(script, setting)
    with plant(), ordered_comm_streams() as streams:
        try:
            return not same_bits(on_host, play(script, setting)) or bool(streams.findings)
        except CheckpointError:
            return True


@pytest.mark.unmerged
@pytest.mark.full(short=["streams run ahead of compute", "buckets are filled while they are reduced"])
@pytest.mark.parametrize("fault", FAULTS)
def test_each_wait_is_needed(run_ranks: RunRanks, fault: str) -> None:
    assert all(run_ranks(SETTINGS[FAULTS[fault][2]][0], is_found, fault))
