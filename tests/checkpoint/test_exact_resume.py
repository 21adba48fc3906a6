"""Ten steps are five steps, a save, new processes, and five steps more: bit for bit."""

import itertools
import math
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from megatron_fsdp.checkpoint import load_checkpoint, save_checkpoint
from megatron_fsdp.checkpoint.rng import place_in
from megatron_fsdp.errors import CheckpointError
from tests.conftest import RunRanks
from tests.support.resume_job import (
    INFINITE_AT,
    Case,
    Counter,
    Outcome,
    Shuffle,
    load_elsewhere,
    resume,
    train_and_save,
    train_whole,
)
from tests.support.worker_pool import WorkerPool

HALF, WHOLE = 5, 10

CASES = {
    1: [Case(0), Case(3, in_background=True)],
    2: [Case(0, in_background=True), Case(3), Case(3, in_background=True)],
    4: [Case(2, "hybrid"), Case(3, "tensor", in_background=True)],
}
"""By number of ranks."""

ALL = [(ranks, index) for ranks, cases in CASES.items() for index in range(len(cases))]


def fresh(ranks: int, fn: Any, *args: Any) -> list[Any]:
    """Run a function in processes that have never run anything else."""
    pool = WorkerPool(ranks)
    try:
        return pool.run(fn, *args, timeout_s=300.0)
    finally:
        pool.stop()


class Runs:
    """Outcomes on one number of ranks, by rank and case, each made when it is first asked for."""

    def __init__(self, run_ranks: RunRanks, ranks: int, folder: str) -> None:
        self._run_ranks, self._ranks, self._folder = run_ranks, ranks, folder

    @cached_property
    def saved(self) -> list[list[Outcome]]:
        """When it was saved."""
        return self._run_ranks(self._ranks, train_and_save, CASES[self._ranks], HALF, self._folder, timeout_s=300.0)

    @cached_property
    def whole(self) -> list[list[Outcome]]:
        """Of whole runs."""
        return self._run_ranks(self._ranks, train_whole, CASES[self._ranks], WHOLE, timeout_s=300.0)

    @cached_property
    def resumed(self) -> list[list[Outcome]]:
        """Of halves that were resumed."""
        assert self.saved
        return fresh(self._ranks, resume, CASES[self._ranks], WHOLE, self._folder)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("resume")


@pytest.fixture(scope="module")
def runs(run_ranks: RunRanks, root: Path) -> dict[int, Runs]:
    """By number of ranks."""
    return {ranks: Runs(run_ranks, ranks, str(root / str(ranks))) for ranks in CASES}


def same(a: Any, b: Any) -> bool:
    """Whether two nestings are equal bit for bit; NaN equals NaN."""
    if isinstance(a, torch.Tensor):
        return (
            a.dtype == b.dtype
            and a.shape == b.shape
            and a.contiguous().numpy().tobytes() == b.contiguous().numpy().tobytes()
        )
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and np.array_equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(value, b[key]) for key, value in a.items())
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return type(a) is type(b) and bool(a == b or (a != a and b != b))


def differing(found: Outcome, wanted: Outcome) -> list[str]:
    """The parts of two outcomes that are not the same."""
    return [part for part in wanted if part in found and not same(found[part], wanted[part])]


@pytest.mark.full(short=["1-flat-0-False", "2-flat-3-True"])
@pytest.mark.parametrize(("ranks", "index"), ALL, ids=[f"{ranks}-{CASES[ranks][index].folder}" for ranks, index in ALL])
def test_a_resumed_run_equals_a_whole_one(runs: dict[int, Runs], ranks: int, index: int) -> None:
    for rank in range(ranks):
        whole, resumed = runs[ranks].whole[rank][index], runs[ranks].resumed[rank][index]
        assert same(resumed.pop("losses"), whole["losses"][HALF:])
        assert differing(resumed, whole) == []
        assert "random states: restored for every logical rank" in resumed["report"]
        assert " 0 missing, 0 unexpected, 0 of another shape" in resumed["report"]
        assert "verified: " in resumed["report"]


@pytest.mark.full(short=["2"])
@pytest.mark.parametrize("ranks", CASES)
def test_the_job_skips_steps_and_its_ranks_go_their_own_ways(runs: dict[int, Runs], ranks: int) -> None:
    for index, case in enumerate(CASES[ranks]):
        replicas = ranks // 2 if case.arrangement == "tensor" else ranks
        outcomes = [runs[ranks].whole[rank][index] for rank in range(ranks)]
        assert outcomes[0]["counter"]["skipped"] == len(INFINITE_AT)
        assert len({outcome["losses"][0] for outcome in outcomes}) == replicas
        assert len({outcome["streams"]["torch"].numpy().tobytes() for outcome in outcomes}) == ranks


