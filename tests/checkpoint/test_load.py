"""Saving and loading a whole job: bit-equal on any ranks, refused in words where it does not fit."""

import os
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from megatron_fsdp import MegatronFSDP
from megatron_fsdp.checkpoint import load_checkpoint, save_checkpoint
from megatron_fsdp.checkpoint.checkpointer import collect
from megatron_fsdp.checkpoint.folder import CheckpointFolder
from megatron_fsdp.checkpoint.save import write_state
from megatron_fsdp.errors import CheckpointError
from tests.checkpoint.test_reshard import by_kind
from tests.conftest import RunRanks
from tests.support import hostile
from tests.support.case import shard
from tests.support.dcp_contents import same, whole_state
from tests.support.doors import step
from tests.support.hostile import saved_bytes
from tests.support.on_ranks import on_ranks, once, refusal
from tests.support.zoo import MODEL_CASES, ModelName

Whole = dict[str, Tensor]


def wrap(name: ModelName, strategy: int, seed: int) -> tuple[MegatronFSDP, torch.optim.Optimizer]:
    return shard(MODEL_CASES[name], by_kind, seed, zero_dp_strategy=strategy)


def contents(model: MegatronFSDP, optimizer: torch.optim.Optimizer) -> tuple[Whole, Whole, list[dict[str, Any]]]:
    """Whole weights, whole optimizer state by name and slot, options of the groups."""
    options = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    return model.full_parameters(), whole_state(model, optimizer), options


@pytest.mark.parametrize("slot", ["step", "exp_avg_sq", "max_exp_avg_sq"])
def test_state_without_what_a_step_needs_is_refused_before_anything_changes(tmp_path: Path, slot: str) -> None:
    """As in a checkpoint that was converted from one without step counts."""
    models = [nn.Linear(3, 2), nn.Linear(3, 2)]
    first, second = (torch.optim.AdamW(model.parameters(), amsgrad=True) for model in models)
    models[0](torch.ones(1, 3)).sum().backward()
    first.step()
    state = collect(models[0], first, 2)
    for slots in state["optimizer"]["state"].values():
        del slots[slot]
    (tmp_path / "lacking").mkdir()
    write_state(state, tmp_path / "lacking")
    before = [param.clone() for param in models[1].parameters()]
    with pytest.raises(CheckpointError, match=rf"optimizer\.state\.module\.weight\.{slot}"):
        load_checkpoint(models[1], second, tmp_path / "lacking")
    assert all(map(torch.equal, before, models[1].parameters()))
    assert not second.state
    report = load_checkpoint(models[1], second, tmp_path / "lacking", strict=False)
    assert sorted(report.missing) == [f"optimizer.state.module.{name}.{slot}" for name in ("bias", "weight")]
    models[1](torch.ones(1, 3)).sum().backward()
    second.step()


def test_complex_weights_do_not_become_real_ones(tmp_path: Path) -> None:
    source, target = nn.Linear(3, 2), nn.Linear(3, 2)
    state = collect(source, None, 2)
    state["model"]["module.weight"] = source.weight.detach().to(torch.complex64)
    (tmp_path / "odd").mkdir()
    write_state(state, tmp_path / "odd")
    before = [param.clone() for param in target.parameters()]
    with pytest.raises(CheckpointError, match=r"module\.weight"):
        load_checkpoint(target, None, tmp_path / "odd")
    assert all(map(torch.equal, before, target.parameters()))


# ---- what does not belong together -----------------------------------------------------------------------------------


def put_pointer(root: Path, content: bytes) -> None:
    (root / "latest_checkpointed_iteration.txt").write_bytes(content)


def plant_hostile(root: Path) -> None:
    raw, _ = hostile.payloads(root / "marker")["builtins.eval"]
    hostile.plant(root / ONE, "iteration", hostile.archive_of(raw))


def edit_manifest(old: str, new: str) -> Callable[[Path], object]:
    def edit(root: Path) -> None:
        manifest = root / ONE / "manifest.json"
        manifest.write_text(manifest.read_text().replace(old, new))

    return edit


def nonsense_for_paths(root: Path) -> None:
    change = {"iteration": (), WEIGHT: ("iteration",)}
    hostile.edit_metadata(root / ONE, lambda found: found.planner_data.update(change))


