"""Damaged bytes anywhere: the right values or a CheckpointError, never anything else; and `verify` sees the damage."""

import pickle
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_fsdp.checkpoint.folder import CheckpointFolder
from megatron_fsdp.checkpoint.load import load_checkpoint
from megatron_fsdp.checkpoint.save import save_alone
from megatron_fsdp.checkpoint.verify import verify
from megatron_fsdp.errors import CheckpointError
from tests.support.dcp_contents import bits, same
from tests.support.hostile import small_state, write_ours

CASES = 60
DATA, METADATA, MANIFEST = "__0_0.distcp", ".metadata", "manifest.json"


def read_all(folder: Path) -> dict[str, Any]:
    opened = CheckpointFolder(folder)
    found: dict[str, Any] = {key: opened.read_tensor(key) for key in opened.tensors}
    return found | {key: opened.read_object(key) for key in opened.objects}


def outcome(folder: Path) -> dict[str, Any] | None:
    """Everything in the folder; None where it was refused. Other errors than of the one kind come through."""
    try:
        return read_all(folder)
    except CheckpointError:
        return None


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


def run_cases(folder: Path, name: str, seeds: range, check: Callable[[dict[str, Any] | None, Path], str]) -> list[str]:
    """Damage one file in many ways; what was done with each."""
    path, done = folder / name, []
    raw = path.read_bytes()
    try:
        for seed in seeds:
            changed = damaged(raw, seed)
            if changed != raw:
                path.write_bytes(changed)
                done.append(check(outcome(folder), folder))
    finally:
        path.write_bytes(raw)
    return done


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ours")
    write_ours(folder)
    return folder


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plain")
    save_alone(small_state(), checkpoint_id=folder)
    return folder


@pytest.mark.parametrize("name", [METADATA, DATA, MANIFEST])
def test_with_a_manifest_what_is_called_whole_has_the_right_values(ours: Path, name: str) -> None:
    truth = read_all(ours)

    def check(found: dict[str, Any] | None, folder: Path) -> str:
        report = verify(folder)
        str(report), report.to_dict()
        if found is None:
            return "refused"
        right = found.keys() == truth.keys() and all(same(found[key], truth[key]) for key in truth)
        assert right or not report.is_whole, "wrong values in a checkpoint that was called whole"
        return "right" if right else "seen by verify"

    done = run_cases(ours, name, range(CASES), check)
    assert done.count("refused") > CASES // 4


@pytest.mark.parametrize("name", [METADATA, DATA])
def test_without_a_manifest_damage_is_an_error_of_one_kind(plain: Path, name: str) -> None:
    truth = read_all(plain)

    def check(found: dict[str, Any] | None, folder: Path) -> str:
        report = verify(folder)
        if found is None:
            assert not report.is_whole
            return "refused"
        if name == METADATA:  # other names or places cannot be told from right ones
            return "read"
        assert all(same(found[key], truth[key]) for key in truth) or not report.is_whole
        return "read"

    done = run_cases(plain, name, range(CASES), check)
    assert done.count("refused") > CASES // 4


class Model(torch.nn.Module):
    """Has what `small_state` calls a model."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(6, 5))
        self.bias = torch.nn.Parameter(torch.zeros(7, dtype=torch.bfloat16))
        self.register_buffer("flags", torch.zeros(3, dtype=torch.bool))


@pytest.mark.parametrize("name", [METADATA, DATA, MANIFEST])
def test_a_verified_load_gives_the_right_weights_or_leaves_them_alone(ours: Path, name: str) -> None:
    truth, zeros, path = small_state()["model"], dict(Model().state_dict()), ours / name
    raw, outcomes = path.read_bytes(), set()
    try:
        for seed in range(1100, 1100 + CASES // 2):
            model = Model()
            path.write_bytes(damaged(raw, seed))
            try:
                load_checkpoint(model, None, ours, with_rng=False, verify=True)
                wanted = truth
            except CheckpointError:
                wanted = zeros
            assert all(same(value, wanted[key]) for key, value in model.state_dict().items()), seed
            outcomes.add(wanted is truth)
    finally:
        path.write_bytes(raw)
    assert outcomes == {True, False}


def test_every_flipped_bit_of_a_tensor_is_found(ours: Path) -> None:
    """All bits of all elements, one at a time."""
    opened, path = CheckpointFolder(ours), ours / DATA
    raw = path.read_bytes()
    flips = 0
    for key, entry in opened.tensors.items():
        elements = bits(opened.read_tensor(key))
        span = entry.chunks[0].span
        begin = raw.index(elements, span.offset, span.offset + span.length) if elements else 0
        places = range(begin, begin + len(elements))
        for place in places if len(elements) < 16 else random.Random(0).sample(places, 16):
            changed = bytearray(raw)
            changed[place] ^= 1 << (place % 8)
            path.write_bytes(changed)
            report = verify(ours)
            assert [(found.kind, found.name) for found in report.damaged] == [("tensor", key)]
            assert "the checksum of 'data/0' does not fit" in str(report)
            assert f"in {path}" in str(report)
            flips += 1
    path.write_bytes(raw)
    assert flips == 16 + 14 + 3 + 4
