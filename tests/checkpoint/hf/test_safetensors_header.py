"""The header of a safetensors file: what is accepted, what is refused, and that no bytes do anything else."""

import json
import struct
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
import safetensors
import safetensors.torch
import torch
from hypothesis import example, given, settings

from megatron_fsdp.checkpoint.hf.index import read_header
from megatron_fsdp.checkpoint.hf.safetensors_format import (
    DTYPES,
    MAX_HEADER_BYTES,
    StoredTensor,
    _without_duplicates,
    lay_out_file,
)
from megatron_fsdp.errors import CheckpointError

GOOD = {
    "b": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
    "a.weight": {"dtype": "BF16", "shape": [4], "data_offsets": [24, 32]},
    "empty": {"dtype": "I64", "shape": [0, 5], "data_offsets": [32, 32]},
}
DATA = bytes(range(32))


def as_file(header: Any, data: bytes = DATA, length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def changed(key: str, **fields: Any) -> dict[str, Any]:
    return {**GOOD, key: {**GOOD[key], **fields}}


def test_a_good_header_is_read(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(as_file({"__metadata__": {"format": "pt"}, **GOOD}))
    tensors, nbytes = read_header(path)
    assert nbytes == path.stat().st_size
    assert [(t.key, t.dtype, t.shape, nbytes - t.start) for t in tensors.values()] == [
        ("b", torch.float32, (2, 3), 32),
        ("a.weight", torch.bfloat16, (4,), 8),
        ("empty", torch.int64, (0, 5), 0),
    ]


BAD: dict[str, tuple[bytes, str]] = {
    "nothing": (b"", "0 bytes"),
    "too short": (b"\x01\x02", "2 bytes"),
    "huge length": (as_file(GOOD, length=2**63), "announces a header"),
    "length beyond the limit": (as_file(GOOD, length=MAX_HEADER_BYTES + 1), "announces a header"),
    "length beyond the file": (as_file(GOOD, length=4096), "cut off"),
    "no JSON": (as_file(b"{'a': 1}"), "no JSON"),
    "not UTF-8": (as_file(b'{"\xff": 1}'), "no JSON"),
    "a list": (as_file([1, 2]), "JSON list"),
    "nested deeply": (as_file(b"[" * 200_000), "no JSON"),
    "a name twice": (as_file(b'{"w": 1, "w": 2}'), "'w' stands in it twice"),
    "metadata no texts": (as_file({"__metadata__": {"a": 1}, **GOOD}), "__metadata__"),
    "a name that is no text": (as_file(b'{"\\ud800": 1}'), "'\\ud800', which is no text"),
    "a tensor as a number": (as_file({"w": 3}, b""), "'w'"),
    "a field more": (as_file(changed("b", more=1)), "'b'"),
    "shape of floats": (as_file(changed("b", shape=[2.0, 3])), "'b'"),
    "shape of truths": (as_file(changed("b", shape=[True, 6])), "'b'"),
    "negative shape": (as_file(changed("b", shape=[-2, -3])), "'b'"),
    "offsets negative": (as_file(changed("b", data_offsets=[-24, 0])), "'b'"),
    "offsets of three": (as_file(changed("b", data_offsets=[0, 24, 24])), "'b'"),
    "unknown dtype": (as_file(changed("b", dtype="F4")), "'F4'"),
    "dtype no text": (as_file(changed("b", dtype=["F32"])), "'b'"),
    "shape does not fit bytes": (as_file(changed("b", shape=[2, 2])), "needs 16 bytes"),
    "overflowing shape": (as_file(changed("b", shape=[2**62, 2**62])), "'b'"),
    "offsets backwards": (as_file(changed("b", data_offsets=[24, 0])), "'b'"),
    "out of the file": (as_file(changed("a.weight", data_offsets=[64, 72])), "'a.weight' ends at byte"),
    "overlap": (as_file(changed("a.weight", data_offsets=[20, 28])), "'a.weight'"),
    "a hole": (as_file(changed("a.weight", data_offsets=[24, 32]), DATA + b"zz"), "2 bytes behind"),
    "a hole before": (as_file({"w": {**GOOD["b"], "data_offsets": [8, 32]}}), "'w' in"),
    "truncated data": (as_file(GOOD, DATA[:-1]), "'a.weight' ends at byte"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_damaged_header_is_refused_by_name(name: str, tmp_path: Path) -> None:
    content, said = BAD[name]
    path = tmp_path / "x.safetensors"
    path.write_bytes(content)
    with pytest.raises(CheckpointError) as raised:
        read_header(path)
    assert said in str(raised.value)
    assert str(path) in str(raised.value)


WHOLE = as_file({"__metadata__": {"format": "pt"}, **GOOD})


def tensors_or_refusal(path: Path) -> tuple[dict[str, StoredTensor] | None, str]:
    try:
        return read_header(path)[0], ""
    except CheckpointError as error:
        return None, str(error)


@settings(max_examples=400)
@given(
    edits=st.lists(st.tuples(st.integers(0, len(WHOLE) - 1), st.integers(0, 255)), max_size=4),
    cut=st.integers(0, len(WHOLE)),
    added=st.binary(max_size=4),
)
@example(edits=[], cut=len(WHOLE), added=b"")
def test_whatever_the_bytes_are_they_are_refused_or_read_as_by_the_library(
    edits: list[tuple[int, int]], cut: int, added: bytes, tmp_path_factory: pytest.TempPathFactory
) -> None:
    content = bytearray(WHOLE)
    for place, value in edits:
        content[place] = value
    path = tmp_path_factory.getbasetemp() / "fuzzed.safetensors"
    path.write_bytes(bytes(content[:cut] if cut < len(WHOLE) - 6 else content) + added)
    tensors, refused = tensors_or_refusal(path)
    if tensors is None:
        assert str(path) in refused
        return
    with safetensors.safe_open(path, "pt") as file:
        assert set(file.keys()) == set(tensors)
        for key, tensor in tensors.items():
            values = file.get_tensor(key)
            assert (values.dtype, tuple(values.shape)) == (tensor.dtype, tensor.shape)
            ours = path.read_bytes()[tensor.start : tensor.start + tensor.nbytes]
            assert bytes(values.view(-1).view(torch.uint8).tolist()) == ours


@given(
    shapes=st.lists(
        st.tuples(st.sampled_from(sorted(DTYPES)), st.lists(st.integers(0, 4), max_size=3)), min_size=1, max_size=6
    )
)
def test_headers_that_are_written_are_read_back(
    shapes: list[tuple[str, list[int]]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    wanted = [(f"t{i}", DTYPES[name], tuple(shape)) for i, (name, shape) in enumerate(shapes)]
    layout = lay_out_file("y.safetensors", wanted, {"format": "pt"})
    path = tmp_path_factory.getbasetemp() / "y.safetensors"
    path.write_bytes(layout.head + bytes(layout.nbytes - len(layout.head)))
    tensors, _ = read_header(path)
    assert sorted((t.key, t.dtype, t.shape) for t in tensors.values()) == sorted(wanted, key=lambda w: w[0])
    assert all(tensor.start % tensor.dtype.itemsize == 0 for tensor in tensors.values())
    assert tensors == {tensor.key: tensor for tensor in layout.tensors}
    with safetensors.safe_open(path, "pt") as file:
        assert len(list(file.keys())) == len(wanted)


def test_a_dtype_that_the_format_lacks_is_refused() -> None:
    with pytest.raises(CheckpointError, match=r"w has dtype torch\.complex128"):
        lay_out_file("y.safetensors", [("w", torch.complex128, (1,))], {})


class CountingKeys(str):
    """Counts how often names are compared."""

    __slots__ = ()
    compared = 0
    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        CountingKeys.compared += 1
        return str.__eq__(self, other)


def test_a_repeated_name_is_found_in_linear_time() -> None:
    count = 2000
    keys = [CountingKeys(f"k{i}") for i in range(count)] + [CountingKeys(f"k{count - 1}")]
    CountingKeys.compared = 0
    with pytest.raises(ValueError, match="'k1999' stands in it twice"):
        _without_duplicates([(key, 0) for key in keys])
    assert CountingKeys.compared < 10 * count
