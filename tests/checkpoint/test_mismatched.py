"""What does not belong together is refused on all ranks with one message; weights and optimizer stay as they are."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from tests.checkpoint.test_checkpointer import save_once, weights_after
from tests.conftest import RunRanks
from tests.support import hostile
from tests.support.byte_damage import saved_bytes

REFUSALS = {
    "nothing there": "does not exist",
    "an empty folder": "there is no checkpoint in",
    "a file": "is a file; give the folder of a run",
    "a pointer to nothing": "says 5, but there is no whole checkpoint of that name",
    "a pointer of nonsense": "should say an iteration",
    "other shapes": "of another shape",
    "other names": "describe different checkpoints",
    "a hostile object": "asks to import builtins.eval",
    "hostile metadata": "asks to import builtins.eval",
    "a damaged manifest": "manifest.json cannot be read as JSON",
    "nonsense for paths": "that it nests in something that is no path",
}


@pytest.fixture(scope="module")
def saved(run_ranks: RunRanks, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("saved")
    run_ranks(3, save_once, str(root))  # ranks that load are two: how many have saved does not matter
    return root


def prepare(kind: str, saved: Path, root: Path) -> Path:
    """A folder with something wrong with it."""
    if kind == "nothing there":
        return root / "run"
    if kind == "an empty folder":
        (root / "run").mkdir()
        return root / "run"
    if kind == "a file":
        (root / "run").write_text("x")
        return root / "run"
    shutil.copytree(saved, root / "run")
    folder = root / "run" / "iter_0000001"
    manifest = folder / "manifest.json"
    first = next(key for key in json.loads(manifest.read_text())["tensors"] if key.startswith("model."))
    if kind == "a pointer to nothing":
        (root / "run" / "latest_checkpointed_iteration.txt").write_text("5")
    elif kind == "a pointer of nonsense":
        (root / "run" / "latest_checkpointed_iteration.txt").write_bytes(b"\xff\x1b[2J")
    elif kind == "other shapes":
        manifest.unlink()
        reshape(folder, first)
    elif kind == "other names":
        manifest.write_text(manifest.read_text().replace(first, "model.module.other"))
    elif kind == "a hostile object":
        raw, _ = hostile.payloads(root / "marker")["eval"]
        hostile.plant(folder, "iteration", hostile.archive_of(raw))
    elif kind == "hostile metadata":
        (folder / ".metadata").write_bytes(hostile.payloads(root / "marker")["eval"][0])
    elif kind == "a damaged manifest":
        manifest.write_bytes(manifest.read_bytes()[:-20])
    else:
        hostile.edit_metadata(folder, lambda found: found.planner_data.update(iteration=(), **{first: ("iteration",)}))
    return root / "run"


def reshape(folder: Path, key: str) -> None:
    """Let one tensor be another one, of another shape."""
    size = torch.Size([2, 3, 5])
    raw = saved_bytes(torch.zeros(size))
    (folder / "other.distcp").write_bytes(raw)

    def change(found: Metadata) -> None:
        chunk = ChunkStorageMetadata(torch.Size([0, 0, 0]), size)
        found.state_dict_metadata[key] = TensorStorageMetadata(TensorProperties(torch.float32), size, [chunk])
        found.storage_data[MetadataIndex(key, chunk.offsets)] = _StorageInfo("other.distcp", 0, len(raw))

    hostile.edit_metadata(folder, change)


@pytest.mark.parametrize("kind", sorted(REFUSALS))
def test_is_refused_on_all_ranks_alike(run_ranks: RunRanks, saved: Path, tmp_path: Path, kind: str) -> None:
    root = prepare(kind, saved, tmp_path)
    before = sorted(path.relative_to(tmp_path) for path in tmp_path.rglob("*"))
    answers = run_ranks(2, weights_after, str(root), kind)
    assert answers[0] == answers[1]
    told, unchanged = answers[0]
    assert REFUSALS[kind] in told
    assert unchanged, told
    assert sorted(path.relative_to(tmp_path) for path in tmp_path.rglob("*")) == before
