"""Comparing checkpoints: by value, however they are cut, one chunk of each side at a time."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron_fsdp.checkpoint.diff import Tolerance, compare_piece, diff
from megatron_fsdp.checkpoint.folder import CheckpointFolder
from megatron_fsdp.checkpoint.naming import alike
from megatron_fsdp.errors import CheckpointError
from megatron_fsdp.sharding.shards import Box
from tests.checkpoint.tools import builders
from tests.support.torch_dist import GptSpec, WriteOptions, make_truth, write_torch_dist

SHAPE = (12, 15)
GRIDS = {
    "whole": builders.grid(SHAPE, [], []),
    "rows": builders.grid(SHAPE, [3, 4, 9], []),
    "columns": builders.grid(SHAPE, [], [7, 11]),
    "both": builders.grid(SHAPE, [5], [2, 8]),
}


@pytest.mark.parametrize("left", GRIDS)
@pytest.mark.parametrize("right", GRIDS)
def test_grids_do_not_matter(tmp_path: Path, left: str, right: str) -> None:
    values = torch.randn(SHAPE, generator=torch.Generator().manual_seed(0))
    changed = values.clone()
    changed[4, 12] += 1.5
    changed[10, 2] -= 1.0
    changed[10, 3] += 0.25
    a = builders.save_cut({"w": (values, GRIDS[left])}, tmp_path / "a")
    b = builders.save_cut({"w": (changed, GRIDS[right])}, tmp_path / "b")
    assert diff(a, a).is_same
    found = diff(a, b).differences[0].values
    assert found is not None
    assert (found.count, found.index) == (3, (4, 12))
    assert found.values == (values[4, 12].item(), changed[4, 12].item())
    assert found.largest == pytest.approx(1.5, abs=1e-6)


def test_the_first_key_that_differs_comes_first(tmp_path: Path) -> None:
    a = builders.save({f"l.{i}.w": torch.zeros(2) for i in (1, 2, 10)} | {"z": 1}, tmp_path / "a")
    b = builders.save({f"l.{i}.w": torch.ones(2) for i in (2, 10)} | {"l.1.w": torch.zeros(2), "z": 2}, tmp_path / "b")
    assert [item.key for item in diff(a, b).differences] == ["l.2.w", "l.10.w", "z"]
    assert [item.key for item in diff(a, b, pattern="z").differences] == ["z"]


def test_every_kind_of_difference_is_told(tmp_path: Path) -> None:
    a = builders.save(
        {
            "a": torch.zeros(2),
            "dtype": torch.zeros(2),
            "shape": torch.zeros(2),
            "type": torch.zeros(2),
            "o": {"x": 1.0},
        },
        tmp_path / "a",
    )
    b = builders.save(
        {"b": 3, "dtype": torch.zeros(2).half(), "shape": torch.zeros(1, 2), "type": 0, "o": {"x": 2.0}}, tmp_path / "b"
    )
    size = len(a.read_bytes("o.x"))
    found = {item.key: (item.kind, item.text) for item in diff(a, b).differences}
    assert found == {
        "a": ("only in A", "tensor (2,) float32 that only A has"),
        "b": ("only in B", "object that only B has"),
        "dtype": ("dtype", "tensor (2,) float32 in A, tensor (2,) float16 in B"),
        "shape": ("shape", "tensor (2,) float32 in A, tensor (1, 2) float32 in B"),
        "type": ("type", "tensor (2,) float32 in A, object in B"),
        "o.x": ("object", f"object of {size} bytes in A, and other {size} bytes in B"),
    }
    assert diff(a, b).compared == 4


def test_objects_are_compared_by_value_with_arrays_and_dtypes_inside(tmp_path: Path) -> None:
    """A pickle refers back to a string that it has written before; a copy of the string is written out."""
    text = "a text that is written once"
    drawn = np.arange(5, dtype=np.uint32)
    a = builders.save({"o": [text, text, drawn], "t": torch.zeros(1)}, tmp_path / "a")
    same = builders.save({"o": [text, text.upper().lower(), drawn], "t": torch.zeros(1)}, tmp_path / "same")
    other = builders.save({"o": [text, text, drawn + 1], "t": torch.zeros(1)}, tmp_path / "other")
    assert a.read_bytes("o") != same.read_bytes("o")
    assert diff(a, same).is_same
    assert [found.key for found in diff(a, other).differences] == ["o"]
    assert not alike([torch.ones(2)], [torch.ones(2).double()])
    assert not alike([drawn], [drawn.astype(np.int64)])


NAN = math.nan


@pytest.mark.parametrize(
    ("a", "b", "tolerance", "count"),
    [
        ([0.0, NAN, 1.0], [-0.0, NAN, 1.0], Tolerance(), 0),
        ([0.0, NAN, 1.0], [-0.0, NAN, 1.0], Tolerance(bitwise=True), 1),
        ([1.0, NAN], [1.0, 2.0], Tolerance(), 1),
        ([1.0, math.inf], [1.05, math.inf], Tolerance(rtol=0.1), 0),
        ([1.0, math.inf], [1.05, -math.inf], Tolerance(rtol=0.1), 1),
        ([1.0, 0.0], [1.05, 0.2], Tolerance(atol=0.1), 1),
    ],
)
def test_what_counts_as_equal(a: list[float], b: list[float], tolerance: Tolerance, count: int) -> None:
    box = Box((0,), (len(a),))
    found = compare_piece(torch.tensor(a), torch.tensor(b), box, tolerance)
    assert (found.count if found else 0) == count


@pytest.mark.parametrize(
    "dtype",
    [torch.int64, torch.uint8, torch.bool, torch.bfloat16, torch.float8_e4m3fn, torch.complex64, torch.complex128],
)
@pytest.mark.parametrize("bitwise", [False, True])
def test_every_dtype_can_be_compared(dtype: torch.dtype, bitwise: bool) -> None:
    a = torch.tensor([0, 1, 0, 1, 1]).to(dtype)
    b = torch.tensor([0, 1, 1, 1, 0]).to(dtype)
    box = Box((10, 0), (5, 1))
    found = compare_piece(a.view(5, 1), b.view(5, 1), box, Tolerance(bitwise=bitwise))
    assert found is not None
    assert (found.count, found.index, found.largest) == (2, (12, 0), 1.0)
    assert compare_piece(a, a.clone(), Box((0,), (5,)), Tolerance(bitwise=bitwise)) is None


@pytest.mark.parametrize("generation", [1, 2])
def test_common_state_beside_the_tensors_is_compared(tmp_path: Path, generation: int) -> None:
    def change(common: dict[str, Any]) -> None:
        common["optimizer"]["optimizer"]["param_groups"][0]["lr"] = 77.0

    truth = make_truth(GptSpec(layers=1))
    left = write_torch_dist(tmp_path / "a", truth, WriteOptions(generation=generation))
    right = write_torch_dist(tmp_path / "b", truth, WriteOptions(generation=generation, change_common=change))
    a, b = CheckpointFolder(left), CheckpointFolder(right)
    assert diff(a, a).is_same
    assert diff(a, a).compared == len(a.tensors) + len(a.objects) + 1
    (found,) = diff(a, b).differences
    assert (found.key, found.kind) == ("common.pt", "object")
    assert diff(a, b, pattern="^decoder").is_same
    (right / "common.pt").unlink()
    assert [(d.key, d.kind) for d in diff(a, b).differences] == [("common.pt", "only in A")]
    (right / "common.pt").mkdir()
    with pytest.raises(CheckpointError, match=r"common\.pt"):
        diff(a, b)
