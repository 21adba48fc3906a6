"""What reading a hostile file costs: memory and time in proportion to its size, no waiting, messages of bounded length.

Everything here is refused by counting; nothing waits for a clock. `limited` is a guard for the day a limit is lost.
"""

import argparse
import collections
import copy
import io
import itertools
import json
import os
import pathlib
import resource
import signal
import socket
import struct
import tracemalloc
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import numpy as np
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

from megatron_fsdp.checkpoint import safe_read
from megatron_fsdp.checkpoint.archive import load_object, load_tensor
from megatron_fsdp.checkpoint.folder import CheckpointFolder, cover_problem
from megatron_fsdp.checkpoint.hf.files import open_folder
from megatron_fsdp.checkpoint.safe_read import load_metadata
from megatron_fsdp.checkpoint.store import POINTER, RunFolder
from megatron_fsdp.checkpoint.verify import verify
from megatron_fsdp.cli.main import main
from megatron_fsdp.errors import CheckpointError
from megatron_fsdp.sharding.shards import Box
from tests.support import hostile
from tests.support.hostile import READERS, STEP, WEIGHT, by_folder, by_loading, saved_bytes, write_linear

LONGEST_MESSAGE = 2000


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A good checkpoint."""
    write_linear(tmp_path / "iter_0000001")
    return tmp_path / "iter_0000001"


@pytest.fixture(autouse=True)
def limited() -> Iterator[None]:
    """A reader that waits, or fills the memory, ends here instead of with the machine."""

    def stop(*_: Any) -> NoReturn:
        pytest.fail("still busy after a minute")  # no Exception, which the readers would take for damage

    before, limits = signal.signal(signal.SIGALRM, stop), resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (8 << 30, limits[1]))
    signal.alarm(60)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)
    resource.setrlimit(resource.RLIMIT_DATA, limits)


def refused(read: Callable[[], object], told: str = "") -> None:
    with pytest.raises(CheckpointError) as caught:
        read()
    assert told in str(caught.value)
    assert len(str(caught.value)) <= LONGEST_MESSAGE


# ---- pickles ---------------------------------------------------------------------------------------------------------


def _put(place: int) -> bytes:
    """Remember what was made last, and take it off the stack."""
    return b"r" + struct.pack("<I", place) + b"0"


def _get(place: int) -> bytes:
    return b"j" + struct.pack("<I", place)


def _results(function: bytes, argument: bytes, use: bytes = b"j\0\0\0\0j\1\0\0\0\x85R") -> bytes:
    """A list of two thousand results of one function (place 0) and one argument (place 1)."""
    return hostile.whole(function + _put(0) + argument + _put(1) + b"](" + use * 2000 + b"e")


def multipliers() -> dict[str, bytes]:
    """Pickles of some thousand bytes that stand for hundreds of megabytes, for hours, or for something without end."""
    numbers = b"(" + b"".join(b"J" + struct.pack("<i", number) for number in range(2000))
    pairs = b"](" + b"".join(b"J" + struct.pack("<i", number) + b"N\x86" for number in range(2000)) + b"e"
    names = b"}(" + b"".join(b"X\5\0\0\0%05dN" % number for number in range(2000)) + b"u"
    long = struct.pack("<I", 100_000) + b"x" * 100_000
    array = b"cnumpy._core.multiarray\n_reconstruct\n(cnumpy\nndarray\n" + hostile.plain((0,)) + b"C\1btR"
    state = (
        b"(K\1" + hostile.plain((100_000,)) + hostile.call("numpy", "dtype", "u1", False, True) + b"\x89B" + long + b"t"
    )
    index = b"ctorch.distributed.checkpoint.metadata\nMetadataIndex\n"
    lists = [b"](" + _get(place - 1) * 2 + b"e" + _put(place) for place in range(1, 60)]
    indices = [
        index
        + b")\x81}("
        + hostile.plain("fqn")
        + _get(place - 1)
        + hostile.plain("offset")
        + _get(place - 1)
        + b"ub"
        + _put(place)
        for place in range(1, 60)
    ]
    return {
        "bytearrays": _results(b"cbuiltins\nbytearray\n", b"B" + long),
        "ordered dicts": _results(b"ccollections\nOrderedDict\n", pairs),
        "sets": _results(b"cbuiltins\nset\n", b"]" + numbers + b"e"),
        "frozensets": _results(b"cbuiltins\nfrozenset\n", numbers + b"t"),
        "sizes": _results(b"ctorch\nSize\n", numbers + b"t"),
        "counters": _results(b"ccollections\nCounter\n", names),
        "bytes as text": _results(b"c_codecs\nencode\n", b"X" + long),
        "arguments of foreign classes": _results(b"cnemo\nThing\n", numbers + b"t", _get(0) + _get(1) + b"\x81"),
        "namespaces": _results(b"cargparse\nNamespace\n", names, _get(0) + b")\x81" + _get(1) + b"b"),
        "arrays": _results(b"N", state, array + _get(1) + b"b"),
        "a long text": _results(b"N", b"X" + long, _get(1)),
        "lists that hold each other": hostile.whole(b"]" + _put(0), *lists, _get(59)),
        "a list that holds itself": hostile.whole(b"]" + _put(0) + _get(0) + _get(0) + b"a"),
        "a huge number": hostile.whole(b"\x8b" + struct.pack("<i", 2000) + b"\x7f" * 2000),
        "an array of another size": hostile.whole(hostile.call("numpy", "ndarray", (1 << 30,))),
        "a new array": hostile.whole(b"cnumpy\nndarray\n" + hostile.plain(((1 << 30,),)) + b"\x81"),
        "an index of a range": hostile.whole(
            index + b"(" + hostile.plain("w") + hostile.call("builtins", "range", 10**8) + b"tR"
        ),
        "hash of nested indices": hostile.whole(index + b")\x81" + _put(0), *indices, b"}" + _get(59) + b"Ns"),
        "large keys of one hash": hostile.whole(
            hostile.plain(dict.fromkeys(n * ((1 << 61) - 1) for n in range(16, 3000)))
        ),
        "complex keys of one hash": hostile.whole(
            hostile.plain(dict.fromkeys(complex(-1000003.0 * n, n) for n in range(3000)))
        ),
    }


@pytest.mark.full(cover=1)
@pytest.mark.parametrize("name", sorted(multipliers()))
@pytest.mark.parametrize("where", ["metadata", "object", "tensor"])
def test_pickles_that_multiply_what_they_hold(name: str, where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(safe_read, "SPARE_BYTES", 1 << 20)
    raw = multipliers()[name]
    archive = hostile.archive_of(raw)
    tracemalloc.start()
    try:
        if where == "metadata":
            refused(lambda: load_metadata(raw, "here"), "here")
        elif where == "tensor":
            refused(lambda: load_tensor(io.BytesIO(archive), "here"), "here")
        else:
            refused(lambda: load_object(archive, "here"), "here")
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 4 * safe_read.SPARE_BYTES + 2 * safe_read.BYTES_PER_BYTE * len(raw)


def tuples_of_one_hash(count: int) -> list[tuple[int, int]]:
    """Different ones; by the arithmetic of Python's hash of tuples (xxHash), backwards."""
    first, second, fifth, word = 11400714785074694791, 14029467366897019727, 2870177450012600261, (1 << 64) - 1
    backwards, found, number = pow(second, -1, 1 << 64), list[tuple[int, int]](), 0
    while len(found) < count:
        number += 1
        mixed = (fifth + number * second) & word
        mixed = ((mixed << 31 | mixed >> 33) & word) * first & word
        other = (12345 - mixed) * backwards & word
        if other < (1 << 61) - 1:
            found.append((number, other))
    return found