@pytest.mark.parametrize(
    ("part", "spoilt"),
    [
        ("streams", "losses"),
        ("optimizer", "weights"),
        ("schedule", "weights"),
        ("scaler", "scaler"),  # a power of two: the weights do not feel it
        ("data", "losses"),
        ("average", "average"),
        ("counter", "counter"),
    ],
)
def test_what_is_not_loaded_is_missed(
    run_ranks: RunRanks, runs: dict[int, Runs], root: Path, part: str, spoilt: str
) -> None:
    assert runs[1].saved
    found = run_ranks(1, resume, CASES[1][:1], WHOLE, str(root / "1"), part)[0][0]
    whole = runs[1].whole[0][0]
    assert not same(found[spoilt], whole[spoilt][HALF:] if spoilt == "losses" else whole[spoilt])


MOVES = [
    (2, Case(3), 3, Case(2)),
    (4, Case(3, "tensor", in_background=True), 4, Case(3)),
    (4, Case(2, "hybrid"), 1, Case(0)),
]
"""(ranks and case that save, ranks and case that load)."""


@pytest.mark.full(short=["2-saved0-3-loaded0"])
@pytest.mark.parametrize(("before", "saved", "after", "loaded"), MOVES)
def test_other_ranks_get_the_same_state_and_streams_of_their_own(
    run_ranks: RunRanks, runs: dict[int, Runs], root: Path, before: int, saved: Case, after: int, loaded: Case
) -> None:
    was = runs[before].saved[0][CASES[before].index(saved)]
    outcomes = run_ranks(after, load_elsewhere, loaded, saved, str(root / str(before)))
    again = run_ranks(after, load_elsewhere, loaded, saved, str(root / str(before)))
    if saved.arrangement == "tensor":  # rank 0 held the columns of its tensor-parallel rank only
        was = {part: was[part] for part in ("options", "schedule", "scaler", "data", "counter", "buffers")}
    for outcome in outcomes:
        assert set(differing(outcome, was)) <= {"losses", "streams"}
        assert "so every rank was seeded anew from the saved states and its logical rank" in outcome["report"]
    assert same([outcome["draws"] for outcome in outcomes], [outcome["draws"] for outcome in again])
    used = {outcome["draws"] for outcome in outcomes}
    assert len(used) == after
    assert all(len({draws[kind] for draws in used}) == after for kind in range(3))


def keep_places(root: str, iteration: int) -> tuple[list[int], str]:
    """Save a place that is another one on every rank, under a name for each; load it into a fresh one."""
    rank = dist.get_rank()
    model = nn.Linear(3, 2)
    there, here = Shuffle(rank), Shuffle(50)
    for _ in range(3 + rank):
        there.take()
    save_checkpoint(model, None, root, iteration=iteration, extra={f"data{rank}": there})
    report = load_checkpoint(model, None, root, extra={f"data{rank}": here})
    wanted = [there.take() for _ in range(12)]
    return [here.take() - each for each in wanted] + [wanted[0]], str(report)


def test_a_place_of_each_rank_is_kept_under_a_name_for_each(run_ranks: RunRanks, tmp_path: Path) -> None:
    for rank, (differences, report) in enumerate(run_ranks(2, keep_places, str(tmp_path), 1)):
        assert differences[:-1] == [0] * 12
        assert f"in the checkpoint and not asked for: data{1 - rank}" in report


def lose_a_key(root: str) -> str:
    model, counter = nn.Linear(3, 2), Counter()
    counter.state = {"skipped": 3}
    save_checkpoint(model, None, root, iteration=1, extra={"counter": counter})
    with pytest.raises(CheckpointError) as caught:
        load_checkpoint(model, None, root, extra={"counter": Counter()})
    return str(caught.value)


def test_what_a_part_of_the_job_lacks_is_named(run_ranks: RunRanks, tmp_path: Path) -> None:
    told = run_ranks(2, lose_a_key, str(tmp_path))
    assert told[0] == told[1]
    assert "missing:\n  counter.seconds\n" in told[0]


@given(shape=st.lists(st.integers(1, 4), min_size=1, max_size=4), data=st.data())
def test_every_coordinate_of_a_mesh_is_a_logical_rank_of_its_own(shape: list[int], data: st.DataObject) -> None:
    names = [f"axis{dim}" for dim in range(len(shape))]
    tp_dim = data.draw(st.sampled_from(names))
    places = [place_in(names, shape, at, tp_dim) for at in itertools.product(*map(range, shape))]
    assert len({place.key for place in places}) == len(places) == math.prod(shape)
    tensor_size = shape[names.index(tp_dim)]
    for place in places:
        assert (place.tensor_size, place.data_size) == (tensor_size, math.prod(shape) // tensor_size)
        assert 0 <= place.tensor < place.tensor_size
        assert 0 <= place.data < place.data_size
    by_tensor = [place.data for place in places if place.tensor == 0]
    assert by_tensor == list(range(places[0].data_size))
