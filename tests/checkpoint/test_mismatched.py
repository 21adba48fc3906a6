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

from megatron_fsdp.checkpoint import load_checkpoint, save_checkpoint
from megatron_fsdp.checkpoint.folder import CheckpointFolder
from megatron_fsdp.errors import MegatronFSDPError
from tests.checkpoint.test_load import contents, step, wrap
from tests.conftest import RunRanks
from tests.support import hostile
from tests.support.hostile import saved_bytes
from tests.support.zoo import ModelName

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
    "a missing file": "__1_0.distcp is missing",
    "a cut file": "__1_0.distcp is cut off",
    "no metadata": "there is no whole checkpoint",
    "a flipped bit": "is damaged",
    "a newer version": "of version 99",
}


Answers = dict[str, tuple[str, bool]]  # by kind what a refused load says, and whether it left everything alone


def save_once(root: str) -> None:
    model, optimizer = wrap("odd_shapes", 3, 0)
    step("odd_shapes", model, optimizer, 1)
    save_checkpoint(model, optimizer, root, iteration=1)


def refusals(name: ModelName, roots: dict[str, str]) -> Answers:
    model, optimizer = wrap(name, 3, 5)
    step(name, model, optimizer, 1)
    before = contents(model, optimizer)

    def is_unchanged() -> bool:
        after = contents(model, optimizer)
        same = all(torch.equal(value, after[part][key]) for part in (0, 1) for key, value in before[part].items())
        return same and before[2] == after[2]

    told = {}
    for kind, root in roots.items():
        try:
            load_checkpoint(model, optimizer, root)
        except MegatronFSDPError as error:
            told[kind] = str(error), is_unchanged()
    if "a flipped bit" in roots:
        load_checkpoint(model, optimizer, roots["a flipped bit"], verify=False)
        assert not is_unchanged()
    return told


@pytest.fixture(scope="module")
def saved(run_ranks: RunRanks, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("saved")
    run_ranks(3, save_once, str(root))  # ranks that load are two: how many have saved does not matter
    return root


@pytest.fixture(scope="module")
def answers(run_ranks: RunRanks, saved: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Answers]:
    """Of each rank, which load from all folders one after another."""
    folder = tmp_path_factory.mktemp("wrong")
    roots = {kind: folder / str(number) for number, kind in enumerate(REFUSALS)}
    for kind, root in roots.items():
        prepare(kind, saved, root)
    before = sorted(folder.rglob("*"))
    found = run_ranks(2, refusals, "odd_shapes", {kind: str(root) for kind, root in roots.items()})
    assert sorted(folder.rglob("*")) == before
    return found


def prepare(kind: str, saved: Path, root: Path) -> None:
    """Make a folder with something wrong with it."""
    if kind == "nothing there":
        return
    if kind == "an empty folder":
        root.mkdir()
        return
    if kind == "a file":
        root.write_text("x")
        return
    shutil.copytree(saved, root)
    folder = root / "iter_0000001"
    manifest, data = folder / "manifest.json", folder / "__1_0.distcp"
    first = next(key for key in json.loads(manifest.read_text())["tensors"] if key.startswith("model."))
    if kind == "a pointer to nothing":
        (root / "latest_checkpointed_iteration.txt").write_text("5")
    elif kind == "a pointer of nonsense":
        (root / "latest_checkpointed_iteration.txt").write_bytes(b"\xff\x1b[2J")
    elif kind == "other shapes":
        manifest.unlink()
        reshape(folder, first)
    elif kind == "other names":
        manifest.write_text(manifest.read_text().replace(first, "model.module.other"))
    elif kind == "a hostile object":
        raw, _ = hostile.payloads(root / "marker")["builtins.eval"]
        hostile.plant(folder, "iteration", hostile.archive_of(raw))
    elif kind == "hostile metadata":
        (folder / ".metadata").write_bytes(hostile.payloads(root / "marker")["builtins.eval"][0])
    elif kind == "a damaged manifest":
        manifest.write_bytes(manifest.read_bytes()[:-20])
    elif kind == "nonsense for paths":
        hostile.edit_metadata(folder, lambda found: found.planner_data.update(iteration=(), **{first: ("iteration",)}))
    elif kind == "a missing file":
        data.unlink()
    elif kind == "a cut file":
        data.write_bytes(data.read_bytes()[:-100])
    elif kind == "no metadata":
        (folder / ".metadata").unlink()
    elif kind == "a flipped bit":
        last = CheckpointFolder(folder).read_tensor(first).flatten()[-2:].numpy().tobytes()
        damaged = next(path for path in folder.glob("*.distcp") if last in path.read_bytes())
        damaged.write_bytes(damaged.read_bytes().replace(last, bytes([last[0] ^ 1]) + last[1:], 1))
    elif kind == "a newer version":
        manifest.write_text(manifest.read_text().replace('"version": 1', '"version": 99'))


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


@pytest.mark.parametrize("kind", REFUSALS)
def test_is_refused_on_all_ranks_alike(answers: list[Answers], kind: str) -> None:
    assert answers[0][kind] == answers[1][kind]
    told, unchanged = answers[0][kind]
    assert REFUSALS[kind] in told
    assert unchanged, told


def test_another_model_is_refused_with_what_is_missing_and_unexpected(run_ranks: RunRanks, saved: Path) -> None:
    first, second = run_ranks(2, refusals, "tied", {"other model": str(saved)})
    assert first == second
    told, unchanged = first["other model"]
    assert all(words in told for words in ("does not fit", "missing:", "unexpected:"))
    assert unchanged
