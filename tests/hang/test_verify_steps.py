"""With `verify_ranks="step"`, ranks that gathered or reduced different units learn at the end of the backward."""

import gc
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megatron_fsdp import DistributedDataParallel, DistributedDataParallelConfig, MegatronFSDP, fully_shard_model
from megatron_fsdp.debug.verify_ranks import (
    DEFAULT_TIMEOUT_S,
    VARIABLE,
    compares_steps,
    resolve_verify_ranks,
)
from megatron_fsdp.errors import ConfigurationError, ScheduleError
from tests.conftest import RunRanks
from tests.support.hanging import misbehaving, step, until_said
from tests.support.settling import settled
from tests.support.usage_models import FEATURES, Layer, Ordered

_TIMEOUT_S = 60.0


def shard(verify: str = "step:20", strategy: int = 3) -> MegatronFSDP:
    torch.manual_seed(0)
    return fully_shard_model(Ordered(), fsdp_unit_modules=[Layer], zero_dp_strategy=strategy, verify_ranks=verify)


def _settled(model: nn.Module) -> None:
    """Past the first backward, whose agreement on used parameters would find a difference too."""
    for _ in range(2):
        step(model)


def swap_silently() -> tuple[str, bool]:
    """Only reductions travel, and sizes are the same, so nothing waits. Afterwards training goes on."""
    model = shard(strategy=0)
    _settled(model)
    model.module.order = (0, 1, 2, 3) if dist.get_rank() == 0 else (0, 2, 1, 3)
    with pytest.raises(ScheduleError) as raised:
        step(model)
    model.reset()
    model.zero_grad()
    model.module.order = (0, 1, 2, 3)
    again = step(model)
    return str(raised.value), bool(torch.isfinite(again))


@pytest.mark.parametrize("ranks", [2, 3])
def test_the_first_difference_is_named_on_every_rank(run_ranks: RunRanks, ranks: int) -> None:
    found = run_ranks(ranks, swap_silently, timeout_s=_TIMEOUT_S)
    (message,) = {text for text, _ in found}
    reduces = ["reduces layers.2 (", "reduces layers.1 ("]
    assert message.startswith("operation 2 since ranks last agreed differs: rank 0 " + reduces[0])
    assert f" bytes) in backward while rank {'1' if ranks == 2 else '1, 2'} {reduces[1]}" in message
    assert "; every rank has to call the same units in the same order, " in message
    assert all(finite for _, finite in found)


def swap_and_wait(model: MegatronFSDP, rank: int) -> None:
    if rank == 1:
        model.module.order = (0, 2, 1, 3)


def test_ranks_that_wait_for_one_another_stop_and_name_the_first_difference(tmp_path: Path) -> None:
    """Gathers and reductions meet each other, and both ranks would wait until the time limit of their group."""
    with misbehaving(swap_and_wait, tmp_path, verify="step:4"):
        said = [until_said(tmp_path / f"stderr-{rank}", "ScheduleError") for rank in range(2)]
    messages = {text.rpartition("megatron_fsdp.errors.ScheduleError: ")[2].splitlines()[0] for text in said}
    assert len(messages) == 1
    assert "rank 0 reduces layers.2 (640 bytes) in backward while rank 1 reduces layers.1 (640 bytes) in" in said[0]


def stay_away() -> str:
    model = shard("step:0.5")
    _settled(model)
    if dist.get_rank() == 1:
        model._engine.executor.verifier = None  # computes everything, and does not come to compare
        step(model)
        return ""
    with pytest.raises(ScheduleError) as raised:
        step(model)
    return str(raised.value)


def test_a_rank_that_does_not_come_is_named(run_ranks: RunRanks) -> None:
    told, nothing = run_ranks(2, stay_away, timeout_s=_TIMEOUT_S)
    assert nothing == ""
    assert told.startswith("rank 1 did not come to compare within 0.5 s of rank 0, which did ")
    assert "(the last: it reduces (root) (" in told


def train(verify: str | bool) -> list[float]:
    torch.manual_seed(0)
    model = fully_shard_model(Ordered(), fsdp_unit_modules=[Layer], verify_ranks=verify)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(3):
        with torch.no_grad():
            model(torch.ones(1, FEATURES))
        losses.append(step(model).item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def test_it_changes_no_value(run_ranks: RunRanks) -> None:
    assert run_ranks(2, train, "step") == run_ranks(2, train, False)


def buckets() -> list[float]:
    """Reductions go on overlapping with the backward."""
    torch.manual_seed(0)
    config = DistributedDataParallelConfig(overlap_grad_reduce=True, bucket_size=300)
    model = DistributedDataParallel(config, Ordered(), verify_ranks="step:20")
    return [step(model).item() for _ in range(2)]


def test_buckets_are_compared_too(run_ranks: RunRanks) -> None:
    first, second = run_ranks(2, buckets, timeout_s=_TIMEOUT_S)
    assert first == second


def open_descriptors(verify: str | bool) -> list[int]:
    """After each of six models that trained a step and were deleted."""
    counts: list[int] = []
    for number in range(6):
        model = fully_shard_model(Ordered(), fsdp_unit_modules=[Layer], verify_ranks=verify)
        step(model)
        del model
        gc.collect()
        dist.barrier()  # ends of connections that the other rank closes
        most = counts[1] if number > 1 else None
        counts.append(settled(open_files, lambda found, most=most: most is None or found <= most))
    return counts


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.mark.parametrize("verify", ["step:20", True])
def test_nothing_is_left_of_the_verifier_of_a_deleted_model(run_ranks: RunRanks, verify: str | bool) -> None:
    for counts in run_ranks(2, open_descriptors, verify, timeout_s=_TIMEOUT_S):
        assert max(counts[2:]) <= counts[1], counts


def test_the_switch_is_read_from_argument_and_environment() -> None:
    assert compares_steps("step")
    assert not compares_steps(True, {VARIABLE: "step"})
    assert compares_steps(None, {VARIABLE: "step:30"})
    assert not compares_steps(None, {})
    assert resolve_verify_ranks("step", {}) == DEFAULT_TIMEOUT_S
    assert resolve_verify_ranks(None, {VARIABLE: "step:30"}) == 30.0
    assert resolve_verify_ranks(False, {VARIABLE: "step"}) == 0.0


@pytest.mark.parametrize("value", ["step:", "step:0", "step:-1", "step:inf", "steps", "step:soon"])
def test_nonsense_is_refused(value: str) -> None:
    with pytest.raises(ConfigurationError, match="neither a switch nor a time"):
        resolve_verify_ranks(value, {})
