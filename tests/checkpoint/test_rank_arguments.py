"""Ranks that ask for different things are all told so, in the same words, and never wait for each other."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megatron_fsdp.checkpoint import Checkpointer, load_checkpoint, save_checkpoint
from megatron_fsdp.checkpoint.store import CheckpointStore
from megatron_fsdp.comm.agreement import by_value
from megatron_fsdp.errors import MegatronFSDPError
from tests.conftest import RunRanks


class Counter:
    """Something more to save."""

    def state_dict(self) -> dict[str, Any]:
        return {"count": 1}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


def build() -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model that is the same on every rank and has stepped once."""
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def nothing(folder: Path) -> None:
    """Writes nothing."""


def told(act: Callable[[], object]) -> str:
    try:
        act()
    except MegatronFSDPError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def ask(root: str) -> tuple[dict[str, str], bool, list[str]]:
    """What each call says whose arguments rank 1 gives differently; whether the model is as it was; what lies there."""
    model, optimizer = build()
    save_checkpoint(model, optimizer, root, iteration=1, extra={"counter": Counter()})
    one = f"{root}/iter_0000001"
    dist.barrier()
    with torch.no_grad():
        model.weight.fill_(7.0)
        optimizer.state[model.weight]["momentum_buffer"].fill_(7.0)
    odd, fresh = dist.get_rank() == 1, f"{root}-new"
    mine = optimizer if odd else None
    extra = {"counter": Counter()} if odd else None
    float_or_int: Any = 1.0 if odd else 1
    five_or_none: Any = 5 if odd else None

    with Checkpointer(root) as checkpoints:
        calls: dict[str, Callable[[], object]] = {
            "load verify": lambda: load_checkpoint(model, optimizer, root, strict=False, verify=odd),
            "load with_rng": lambda: load_checkpoint(model, optimizer, root, strict=False, with_rng=odd),
            "load strict": lambda: load_checkpoint(model, optimizer, root, strict=odd),
            "load optimizer": lambda: load_checkpoint(model, mine, root),
            "load extra": lambda: load_checkpoint(model, optimizer, root, extra=extra),
            "load iteration": lambda: load_checkpoint(model, optimizer, root, iteration=1 + odd),
            "load one": lambda: load_checkpoint(model, optimizer, one, iteration=1 if odd else None),
            "load no iteration": lambda: checkpoints.load(model, optimizer, iteration=-1 if odd else 1),
            "save iteration": lambda: save_checkpoint(model, None, fresh, iteration=float_or_int),
            "save other": lambda: save_checkpoint(model, None, fresh, iteration=1 + odd),
            "save overwrite": lambda: save_checkpoint(model, None, fresh, iteration=1, overwrite=odd),
            "save with_rng": lambda: save_checkpoint(model, None, fresh, iteration=1, with_rng=odd),
            "save optimizer": lambda: checkpoints.save(2, model, mine),
            "save extra": lambda: checkpoints.save(2, model, extra=extra),
            "save no extra": lambda: checkpoints.save(2, model, extra=five_or_none),
            "in background": lambda: Checkpointer(root, in_background=odd),
            "write iteration": lambda: CheckpointStore(fresh).write(float_or_int, nothing),
            "all wrong": lambda: checkpoints.load(model, optimizer, iteration=-1),
        }
        said = {name: told(call) for name, call in calls.items()}
        if not odd:
            Path(fresh).rmdir()  # which it can only if there is nothing in it
    untouched = bool((model.weight == 7.0).all() and (optimizer.state[model.weight]["momentum_buffer"] == 7.0).all())
    dist.barrier()
    return said, untouched, sorted(path.name for path in Path(root).iterdir())


DIFFERENT = {
    "load verify": "verify is False on rank 0, True on rank 1",
    "load with_rng": "with_rng is False on rank 0, True on rank 1",
    "load strict": "strict is False on rank 0, True on rank 1",
    "load optimizer": "optimizer is None on rank 0, given on rank 1",
    "load extra": "extra is empty on rank 0, 1 names on rank 1",
    "load iteration": "iteration is 1 on rank 0, 2 on rank 1",
    "load one": "iteration is None on rank 0, 1 on rank 1",
    "load no iteration": "iteration is 1 on rank 0, -1 on rank 1",
    "save iteration": "iteration is 1 on rank 0, 1.0 on rank 1",
    "write iteration": "iteration is 1 on rank 0, 1.0 on rank 1",
    "save other": "iteration is 1 on rank 0, 2 on rank 1",
    "save overwrite": "overwrite is False on rank 0, True on rank 1",
    "save with_rng": "with_rng is False on rank 0, True on rank 1",
    "save optimizer": "optimizer is None on rank 0, given on rank 1",
    "save extra": "extra is empty on rank 0, 1 names on rank 1",
    "in background": "in_background is False on rank 0, True on rank 1",
}


def test_ranks_that_ask_for_different_things_are_all_told_so(run_ranks: RunRanks, tmp_path: Path) -> None:
    first, second = run_ranks(2, ask, str(tmp_path / "run"))
    assert first == second
    said, is_untouched, left = first
    for name, difference in DIFFERENT.items():
        assert said[name] == (f"ConfigurationError: ranks differ: {difference}; give the same on every rank"), name
    assert "rank 1: TypeError" in said["save no extra"]
    assert said["all wrong"] == "ConfigurationError: iteration=-1: give a whole number from 0"
    assert is_untouched
    assert left == ["iter_0000001", "latest_checkpointed_iteration.txt"]


@pytest.mark.parametrize(
    ("values", "words"),
    [
        (["a"], "a on rank 0"),
        (["a", "b", "a"], "a on ranks 0, 2, b on rank 1"),
        (["a"] * 20, "a on ranks 0, 1, 2, 3, 4, 5, 6, 7, ..."),
        ([str(n) for n in range(9)], ", ".join(f"{n} on rank {n}" for n in range(8)) + ", ..."),
    ],
)
def test_values_are_told_once_with_their_ranks(values: list[str], words: str) -> None:
    assert by_value(enumerate(values)) == words


def test_a_closed_checkpointer_saves_nothing_in_the_background(tmp_path: Path) -> None:
    checkpoints = Checkpointer(tmp_path, in_background=True)
    checkpoints.close()
    assert "this Checkpointer is closed" in told(lambda: checkpoints.save(1, build()[0]))
    assert list(tmp_path.iterdir()) == []
