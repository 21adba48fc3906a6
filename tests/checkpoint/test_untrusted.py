"""Nothing in a checkpoint runs when it is read: a hostile pickle in each place is refused by name."""

import contextlib
import copyreg
import io
import json
import pathlib
import pickle
import tracemalloc
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import metadata as dcp_metadata
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex

from megatron_fsdp.checkpoint.folder import CheckpointFolder
from megatron_fsdp.checkpoint.loading import read_checkpoint
from megatron_fsdp.checkpoint.objects import load_object_bytes, load_tensor
from megatron_fsdp.checkpoint.restricted_pickle import load_restricted
from megatron_fsdp.checkpoint.storage import SafeLoadPlanner, SafeReader
from megatron_fsdp.checkpoint.verify import verify
from megatron_fsdp.errors import CheckpointError
from tests.support import hostile

MARKER = Path("created-by-a-pickle")
NAMES = sorted(hostile.payloads(MARKER))
WEIGHT, STEP = "model.weight", "schedule.step"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkpoint of a linear layer, as torch writes it."""
    path = tmp_path / "iter_0000001"
    state = {"model": dict(torch.nn.Linear(4, 3).state_dict()), "schedule": {"step": 5}}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is one process
        dcp.save(state, checkpoint_id=path, no_dist=True)
    return path


def by_folder(folder: Path) -> None:
    opened = CheckpointFolder(folder)
    for key in opened.tensors:
        opened.read_tensor(key)
    for key in opened.objects:
        opened.read_object(key)


def by_dcp(folder: Path) -> None:
    state: dict[str, Any] = {
        "model": {"weight": torch.zeros(3, 4), "bias": torch.zeros(3)},
        "schedule": {"step": 0},
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            dcp.load(
                state, storage_reader=SafeReader(CheckpointFolder(folder)), planner=SafeLoadPlanner(), no_dist=True
            )
        except CheckpointException as error:  # what torch puts around errors
            raise error.failures[0][0] from error


def by_loading(folder: Path) -> None:
    """With the step as something that a model's owner loads too."""

    class Step:
        def state_dict(self) -> dict[str, Any]:
            return {"step": 1}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            raise AssertionError(f"given {state}")

    model = torch.nn.Linear(4, 3)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    try:
        read_checkpoint(folder, model, extra={"schedule": Step()}, with_rng=False)
    except CheckpointError as error:
        if "in memory now" not in str(error):
            assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
        raise


def by_verify(folder: Path) -> None:
    report = verify(folder)
    if not report.is_whole:
        raise CheckpointError(str(report))


READERS = [by_folder, by_dcp, by_loading, by_verify]
Reader = Callable[[Path], None]


