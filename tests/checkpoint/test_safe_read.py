"""What torch.save wrote comes back as it was, and nothing in a checkpoint runs when it is read."""

import argparse
import collections
import io
import json
import pathlib
import pickle
import random
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.checkpoint import metadata as dcp_metadata
from torch.distributed.checkpoint.metadata import Metadata

from megatron_fsdp.checkpoint.archive import load_object, load_tensor, write_archive
from megatron_fsdp.checkpoint.metadata_reader import load_metadata
from megatron_fsdp.checkpoint.safe_read import Opaque
from megatron_fsdp.errors import CheckpointError
from tests.support import hostile
from tests.support.hostile import READERS, STEP, WEIGHT, Reader, by_verify, refused, saved_bytes, write_linear

DTYPES = sorted(
    {
        dtype
        for dtype in vars(torch).values()
        if isinstance(dtype, torch.dtype) and not re.match(r"torch\.(q|bits|complex32|u?int[1-7]$)", str(dtype))
    },
    key=str,
)

OBJECTS: dict[str, Any] = {
    "numbers": [1, -1, 2.5, True, None, 10**40, complex(1, -2), float("inf")],
    "containers": {"a": (1, [2, {"b": {3, 4}}]), (0, 1): frozenset({5}), 7: range(4), "s": slice(1, None, 2)},
    "bytes": [b"abc", bytearray(b"xy"), b""],
    "ordered": collections.OrderedDict(b=1, a=2),
    "counted": collections.Counter("aab"),
    "torch": [torch.Size([1, 2]), torch.bfloat16, torch.device("cpu"), torch.device("meta")],
    "arguments": argparse.Namespace(layers=2, betas=(0.9, 0.95), dtype=torch.float16),
    "random": random.Random(1).getstate(),
    "scalars": [np.float32(3.5), np.int64(7), np.bool_(True), np.str_("x")],
    "text": "a\nb\u00e9\U0001f600",
}


@pytest.mark.parametrize("name", OBJECTS)
def test_objects(name: str) -> None:
    found = load_object(saved_bytes(OBJECTS[name]), "here")
    assert found == OBJECTS[name]
    assert type(found) is type(OBJECTS[name])


@pytest.mark.parametrize("code", ["?", "i1", "u8", "f2", "f8", "c16", "S3", "U2", ">i4", ">f8"])
@pytest.mark.parametrize("shape", [(0,), (5,), (2, 3), ()])
def test_arrays(code: str, shape: tuple[int, ...]) -> None:
    array = np.arange(np.prod(shape, dtype=int)).reshape(shape).astype(code)
    for given in (array, array.T):
        found = load_object(saved_bytes(given), "here")
        assert np.array_equal(found, given)
        assert found.shape == given.shape
        assert found.dtype.newbyteorder("=") == given.dtype.newbyteorder("=")


def test_random_states_of_numpy_can_be_set_again() -> None:
    first = np.random.RandomState(3)
    second = np.random.RandomState(4)
    second.set_state(load_object(saved_bytes(first.get_state()), "here"))
    assert first.random() == second.random()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tensors_of_every_dtype(dtype: torch.dtype) -> None:
    raw = torch.arange(24 * dtype.itemsize, dtype=torch.uint8) % (2 if dtype == torch.bool else 251)
    values = raw.view(dtype).reshape(4, 6)
    found = load_tensor(io.BytesIO(saved_bytes(values)), "here", check=True)
    assert (found.dtype, found.shape) == (dtype, (4, 6))
    assert torch.equal(found.reshape(-1).view(torch.uint8), raw)


def test_tensors_of_every_form() -> None:
    base = torch.arange(24.0)
    forms = [base.view(4, 6).t(), base[3:9], base[::2], base[5], torch.empty(0, 3), base.view(4, 6)[1:3, 2:4]]
    forms += [torch.randn(3, dtype=torch.cfloat).conj(), torch.nn.Parameter(torch.ones(2)), torch.zeros(1).expand(5)]
    for given in forms:
        found = load_object(saved_bytes(given), "here")
        assert torch.equal(found, given)
        assert type(found) is type(given)
        assert (found.stride(), found.is_conj(), found.requires_grad) == (
            given.stride(),
            given.is_conj(),
            given.requires_grad,
        )


def test_tensors_that_share_their_elements_still_do() -> None:
    base = torch.zeros(4)
    found = load_object(saved_bytes({"a": base, "b": base[1:], "same": base}), "here")
    found["a"][1] = 9.0
    assert found["b"].tolist() == [9.0, 0.0, 0.0]
    assert found["same"] is found["a"]


def test_big_endian_files() -> None:
    stored = hostile.archive_of(
        hostile.tensor_pickle(2, (2,), (1,)), data_0=np.array([1.5, -2.0], ">f4").tobytes(), byteorder=b"big"
    )
    assert load_object(stored, "here").tolist() == [1.5, -2.0]


def test_objects_of_packages_that_are_not_imported_keep_their_data() -> None:
    made = b"cmegatron.core.enums\nKind\n(K\2tR"
    state = b"}X\1\0\0\0aK\1sb"
    [found] = load_metadata(io.BytesIO(hostile.whole(b"]" + made + state + b"a")), "here")
    assert isinstance(found, Opaque)
    assert (found.qualified_name, found.arguments, found.state) == ("megatron.core.enums.Kind", (2,), {"a": 1})
    assert repr(found) == "<megatron.core.enums.Kind, not read>"


def test_crcs_that_were_left_out_are_not_compared() -> None:
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        raw = saved_bytes(torch.arange(3.0))
    finally:
        torch.serialization.set_crc32_options(before)
    assert load_tensor(io.BytesIO(raw), "here", check=True).tolist() == [0.0, 1.0, 2.0]


# ---- writing ---------------------------------------------------------------------------------------------------------


class FullDisk(io.BytesIO):
    """A file that can grow to so many bytes and no further."""

    def __init__(self, room: int) -> None:
        super().__init__()
        self._room = room

    def write(self, data: object, /) -> int:
        if self.tell() + memoryview(data).nbytes > self._room:  # type: ignore[arg-type]
            raise OSError(28, "No space left on device")
        return super().write(data)  # type: ignore[arg-type]


def test_a_full_disk_is_told_wherever_the_archive_stops() -> None:
    values = torch.arange(300.0)
    whole = io.BytesIO()
    torch.save(values, whole)
    size = whole.tell()
    for room in range(0, size, 20):
        with pytest.raises(OSError, match="No space left on device"):
            write_archive(values, FullDisk(room))
    fits = FullDisk(size)
    write_archive(values, fits)
    assert torch.equal(load_tensor(fits, "a file"), values)


# ---- nothing in a checkpoint runs when it is read: a hostile pickle in each place is refused by name -----------------


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
    for read in (lambda: load_metadata(io.BytesIO(raw), "here"), lambda: load_object(hostile.archive_of(raw), "here")):
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
