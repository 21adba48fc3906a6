"""Ten steps are five steps, a save, new processes, and five steps more: bit for bit.

In the job everything matters that a resume could forget: dropout, draws from Python, NumPy and torch in every step,
accumulation, a schedule, a gradient scaler that meets an infinity, a data position with a shuffle of its own, an
average, a buffer, a counter.
"""

import copy
import random
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from megatron_fsdp.checkpoint import Checkpointer, load_checkpoint, save_checkpoint
from tests.checkpoint.test_load import contents
from tests.checkpoint.test_reshard import by_kind
from tests.conftest import RunRanks
from tests.support.arrangements import FLAT, Arrangement, hybrid_arguments, place_tensors, tensor_arguments
from tests.support.case import shard
from tests.support.dcp_contents import Stateful, same
from tests.support.on_ranks import fixed_seed, on_ranks
from tests.support.worker_pool import WorkerPool

# ---- the job ---------------------------------------------------------------------------------------------------------

FEATURES, SAMPLES, MICROBATCHES = 7, 2, 2
INFINITE_AT = (2, 8)
"""Steps (from 0) whose loss is infinite on one rank: one before the save, one after."""

Outcome = dict[str, Any]


class NoisyBlock(nn.Module):
    """A residual layer with dropout, and a counter of its calls in a buffer."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(FEATURES, 12)
        self.back = nn.Linear(12, FEATURES)
        self.drop = nn.Dropout(0.3)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x + self.back(self.drop(torch.tanh(self.wide(x))))


def divide(model: nn.Module, mesh: Any) -> None:
    """Tensor parallelism inside the blocks: each rank drops its own columns."""
    for name, module in model.named_children():
        if isinstance(module, NoisyBlock):
            parallelize_module(model, mesh, {f"{name}.wide": ColwiseParallel(), f"{name}.back": RowwiseParallel()})


ARRANGEMENTS: dict[str, Arrangement] = {
    "flat": FLAT,
    "hybrid": Arrangement("hybrid", partial(hybrid_arguments, 2, 2)),
    "tensor": Arrangement("tensor", tensor_arguments, partial(place_tensors, divide)),
}


@dataclass(frozen=True)
class Case:
    """How a job is sharded, by the name of an arrangement, and saved."""

    strategy: int
    arrangement: str = "flat"
    in_background: bool = False

    @property
    def folder(self) -> str:
        return f"{self.arrangement}-{self.strategy}-{self.in_background}"


class Shuffle(Stateful):
    """A data position: an order drawn anew for each epoch, and a place in it; the same on every rank."""

    length = 10

    def __init__(self, seed: int) -> None:
        self.state = {"generator": torch.Generator().manual_seed(seed).get_state()}
        self.shuffle()

    def shuffle(self) -> None:
        generator = torch.Generator()
        generator.set_state(self.state["generator"])
        order = torch.randperm(self.length, generator=generator)
        self.state = {"order": order, "place": 0, "generator": generator.get_state()}

    def take(self) -> int:
        if self.state["place"] == self.length:
            self.shuffle()
        self.state["place"] += 1
        return int(self.state["order"][self.state["place"] - 1])


class Average:
    """The mean of the weights, by shards."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.shards = {name: param.detach().clone() for name, param in model.named_parameters()}

    def update(self) -> None:
        torch._foreach_lerp_(list(self.shards.values()), [param.detach() for param in self.model.parameters()], 0.2)

    def state_dict(self) -> dict[str, Tensor]:
        return self.shards

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        for name, value in state.items():
            self.shards[name].copy_(value)


@dataclass
class Job:
    """Model, optimizer and all the rest, on one rank."""

    case: Case
    seed: int
    losses: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        arrangement = ARRANGEMENTS[self.case.arrangement]
        with fixed_seed(self.seed):
            model = nn.Sequential(NoisyBlock(), NoisyBlock(), nn.Linear(FEATURES, 3))
            arrangement.place(model)
        options: dict[str, Any] = {"fsdp_unit_modules": [NoisyBlock], "zero_dp_strategy": self.case.strategy}
        self.model, self.optimizer = shard(model, by_kind, **options, **arrangement.arguments())
        self.schedule = torch.optim.lr_scheduler.OneCycleLR(self.optimizer, max_lr=[2e-2, 5e-3], total_steps=12)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3)
        self.data, self.counter = Shuffle(self.seed), Stateful({"skipped": 0, "seconds": 0.0})
        self.average = Average(self.model)
        # Ranks of one tensor-parallel group see the same samples; their dropout differs all the same.
        self.replica = dist.get_rank() // 2 if self.case.arrangement == "tensor" else dist.get_rank()
        random.seed(self.seed + 100 * self.replica)
        np.random.seed(self.seed + 200 * self.replica)
        torch.manual_seed(self.seed + 300 * dist.get_rank())

    @property
    def extra(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("schedule", "scaler", "data", "average", "counter")}

    def step(self, number: int) -> None:
        total = 0.0
        for microbatch in range(MICROBATCHES):
            last = microbatch == MICROBATCHES - 1
            with nullcontext() if last else self.model.no_sync():
                loss = self.loss(infinite=number in INFINITE_AT and last and self.replica == 0) / MICROBATCHES
                self.scaler.scale(loss).backward()
            total += loss.item()
        self.scaler.unscale_(self.optimizer)
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        self.schedule.step()
        self.average.update()
        self.counter.state["skipped"] += int(not torch.isfinite(norm).item())
        self.counter.state["seconds"] += 0.1
        self.losses.append(total)

    def loss(self, infinite: bool) -> Tensor:
        sample = self.data.take()
        values = np.random.default_rng((sample, self.replica)).normal(size=(SAMPLES, FEATURES))
        inputs = torch.from_numpy((values + np.random.normal() * random.random()).astype(np.float32))
        if self.case.arrangement != "tensor":
            inputs = inputs + 0.1 * torch.randn_like(inputs)
        outputs: Tensor = self.model(inputs)
        return outputs.square().mean() * (float("inf") if infinite else 1.0)

    def outcome(self) -> Outcome:
        """Everything there is, whole or of this rank."""
        weights, state, options = contents(self.model, self.optimizer)
        return {
            "losses": list(self.losses),
            "weights": {name: _whole(value) for name, value in weights.items()},
            "buffers": {name: value.clone() for name, value in self.model.named_buffers()},
            "optimizer": state,
            "options": options,
            **copy.deepcopy({name: each.state_dict() for name, each in self.extra.items() if name != "average"}),
            "average": {name: _whole(value) for name, value in self.average.state_dict().items()},
            "streams": {"python": random.getstate(), "numpy": np.random.get_state(), "torch": torch.get_rng_state()},
        }


