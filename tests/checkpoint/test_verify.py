"""Checksums, what `verify` and its command say of whole and damaged checkpoints, and readers of damaged bytes."""

import itertools
import json
import math
import pickle
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex

from megatron_fsdp.checkpoint import manifest
from megatron_fsdp.checkpoint.folder import CheckpointFolder
from megatron_fsdp.checkpoint.load import load_checkpoint
from megatron_fsdp.checkpoint.manifest import checksum_box, combine
from megatron_fsdp.checkpoint.store import POINTER
from megatron_fsdp.checkpoint.verify import NO_MANIFEST, NOT_READ, VerifyReport, verify
from megatron_fsdp.cli.main import main
from megatron_fsdp.errors import CheckpointError
from megatron_fsdp.sharding.shards import boxes_of_range
from tests.support import hostile
from tests.support.dcp_contents import same
from tests.support.hostile import saved_bytes, small_state
from tests.support.torch_dist import GptSpec, WriteOptions, make_truth, write_torch_dist
from tests.support.zoo import Holder

DATA, WEIGHT, LR = "__0_0.distcp", "model.weight", "optimizer.lr"
Found = set[tuple[str, str]]


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("good") / "iter_0000001"
    hostile.write_ours(folder)
    return folder


@pytest.fixture
def folder(good: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(good, tmp_path / "iter_0000001"))


def names(report: VerifyReport) -> tuple[Found, Found, Found]:
    return (
        {(found.kind, found.name) for found in report.damaged},
        {(found.kind, found.name) for found in report.missing},
        {(found.kind, found.name) for found in report.unexpected},
    )


