"""What torch.save wrote comes back as it was: objects of every kind that checkpoints hold, tensors of every dtype."""

import argparse
import collections
import io
import random
import re
from typing import Any

import numpy as np
import pytest
import torch

from megatron_fsdp.checkpoint.archive import load_object, load_tensor, write_archive
from megatron_fsdp.checkpoint.safe_read import Opaque, load_metadata
from tests.support import hostile
from tests.support.hostile import saved_bytes

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
    [found] = load_metadata(hostile.whole(b"]" + made + state + b"a"), "here")
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
