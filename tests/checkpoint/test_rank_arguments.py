"""Ranks that ask for different things, or hold them, are all told so, in the same words, and never wait."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn

from megatron_fsdp.checkpoint import Checkpointer, load_checkpoint, save_checkpoint
from megatron_fsdp.checkpoint.save import write_state
from megatron_fsdp.checkpoint.store import CLAIM, CheckpointStore
from megatron_fsdp.comm.agreement import by_value
from megatron_fsdp.errors import CheckpointError, ConfigurationError
from tests.support.case import shard
from tests.support.dcp_contents import Stateful
from tests.support.on_ranks import on_ranks, once, refusal


def build() -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model that is the same on every rank and has stepped once."""
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


@on_ranks(2)
def test_ranks_that_ask_for_different_things_are_all_told_so(tmp_path: Path) -> None:
    """Calls whose arguments rank 1 gives differently, by what is said of them; nothing is loaded and nothing saved."""
    root, fresh = tmp_path / "run", tmp_path / "new"
    model, optimizer = build()
    save_checkpoint(model, optimizer, root, iteration=1, extra={"counter": Stateful({"count": 1})})
    with torch.no_grad():
        model.weight.fill_(7.0)
        optimizer.state[model.weight]["momentum_buffer"].fill_(7.0)
    odd = dist.get_rank() == 1
    mine, extra = (optimizer, {"counter": Stateful({"count": 1})}) if odd else (None, None)
    number: Any = 1.0 if odd else 1
    other = 1 + odd
    load, save = partial(load_checkpoint, model), partial(save_checkpoint, model, None, fresh)
    with Checkpointer(root) as checkpoints:
        calls: list[tuple[str, Callable[[], object]]] = [
            ("verify is False on rank 0, True on rank 1", lambda: load(optimizer, root, strict=False, verify=odd)),
            ("with_rng is False on rank 0, True on rank 1", lambda: load(optimizer, root, strict=False, with_rng=odd)),
            ("strict is False on rank 0, True on rank 1", lambda: load(optimizer, root, strict=odd)),
            ("optimizer is None on rank 0, given on rank 1", lambda: load(mine, root)),
            ("extra is empty on rank 0, 1 names on rank 1", lambda: load(optimizer, root, extra=extra)),
            ("iteration is 1 on rank 0, 2 on rank 1", lambda: load(optimizer, root, iteration=other)),
            (
                "iteration is None on rank 0, 1 on rank 1",
                lambda: load(optimizer, root / "iter_0000001", iteration=1 if odd else None),
            ),
            (
                "iteration is 1 on rank 0, -1 on rank 1",
                lambda: checkpoints.load(model, optimizer, iteration=-1 if odd else 1),
            ),
            ("iteration is 1 on rank 0, 1.0 on rank 1", lambda: save(iteration=number)),
            ("iteration is 1 on rank 0, 1.0 on rank 1", lambda: CheckpointStore(fresh).write(number, Path.exists)),
            ("iteration is 1 on rank 0, 2 on rank 1", lambda: save(iteration=other)),
            ("overwrite is False on rank 0, True on rank 1", lambda: save(iteration=1, overwrite=odd)),
            ("with_rng is False on rank 0, True on rank 1", lambda: save(iteration=1, with_rng=odd)),
            ("optimizer is None on rank 0, given on rank 1", lambda: checkpoints.save(2, model, mine)),
            ("extra is empty on rank 0, 1 names on rank 1", lambda: checkpoints.save(2, model, extra=extra)),
            ("in_background is False on rank 0, True on rank 1", lambda: Checkpointer(root, in_background=odd)),
        ]
        for difference, call in calls:
            told = refusal(call, error=ConfigurationError)
            assert told == f"ranks differ: {difference}; give the same on every rank"
        wrong: Any = 5 if odd else None
        assert "rank 1: TypeError" in refusal(checkpoints.save, 2, model, extra=wrong)
        assert refusal(checkpoints.load, model, optimizer, iteration=-1) == "iteration=-1: give a whole number from 0"
    assert {path.name for path in fresh.iterdir()} <= {CLAIM}
    assert (model.weight == 7.0).all()
    assert (optimizer.state[model.weight]["momentum_buffer"] == 7.0).all()
    assert sorted(path.name for path in root.iterdir()) == ["iter_0000001", "latest_checkpointed_iteration.txt"]


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
    with pytest.raises(ConfigurationError, match="this Checkpointer is closed"):
        checkpoints.save(1, build()[0])
    assert list(tmp_path.iterdir()) == []


# ---- state that ranks have differently -------------------------------------------------------------------------------


