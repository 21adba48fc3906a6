"""Files that do not fit or cannot be read: the same error on every rank, and nothing half-loaded unsaid."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from megatron_fsdp.checkpoint.hf import load_hf
from megatron_fsdp.checkpoint.hf.files import MODEL_FILE, FolderReader
from megatron_fsdp.errors import CheckpointError, ConfigurationError
from tests.checkpoint.hf.hf_models import build, same_tensors, save_reference, shard
from tests.conftest import RunRanks
from tests.support.on_ranks import on_ranks

pytest.importorskip("transformers")


def refuse(kind: str, folder: str, rank_without: int = -1) -> tuple[str, bool]:
    """What one rank met, and whether its model is as it was."""
    model = shard(build(kind))
    before = model.full_parameters()
    path = folder if dist.get_rank() != rank_without else folder + "-elsewhere"
    with pytest.raises(CheckpointError) as raised:
        load_hf(model, path)
    return str(raised.value), same_tensors(model.full_parameters(), before)


def _edit(folder: Path, edit: Callable[[dict[str, Tensor]], None]) -> None:
    tensors = load_file(folder / MODEL_FILE)
    edit(tensors)
    save_file(tensors, folder / MODEL_FILE)


def _drop(key: str) -> Callable[[Path], None]:
    return lambda folder: _edit(folder, lambda tensors: tensors.__delitem__(key))


def _put(key: str, value: Tensor) -> Callable[[Path], None]:
    return lambda folder: _edit(folder, lambda tensors: tensors.update({key: value}))


def _cut(folder: Path) -> None:
    content = (folder / MODEL_FILE).read_bytes()
    (folder / MODEL_FILE).write_bytes(content[:-10])


NORM, EXPERT = "model.norm.weight", "model.layers.1.mlp.experts.2.up_proj.weight"
UNFIT: dict[str, tuple[str, Callable[[Path], None], list[str]]] = {
    "missing": ("llama", _drop(NORM), ["20 loaded, 1 missing, 0 unexpected", NORM, "nothing was loaded"]),
    "unexpected": ("llama", _put("extra", torch.ones(2)), ["0 missing, 1 unexpected", "  extra"]),
    "reshaped": ("llama", _put(NORM, torch.ones(8)), ["1 of another shape", f"{NORM} (has (8,), wanted (16,))"]),
    "quantised": (
        "llama",
        _put(NORM, torch.ones(16).to(torch.float8_e4m3fn)),
        [f"'{NORM}' is stored as torch.float8_e4m3fn, and {NORM} is torch.float32"],
    ),
    "integers": ("llama", _put(NORM, torch.ones(16, dtype=torch.int32)), ["stored as torch.int32"]),
    "an expert missing": (
        "qwen_moe",
        _drop(EXPERT),
        ["model.layers.1.mlp.experts.gate_up_proj", f"stored only in part: 7 of 8, not {EXPERT}"],
    ),
    "an expert reshaped": ("qwen_moe", _put(EXPERT, torch.ones(12, 8)), [f"{EXPERT} (has (12, 8), wanted (12, 16))"]),
    "untied head": (
        "gpt2",
        _put("lm_head.weight", torch.ones(41, 16)),
        ["transformer.wte.weight and lm_head.weight are one tied weight in the model, and two different ones"],
    ),
    "a cut file": ("llama", _cut, ["model.safetensors cannot be read as safetensors", "cut off"]),
}


@pytest.mark.parametrize("name", UNFIT)
def test_what_does_not_fit_is_refused_on_all_ranks_and_changes_nothing(
    run_ranks: RunRanks, tmp_path: Path, name: str
) -> None:
    kind, spoil, said = UNFIT[name]
    save_reference(tmp_path, kind)
    spoil(tmp_path)
    found = run_ranks(2, refuse, kind, str(tmp_path))
    assert found[0] == found[1]
    assert [text for text in said if text not in found[0][0]] == []
    assert found[0][1]


def test_a_folder_that_one_rank_lacks_is_refused_by_all(run_ranks: RunRanks, tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    save_reference(tmp_path / "m", "llama")
    for bad_rank, said in ((0, "elsewhere"), (1, "rank 1: CheckpointError")):
        (first, unchanged), (second, too) = run_ranks(2, refuse, "llama", str(tmp_path / "m"), bad_rank)
        assert first.split("failed")[-1] == second.split("failed")[-1]
        assert said in first
        assert unchanged
        assert too


def load_what_fits(folder: str) -> tuple[Any, bool, bool]:
    model = shard(build("qwen_moe"))
    before = model.full_parameters()
    report = load_hf(model, folder, strict=False)
    after, truth = model.full_parameters(), dict(build("qwen_moe", seed=7).named_parameters())
    not_loaded = set(report.missing) | {"model.norm.weight"}
    kept = all(torch.equal(after[name], before[name]) for name in not_loaded)
    return report, kept, all(torch.equal(after[name], truth[name]) for name in report.loaded)


def test_without_strict_what_fits_is_loaded_and_the_rest_is_said(run_ranks: RunRanks, tmp_path: Path) -> None:
    save_reference(tmp_path, "qwen_moe")
    for spoil in (_drop(EXPERT), _put(NORM, torch.ones(8)), _put("extra", torch.ones(2))):
        spoil(tmp_path)
    for report, kept, right in run_ranks(2, load_what_fits, str(tmp_path)):
        assert kept
        assert right
        assert len(report.loaded) == 32
        assert report.missing == ("model.layers.1.mlp.experts.gate_up_proj",)
        assert report.unexpected == ("extra",)
        assert report.reshaped == {NORM: ((8,), (16,))}


def fail_midway(folder: str) -> list[str]:
    """Rank 1's disk fails after the checks."""
    model = shard(build("llama"))

    def failing(*_: Any) -> Tensor:
        raise OSError("disk on fire")

    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 1:
            patch.setattr(FolderReader, "read", failing)
        with pytest.raises(CheckpointError) as raised:
            load_hf(model, folder)
    return [str(raised.value), str(load_hf(model, folder))]