def refused(read: Reader, folder: Path, marker: Path, *told: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        read(folder)
    for words in told:
        assert words in str(caught.value)
    assert not marker.exists()


def test_the_payloads_would_work(tmp_path: Path) -> None:
    """Those that are complete do create the file when Python's own reader takes them."""
    for name in ("eval", "exec", "system", "nested pickle", "instance", "object"):
        marker = tmp_path / name.replace(" ", "-")
        raw, _ = hostile.payloads(marker)[name]
        try:
            pickle.loads(raw)
        except pickle.UnpicklingError:
            pytest.fail(f"{name} is no pickle")
        assert marker.exists(), name


@pytest.mark.parametrize("name", NAMES)
def test_in_the_metadata(folder: Path, tmp_path: Path, name: str) -> None:
    marker = tmp_path / "marker"
    raw, told = hostile.payloads(marker)[name]
    (folder / ".metadata").write_bytes(raw)
    for read in READERS:
        refused(read, folder, marker, told, ".metadata")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("key", [WEIGHT, STEP])
def test_in_the_entry_of_a_tensor_or_object(folder: Path, tmp_path: Path, name: str, key: str) -> None:
    marker = tmp_path / "marker"
    raw, told = hostile.payloads(marker)[name]
    hostile.plant(folder, key, hostile.archive_of(raw))
    for read in READERS:
        refused(read, folder, marker, told, key)


@pytest.mark.parametrize("name", NAMES)
def test_in_the_common_file_of_megatron(folder: Path, tmp_path: Path, name: str) -> None:
    marker = tmp_path / "marker"
    raw, told = hostile.payloads(marker)[name]
    (folder / "common.pt").write_bytes(hostile.archive_of(raw))
    refused(by_verify, folder, marker, told, "common.pt")


class Evil:
    """Creates a file when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return open, (str(self.marker), "w")


@pytest.mark.parametrize("read", READERS)
def test_deep_inside_of_good_metadata(folder: Path, tmp_path: Path, read: Reader) -> None:
    marker = tmp_path / "marker"

    def change(found: Metadata) -> None:
        found.planner_data = {"model.weight": ("model", Evil(marker))}

    hostile.edit_metadata(folder, change)
    refused(read, folder, marker, "io.open", ".metadata")


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
        (b"", "not an archive"),
    ):
        hostile.plant(folder, key, raw, file="model.safetensors")
        refused(read, folder, marker, told, key)


@pytest.mark.parametrize("kind", sorted(hostile.tampering()))
def test_classes_and_functions_stay_as_they_are(kind: str) -> None:
    raw = hostile.tampering()[kind]
    for read in (
        lambda: load_restricted(_stream(raw), "here"),
        lambda: load_object_bytes(hostile.archive_of(raw), "here"),
    ):
        with pytest.raises(CheckpointError, match="here"):
            read()
    assert not pathlib.PurePosixPath("x").is_absolute()
    assert not hasattr(Metadata, "is_absolute")
    assert dcp_metadata._MEM_FORMAT_ENCODING(0).value == 0


@pytest.mark.parametrize("kind", sorted(hostile.bombs()))
def test_short_pickles_take_little(kind: str) -> None:
    raw = hostile.bombs()[kind]
    archive = hostile.archive_of(raw)
    tracemalloc.start()
    try:
        for read in (lambda: load_restricted(_stream(raw), "here"), lambda: load_object_bytes(archive, "here")):
            with contextlib.suppress(CheckpointError):
                read()
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 64 << 20


def test_what_other_pickles_have_registered_is_out_of_reach(tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    copyreg.add_extension("builtins", "eval", 0xF1)
    try:
        raw, _ = hostile.payloads(marker)["extension code"]
        pickle.loads(raw)
        assert marker.exists()
        marker.unlink()
        with pytest.raises(CheckpointError, match="0x82"):
            load_restricted(_stream(raw), "here")
        assert not marker.exists()
    finally:
        copyreg.remove_extension("builtins", "eval", 0xF1)


@pytest.mark.parametrize(
    ("numel", "size", "stride", "start", "key"),
    [
        (1 << 20, (3, 4), (4, 1), 0, "0"),  # more elements than the record has
        (12, (3, 4), (4, 1), 1, "0"),  # beyond the end
        (12, (3, 4), (1 << 40, 1), 0, "0"),
        (12, (1 << 50, 4), (0, 0), 0, "0"),  # one element that stands for many
        (12, (3, 4), (-4, 1), 0, "0"),
        (12, (-3, -4), (4, 1), 0, "0"),
        (12, (3, 4), (4,), 0, "0"),
        (-1, (3, 4), (4, 1), 0, "0"),
        (12, (3, 4), (4, 1), 0, "../../etc/passwd"),
        (12, (3, 4), (4, 1), 0, "1"),
        (12, (3, 4), (0, 0), 0, "0"),
    ],
)
def test_tensors_that_claim_what_is_not_there(
    folder: Path, numel: int, size: tuple[int, ...], stride: tuple[int, ...], start: int, key: str
) -> None:
    pickled = hostile.tensor_pickle(numel, size, stride, start=start, key=key)
    raw = bytes(48) if stride != (0, 0) or size != (3, 4) else bytes(4)
    if len(raw) == 4:
        pickled = hostile.tensor_pickle(1, size, stride)
    hostile.plant(folder, WEIGHT, hostile.archive_of(pickled, data_0=raw))
    for read in READERS:
        refused(read, folder, folder / "marker", WEIGHT)


def test_the_same_tensor_without_a_lie_is_read(folder: Path) -> None:
    values = torch.arange(12.0).reshape(3, 4)
    pickled = hostile.tensor_pickle(12, (3, 4), (4, 1))
    hostile.plant(folder, WEIGHT, hostile.archive_of(pickled, data_0=values.numpy().tobytes()))
    assert torch.equal(CheckpointFolder(folder).read_tensor(WEIGHT), values)


@pytest.mark.parametrize(
    "name", ["../outside", "/etc/passwd", "..", ".", "", "a/b", "a\\b", "a\0b", "\x1b[2J", "x" * 300]
)
@pytest.mark.parametrize("read", READERS)
def test_paths_that_leave_the_folder(folder: Path, read: Reader, name: str) -> None:
    (folder.parent / "outside").write_bytes(hostile.tensor_bytes(torch.ones(3, 4)))

    def change(found: Metadata) -> None:
        places: dict[MetadataIndex, Any] = found.storage_data
        places.update({i: _StorageInfo(name, 0, 10) for i in places if i.fqn == WEIGHT})

    hostile.edit_metadata(folder, change)
    refused(read, folder, folder / "marker", "not a file of the folder", WEIGHT)


def test_a_link_is_followed_and_what_it_leads_to_is_data(folder: Path, tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    raw, told = hostile.payloads(marker)["eval"]
    hostile.plant(folder, STEP, hostile.archive_of(raw))
    moved = (folder / "planted.distcp").rename(tmp_path / "elsewhere")
    (folder / "planted.distcp").symlink_to(moved)
    for read in READERS:
        refused(read, folder, marker, told)


def _offset(found: Metadata) -> None:
    next(iter(found.storage_data.values())).offset = -1


def _length(found: Metadata) -> None:
    next(iter(found.storage_data.values())).length = 1 << 61


def _huge(found: Metadata) -> None:
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
    "change",
    [_offset, _length, _huge, _digits, _twice, _no_chunks, _no_size, _key, _number_key, _extension, _nothing],
)
@pytest.mark.parametrize("read", READERS)
def test_metadata_that_make_no_sense(folder: Path, read: Reader, change: Callable[[Metadata], None]) -> None:
    hostile.edit_metadata(folder, change)
    refused(read, folder, folder / "marker")


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
}


@pytest.mark.parametrize("kind", sorted(MANIFESTS))
@pytest.mark.parametrize("read", READERS)
def test_a_manifest_that_is_none(folder: Path, read: Reader, kind: str) -> None:
    (folder / "manifest.json").write_text(MANIFESTS[kind])
    refused(read, folder, folder / "marker", "manifest.json", *(["update the library"] if kind == "newer" else []))


def test_arrays_of_numpy_that_would_end_the_process() -> None:
    reconstruct = "numpy._core.multiarray"
    objects = hostile.call("numpy", "dtype", "O8", False, True)
    empty = b"c" + f"{reconstruct}\n_reconstruct\n".encode() + b"cnumpy\nndarray\n" + pickle.dumps((0,), 2)[2:-1]
    empty += b"C\1b" + b"\x87R"
    floats = hostile.call("numpy", "dtype", "f8", False, True)

    def state(dtype: bytes, shape: tuple[int, ...], raw: bytes) -> bytes:
        return b"(" + _inline(1) + _inline(shape) + dtype + b"\x89" + _inline(raw) + b"t"

    wrong = {
        "objects": hostile.whole(objects),
        "length": hostile.whole(empty + state(floats, (1 << 40,), bytes(8)) + b"b"),
        "short": hostile.whole(empty + state(floats, (3,), bytes(8)) + b"b"),
        "fields": hostile.whole(floats + _inline((3, "<", None, ("a",), {"a": 1}, 8, 8, 63)) + b"b"),
        "flags": hostile.whole(floats + _inline((3, "<", None, None, None, -1, -1, 63)) + b"b"),
        "scalar": hostile.whole(f"c{reconstruct}\nscalar\n".encode() + floats + _inline(b"123") + b"\x86R"),
    }
    for name, raw in wrong.items():
        with pytest.raises(CheckpointError, match="NumPy"):
            load_object_bytes(hostile.archive_of(raw), name)
    right = hostile.whole(
        empty + state(floats, (1,), torch.tensor([2.5], dtype=torch.float64).numpy().tobytes()) + b"b"
    )
    assert load_object_bytes(hostile.archive_of(right), "right").tolist() == [2.5]


def test_torchs_own_switches_change_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Neither what a program has allowed torch to load nor torch's environment variables widen or break reading."""
    marker = tmp_path / "marker"
    raw, told = hostile.payloads(marker)["eval"]
    for variable in ("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "TORCH_FORCE_WEIGHTS_ONLY_LOAD"):
        with monkeypatch.context() as patched:
            patched.setenv(variable, "1")
            by_folder(folder)
            with torch.serialization.safe_globals([eval]), pytest.raises(CheckpointError, match=told):
                load_tensor(bytearray(hostile.archive_of(raw)), "here")
    assert not marker.exists()


def _inline(value: Any) -> bytes:
    """The operations of a plain value."""
    return pickle.dumps(value, 3)[2:-1]


def _stream(raw: bytes) -> Any:
    return io.BytesIO(raw)
