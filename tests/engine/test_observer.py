"""What observers are told, against what is known of a step; and that a watched run computes the same."""

import pytest
import torch
import torch.distributed as dist

from megatron_fsdp import MegatronFSDP, fully_shard
from megatron_fsdp.comm.streams import Moment
from megatron_fsdp.engine.observer import Observer, Phase
from tests.support.on_ranks import fixed_seed, on_ranks
from tests.support.zoo import FLOORS, TOWER_FEATURES, Floor, Tower, tower_loss

pytestmark = pytest.mark.unmerged


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

    def communicates(self, number: int, moment: Moment, stream: str, work: dist.Work | None) -> None:
        assert work is None or moment is Moment.LAUNCHED
        self.moments.setdefault(number, [stream]).append(moment.value)

    @property
    def unfinished(self) -> list[tuple[Phase, int]]:
        return list(self._open)


def train(model: MegatronFSDP, optimizer: torch.optim.Optimizer) -> float:
    optimizer.zero_grad()
    loss = tower_loss(model, torch.linspace(-1, 1, 4 * TOWER_FEATURES).view(4, TOWER_FEATURES))
    loss.backward()
    optimizer.step()
    return loss.item()


@pytest.mark.parametrize("strategy", [0, 3])
@on_ranks(2)
def test_watching_tells_every_phase_and_collective_and_changes_nothing(strategy: int) -> None:
    losses, notes = [], Notes()
    for watched in (False, True):
        with fixed_seed(0):
            model = Tower()
        sharded, optimizer = fully_shard(
            model,
            torch.optim.AdamW(model.parameters(), lr=1e-2),
            fsdp_unit_modules=[Floor],
            zero_dp_strategy=strategy,
        )
        if watched:
            sharded.observe(notes)
        ends = []
        for _ in range(3):
            losses.append(train(sharded, optimizer))
            ends.append(len(notes.told))
    assert losses[:3] == losses[3:]
    assert notes.unfinished == []
    told = notes.told[ends[0] : notes.told.index("install 0", ends[0] + 1) + 1]
    assert [text for text in told if text.startswith("forward")] == [f"forward {u}" for u in range(FLOORS + 1)]
    backward = [text for text in told if text.startswith("backward")]
    assert backward == ["backward 0", *(f"backward {unit}" for unit in range(FLOORS, 0, -1))]
    assert told.count("finalise 0") == 1
    assert sum(text.startswith("reduce") for text in told) == FLOORS + 1
    gathers = [int(text.split()[1]) for text in told if text.startswith("gather ")]
    again = [*range(FLOORS - 2, 0, -1)] if strategy == 3 else []
    assert gathers == ([*range(FLOORS + 1), *again] if strategy else [])
    life = ("launches", "launched", "waits", "arrived", "finished", "waited")
    kinds = {tuple(moments) for moments in notes.moments.values()}
    assert kinds == {("reduce", *life), *([("gather", *life)] if strategy else [])}
    sharded.stop_observing(notes)
    train(sharded, optimizer)
    assert len(notes.told) == ends[-1]
    assert len(notes.moments) < sharded.traffic().gathers + sharded.traffic().reductions