def test_an_error_midway_says_that_the_model_is_partly_loaded(run_ranks: RunRanks, tmp_path: Path) -> None:
    save_reference(tmp_path, "llama")
    one, other = run_ranks(2, fail_midway, str(tmp_path))
    assert one == other
    assert "the model is partly loaded, load again before using it" in one[0]
    assert "rank 1: CheckpointError" in one[0]
    assert "disk on fire" in one[0]
    assert "21 loaded, 0 missing" in one[1]


def test_tensors_that_a_model_lets_pass_are_noted(tmp_path: Path) -> None:
    model = build("llama")
    model.save_pretrained(tmp_path)
    for spoil in (_drop(NORM), _put("old_bias", torch.ones(1))):
        spoil(tmp_path)
    model._keys_to_ignore_on_load_unexpected = [r"old_b.*"]
    model._keys_to_ignore_on_load_missing = [r"model\.norm"]
    report = load_hf(model, tmp_path)
    assert report.is_complete
    assert "old_bias is stored and was left out, as the model asks" in report.notes
    assert f"{NORM} is not stored and kept its value, as the model allows" in report.notes


@on_ranks(1)
def test_full_parameters_are_not_loaded_into(tmp_path: Path) -> None:
    save_reference(tmp_path, "llama")
    model = shard(build("llama"))
    with model.full_parameters_context(), pytest.raises(ConfigurationError, match="full parameters at the moment"):
        load_hf(model, tmp_path)
    assert load_hf(model, tmp_path).is_complete


class Expanded(nn.Module):
    """A buffer of which all rows are one place in memory, behind a weight."""

    def __init__(self, value: float, is_expanded: bool = True) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((2,), value))
        self.register_buffer("rows", torch.arange(3.0).expand(2, 3) if is_expanded else torch.arange(6.0).view(3, 2).T)


def test_memory_that_cannot_be_written_to_is_found_before_anything_changes(tmp_path: Path) -> None:
    save_file({"weight": torch.ones(2), "rows": torch.ones(2, 3)}, tmp_path / MODEL_FILE)
    model = Expanded(5.0)
    with pytest.raises(CheckpointError, match="several elements of rows share one place") as raised:
        load_hf(model, tmp_path)
    assert "partly loaded" not in str(raised.value)
    assert model.weight.tolist() == [5.0, 5.0]
    transposed = Expanded(5.0, is_expanded=False)
    assert load_hf(transposed, tmp_path).is_complete
    assert transposed.rows.tolist() == [[1.0] * 3] * 2
