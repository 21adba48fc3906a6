"""How files are laid out, shared out and filled: pure plans."""

import itertools
import math

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from megatron_fsdp.checkpoint.hf.file_tensors import FileTensor, Followed
from megatron_fsdp.checkpoint.hf.writing import Cut, Held, lay_out_files, moves_of, portions_of
from megatron_fsdp.errors import CheckpointError
from megatron_fsdp.sharding.shards import Box, boxes_of_range


def held(shape: tuple[int, ...], edges: list[int], dtype: torch.dtype = torch.float32) -> Held:
    """A tensor cut at these elements, one rank after another."""
    holders = {
        box: (rank,)
        for rank, (start, stop) in enumerate(itertools.pairwise(edges))
        for box in boxes_of_range(shape, start, stop)
    }
    return Held(shape, dtype, holders, True)


def dtypes_of(catalog: dict[str, Held]) -> dict[str, torch.dtype]:
    return {name: tensor.dtype for name, tensor in catalog.items()}


def test_files_are_filled_in_order() -> None:
    sizes = {"a": 4, "b": 4, "c": 3, "d": 9, "e": 1}
    tensors = {key: FileTensor.of(key, (size,)) for key, size in sizes.items()}
    catalog = {key: held((size,), [0, size], torch.uint8) for key, size in sizes.items()}

    def keys_by_file(max_bytes: int) -> list[tuple[str, list[str]]]:
        files = lay_out_files(tensors, dtypes_of(catalog), Cut(max_bytes, "m.safetensors"))
        return [(file.name, [tensor.key for tensor in file.tensors]) for file in files]

    assert keys_by_file(8) == [
        ("m-00001-of-00004.safetensors", ["a", "b"]),
        ("m-00002-of-00004.safetensors", ["c"]),
        ("m-00003-of-00004.safetensors", ["d"]),
        ("m-00004-of-00004.safetensors", ["e"]),
    ]
    assert keys_by_file(21) == [("m.safetensors", list(sizes))]
    (empty,) = lay_out_files({}, {}, Cut(1, "m.safetensors"))
    assert (empty.name, empty.tensors) == ("m.safetensors", ())


def test_dtypes_are_cast_only_where_they_are_floating_point() -> None:
    tensors = {name: FileTensor.of(name, (2,)) for name in ("w", "n")}
    catalog = {"w": held((2,), [0, 2]), "n": held((2,), [0, 2], torch.int64)}
    (file,) = lay_out_files(tensors, dtypes_of(catalog), Cut(100, "m.safetensors", torch.bfloat16))
    assert {tensor.key: tensor.dtype for tensor in file.tensors} == {"w": torch.bfloat16, "n": torch.int64}
    with Followed({"w": (2,), "n": (2,)}) as followed:
        mixed = {"x": followed.file_tensor(torch.cat(list(followed.tensors.values())))}
    with pytest.raises(CheckpointError, match="x would be made of tensors of several dtypes"):
        lay_out_files(mixed, dtypes_of(catalog), Cut(100, "m.safetensors"))


@st.composite
def cut_tensors(draw: st.DrawFn) -> tuple[tuple[int, ...], list[int]]:
    shape = tuple(draw(st.lists(st.integers(1, 5), min_size=1, max_size=3)))
    numel = math.prod(shape)
    edges = sorted(draw(st.lists(st.integers(0, numel), max_size=3)))
    return shape, [0, *edges, numel]


@given(cut_tensors(), st.integers(1, 3), st.integers(0, 2), st.integers(4, 64))
def test_portions_are_filled_by_their_holders_once(
    case: tuple[tuple[int, ...], list[int]], chunks: int, dim: int, max_bytes: int
) -> None:
    """File tensors that are pieces of a model tensor (or it whole) come out right, portion by portion."""
    shape, edges = case
    model = torch.arange(math.prod(shape), dtype=torch.float32).view(shape)
    catalog = {"w": held(shape, edges)}
    with Followed({"w": shape}) as followed:
        pieces = torch.chunk(followed.tensors["w"], chunks, dim=dim % len(shape))
    tensors = {f"k{i}": followed.file_tensor(piece) for i, piece in enumerate(pieces)}
    (file,) = lay_out_files(tensors, dtypes_of(catalog), Cut(10_000, "m.safetensors"))
    written: dict[str, list[torch.Tensor]] = {tensor.key: [] for tensor in file.tensors}
    for stored, target in portions_of([file], max_bytes):
        assert target.numel * 4 <= max_bytes
        values = torch.full(target.lengths, -1.0)
        for move in moves_of(target, tensors[stored.key], catalog, 0):
            assert catalog["w"].holders[move.held] == (move.source,)
            assert (values[move.place.indices] == -1).all()
            values[move.place.indices] = model[move.box.indices].reshape(move.place.lengths)
        written[stored.key].append(values.view(-1))
    for key, wanted in zip(tensors, torch.chunk(model, chunks, dim=dim % len(shape)), strict=True):
        assert torch.equal(torch.cat(written[key]), wanted.reshape(-1))


def test_holders_of_the_same_elements_take_turns() -> None:
    box = Box((0,), (4,))
    shared = Held((4,), torch.float32, {box: (1, 3)}, True)
    assert [shared.source_of(box, writer) for writer in range(4)] == [1, 1, 1, 3]
    whole = Held((4,), torch.float32, {box: (0, 1, 2)}, False)
    assert [whole.source_of(box, writer) for writer in range(3)] == [0, 0, 0]


def test_holders_far_from_a_box_are_not_looked_at() -> None:
    tensor = held((1000, 4), [0, 2, *range(4, 4001, 4)])
    met = dict(tensor.index.meeting(Box((500, 0), (2, 4))))
    assert [tensor.boxes[at] for at in met] == list(met.values()) == [Box((500, 0), (1, 4)), Box((501, 0), (1, 4))]
    assert len(list(tensor.index.candidates(Box((500, 0), (2, 4))))) == 2
    scalar = Held((), torch.float32, {Box((), ()): (0,)}, False)
    assert list(scalar.index.meeting(Box((), ()))) == [(0, Box((), ()))]
