"""What would be saved from one rank and lost from the others is refused; so is what would hide another checkpoint."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn

from megatron_fsdp import fully_shard
from megatron_fsdp.checkpoint import load_checkpoint, save_checkpoint
from megatron_fsdp.checkpoint.save import write_state
from megatron_fsdp.errors import CheckpointError
from tests.checkpoint.test_odd_states import Box
from tests.checkpoint.test_rank_arguments import build, told
from tests.conftest import RunRanks
from tests.support.on_ranks import on_ranks, same_on_ranks


def save_disagreeing(root: str) -> tuple[list[str], list[str]]:
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = nn.Linear(6, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sharded, optimizer = fully_shard(model, optimizer, fsdp_unit_modules=[nn.Linear], zero_dp_strategy=3)
    for param in sharded.parameters():
        optimizer.state[param]["kept"] = torch.zeros_like(param.to_local())  # a part of it, and nobody knows of which
    values: list[Any] = [torch.zeros(2 + rank), torch.zeros(2, dtype=(torch.float32, torch.float64)[rank])]
    values += [torch.zeros(2) if rank else 5]
    said = [told(lambda: save_checkpoint(sharded, optimizer, root, iteration=1))]
    said += [
        told(lambda held=held: save_checkpoint(sharded, None, root, iteration=1, extra={"held": Box({"value": held})}))
        for held in values
    ]
    plain, same = nn.Linear(2, 3 + rank), Box({"value": torch.ones(2)})
    said += [told(lambda: save_checkpoint(plain, None, root, iteration=1))]
    said += [told(lambda: save_checkpoint(sharded, None, root, iteration=1, extra={"held": same}))]
    dist.barrier()
    return said, sorted(path.name for path in Path(root).iterdir())


def test_ranks_that_hold_different_tensors_under_one_name_are_refused(run_ranks: RunRanks, tmp_path: Path) -> None:
    first, second = run_ranks(2, save_disagreeing, str(tmp_path))
    assert first == second
    (local, shape, dtype, kind, plain, same), left = first
    assert "kept" in local
    assert "torch.zeros_like(param)" in local
    assert "a plain tensor of this rank's part" in local
    assert (
        "held.value is not the same on all ranks: torch.float32 of shape (2,) on rank 0, torch.float32 of shape (3,) "
        "on rank 1; " in shape
    )
    assert "torch.float32 of shape (2,) on rank 0, torch.float64 of shape (2,) on rank 1" in dtype
    assert "held.value is not the same on all ranks: an object on rank 0, torch.float32 of shape (2,) on rank 1" in kind
    assert "model.module.weight (and 1 more) is not the same on all ranks: torch.float32 of shape (3, 2)" in plain
    assert same == "no error"
    assert left == ["iter_0000001", "latest_checkpointed_iteration.txt"]


# ---- random states --------------------------------------------------------------------------------------------------


GOOD = [{"torch_rng_state": torch.get_rng_state(), "random_rng_state": (3, (1,) * 624 + (624,), None)}]
DAMAGED: dict[str, tuple[dict[int, Any], str]] = {
    "missing": ({0: GOOD}, "logical rank (0, 0).1 are missing or damaged; load with with_rng=False"),
    "cut": ({0: GOOD, 1: [{**GOOD[0], "torch_rng_state": torch.zeros(3, dtype=torch.uint8)}]}, "cannot be set"),
    "other": ({0: GOOD, 1: [{**GOOD[0], "random_rng_state": 5}]}, "the saved random states cannot be set"),
}


def load_damaged(root: str) -> tuple[dict[str, str], bool]:
    """What loads of damaged random states say, and whether weights and streams are as they were."""
    model, _ = build()
    state: dict[str, Any] = {"model": {f"module.{key}": value for key, value in model.state_dict().items()}}
    rank, said = dist.get_rank(), {}
    for kind, (of_rank, _) in DAMAGED.items():
        state["rng_state"] = {"topology": [1, 2]}
        if rank in of_rank:
            state["rng_state"]["(0, 0)"] = {str(rank): {"states": of_rank[rank]}}
        Path(root, kind).mkdir(exist_ok=True)
        dist.barrier()
        write_state(state, Path(root, kind))
    with torch.no_grad():
        model.weight.fill_(7.0)
    stream = torch.get_rng_state()
    for kind in DAMAGED:
        said[kind] = told(lambda folder=f"{root}/{kind}": load_checkpoint(model, None, folder))
    said["loose"] = told(lambda: load_checkpoint(model, None, f"{root}/missing", strict=False))
    return said, bool((model.weight == 7.0).all()) and torch.equal(stream, torch.get_rng_state())


def test_damaged_random_states_change_nothing(run_ranks: RunRanks, tmp_path: Path) -> None:
    first, second = run_ranks(2, load_damaged, str(tmp_path))
    assert first == second
    said, is_untouched = first
    assert is_untouched
    for kind, (_, words) in {**DAMAGED, "loose": DAMAGED["missing"]}.items():
        assert "rank 1: " in said[kind]
        assert words in said[kind]
        assert "in memory now" not in said[kind]


# ---- a checkpoint that is also the folder of a run ------------------------------------------------------------------


@on_ranks(2)
def test_a_checkpoint_does_not_become_the_folder_of_a_run(tmp_path: Path) -> None:
    model, _ = build()
    dcp.save({"model": model.state_dict()}, checkpoint_id=tmp_path)
    dist.barrier()
    said = same_on_ranks(told(lambda: save_checkpoint(model, None, tmp_path, iteration=2)))
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
