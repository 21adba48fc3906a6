"""What reading a hostile file costs: memory and time in proportion to its size, no waiting, messages of bounded length.

Everything here is refused by counting; nothing waits for a clock. `limited` is a guard for the day a limit is lost.
"""

import copy
import io
import itertools
import json
import os
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
from megatron_fsdp.checkpoint.folder import CheckpointFolder, Chunks, Span
from megatron_fsdp.checkpoint.metadata_reader import load_metadata
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
    """Short pickles that stand for hundreds of megabytes, for hours, or for something without end."""
    numbers = b"(" + b"".join(b"J" + struct.pack("<i", number) for number in range(2000))
    pairs = b"](" + b"".join(b"J" + struct.pack("<i", number) + b"N\x86" for number in range(2000)) + b"e"
    names = b"}(" + b"".join(b"X\5\0\0\0%05dN" % number for number in range(2000)) + b"u"
    long = struct.pack("<I", 100_000) + b"x" * 100_000
    array = b"cnumpy._core.multiarray\n_reconstruct\n(cnumpy\nndarray\n" + hostile.plain((0,)) + b"C\1btR"
    state = (
        b"(K\1" + hostile.plain((100_000,)) + hostile.call("numpy", "dtype", "u1", False, True) + b"\x89B" + long + b"t"
    )
    index = b"ctorch.distributed.checkpoint.metadata\nMetadataIndex\n"
    shared = b")" + b"".join(b"q" + bytes([i]) + b"h" + bytes([i]) + b"\x86" for i in range(60))
    lists = [b"](" + _get(place - 1) * 2 + b"e" + _put(place) for place in range(1, 60)]
    fqn, offset = hostile.plain("fqn"), hostile.plain("offset")
    indices = [
        index + b")\x81}(" + fqn + _get(place - 1) + offset + _get(place - 1) + b"ub" + _put(place)
        for place in range(1, 60)
    ]
    return {
        "bytearrays": _results(b"cbuiltins\nbytearray\n", b"B" + long),
        "ordered dicts": _results(b"ccollections\nOrderedDict\n", pairs),
        "frozensets": _results(b"cbuiltins\nfrozenset\n", numbers + b"t"),
        "bytes as text": _results(b"c_codecs\nencode\n", b"X" + long),
        "arguments of foreign classes": _results(b"cnemo\nThing\n", numbers + b"t", _get(0) + _get(1) + b"\x81"),
        "namespaces": _results(b"cargparse\nNamespace\n", names, _get(0) + b")\x81" + _get(1) + b"b"),
        "arrays": _results(b"N", state, array + _get(1) + b"b"),
        "a long text": _results(b"N", b"X" + long, _get(1)),
        "lists that hold each other": hostile.whole(b"]" + _put(0), *lists, _get(59)),
        "a list that holds itself": hostile.whole(b"]" + _put(0) + _get(0) + _get(0) + b"a"),
        "a huge number": hostile.whole(b"\x8b" + struct.pack("<i", 2000) + b"\x7f" * 2000),
        "an array of another size": hostile.whole(hostile.call("numpy", "ndarray", (1 << 30,))),
        "an index of a range": hostile.whole(
            index + b"(" + hostile.plain("w") + hostile.call("builtins", "range", 10**8) + b"tR"
        ),
        "hash of nested indices": hostile.whole(index + b")\x81" + _put(0), *indices, b"}" + _get(59) + b"Ns"),
        "large keys of one hash": hostile.whole(
            hostile.plain(dict.fromkeys(n * ((1 << 61) - 1) for n in range(16, 3000)))
        ),
        "a large memo": hostile.whole(b"Kr" + b"r" + struct.pack("<I", (1 << 31) - 1)),
        "hash of shared tuples": hostile.whole(b"}" + shared + b"Ks"),
        "hash of deep tuples": hostile.whole(b"}" + b")" + b"\x85" * 100_000 + b"K\1s"),
        "set of a range": hostile.whole(b"cbuiltins\nset\n" + hostile.call("builtins", "range", 10**12) + b"\x85R"),
        "a long bytearray": hostile.whole(b"\x96" + struct.pack("<Q", 10**11)),
        "a long frame": hostile.whole(b"\x95" + struct.pack("<Q", 10**11)),
        "deep lists": hostile.whole(b"]" * 50_000 + b"a" * 49_999),
        "copies by codec": hostile.whole(hostile.call("_codecs", "encode", "x", "rot13")),
    }


