"""Nothing in a checkpoint runs when it is read: a hostile pickle in each place is refused by name."""

import json
import pathlib
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import metadata as dcp_metadata
from torch.distributed.checkpoint.metadata import Metadata

from megatron_fsdp.checkpoint.archive import load_object
from megatron_fsdp.checkpoint.safe_read import load_metadata
from megatron_fsdp.errors import CheckpointError
from tests.support import hostile
from tests.support.hostile import READERS, STEP, WEIGHT, Reader, by_verify, refused, write_linear

MARKER = Path("created-by-a-pickle")
NAMES = sorted(hostile.payloads(MARKER))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A good checkpoint."""
    write_linear(tmp_path / "iter_0000001")
    return tmp_path / "iter_0000001"


def test_the_payloads_would_work(tmp_path: Path) -> None:
    """Those that are complete do create the file when Python's own reader takes them."""
    for name in ("builtins.eval", "builtins.exec", "posix.system", "pickle.loads", "instance", "object"):
        marker = tmp_path / name.replace(" ", "-")
        raw, _ = hostile.payloads(marker)[name]
        try:
            pickle.loads(raw)
        except pickle.UnpicklingError:
            pytest.fail(f"{name} is no pickle")
        assert marker.exists(), name


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("where", [".metadata", "common.pt", WEIGHT, STEP])
def test_in_every_place(folder: Path, tmp_path: Path, name: str, where: str) -> None:
    marker = tmp_path / "marker"
    raw, told = hostile.payloads(marker)[name]
    if where == ".metadata":
        (folder / where).write_bytes(raw)
    elif where == "common.pt":
        (folder / where).write_bytes(hostile.archive_of(raw))
    else:
        hostile.plant(folder, where, hostile.archive_of(raw))
    for read in READERS if where != "common.pt" else [by_verify]:
        refused(read, folder, marker, told, where)


class Evil:
    """Creates a file when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return open, (str(self.marker), "w")


@pytest.mark.parametrize("key", [WEIGHT, STEP])
@pytest.mark.parametrize("read", READERS)
def test_in_the_older_format_and_in_other_kinds_of_files(folder: Path, tmp_path: Path, key: str, read: Reader) -> None:
    marker = tmp_path / "marker"
    older = tmp_path / "older.pt"
    torch.save({"a": Evil(marker)}, older, _use_new_zipfile_serialization=False)
    body = hostile.whole(hostile.call("builtins", "open", str(marker), "w"))
    script = hostile.archive_of(body, **{"constants.pkl": body, "code___torch__.py": b"import os"})
    header = json.dumps({"weight": {"dtype": "F32", "shape": [3, 4], "data_offsets": [0, 48]}}).encode()
    safetensors = len(header).to_bytes(8, "little") + header + bytes(48)
    for raw, told in (
        (older.read_bytes(), "not an archive"),
        (body, "not an archive"),
        (script, "TorchScript"),
        (safetensors, "not an archive"),
        (b"", "not an archive" if key == STEP else "in 0 bytes"),
    ):
        hostile.plant(folder, key, raw, file="model.safetensors")
        refused(read, folder, marker, told, key)


_SETTING = hostile.plain((None, {"is_absolute": 1, "__code__": 2, "parts": ("x",)}))
_PLAIN = hostile.plain({"_value_": 9})
_METADATA = "torch.distributed.checkpoint.metadata"
TAMPERING: dict[str, bytes] = {
    "attributes of a class": hostile.whole(f"c{_METADATA}\nMetadata\n".encode() + _SETTING + b"b"),
    "attributes of a path class": hostile.whole(b"cpathlib\nPosixPath\n" + _SETTING + b"b"),
    "attributes of a function": hostile.whole(b"ccollections\nOrderedDict\n" + _SETTING + b"b"),
    "dict of a function": hostile.whole(b"ctorch\nSize\n" + _PLAIN + b"b"),
    "an enumeration": hostile.whole(hostile.call(_METADATA, "_MEM_FORMAT_ENCODING", 0) + _PLAIN + b"b"),
    "a call of a class's object": hostile.whole(b"cargparse\nNamespace\n)\x81)R"),
    "a new function": hostile.whole(b"ctorch\nSize\n)\x81"),
}
"""Pickles that call nothing and set attributes of classes, functions and shared objects, or build wrong ones."""


@pytest.mark.parametrize("kind", sorted(TAMPERING))
def test_classes_and_functions_stay_as_they_are(kind: str) -> None:
    raw = TAMPERING[kind]
    for read in (lambda: load_metadata(raw, "here"), lambda: load_object(hostile.archive_of(raw), "here")):
        with pytest.raises(CheckpointError, match="here"):
            read()
    assert not pathlib.PurePosixPath("x").is_absolute()
    assert not hasattr(Metadata, "is_absolute")
    assert dcp_metadata._MEM_FORMAT_ENCODING(0).value == 0


def test_arrays_of_numpy_that_would_end_the_process() -> None:
    reconstruct = "numpy._core.multiarray"
    objects = hostile.call("numpy", "dtype", "O8", False, True)
    empty = b"c" + f"{reconstruct}\n_reconstruct\n".encode() + b"cnumpy\nndarray\n" + hostile.plain((0,))
    empty += b"C\1b" + b"\x87R"
    floats = hostile.call("numpy", "dtype", "f8", False, True)

    def state(dtype: bytes, shape: tuple[int, ...], raw: bytes) -> bytes:
        return b"(" + hostile.plain(1) + hostile.plain(shape) + dtype + b"\x89" + hostile.plain(raw, 3) + b"t"

    wrong = {
        "objects": hostile.whole(objects),
        "length": hostile.whole(empty + state(floats, (1 << 40,), bytes(8)) + b"b"),
        "short": hostile.whole(empty + state(floats, (3,), bytes(8)) + b"b"),
        "fields": hostile.whole(floats + hostile.plain((3, "<", None, ("a",), {"a": 1}, 8, 8, 63)) + b"b"),
        "flags": hostile.whole(floats + hostile.plain((3, "<", None, None, None, -1, -1, 63)) + b"b"),
        "scalar": hostile.whole(f"c{reconstruct}\nscalar\n".encode() + floats + hostile.plain(b"123", 3) + b"\x86R"),
    }
    for name, raw in wrong.items():
        with pytest.raises(CheckpointError, match="NumPy"):
            load_object(hostile.archive_of(raw), name)
    right = hostile.whole(
        empty + state(floats, (1,), torch.tensor([2.5], dtype=torch.float64).numpy().tobytes()) + b"b"
    )
    assert load_object(hostile.archive_of(right), "right").tolist() == [2.5]