def _whole(value: Any) -> Any:
    return value.full_tensor() if hasattr(value, "full_tensor") else value.clone()


def train_whole(cases: list[Case], steps: int) -> list[Outcome]:
    """Train without a checkpoint."""
    return [train(Job(case, 0), range(steps)) for case in cases]


def train(job: Job, steps: range) -> Outcome:
    for number in steps:
        job.step(number)
    return job.outcome()


def train_and_save(cases: list[Case], steps: int, root: str) -> list[Outcome]:
    """Train the first half, save, and train on, so that what is saved late would be wrong. Returns what was saved."""
    saved = []
    for case in cases:
        job = Job(case, 0)
        with Checkpointer(f"{root}/{case.folder}", in_background=case.in_background) as checkpoints:
            saved.append(train(job, range(steps)))
            checkpoints.save(steps, job.model, job.optimizer, extra=job.extra)
            job.step(steps)
    return saved


def resume(cases: list[Case], steps: int, root: str) -> list[Outcome]:
    """Load into jobs that were begun otherwise, and train to the end."""
    outcomes = []
    for case in cases:
        job = Job(case, 7)
        with Checkpointer(f"{root}/{case.folder}") as checkpoints:
            report = checkpoints.load(job.model, job.optimizer, extra=job.extra, verify=True)
        assert report.iteration is not None
        outcomes.append({**train(job, range(report.iteration, steps)), "report": str(report)})
    return outcomes


def load_elsewhere(case: Case, saved: Case, root: str) -> Outcome:
    """Load what other ranks or another strategy saved, and draw from every stream."""
    job = Job(case, 7)
    with Checkpointer(f"{root}/{saved.folder}") as checkpoints:
        report = checkpoints.load(job.model, job.optimizer, extra=job.extra)
    loaded = job.outcome()
    draws = (random.random(), float(np.random.random()), float(torch.rand((), dtype=torch.float64)))
    return {**loaded, "report": str(report), "draws": draws}


# ---- runs ------------------------------------------------------------------------------------------------------------

HALF, WHOLE = 3, 6

CASES = {
    1: [Case(0), Case(3, in_background=True)],
    2: [Case(0, in_background=True), Case(3), Case(3, in_background=True)],
    4: [Case(2, "hybrid"), Case(3, "tensor", in_background=True)],
}
"""By number of ranks."""

ALL = [(ranks, index) for ranks, cases in CASES.items() for index in range(len(cases))]


class Runs:
    """Outcomes on one number of ranks, by rank and case, each made when it is first asked for."""

    def __init__(self, run_ranks: RunRanks, ranks: int, folder: str) -> None:
        self._run = partial(run_ranks, ranks, timeout_s=300.0)
        self._ranks, self._cases, self._folder = ranks, CASES[ranks], folder

    @cached_property
    def saved(self) -> list[list[Outcome]]:
        """When it was saved."""
        return self._run(train_and_save, self._cases, HALF, self._folder)

    @cached_property
    def whole(self) -> list[list[Outcome]]:
        """Of whole runs."""
        return self._run(train_whole, self._cases, WHOLE)

    @cached_property
    def resumed(self) -> list[list[Outcome]]:
        """Of halves that were resumed, in processes that have never run anything else."""
        assert self.saved
        pool = WorkerPool(self._ranks)
        try:
            return pool.run(resume, self._cases, WHOLE, self._folder, timeout_s=300.0)
        finally:
            pool.stop()


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("resume")


@pytest.fixture(scope="module")
def runs(run_ranks: RunRanks, root: Path) -> dict[int, Runs]:
    """By number of ranks."""
    return {ranks: Runs(run_ranks, ranks, str(root / str(ranks))) for ranks in CASES}


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


@on_ranks(2)
def test_a_place_of_each_rank_is_kept_under_a_name_for_each(tmp_path: Path) -> None:
    """A place that is another one on every rank goes into a fresh one."""
    rank = dist.get_rank()
    model = nn.Linear(3, 2)
    there, here = Shuffle(rank), Shuffle(50)
    for _ in range(3 + rank):
        there.take()
    save_checkpoint(model, None, tmp_path, iteration=1, extra={f"data{rank}": there})
    report = load_checkpoint(model, None, tmp_path, extra={f"data{rank}": here})
    assert [here.take() for _ in range(12)] == [there.take() for _ in range(12)]
    assert f"in the checkpoint and not asked for: data{1 - rank}" in str(report)
