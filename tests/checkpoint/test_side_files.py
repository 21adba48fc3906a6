"""`verify` misses files beside the tensors that a checkpoint cannot do without."""

from pathlib import Path

import pytest
import torch

from megatron_fsdp.checkpoint.folder import CheckpointFolder
from megatron_fsdp.checkpoint.tools.edit import edit
from megatron_fsdp.checkpoint.tools.edit_plan import parse_operation
from megatron_fsdp.checkpoint.tools.side_files import noted_files
from megatron_fsdp.checkpoint.tools.torch_save import from_torch_save
from megatron_fsdp.checkpoint.verify import VerifyReport, verify
from tests.support.torch_dist.gpt import GptSpec, make_truth
from tests.support.torch_dist.write import WriteOptions, write_torch_dist


def files(report: VerifyReport) -> dict[str, set[str]]:
    kinds = {"damaged": report.damaged, "missing": report.missing, "unexpected": report.unexpected}
    return {kind: {item.name for item in found} for kind, found in kinds.items() if found}


@pytest.mark.parametrize("is_edited", [False, True])
def test_the_structure_of_a_state_dict(tmp_path: Path, is_edited: bool) -> None:
    torch.save({1: torch.ones(2), "e": {}}, tmp_path / "x.pt")
    folder = tmp_path / "a"
    from_torch_save(tmp_path / "x.pt", folder)
    if is_edited:
        edit(CheckpointFolder(folder), tmp_path / "b", [parse_operation("cast 1 bfloat16")])
        folder = tmp_path / "b"
    structure = folder / "structure.json"
    right = structure.read_bytes()
    assert verify(folder).is_whole
    assert files(verify(folder)) == {}
    structure.write_bytes(right.replace(b"dict", b"list"))
    assert files(verify(folder)) == {"damaged": {"structure.json"}}
    structure.unlink()
    assert files(verify(folder, deep=False)) == {"missing": {"structure.json"}}
    assert not verify(folder).is_whole
    (folder / "manifest.json").unlink()
    structure.write_text("nul")
    assert files(verify(folder)) == {"damaged": {"structure.json"}}


def test_a_manifest_of_nonsense_names_nothing() -> None:
    names = ["", ".", "..", "a/b", "../x", "a" * 300, "\ud800", "a\0b", "\n"]
    assert noted_files({"files": dict.fromkeys([*names, "good.json"], "0")}) == {"good.json": "0"}
    assert noted_files({"files": {"good.json": 1}}) == {}
    assert noted_files({"files": ["good.json"]}) == {}


@pytest.mark.full(short=["2"])
@pytest.mark.parametrize("generation", [1, 2, 3])
def test_what_megatron_writes_beside_the_tensors(tmp_path: Path, generation: int) -> None:
    folder = write_torch_dist(tmp_path / "a", make_truth(GptSpec(layers=1)), WriteOptions(generation=generation))
    marker, common = folder / "metadata.json", folder / "common.pt"
    assert verify(folder).is_whole
    assert files(verify(folder)) == {}
    right = marker.read_bytes()
    for wrong in (b"\0garbage", b"[1]", b'{"sharded_backend": "zarr"}', b"{}"):
        marker.write_bytes(wrong)
        assert files(verify(folder)) == {"damaged": {"metadata.json"}}, wrong
    marker.unlink()
    assert files(verify(folder)) == {"missing": {"metadata.json"}}
    if generation < 3:
        common.unlink()
        assert files(verify(folder)) == {"missing": {"metadata.json", "common.pt"}}
        marker.write_bytes(right)
        assert files(verify(folder)) == {"missing": {"common.pt"}}
        assert "common.pt: iteration, arguments and parameter groups" in str(verify(folder))
