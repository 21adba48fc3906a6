"""The tools on checkpoints that this library's training wrote, on one rank and on three."""

from pathlib import Path

import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save, torch_save_to_dcp

from megatron_fsdp.checkpoint import load_checkpoint, save_checkpoint
from megatron_fsdp.checkpoint.diff import diff
from megatron_fsdp.checkpoint.folder import CheckpointFolder
from megatron_fsdp.checkpoint.inspect import inspect_folder
from megatron_fsdp.checkpoint.store import locate
from tests.checkpoint.test_load import contents, step, wrap
from tests.conftest import RunRanks
from tests.support.on_ranks import assert_equal_tensors

MODEL, STRATEGY = "odd_shapes", 3


def save(root: str) -> None:
    model, optimizer = wrap(MODEL, STRATEGY, 0)
    step(MODEL, model, optimizer, 1)
    save_checkpoint(model, optimizer, root, iteration=5)


def resave(source: str, root: str) -> None:
    """What one checkpoint holds, saved by other ranks."""
    model, optimizer = wrap(MODEL, STRATEGY, 3)
    load_checkpoint(model, optimizer, source)
    save_checkpoint(model, optimizer, root, iteration=5)


def load(roots: list[str]) -> list[dict[str, torch.Tensor]]:
    model, optimizer = wrap(MODEL, STRATEGY, 3)
    found = []
    for root in roots:
        load_checkpoint(model, optimizer, root)
        found.append(contents(model, optimizer)[0])
    return found


def test_our_own_checkpoints(run_ranks: RunRanks, tmp_path: Path) -> None:
    run_ranks(3, save, str(tmp_path / "three"))
    run_ranks(1, resave, str(tmp_path / "three"), str(tmp_path / "one"))
    three, one = CheckpointFolder(locate(tmp_path / "three")), CheckpointFolder(locate(tmp_path / "one"))

    found = inspect_folder(three)
    assert (found["format"], found["optimizer"], found["has_manifest"]) == ("fsdp_dtensor", "per_parameter", True)
    assert found["common"]["iteration"] == 5
    assert found["problems"] == []
    assert any(entry["chunks"] > 1 for entry in found["entries"])
    compared = diff(three, one, pattern=r"^(model|optimizer\.state)\.")
    assert compared.is_same
    assert compared.compared == sum(
        entry["key"].startswith(("model.", "optimizer.state.")) for entry in found["entries"]
    )

    back = tmp_path / "back" / "iter_0000005"
    dcp_to_torch_save(three.path, tmp_path / "all.pt")  # torch's own converters read and write what we do
    torch_save_to_dcp(tmp_path / "all.pt", back)
    assert diff(three, CheckpointFolder(back), pattern=r"^(model|optimizer\.state)\.").is_same
    assert "optimizer.param_groups.0.lr" in CheckpointFolder(back).objects

    roots = [str(root) for root in (tmp_path / "three", back.parent)]
    for wanted, *others in run_ranks(2, load, roots):
        for loaded in others:
            assert_equal_tensors(loaded, wanted)