def test_the_clock_is_looked_at_where_hashes_may_be_equal(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = tuples_of_one_hash(2000)
    assert len({hash(key) for key in keys}) == 1
    raw = saved_bytes(dict.fromkeys(keys))
    assert load_object(raw, "here") == dict.fromkeys(keys)
    seconds = itertools.count(step=60)
    monkeypatch.setattr(safe_read, "time", SimpleNamespace(thread_time=lambda: next(seconds)))
    refused(lambda: load_object(raw, "here"), "takes far longer than its size calls for")


def test_a_storage_is_read_and_copied_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of big-endian bytes a copy is made: 500 references to 100 KB are one of them."""
    reference = hostile.tensor_pickle(25_000, (25_000,), (1,))
    body = b"](" + b"".join(reference[2:-1] for _ in range(500)) + b"e"
    raw = hostile.archive_of(hostile.whole(body), data_0=bytes(100_000), byteorder=b"big")
    found = load_object(raw, "here")
    assert len({tensor.untyped_storage().data_ptr() for tensor in found}) == 1
    other = hostile.tensor_pickle(24_999, (1,), (1,))[2:-1]
    wrong = hostile.archive_of(hostile.whole(b"](" + reference[2:-1] + other + b"e"), data_0=bytes(100_000))
    refused(lambda: load_object(wrong, "here"), "not 24999 elements")
    monkeypatch.setattr(safe_read, "BYTES_PER_BYTE", 4)
    refused(lambda: load_object(raw, "here"), "far more memory")


@pytest.mark.parametrize(
    ("numel", "size", "stride", "start", "key", "told"),
    [
        (12, (1,) * 60_000, (0,) * 60_000, 0, "0", "a tensor of other lengths"),
        (12, (1,) * 65, (0,) * 65, 0, "0", "a tensor of other lengths"),
        (12, (3, 4), (4, -1), 0, "0", "a tensor of other lengths"),
        (12, (-3, -4), (4, 1), 0, "0", "a tensor of other lengths"),
        (12, (3, 4), (4,), 0, "0", "a tensor with hooks, which are code"),
        (12, (3, 4), (4, 1), 1, "0", "elements beyond its storage"),
        (12, (1 << 34,), (1,), 0, "0", "elements beyond its storage"),
        (12, (3, 4), (1 << 40, 1), 0, "0", "elements beyond its storage"),
        (1 << 40, (3, 4), (4, 1), 0, "0", "48 bytes, not 1099511627776 elements"),
        (-1, (3, 4), (4, 1), 0, "0", "48 bytes, not -1 elements"),
        (12, (1 << 50, 4), (0, 0), 0, "0", "far more memory"),  # one element that stands for many
        (12, (3, 4), (4, 1), 0, "../../etc/passwd", "it has no 'data/../../etc/passwd'"),
        (12, (3, 4), (4, 1), 0, "1", "it has no 'data/1'"),
    ],
)
def test_tensors_that_claim_what_is_not_there(
    numel: int, size: tuple[int, ...], stride: tuple[int, ...], start: int, key: str, told: str
) -> None:
    raw = hostile.archive_of(hostile.tensor_pickle(numel, size, stride, start=start, key=key), data_0=bytes(48))
    refused(lambda: load_tensor(io.BytesIO(raw), "here"), told)
    refused(lambda: load_object(raw, "here"), told)


def test_a_tensor_that_shows_one_element_many_times_is_refused_and_an_honest_one_read(folder: Path) -> None:
    spread = hostile.archive_of(hostile.tensor_pickle(1, (3, 4), (0, 0)), data_0=bytes(4))
    hostile.plant(folder, WEIGHT, spread)
    for read in READERS:
        refused(lambda: read(folder), WEIGHT)  # noqa: B023
    values = torch.arange(12.0).reshape(3, 4)
    honest = hostile.archive_of(hostile.tensor_pickle(12, (3, 4), (4, 1)), data_0=values.numpy().tobytes())
    hostile.plant(folder, WEIGHT, honest)
    assert torch.equal(CheckpointFolder(folder).read_tensor(WEIGHT), values)


def test_a_tensor_entry_that_asks_for_memory() -> None:
    """`torch.load(weights_only=True)` would give it."""
    asked = b"\x80\x02" + hostile.call("builtins", "bytearray", 10**11) + b"."
    refused(lambda: load_tensor(io.BytesIO(hostile.archive_of(asked)), "here"), "something else than bytes")


def test_records_of_an_archive_do_not_stand_for_more_than_it_is_long() -> None:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        archive.writestr("archive/data.pkl", b"\x80\x02N.")
        archive.writestr("archive/data/0", bytes(10_000))
        other = copy.copy(archive.getinfo("archive/data/0"))
        other.filename = "archive/data/1"
        archive.filelist.append(other)
    refused(lambda: load_object(stream.getvalue(), "here"), "lie in one another")


GOOD: dict[str, Any] = {
    "many keys": {f"model.layers.{number}.weight": {"step": number, "lr": 0.1} for number in range(20_000)},
    "numbers": list(range(100_000)),
    "nothing": [None] * 500_000,
    "empty dicts": [{} for _ in range(50_000)],
    "numbers as keys": dict.fromkeys(range(-50_000, 50_000)),
    "pairs as keys": {(number, -number): None for number in range(20_000)},
    "sets": [{number, number + 1} for number in range(300)] + [set(range(50_000)), frozenset(range(300))],
    "long texts as keys": {f"{number}" * 500: number for number in range(100)},
    "large numbers": [10**600, -(10**600), {2**64 - 1: 2**200}],
    "bytes": [bytes(500_000), bytearray(500_000), np.zeros(100_000)],
    "one dict in many places": [[{"lr": 0.1, "betas": [0.9, 0.95]}] * 5000],
    "one list in many dicts": (lambda shared: dict.fromkeys(range(3000), shared))(list(range(50))),
    "paths": [pathlib.PurePosixPath("/data/corpus/shards", f"{number:05d}.bin") for number in range(5000)],
    "ordered": [collections.OrderedDict(a=number) for number in range(3000)],
    "namespace": argparse.Namespace(**{f"option_{number}": number for number in range(3000)}),
}


def nested(depth: int) -> list[Any]:
    found: list[Any] = []
    for _ in range(depth):
        found = [found]
    return found


@pytest.mark.parametrize("name", GOOD)
def test_large_honest_objects_are_read(name: str) -> None:
    found = load_object(saved_bytes(GOOD[name]), "here")
    assert np.array_equal(found[2], GOOD[name][2]) if name == "bytes" else found == GOOD[name]
    shared = nested(90)
    assert load_object(saved_bytes([shared, shared]), "here") == [shared, shared]


def test_tensors_that_share_a_storage_are_read() -> None:
    base = torch.arange(1000.0)
    found = load_object(saved_bytes([base[first:] for first in range(50)] + [torch.ones(1).expand(1 << 20)]), "x")
    assert all(torch.equal(found[first], base[first:]) for first in range(50))
    assert found[-1].sum() == 1 << 20


# ---- metadata --------------------------------------------------------------------------------------------------------


def described(shape: tuple[int, ...], chunks: list[ChunkStorageMetadata]) -> TensorStorageMetadata:
    return TensorStorageMetadata(TensorProperties(torch.float32), shape, chunks)  # type: ignore[arg-type]


def _dims(found: Metadata) -> None:
    found.state_dict_metadata[WEIGHT] = described((1 << 61,) * 60_000, [])


def _more_dims_than_torch_has(found: Metadata) -> None:
    found.state_dict_metadata[WEIGHT] = described((1,) * 65, [])


def _shared_chunks(found: Metadata) -> None:
    """Chunks without elements may lie anywhere any number of times."""
    chunks = [ChunkStorageMetadata(torch.Size([0, 0]), torch.Size([0, 4]))] * 1000
    for number in range(1000):
        found.state_dict_metadata[f"w{number}"] = described((0, 4), chunks)
        found.storage_data[MetadataIndex(f"w{number}")] = _StorageInfo("__0_0.distcp", 0, 10)


def _claims(found: Metadata) -> None:
    chunk = ChunkStorageMetadata(torch.Size([0]), torch.Size([1 << 40]))
    found.state_dict_metadata[WEIGHT] = described((1 << 40,), [chunk])
    found.storage_data[MetadataIndex(WEIGHT, (0,))] = _StorageInfo("__0_0.distcp", 0, 100)


def _same_bytes(found: Metadata) -> None:
    place = next(iter(found.storage_data.values()))
    for number in range(1000):
        found.state_dict_metadata[f"o{number}"] = found.state_dict_metadata[STEP]
        found.storage_data[MetadataIndex(f"o{number}")] = _StorageInfo(place.relative_path, 0, 1000)


def _lists(found: Metadata) -> None:
    for number in range(1000):
        found.planner_data[f"w{number}"] = ("state", str(number), (1 << 20) - 1)


def _long_path(found: Metadata) -> None:
    found.planner_data[WEIGHT] = ("a",) * 1000


def _no_path(found: Metadata) -> None:
    found.planner_data[WEIGHT] = ("a", (1 << 20))


def _long_key(found: Metadata) -> None:
    found.state_dict_metadata["k" * 1_000_000] = found.state_dict_metadata[WEIGHT]


def _dots(found: Metadata) -> None:
    found.state_dict_metadata["a" + ".a" * 1000] = found.state_dict_metadata[WEIGHT]


def _other_spelling(found: Metadata) -> None:
    """As many names for one file as one likes."""
    found.storage_data.update({index: _StorageInfo("./__0_0.distcp", 0, 9) for index in found.storage_data})


def _long_file(found: Metadata) -> None:
    found.storage_data.update({index: _StorageInfo("x" * 1_000_000, 0, 9) for index in found.storage_data})


def _transforms(found: Metadata) -> None:
    next(iter(found.storage_data.values())).transform_descriptors = ["stream.zstd/1"] * 1000


def _description(found: Metadata) -> None:
    """Reading it back is cheap, telling it takes 2^60 steps."""
    lists: list[Any] = []
    for _ in range(60):
        lists = [lists, lists]
    found.mcore_data = {WEIGHT: lists}  # type: ignore[attr-defined]


def _offset(found: Metadata) -> None:
    next(iter(found.storage_data.values())).offset = -1


def _length(found: Metadata) -> None:
    next(iter(found.storage_data.values())).length = 1 << 61


def _more_elements_than_any(found: Metadata) -> None:
    found.state_dict_metadata[WEIGHT].size = torch.Size([1 << 50, 1 << 50])  # type: ignore[union-attr]


def _digits(found: Metadata) -> None:
    found.state_dict_metadata[WEIGHT].size = (10**5000, 4)  # type: ignore[union-attr,assignment]


def _twice(found: Metadata) -> None:
    entry: Any = found.state_dict_metadata[WEIGHT]
    entry.chunks = [ChunkStorageMetadata(torch.Size([0, 0]), torch.Size([3, 2]))] * 2


def _no_chunks(found: Metadata) -> None:
    entry: Any = found.state_dict_metadata[WEIGHT]
    entry.chunks = None


def _no_size(found: Metadata) -> None:
    del found.state_dict_metadata[WEIGHT].__dict__["size"]


def _key(found: Metadata) -> None:
    found.state_dict_metadata["\x1b]0;title\a"] = found.state_dict_metadata[WEIGHT]


def _number_key(found: Metadata) -> None:
    found.state_dict_metadata[3] = found.state_dict_metadata[WEIGHT]  # type: ignore[index]


def _extension(found: Metadata) -> None:
    next(iter(found.storage_data.values())).transform_descriptors = ["stream.unknown/1"]


def _nothing(found: Metadata) -> None:
    found.__dict__.clear()


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (_dims, "something else where lengths should stand"),
        (_more_dims_than_torch_has, "something else where lengths should stand"),
        (_shared_chunks, "far more memory"),
        (_claims, "has a chunk of (1099511627776,) in 100 bytes"),
        (_same_bytes, "the same ones again and again"),
        (_lists, "far more memory"),
        (_long_path, "no path"),
        (_no_path, "no path"),
        (_long_key, "a key of 1000000 characters"),
        (_dots, "and 1000 dots"),
        (_long_file, "not a file of the folder"),
        (_other_spelling, "not a file of the folder"),
        (_transforms, "a stream extension of torch"),
        (_description, "far more memory"),
        (_offset, "something else where lengths should stand"),
        (_length, ".distcp is cut off"),
        (_more_elements_than_any, "more elements than any tensor has"),
        (_digits, "a whole number of more than 255 bytes"),
        (_twice, "has elements more than once"),
        (_no_chunks, "damaged and cannot be read"),
        (_no_size, "damaged and cannot be read"),
        (_key, "a key with control characters"),
        (_number_key, "a key that is not text but int"),
        (_extension, "a stream extension of torch"),
        (_nothing, "not the metadata of torch.distributed.checkpoint"),
    ],
)
def test_metadata_that_cannot_be_true(folder: Path, change: Callable[[Metadata], None], told: str) -> None:
    hostile.edit_metadata(folder, change)
    for read in READERS:
        refused(lambda: read(folder), told)  # noqa: B023
    assert not verify(folder, deep=False).is_whole


@pytest.mark.parametrize(
    "name", ["../outside", "/etc/passwd", "..", ".", "", "a/b", "a\\b", "a\0b", "\x1b[2J", "x" * 300]
)
def test_paths_that_leave_the_folder(folder: Path, name: str) -> None:
    (folder.parent / "outside").write_bytes(saved_bytes(torch.ones(3, 4)))

    def change(found: Metadata) -> None:
        places: dict[MetadataIndex, Any] = found.storage_data
        places.update({i: _StorageInfo(name, 0, 10) for i in places if i.fqn == WEIGHT})

    hostile.edit_metadata(folder, change)
    for read in READERS:
        refused(lambda: read(folder), f"{WEIGHT} points to")  # noqa: B023


def test_spans_that_are_longer_than_what_lies_in_them(folder: Path) -> None:
    """Of a sparse file that costs its writer nothing, and of which nothing is read."""
    with (folder / "sparse.distcp").open("wb") as file:
        file.truncate(60 << 30)

    def point(found: Metadata) -> None:
        for index in found.storage_data:
            found.storage_data[index] = _StorageInfo("sparse.distcp", 0, 12 << 30)

    hostile.edit_metadata(folder, point)
    opened = CheckpointFolder(folder)
    refused(lambda: opened.read_tensor(WEIGHT), "has 12884901888 bytes, and needs no more than 1048624")
    refused(lambda: opened.read_object(STEP), "has 12884901888 bytes, and needs no more than 4294967296")


def test_a_lack_of_memory_is_told_in_words(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def lacking(*_: Any, **__: Any) -> NoReturn:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr("megatron_fsdp.checkpoint.archive._Archive", lacking)
        refused(lambda: CheckpointFolder(folder).read_object(STEP), "there is not enough memory to read")
    with monkeypatch.context() as patch:
        patch.setattr("megatron_fsdp.cli.checkpoint.inspect_folder", lacking)
        assert main(["checkpoint", "inspect", str(folder)]) == 2
    assert capsys.readouterr().err.startswith("error: there is not enough memory for this")


def test_boxes_that_do_not_hold_each_element_once_are_seen() -> None:
    """Also where as many elements are held twice as not at all; 2^10 boxes that all share a stretch take no time."""
    halves = [Box(offsets, (1,) * 10) for offsets in itertools.product((0, 1), repeat=10)]
    assert cover_problem((2,) * 10, halves) is None
    assert cover_problem((2,) * 10, [*halves[:-1], halves[0]]) == "has elements more than once"
    assert cover_problem((4, 4), [Box((0, 0), (2, 3)), Box((2, 1), (2, 3)), Box((0, 2), (2, 2))]) is not None
    for _ in range(1000):  # the check draws numbers, and no draw may let them pass
        assert cover_problem((3, 4), [Box((0, 0), (3, 2))] * 2) == "has elements more than once"
    assert cover_problem((), [Box((), ())]) is None
    half = Box((0, 0), (3, 2))  # places are drawn anew each time: none of the draws may take it for both halves
    assert all(cover_problem((3, 4), [half, half]) for _ in range(500))
    assert cover_problem((), [Box((), ())] * 2) is not None
    assert cover_problem((3, 0), []) is None


# ---- what is no file -------------------------------------------------------------------------------------------------


def _pipe(path: Path) -> None:
    os.mkfifo(path)


def _endless(path: Path) -> None:
    path.symlink_to("/dev/zero")


def _socket(path: Path) -> None:
    here = Path.cwd()
    os.chdir(path.parent)  # names of sockets are short
    try:
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(path.name)
    finally:
        os.chdir(here)


NO_FILES: list[Callable[[Path], None]] = [_pipe, _endless, _socket, Path.mkdir]


@pytest.mark.full(cover=1)
@pytest.mark.parametrize("make", NO_FILES)
@pytest.mark.parametrize(
    "name", ["manifest.json", ".metadata", "__0_0.distcp", "common.pt", "metadata.json", "structure.json"]
)
def test_what_is_no_file_is_not_waited_for(folder: Path, name: str, make: Callable[[Path], None]) -> None:
    (folder / name).unlink(missing_ok=True)
    make(folder / name)
    for words in (["inspect"], ["verify"], ["show", WEIGHT]):
        assert main(["checkpoint", words[0], str(folder), *words[1:]]) in (0, 1, 2)
    if name in ("manifest.json", ".metadata", "__0_0.distcp"):
        refused(lambda: CheckpointFolder(folder))
        assert not verify(folder).is_whole


@pytest.mark.parametrize("make", NO_FILES)
def test_a_pointer_that_is_no_file(folder: Path, make: Callable[[Path], None]) -> None:
    make(folder.parent / POINTER)
    refused(lambda: RunFolder(folder.parent).latest(), "cannot be read")
    assert main(["checkpoint", "inspect", str(folder.parent)]) == 2


@pytest.mark.parametrize("make", NO_FILES)
@pytest.mark.parametrize("name", ["model.safetensors", "model.safetensors.index.json", "part.safetensors"])
def test_weights_that_are_no_file(tmp_path: Path, name: str, make: Callable[[Path], None]) -> None:
    index = {"weight_map": {"w": "part.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    (tmp_path / name).unlink(missing_ok=True)
    make(tmp_path / name)
    refused(lambda: open_folder(tmp_path), name if name != "model.safetensors" else "part.safetensors is missing")


# ---- messages, and what is printed -----------------------------------------------------------------------------------


LONG = "n" * 1_000_000
HEADERS: dict[str, dict[str, Any]] = {
    "many dimensions": {"w": {"dtype": "F32", "shape": [1 << 61] * 60_000, "data_offsets": [0, 48]}},
    "a large dimension": {"w": {"dtype": "F32", "shape": [10**4000] * 4, "data_offsets": [0, 48]}},
    "a large offset": {"w": {"dtype": "F32", "shape": [12], "data_offsets": [0, 10**4000]}},
    "a long key": {LONG: {"dtype": "F32", "shape": [1], "data_offsets": [0, 48]}},
    "a long dtype": {"w": {"dtype": LONG, "shape": [12], "data_offsets": [0, 48]}},
    "long metadata": {"__metadata__": {"a": [LONG]}},
}


@pytest.mark.parametrize("name", HEADERS)
def test_headers_of_safetensors(tmp_path: Path, name: str) -> None:
    text = json.dumps(HEADERS[name]).encode()
    (tmp_path / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + bytes(48))
    refused(lambda: open_folder(tmp_path), "model.safetensors")


@pytest.mark.parametrize(
    "weight_map", [{"w": LONG}, {LONG: "no.safetensors"}, {LONG: 3}, {"w": "x" * 300 + ".safetensors"}]
)
def test_an_index_with_long_names(tmp_path: Path, weight_map: dict[str, Any]) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    refused(lambda: open_folder(tmp_path), "safetensors")


_NO_ENTRIES = {"version": 1, "tensors": {}, "objects": {}, "facts": {}, "checksum_name": "x"}
MANIFESTS = {
    "deep": "[" * 100_000,
    "deeper": '{"a":' * 100_000,
    "a list": "[]",
    "a number": "1" * 5000,
    "nothing": "{}",
    "text": '"' + "x" * 1000 + '"',
    "wrong types": '{"version": 1, "tensors": [], "objects": 3, "facts": {}, "checksum_name": "x"}',
    "wrong shapes": '{"version": 1, "tensors": {"a": {"shape": "3", "dtype": 1, "checksum": 2}}, "objects": {}, '
    '"facts": {}, "checksum_name": "x"}',
    "version of text": '{"version": "1", "tensors": {}, "objects": {}, "facts": {}, "checksum_name": "x"}',
    "version of truth": '{"version": true, "tensors": {}, "objects": {}, "facts": {}, "checksum_name": "x"}',
    "infinity": '{"version": Infinity}',
    "newer": '{"version": 2}',
    "other": '{"version": 1, "tensors": {"\\u001b[2J": {"shape": [1], "dtype": "torch.int8", "checksum": "0"}}, '
    '"objects": {}, "facts": {}, "checksum_name": "x"}',
    "a long version": json.dumps(_NO_ENTRIES | {"version": LONG}),
    "a long key": json.dumps(_NO_ENTRIES | {"tensors": {LONG: {"shape": [1], "dtype": "x", "checksum": "0"}}}),
    "many dimensions": json.dumps(
        _NO_ENTRIES | {"tensors": {"w": {"shape": [1] * 1_000_000, "dtype": LONG, "checksum": "0"}}}
    ),
    "a list for a dtype": json.dumps(
        _NO_ENTRIES | {"tensors": {"w": {"shape": [1], "dtype": [LONG], "checksum": "0"}}}
    ),
    "a long kind of checksums": json.dumps(_NO_ENTRIES | {"checksum_name": LONG}),
}


@pytest.mark.parametrize("kind", MANIFESTS)
def test_a_manifest_that_is_none(folder: Path, kind: str) -> None:
    (folder / "manifest.json").write_text(MANIFESTS[kind])
    for read in (by_folder, by_loading):
        refused(lambda: read(folder), "update the library" if kind == "newer" else "manifest.json")  # noqa: B023
    report = verify(folder)
    assert not report.is_whole
    assert len(str(report)) < 20_000


def test_numbers_in_keys(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Python reads no more than 4,300 digits; a key has no more than 4,096."""
    key = "9" * 4000

    def name(found: Metadata) -> None:
        found.state_dict_metadata[key] = found.state_dict_metadata[STEP]
        found.storage_data[MetadataIndex(key)] = found.storage_data[MetadataIndex(STEP)]

    hostile.edit_metadata(folder, name)
    assert main(["checkpoint", "inspect", str(folder)]) == 0
    assert main(["checkpoint", "diff", str(folder), str(folder)]) == 0
    key = "9" * 5000
    hostile.edit_metadata(folder, name)
    capsys.readouterr()
    for words in (["inspect", str(folder)], ["diff", str(folder), str(folder)]):
        assert main(["checkpoint", *words]) == 2
        told = capsys.readouterr().err
        assert told.count("\n") == 1
        assert "a key of 5000 characters" in told


@pytest.mark.parametrize(
    "name", ["lists that hold each other", "a list that holds itself", "a huge number", "a long text"]
)
def test_commands_that_print_objects_say_one_line(folder: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    hostile.plant(folder, STEP, hostile.archive_of(multipliers()[name]))
    assert main(["checkpoint", "show", str(folder), STEP]) == 2
    told = capsys.readouterr()
    assert told.err.count("\n") == 1
    assert len(told.err) < LONGEST_MESSAGE + 100
    assert STEP in told.err
    assert main(["checkpoint", "verify", str(folder)]) == 1


@pytest.mark.parametrize("depth", [90, 110, 100_000])
def test_what_nests_too_deep_is_refused_by_all(folder: Path, capsys: pytest.CaptureFixture[str], depth: int) -> None:
    hostile.plant(folder, STEP, hostile.archive_of(hostile.whole(b"N" + b"\x85" * depth)))
    is_fine = depth < 100
    assert main(["checkpoint", "show", str(folder), STEP]) == (0 if is_fine else 2)
    assert is_fine or "nests more than 100 deep" in capsys.readouterr().err
    assert main(["checkpoint", "verify", str(folder)]) == (0 if is_fine else 1)


def test_an_error_of_a_checkpoint_keeps_begin_and_end() -> None:
    told = str(CheckpointError(f"begin {LONG} end"))
    assert len(told) < LONGEST_MESSAGE
    assert told.startswith("begin nnn")
    assert told.endswith("nnn end")