READABLE = {"a large memo", "hash of shared tuples"}
"""They stand for little, where what they repeat is not made anew."""


@pytest.mark.parametrize(
    ("name", "where"), list(zip(sorted(multipliers()), itertools.cycle(["metadata", "object", "tensor"]), strict=False))
)
def test_pickles_that_multiply_what_they_hold(name: str, where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(safe_read, "SPARE_BYTES", 1 << 20)
    raw = multipliers()[name]
    archive = hostile.archive_of(raw)
    load = {
        "metadata": lambda: load_metadata(io.BytesIO(raw), "here"),
        "object": lambda: load_object(archive, "here"),
    }.get(where, lambda: load_tensor(io.BytesIO(archive), "here"))
    tracemalloc.start()
    try:
        if name in READABLE and where != "tensor":
            load()
        else:
            refused(load, "here")
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
    "pairs as keys": {(number, -number): None for number in range(20_000)},
    "sets": [{number, number + 1} for number in range(300)] + [set(range(50_000)), frozenset(range(300))],
    "bytes": [bytes(500_000), bytearray(500_000), np.zeros(100_000)],
    "one dict in many places": [[{"lr": 0.1, "betas": [0.9, 0.95]}] * 5000],
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


# ---- metadata --------------------------------------------------------------------------------------------------------


DOUBLED: list[Any] = []
for _ in range(60):
    DOUBLED = [DOUBLED, DOUBLED]  # reading it back is cheap, telling it takes 2^60 steps
THOUSAND, NO_LENGTHS = range(1000), "something else where lengths should stand"
NO_FILE, EXTENSION = "not a file of the folder", "a stream extension of torch"
OUTSIDE = ["../outside", "/etc/passwd", "..", ".", "", "a/b", "a\\b", "a\0b", "\x1b[2J", "x" * 300, "x" * 10**6]


def tensor(shape: Any, *chunks: tuple[tuple[int, ...], tuple[int, ...]]) -> TensorStorageMetadata:
    found = [ChunkStorageMetadata(torch.Size(offsets), torch.Size(lengths)) for offsets, lengths in chunks]
    return TensorStorageMetadata(TensorProperties(torch.float32), shape, found)


def describe(shape: Any, *chunks: Any) -> Callable[[Any], object]:
    """Metadata say that the weight is such a tensor."""
    return lambda m: m.state_dict_metadata.update({WEIGHT: tensor(shape, *chunks)})


def call(key: Any) -> Callable[[Any], object]:
    """The weight has another name, too."""
    return lambda m: m.state_dict_metadata.update({key: m.state_dict_metadata[WEIGHT]})


def lead(path: Any) -> Callable[[Any], object]:
    """The weight has another path in the state dict."""
    return lambda m: m.planner_data.update({WEIGHT: path})


def place(name: str) -> Callable[[Any], object]:
    """Everything lies in a file of this name."""
    return lambda m: m.storage_data.update(dict.fromkeys(m.storage_data, _StorageInfo(name, 0, 9)))


def set_first(**fields: Any) -> Callable[[Any], object]:
    """The first place has other fields."""
    return lambda m: vars(next(iter(m.storage_data.values()))).update(fields)


def share_chunks(m: Any) -> None:
    """Those without elements may lie anywhere any number of times."""
    empty = tensor((0, 4), ((0, 0), (0, 4))).chunks * 1000
    m.state_dict_metadata.update(
        {f"w{n}": TensorStorageMetadata(TensorProperties(torch.float32), torch.Size((0, 4)), empty) for n in THOUSAND}
    )
    m.storage_data.update({MetadataIndex(f"w{n}"): _StorageInfo("__0_0.distcp", 0, 10) for n in THOUSAND})


def claim(m: Any) -> None:
    describe((1 << 40,), ((0,), (1 << 40,)))(m)
    m.storage_data[MetadataIndex(WEIGHT, (0,))] = _StorageInfo("__0_0.distcp", 0, 100)


def share_bytes(m: Any) -> None:
    file = next(iter(m.storage_data.values())).relative_path
    m.state_dict_metadata.update({f"o{n}": m.state_dict_metadata[STEP] for n in THOUSAND})
    m.storage_data.update({MetadataIndex(f"o{n}"): _StorageInfo(file, 0, 1000) for n in THOUSAND})


METADATA: dict[str, tuple[Callable[[Any], object], str]] = {
    "long lengths": (describe((1 << 61,) * 60_000), NO_LENGTHS),
    "more dimensions than torch has": (describe((1,) * 65), NO_LENGTHS),
    "more elements than any": (describe(torch.Size([1 << 50, 1 << 50])), "more elements than any tensor has"),
    "digits": (describe((10**5000, 4)), "a whole number of more than 255 bytes"),
    "twice": (describe(torch.Size([3, 4]), *[((0, 0), (3, 2))] * 2), "has elements more than once"),
    "shared chunks": (share_chunks, "far more memory"),
    "a claim": (claim, "has a chunk of (1099511627776,) in 100 bytes"),
    "the same bytes": (share_bytes, "the same ones again and again"),
    "lists": (
        lambda m: m.planner_data.update({f"w{n}": ("state", str(n), (1 << 20) - 1) for n in THOUSAND}),
        "far more memory",
    ),
    "no path": (lead(("a", (1 << 20))), "no path"),
    "a long key": (call("k" * 1_000_000), "a key of 1000000 characters"),
    "dots": (call("a" + ".a" * 1000), "and 1000 dots"),
    "a control character": (call("\x1b]0;title\a"), "a key with control characters"),
    "a number for a key": (call(3), "a key that is not text but int"),
    **{f"file {name[:9]!a} of {len(name)}": (place(name), NO_FILE) for name in OUTSIDE},
    "another spelling": (place("./__0_0.distcp"), NO_FILE),  # as many names for one file as one likes
    "transforms": (set_first(transform_descriptors=["stream.zstd/1"] * 1000), EXTENSION),
    "an offset": (set_first(offset=-1), NO_LENGTHS),
    "a length": (set_first(length=1 << 61), ".distcp is cut off"),
    "a description": (lambda m: setattr(m, "mcore_data", {WEIGHT: DOUBLED}), "far more memory"),
    "no chunks": (lambda m: setattr(m.state_dict_metadata[WEIGHT], "chunks", None), "damaged and cannot be read"),
    "nothing": (lambda m: vars(m).clear(), "not the metadata of torch.distributed.checkpoint"),
}


@pytest.mark.parametrize("kind", METADATA)
def test_metadata_that_cannot_be_true(folder: Path, kind: str) -> None:
    change, told = METADATA[kind]
    (folder.parent / "outside").write_bytes(saved_bytes(torch.ones(3, 4)))
    hostile.edit_metadata(folder, change)
    for read in READERS:
        refused(lambda: read(folder), told)  # noqa: B023
    assert not verify(folder, deep=False).is_whole


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


def cover_problem(shape: tuple[int, ...], boxes: list[Box]) -> str | None:
    return Chunks.of(len(shape), boxes, [Span("", 0, 0)] * len(boxes)).boxes.cover_problem(shape)


def test_boxes_that_do_not_hold_each_element_once_are_seen() -> None:
    """Also where as many elements are held twice as not at all; 2^10 boxes that all share a stretch take no time."""
    halves = [Box(offsets, (1,) * 10) for offsets in itertools.product((0, 1), repeat=10)]
    assert cover_problem((2,) * 10, halves) is None
    assert cover_problem((2,) * 10, [*halves[:-1], halves[0]]) == "has elements more than once"
    assert cover_problem((4, 4), [Box((0, 0), (2, 3)), Box((2, 1), (2, 3)), Box((0, 2), (2, 2))]) is not None
    for _ in range(1000):  # the check draws numbers, and no draw may let them pass
        assert cover_problem((3, 4), [Box((0, 0), (3, 2))] * 2) == "has elements more than once"
    assert cover_problem((), [Box((), ())]) is None
    assert cover_problem((), [Box((), ())] * 2) is not None
    assert cover_problem((3, 0), []) is None


# ---- what is no file -------------------------------------------------------------------------------------------------


def _socket(path: Path) -> None:
    here = Path.cwd()
    os.chdir(path.parent)  # names of sockets are short
    try:
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(path.name)
    finally:
        os.chdir(here)


NO_FILES: dict[str, Callable[[Path], object]] = {
    "pipe": os.mkfifo,
    "endless": lambda path: path.symlink_to("/dev/zero"),
    "socket": _socket,
    "folder": Path.mkdir,
}
anything_but_a_file = pytest.mark.parametrize("make", NO_FILES.values(), ids=NO_FILES)


@pytest.mark.full(cover=1)
@anything_but_a_file
@pytest.mark.parametrize(
    "name", ["manifest.json", ".metadata", "__0_0.distcp", "common.pt", "metadata.json", "structure.json"]
)
def test_what_is_no_file_is_not_waited_for(folder: Path, name: str, make: Callable[[Path], object]) -> None:
    (folder / name).unlink(missing_ok=True)
    make(folder / name)
    for words in (["inspect"], ["verify"], ["show", WEIGHT]):
        assert main(["checkpoint", words[0], str(folder), *words[1:]]) in (0, 1, 2)
    if name in ("manifest.json", ".metadata", "__0_0.distcp"):
        refused(lambda: CheckpointFolder(folder))
        assert not verify(folder).is_whole


@anything_but_a_file
def test_a_pointer_that_is_no_file(folder: Path, make: Callable[[Path], object]) -> None:
    make(folder.parent / POINTER)
    refused(lambda: RunFolder(folder.parent).latest(), "cannot be read")
    assert main(["checkpoint", "inspect", str(folder.parent)]) == 2


# ---- messages, and what is printed -----------------------------------------------------------------------------------


LONG = "n" * 1_000_000


def manifest_of(**changes: Any) -> str:
    return json.dumps({"version": 1, "tensors": {}, "objects": {}, "facts": {}, "checksum_name": "x"} | changes)


def of_entry(key: str = "w", shape: Any = (1,), dtype: Any = "x", checksum: Any = "0") -> str:
    return manifest_of(tensors={key: {"shape": shape, "dtype": dtype, "checksum": checksum}})


MANIFESTS = {
    "deep": "[" * 100_000,
    "a list": "[]",
    "nothing": "{}",
    "wrong types": manifest_of(tensors=[], objects=3),
    "wrong shapes": of_entry("a", "3", 1, 2),
    "version of text": manifest_of(version="1"),
    "newer": '{"version": 2}',
    "other": of_entry("\x1b[2J", dtype="torch.int8"),
    "a long version": manifest_of(version=LONG),
    "a long key": of_entry(LONG),
    "a long kind of checksums": manifest_of(checksum_name=LONG),
}


@pytest.mark.parametrize("kind", MANIFESTS)
def test_a_manifest_that_is_none(folder: Path, kind: str) -> None:
    (folder / "manifest.json").write_text(MANIFESTS[kind])
    for read in (by_folder, by_loading):
        refused(lambda: read(folder), "update the library" if kind == "newer" else "manifest.json")  # noqa: B023
    report = verify(folder)
    assert not report.is_whole
    assert len(str(report)) < 20_000


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