def edit_manifest(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    path = folder / "manifest.json"
    found = json.loads(path.read_text())
    change(found)
    path.write_text(json.dumps(found))


def test_a_whole_one(folder: Path) -> None:
    report = verify(folder)
    assert report.is_whole
    assert (report.tensors, report.objects) == (5, 5)
    assert report.unverified == []
    assert report.nbytes >= 6 * 5 * 4 + 7 * 2 + 3 + 4
    assert str(report).startswith(f"{folder}: whole (5 tensors, 5 objects")
    assert json.loads(json.dumps(report.to_dict()))["is_whole"] is True


def flip(folder: Path) -> None:
    """Change one bit of a tensor's elements."""
    raw = bytearray((folder / DATA).read_bytes())
    raw[raw.index(hostile.small_state()["model"]["weight"].numpy().tobytes()) + 5] ^= 1
    (folder / DATA).write_bytes(raw)


def test_quickly_contents_stay_unread(folder: Path) -> None:
    flip(folder)
    report = verify(folder, deep=False)
    assert report.is_whole
    assert report.nbytes == 0
    assert {found.reason for found in report.unverified} == {NOT_READ}
    assert len(report.unverified) == 10


def test_without_a_manifest_contents_are_read_and_not_compared(folder: Path) -> None:
    (folder / "manifest.json").unlink()
    report = verify(folder)
    assert report.is_whole
    assert {found.reason for found in report.unverified} == {NO_MANIFEST}
    assert f"unverified, 10 of 10 tensors and objects: {NO_MANIFEST}" in str(report)


def _missing(folder: Path) -> None:
    hostile.plant(folder, WEIGHT, saved_bytes(torch.zeros(6, 5)))
    (folder / "planted.distcp").unlink()


def _cut_off(folder: Path) -> None:
    hostile.plant(folder, LR, saved_bytes(0.1))
    (folder / "planted.distcp").write_bytes(saved_bytes(0.1)[:-1])


def _flipped(folder: Path) -> None:
    """Without a manifest, torch's own checksums find it."""
    (folder / "manifest.json").unlink()
    flip(folder)


def _shared_bytes(folder: Path) -> None:
    """Metadata let two tensors lie in the same bytes."""

    def change(found: Metadata) -> None:
        places: dict[MetadataIndex, _StorageInfo] = found.storage_data
        step, flags = (next(at for at in places if at.fqn == name) for name in ("optimizer.step", "model.flags"))
        places[step] = places[flags]

    hostile.edit_metadata(folder, change)


@pytest.mark.parametrize(
    ("spoil", "damaged", "missing", "told"),
    [
        (_missing, {("tensor", WEIGHT)}, {("file", "planted.distcp")}, "planted.distcp is missing"),
        (_cut_off, {("file", "planted.distcp"), ("object", LR)}, set(), "is cut off"),
        (_flipped, {("tensor", WEIGHT)}, set(), "the checksum of 'data/0' does not fit"),
        (
            lambda folder: hostile.plant(folder, LR, saved_bytes(0.2)),
            {("object", LR)},
            set(),
            "holds other bytes than were saved",
        ),
        (_shared_bytes, {("tensor", "optimizer.step")}, set(), "where the metadata say () of torch.float32"),
        (  # as where files of two checkpoints were mixed
            lambda folder: hostile.plant(folder, WEIGHT, saved_bytes(torch.zeros(6, 5))),
            {("tensor", WEIGHT)},
            set(),
            "another one stands in its place",
        ),
    ],
)
def test_what_is_not_as_it_was_saved(
    folder: Path, spoil: Callable[[Path], None], damaged: Found, missing: Found, told: str
) -> None:
    spoil(folder)
    for deep in (True, False) if missing else (True,):
        report = verify(folder, deep=deep)
        assert names(report) == (damaged, missing, set())
        assert told in str(report)


def test_names_that_only_one_of_manifest_and_metadata_has(folder: Path) -> None:
    def change(found: dict[str, Any]) -> None:
        found["tensors"]["model.lost"] = found["tensors"].pop(WEIGHT)
        found["objects"]["lost"] = found["objects"].pop(LR)
        found["tensors"]["model.bias"]["shape"] = [1, 7]

    edit_manifest(folder, change)
    report = verify(folder)
    damaged, missing, unexpected = names(report)
    assert damaged == {("tensor", "model.bias")}
    assert missing == {("tensor", "model.lost"), ("object", "lost")}
    assert unexpected == {("tensor", WEIGHT), ("object", LR)}
    assert {found.name for found in report.unverified} == {WEIGHT, LR}


def test_files_that_belong_to_nothing_are_named_and_do_no_harm(folder: Path) -> None:
    (folder / "__9_0.distcp").write_bytes(b"left over")
    (folder / "tokenizer").mkdir()
    report = verify(folder)
    assert names(report) == (set(), set(), {("file", "__9_0.distcp"), ("file", "tokenizer")})
    assert report.is_whole


@pytest.mark.parametrize("content", [None, b"", b"\x80\x04.", pickle.dumps(Metadata({}, storage_data=None))])
def test_without_metadata_nothing_else_can_be_said(folder: Path, content: bytes | None) -> None:
    path = folder / ".metadata"
    path.unlink()
    if content is not None:
        path.write_bytes(content)
    damaged, missing, _ = names(verify(folder))
    assert (missing if content is None else damaged) == {("file", ".metadata")}


def files(report: VerifyReport) -> dict[str, set[str]]:
    kinds = {"damaged": report.damaged, "missing": report.missing, "unexpected": report.unexpected}
    return {kind: {item.name for item in found} for kind, found in kinds.items() if found}


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
        common.write_bytes(b"PK")
        assert files(verify(folder)) == {"missing": {"metadata.json"}, "damaged": {"common.pt"}}
        common.unlink()
        assert files(verify(folder)) == {"missing": {"metadata.json", "common.pt"}}
        marker.write_bytes(right)
        assert files(verify(folder)) == {"missing": {"common.pt"}}
        assert "common.pt: iteration, arguments and parameter groups" in str(verify(folder))


# ---- the command ----------------------------------------------------------------------------------------------------


def command(*arguments: str | Path) -> int:
    return main(["checkpoint", "verify", *map(str, arguments)])


@pytest.fixture
def root(good: Path, tmp_path: Path) -> Path:
    """Two checkpoints; of the first, which is not the latest, a bit is flipped."""
    for name in ("iter_0000001", "iter_0000002"):
        shutil.copytree(good, tmp_path / "run" / name)
    (tmp_path / "run" / POINTER).write_text("2")
    flip(tmp_path / "run" / "iter_0000001")
    return tmp_path / "run"


def test_exit_status_and_words(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command(root) == 0
    assert f"{root / 'iter_0000002'}: whole" in capsys.readouterr().out
    assert command(root / "iter_0000001") == 1
    assert "tensor model.weight: cannot be read: model.weight at " in capsys.readouterr().out
    assert command(root / "iter_0000001", "--quick") == 0
    capsys.readouterr()
    assert command(root, "--all") == 1
    out = capsys.readouterr().out
    assert "iter_0000001: DAMAGED" in out
    assert "iter_0000002: whole" in out
    (root / "iter_0000002" / ".metadata").unlink()
    assert command(root / "iter_0000002") == 1
    assert "file .metadata: without it nothing can be read" in capsys.readouterr().out
    assert command(root) == 1


@pytest.mark.parametrize("said", ["7", "\x1b[2J"])
def test_a_wrong_pointer_is_damage_and_the_checkpoints_are_looked_at(
    root: Path, capsys: pytest.CaptureFixture[str], said: str
) -> None:
    (root / POINTER).write_text(said)
    assert command(root) == 1
    out = capsys.readouterr().out
    assert POINTER in out
    assert "iter_0000002: whole" in out
    assert "\x1b" not in out


def test_what_cannot_be_looked_at(root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty").mkdir()
    one = root / "iter_0000001"
    for words, told in (((tmp_path / "empty",), "no checkpoint"), ((one, "--all"), "--all takes")):
        assert command(*words) == 2
        assert told in capsys.readouterr().err


# ---- damaged bytes anywhere ------------------------------------------------------------------------------------------

CASES = 60
METADATA, MANIFEST = ".metadata", "manifest.json"


def read_all(folder: Path) -> dict[str, Any]:
    opened = CheckpointFolder(folder)
    found: dict[str, Any] = {key: opened.read_tensor(key) for key in opened.tensors}
    return found | {key: opened.read_object(key) for key in opened.objects}


_OPERATIONS = [code for code in vars(pickle).values() if isinstance(code, bytes) and len(code) == 1]


def damaged(raw: bytes, seed: int) -> bytes:
    """The same bytes, damaged in a way that the seed decides; of an empty file nothing is left to damage."""
    if not raw:
        return raw
    draw = random.Random(seed)
    first, other, count = draw.randrange(len(raw)), draw.randrange(len(raw)), draw.choice([1, 1, 1, 4, 64])
    piece, rest = raw[first : first + count], raw[first + count :]
    changed = draw.choice(
        [
            bytes([piece[0] ^ 1 << draw.randrange(8), *piece[1:]]),
            draw.randbytes(count) + piece,
            bytes(len(piece)),
            b"",
            raw[other : other + len(piece)],
            draw.choice(_OPERATIONS) + piece[1:],  # of pickles: more likely to mean something
        ]
    )
    return raw[:first] + changed + draw.choice([rest] * 6 + [b""])


def model_of_small_state() -> torch.nn.Module:
    flags = torch.zeros(3, dtype=torch.bool)
    return Holder({"flags": flags}, weight=torch.zeros(6, 5), bias=torch.zeros(7, dtype=torch.bfloat16))


@pytest.mark.parametrize("name", [METADATA, DATA, MANIFEST])
def test_a_verified_load_gives_the_right_weights_or_leaves_them_alone(good: Path, name: str) -> None:
    """And what is called whole has the right values."""
    truth, zeros, path = read_all(good), dict(model_of_small_state().state_dict()), good / name
    raw, outcomes = path.read_bytes(), set()
    try:
        for seed in range(CASES):
            model = model_of_small_state()
            path.write_bytes(damaged(raw, seed))
            report = verify(good)
            str(report), report.to_dict()
            if report.is_whole:
                found = read_all(good)
                assert found.keys() == truth.keys(), seed
                assert all(same(found[key], truth[key]) for key in truth), seed
            try:
                load_checkpoint(model, None, good, with_rng=False, verify=True)
                wanted = small_state()["model"]
            except CheckpointError:
                wanted = zeros
            assert all(same(value, wanted[key]) for key, value in model.state_dict().items()), seed
            outcomes.add(wanted is zeros)
    finally:
        path.write_bytes(raw)
    assert outcomes == {True, False}


# ---- the checksum of a tensor: the same for every cut, another for every change --------------------------------------


SHAPES = st.lists(st.integers(1, 7), min_size=0, max_size=4).map(tuple)


def whole(values: torch.Tensor) -> int:
    return checksum_box(values, (0,) * values.dim(), tuple(values.shape))


def by_definition(values: torch.Tensor) -> int:
    """Word by word, in Python's integers, with weights from tables as the formula says."""
    words = (
        values.contiguous().reshape(-1).view({1: torch.int8, 2: torch.int16}.get(values.element_size(), torch.int32))
    )
    tables = [manifest._table(level, torch.device("cpu")).tolist() for level in (0, 1)]
    return sum(bits * tables[0][k & 0xFFFF] * tables[1][k >> 16] for k, bits in enumerate(words.tolist())) & (2**64 - 1)


@given(SHAPES, st.data())
def test_any_cut_gives_the_same_sum(shape: tuple[int, ...], data: st.DataObject) -> None:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    numel = math.prod(shape)
    edges = sorted({0, numel, *data.draw(st.lists(st.integers(0, numel), max_size=4))})
    parts = []
    for start, stop in itertools.pairwise(edges):
        parts += [checksum_box(values[box.indices], box.offsets, shape) for box in boxes_of_range(shape, start, stop)]
    assert combine(parts) == whole(values) == by_definition(values)


def test_indices_beyond_two_to_the_32_have_weights_of_their_own() -> None:
    values, huge = torch.tensor([1.5, 2.5]), 2**40
    sums = {checksum_box(values, (start,), (huge,)) for start in (0, 2**16, 2**17, 2**32, 2**33, 2**39)}
    assert len(sums) == 6
    rows = checksum_box(values.view(2, 1), (2**32, 5), (2**33, 7))  # through the look-up of short runs
    singly = [checksum_box(values[i : i + 1], ((2**32 + i) * 7 + 5,), (7 * 2**33,)) for i in range(2)]
    assert rows == combine(singly)


@given(st.integers(0, 10_000), st.integers(0, 31))
def test_a_flipped_bit_changes_the_sum(place: int, bit: int) -> None:
    values = torch.randn(10_001, generator=torch.Generator().manual_seed(2))
    before = whole(values)
    values.view(torch.int32)[place] ^= torch.tensor(1 << bit if bit < 31 else -(2**31), dtype=torch.int32)
    assert whole(values) != before


@pytest.mark.parametrize(
    "dtype",
    [torch.float64, torch.float16, torch.int8, torch.uint8, torch.bool, torch.int64, torch.complex64, torch.complex128],
)
def test_every_dtype_has_one(dtype: torch.dtype) -> None:
    values = (torch.arange(12) % 5).to(dtype).reshape(3, 4)
    parts = [checksum_box(values[i : i + 1], (i, 0), (3, 4)) for i in range(3)]
    other = values.clone()
    other[1, 2] = 0
    assert combine(parts) == whole(values) != whole(other)


def test_signs_of_zero_and_nan_payloads_count() -> None:
    assert whole(torch.tensor([0.0, 1.0])) != whole(torch.tensor([-0.0, 1.0]))
    assert whole(torch.empty(0, 3)) == 0


def test_the_sum_is_fixed_for_good() -> None:
    """Manifests outlive versions: these numbers may never change under this name."""
    assert manifest.CHECKSUM_NAME == "multilinear64-v1"
    assert whole(torch.arange(100_000, dtype=torch.float32)) == 6577949694269529600
