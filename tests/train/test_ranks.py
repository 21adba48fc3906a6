"""Work that the first rank of each machine does: all wait for it, and all hear of what went wrong."""

import os
import time

import pytest
import torch

from megatron_fsdp.errors import ConfigurationError
from megatron_fsdp.train import ranks
from megatron_fsdp.train.failures import OutOfMemoryError
from megatron_fsdp.train.ranks import Rank, is_first_here, restarts_so_far, work_on_machines
from tests.conftest import RunRanks
from tests.support.on_ranks import on_ranks
from tests.support.train_program import (
    this_rank,
)


def on_two_machines(local: str, seconds: float, failing: dict[int, str]) -> tuple[bool, str | None]:
    """Work as `local` says; returns whether this rank worked, and what was raised."""
    rank, done = this_rank(), []
    os.environ["LOCAL_RANK"] = local.split(",")[rank.index]

    def work() -> None:
        time.sleep(seconds)
        done.append(rank.index)
        if rank.index in failing:
            raise {"usage": ConfigurationError, "memory": OutOfMemoryError, "bug": KeyError}[failing[rank.index]](
                "no text"
            )

    beat, ranks._BEAT_S = ranks._BEAT_S, 0.05
    try:
        work_on_machines(rank, work)
    except (ConfigurationError, OutOfMemoryError, RuntimeError) as error:
        return bool(done), f"{type(error).__name__} {error}"
    finally:
        ranks._BEAT_S = beat
        del os.environ["LOCAL_RANK"]
    return bool(done), None


def test_the_first_rank_of_each_machine_works_and_all_wait_longer_than_a_beat(run_ranks: RunRanks) -> None:
    assert run_ranks(3, on_two_machines, "0,1,0", 0.0, {}) == [(True, None), (False, None), (True, None)]
    assert run_ranks(3, on_two_machines, "0,1,2", 0.4, {}) == [(True, None), (False, None), (False, None)]


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("usage", "ConfigurationError no text"),
        ("memory", "OutOfMemoryError no text"),
        ("bug", "RuntimeError rank 2: KeyError('no text')"),
    ],
)
def test_what_goes_wrong_on_one_machine_is_raised_on_all(run_ranks: RunRanks, kind: str, said: str) -> None:
    found = run_ranks(3, on_two_machines, "0,1,0", 0.0, {2: kind})
    assert found == [(True, said), (False, said), (True, said)]


@on_ranks(2)
def test_ranks_agree_on_restarts_where_an_agent_came_back_and_counts_anew() -> None:
    rank = this_rank()
    for counts, agreed in ((("1", "0"), 1), (("0", "0"), 0)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("TORCHELASTIC_RESTART_COUNT", counts[rank.index])
            assert restarts_so_far(rank) == agreed


# ---- two hosts on one machine: two loopback addresses ---------------------------------------------------------------


def test_without_torchrun_all_ranks_are_on_one_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    assert [is_first_here(Rank(index, 2, torch.device("cpu"), 1)) for index in (0, 1)] == [True, False]
    monkeypatch.setenv("LOCAL_RANK", "0")
    assert is_first_here(Rank(8, 16, torch.device("cpu"), 1))