@on_ranks(2)
def test_ranks_that_hold_different_tensors_under_one_name_are_refused(tmp_path: Path) -> None:
    rank = dist.get_rank()
    torch.manual_seed(0)
    sharded, optimizer = shard(nn.Linear(6, 3), fsdp_unit_modules=[nn.Linear])
    for param in sharded.parameters():
        optimizer.state[param]["kept"] = torch.zeros_like(param.to_local())  # a part of it, and nobody knows of which
    told = refusal(save_checkpoint, sharded, optimizer, tmp_path, iteration=1)
    for words in ("kept", "torch.zeros_like(param)", "a plain tensor of this rank's part"):
        assert words in told
    of_two, name = "torch.float32 of shape (2,)", "held.value is not the same on all ranks: "
    for held, words in (
        (torch.zeros(2 + rank), f"{name}{of_two} on rank 0, torch.float32 of shape (3,) on rank 1; "),
        (torch.zeros(2, dtype=(torch.float32, torch.float64)[rank]), f"{of_two} on rank 0, torch.float64 of shape (2,"),
        (torch.zeros(2) if rank else 5, f"{name}an object on rank 0, {of_two} on rank 1"),
    ):
        extra = {"held": Stateful({"value": held})}
        assert words in refusal(save_checkpoint, sharded, None, tmp_path, iteration=1, extra=extra)
    words = "model.module.weight (and 1 more) is not the same on all ranks: torch.float32 of shape (3, 2)"
    assert words in refusal(save_checkpoint, nn.Linear(2, 3 + rank), None, tmp_path, iteration=1)
    save_checkpoint(sharded, None, tmp_path, iteration=1, extra={"held": Stateful({"value": torch.ones(2)})})
    dist.barrier()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["iter_0000001", "latest_checkpointed_iteration.txt"]


# ---- random states --------------------------------------------------------------------------------------------------


GOOD = [{"torch_rng_state": torch.get_rng_state(), "random_rng_state": (3, (1,) * 624 + (624,), None)}]
DAMAGED: dict[str, tuple[dict[int, Any], str]] = {
    "missing": ({0: GOOD}, "logical rank (0, 0).1 are missing or damaged; load with with_rng=False"),
    "cut": ({0: GOOD, 1: [{**GOOD[0], "torch_rng_state": torch.zeros(3, dtype=torch.uint8)}]}, "cannot be set"),
    "other": ({0: GOOD, 1: [{**GOOD[0], "random_rng_state": 5}]}, "the saved random states cannot be set"),
}


@on_ranks(2)
def test_damaged_random_states_change_nothing(tmp_path: Path) -> None:
    model, _ = build()
    state: dict[str, Any] = {"model": {f"module.{key}": value for key, value in model.state_dict().items()}}
    rank = dist.get_rank()
    for kind, (of_rank, _) in DAMAGED.items():
        state["rng_state"] = {"topology": [1, 2]}
        if rank in of_rank:
            state["rng_state"]["(0, 0)"] = {str(rank): {"states": of_rank[rank]}}
        once((tmp_path / kind).mkdir)
        write_state(state, tmp_path / kind)
    with torch.no_grad():
        model.weight.fill_(7.0)
    stream = torch.get_rng_state()
    for kind, (_, words) in DAMAGED.items():
        for strict in (True, False) if kind == "missing" else (True,):
            told = refusal(load_checkpoint, model, None, tmp_path / kind, strict=strict)
            assert "rank 1: " in told
            assert words in told
            assert "in memory now" not in told
    assert (model.weight == 7.0).all()
    assert torch.equal(stream, torch.get_rng_state())


# ---- a checkpoint that is also the folder of a run ------------------------------------------------------------------


@on_ranks(2)
def test_a_checkpoint_does_not_become_the_folder_of_a_run(tmp_path: Path) -> None:
    model, _ = build()
    dcp.save({"model": model.state_dict()}, checkpoint_id=tmp_path)
    dist.barrier()
    said = refusal(save_checkpoint, model, None, tmp_path, iteration=2)
    assert f"{tmp_path} is a checkpoint itself (it has a .metadata); save in another folder" in said
    assert not (tmp_path / "iter_0000002").exists()


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_what_is_both_is_refused_and_either_can_be_loaded(tmp_path: Path) -> None:
    model, _ = build()
    save_checkpoint(model, None, tmp_path, iteration=2, with_rng=False)
    old = nn.Linear(3, 2)
    dcp.save({"model": old.state_dict()}, checkpoint_id=tmp_path)  # torch's own does not ask
    target = nn.Linear(3, 2)
    with pytest.raises(CheckpointError, match=r"is a checkpoint itself .* as \S+iter_0000002, or move its latest_"):
        load_checkpoint(target, None, tmp_path)
    load_checkpoint(target, None, tmp_path / "iter_0000002")
    assert torch.equal(target.weight, model.weight)
    for path in [tmp_path / "latest_checkpointed_iteration.txt", tmp_path / "iter_0000002"]:
        path.rename(path.with_name(f"{path.name}.aside"))
    load_checkpoint(target, None, tmp_path)
    assert torch.equal(target.weight, old.weight)