def flip(root: Path) -> None:
    last = CheckpointFolder(root / ONE).read_tensor(WEIGHT).flatten()[-2:].numpy().tobytes()
    damaged = next(path for path in (root / ONE).glob("*.distcp") if last in path.read_bytes())
    damaged.write_bytes(damaged.read_bytes().replace(last, bytes([last[0] ^ 1]) + last[1:], 1))


ONE, DATA, WEIGHT = "iter_0000001", "__1_0.distcp", "model.module.0.wide.weight"
SPOILED: dict[str, tuple[Callable[[Path], object], str]] = {
    "a pointer to nothing": (partial(put_pointer, content=b"5"), "says 5, but there is no whole checkpoint of that"),
    "a pointer of nonsense": (partial(put_pointer, content=b"\xff\x1b[2J"), "should say an iteration"),
    "other shapes": (lambda root: reshape(root / ONE, WEIGHT), "of another shape"),
    "other names": (edit_manifest(WEIGHT, "model.module.other"), "describe different checkpoints"),
    "a hostile object": (plant_hostile, "asks to import builtins.eval"),
    "nonsense for paths": (nonsense_for_paths, "that it nests in something that is no path"),
    "a missing file": (lambda root: (root / ONE / DATA).unlink(), f"{DATA} is missing"),
    "a cut file": (lambda root: os.truncate(root / ONE / DATA, 100), f"{DATA} is cut off"),
    "no metadata": (lambda root: (root / ONE / ".metadata").unlink(), "there is no whole checkpoint"),
    "a flipped bit": (flip, "is damaged"),
    "a newer version": (edit_manifest('"version": 1', '"version": 99'), "of version 99"),
}
"""What is wrong with a folder, and what is said of it; tests of one process show further ways."""


@pytest.fixture(scope="module")
def saved(run_ranks: RunRanks, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("saved")
    run_ranks(3, save_once, str(root))  # ranks that load are two: how many have saved does not matter
    return root


def save_once(root: str) -> None:
    model, optimizer = wrap("odd_shapes", 3, 0)
    step(model, optimizer, 1, MODEL_CASES["odd_shapes"])
    save_checkpoint(model, optimizer, root, iteration=1)


def refusal_to_load(name: ModelName, root: Path) -> str:
    """What a load says on all ranks alike, which leaves everything alone."""
    model, optimizer = wrap(name, 3, 5)
    step(model, optimizer, 1, MODEL_CASES[name])
    before = contents(model, optimizer)
    told = refusal(load_checkpoint, model, optimizer, root)
    assert same(contents(model, optimizer), before)
    return told


@pytest.mark.parametrize("kind", SPOILED)
@on_ranks(2)
def test_is_refused_on_all_ranks_alike(saved: Path, tmp_path: Path, kind: str) -> None:
    root, (spoil, words) = tmp_path / "run", SPOILED[kind]
    once(lambda: spoil(Path(shutil.copytree(saved, root))))
    files = sorted(tmp_path.rglob("*"))
    assert words in refusal_to_load("odd_shapes", root)
    assert sorted(tmp_path.rglob("*")) == files


@on_ranks(2)
def test_another_model_is_refused_with_what_is_missing_and_unexpected(saved: Path) -> None:
    told = refusal_to_load("tied", saved)
    assert all(words in told for words in ("does not fit", "missing:", "unexpected:"))


@on_ranks(2)
def test_what_is_not_verified_is_loaded(saved: Path, tmp_path: Path) -> None:
    once(lambda: flip(Path(shutil.copytree(saved, tmp_path / "run"))))
    model, optimizer = wrap("odd_shapes", 3, 5)
    before = model.full_parameters()
    load_checkpoint(model, optimizer, tmp_path / "run", verify=False)
    assert not same(model.full_parameters(), before)


def reshape(folder: Path, key: str) -> None:
    """Let one tensor be another one, of another shape."""
    (folder / "manifest.json").unlink()
    size = torch.Size([2, 3, 5])
    raw = saved_bytes(torch.zeros(size))
    (folder / "other.distcp").write_bytes(raw)

    def change(found: Metadata) -> None:
        chunk = ChunkStorageMetadata(torch.Size([0, 0, 0]), size)
        found.state_dict_metadata[key] = TensorStorageMetadata(TensorProperties(torch.float32), size, [chunk])
        found.storage_data[MetadataIndex(key, chunk.offsets)] = _StorageInfo("other.distcp", 0, len(raw))

    hostile.edit_metadata(folder, change)
