"""What observers are told, against what is known of a step; and that a watched run computes the same."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from megatron_fsdp import fully_shard
from megatron_fsdp.comm.lanes import Moment
from megatron_fsdp.engine.observer import Observer, Phase
from tests.conftest import RunRanks
from tests.support.parity import fixed_seed
from tests.support.tower import FEATURES, FLOORS, Floor, Tower, tower_loss


class Notes(Observer):
    """Writes down everything, phases with their nesting."""

    def __init__(self) -> None:
        self.told: list[str] = []
        self.moments: dict[int, list[str]] = {}
        self._open: list[tuple[Phase, int]] = []

    def begins(self, phase: Phase, unit: int) -> None:
        self.told.append(f"{phase.value} {unit}")
        self._open.append((phase, unit))

    def ends(self, phase: Phase, unit: int) -> None:
        assert (phase, unit) in self._open, (phase, unit, self._open)
        self._open.remove((phase, unit))

    def communicates(self, number: int, moment: Moment, lane: str, work: dist.Work | None) -> None:
        assert work is None or moment is Moment.LAUNCHED
        self.moments.setdefault(number, [lane]).append(moment.value)

    @property
    def unfinished(self) -> list[tuple[Phase, int]]:
        return list(self._open)


def _train(watched: bool, strategy: int) -> dict[str, Any]:
    with fixed_seed(0):
        model = Tower()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
    sharded, optimizer = fully_shard(
        model,
        torch.optim.AdamW(model.parameters(), lr=1e-2),
        device_mesh=mesh,
        dp_shard_dim="dp",
        fsdp_unit_modules=[Floor],
        zero_dp_strategy=strategy,
    )
    notes = Notes()
    if watched:
        sharded.observe(notes)
    losses, second, x = [], 0, torch.linspace(-1, 1, 4 * FEATURES).view(4, FEATURES)
    for step in range(3):
        second = len(notes.told) if step == 1 else second
        optimizer.zero_grad()
        loss = tower_loss(sharded, x)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    end = len(notes.told)
    if watched:
        sharded.stop_observing(notes)
        tower_loss(sharded, x).backward()
        assert len(notes.told) == end
    return {
        "losses": losses,
        "told": notes.told[second : notes.told.index("install 0", second + 1) + 1] if watched else [],
        "moments": list(notes.moments.values()),
        "unfinished": notes.unfinished,
        "collectives": sharded.traffic().gathers + sharded.traffic().reductions,
    }


@pytest.mark.full(short=["1", "3"])
@pytest.mark.parametrize("strategy", [0, 1, 2, 3])
def test_watching_tells_every_phase_and_changes_nothing(run_ranks: RunRanks, strategy: int) -> None:
    plain = run_ranks(2, _train, False, strategy)
    watched = run_ranks(2, _train, True, strategy)
    for rank in range(2):
        assert watched[rank]["losses"] == plain[rank]["losses"]
        assert watched[rank]["unfinished"] == []
        told = watched[rank]["told"]
        assert [text for text in told if text.startswith("forward")] == [f"forward {u}" for u in range(FLOORS + 1)]
        backward = [text for text in told if text.startswith("backward")]
        assert backward == ["backward 0", *(f"backward {unit}" for unit in range(FLOORS, 0, -1))]
        assert told.count("finalise 0") == 1
        assert sum(text.startswith("reduce") for text in told) == FLOORS + 1
        gathers = [int(text.split()[1]) for text in told if text.startswith("gather ")]
        expected = {0: [], 1: [*range(FLOORS + 1)], 2: [*range(FLOORS + 1)]}
        if strategy in expected:
            assert gathers == expected[strategy]
        else:
            assert gathers == [*range(FLOORS + 1), *range(FLOORS - 2, 0, -1)]


def test_every_collective_is_told_from_launch_to_the_end_of_waiting(run_ranks: RunRanks) -> None:
    for found in run_ranks(2, _train, True, 3):
        lived = {tuple(moments) for moments in found["moments"]}
        life = ("launches", "launched", "waits", "arrived", "finished", "waited")
        assert lived == {("gather", *life), ("reduce", *life)}
        assert len(found["moments"]) < found["collectives"]  # the last backward was not watched
