"""Any arrangement of up to 16 ranks, without ranks: chunks tile tensors, and any layout loads what any other saved."""

import itertools

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from megatron_fsdp.dtensor.chunks import LocalChunks
from megatron_fsdp.sharding.shards import ShardDescription
from tests.support.simulated_ranks import Arrangement, Tensors, descriptions

MAX_RANKS = 16


@st.composite
def arrangements(draw: st.DrawFn) -> Arrangement:
    """Strategies 0 to 3 on one axis or two, with tensor parallelism or without, by rows or by elements."""
    tensor = draw(st.sampled_from([0, 0, 1, 2]))
    left = MAX_RANKS // max(tensor, 1)
    outer = draw(st.sampled_from([0, 0, 1, 2, 3]))
    inner = draw(st.integers(1, left // max(outer, 1)))
    strategy = draw(st.integers(0, 3))
    outer_strategy = draw(st.integers(0, 1)) if outer and strategy else 0
    return Arrangement(inner, outer, tensor, strategy, outer_strategy)


@st.composite
def models(draw: st.DrawFn) -> Tensors:
    """A few tensors, of size zero and without dimensions too; what tensor parallelism cuts is even."""
    shapes, cuts = [], []
    for _ in range(draw(st.integers(1, 4))):
        shape = draw(st.lists(st.integers(0, 7), max_size=3))
        cut = draw(st.sampled_from([None, 0, 1]))
        if cut is not None and cut < len(shape):
            shape[cut] *= 2
        else:
            cut = None
        shapes.append(tuple(shape))
        cuts.append(cut)
    return Tensors(tuple(shapes), tuple(cuts), frozen=draw(st.booleans()))


def whole_of(shape: tuple[int, ...], seed: int) -> Tensor:
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float64).view(shape) + 1000.0 * (seed + 1)


def local_of(description: ShardDescription, whole: Tensor) -> Tensor:
    """Cut out box by box, and so independently of how the engine cuts."""
    pieces = [whole[box_index(box.offsets, box.lengths)].reshape(-1) for box in description.boxes()]
    return torch.cat([whole.new_empty(0), *pieces]).view(description.local_shape)


def box_index(offsets: tuple[int, ...], lengths: tuple[int, ...]) -> tuple[slice, ...]:
    return tuple(slice(offset, offset + length) for offset, length in zip(offsets, lengths, strict=True))


def chunks_of(description: ShardDescription, local: Tensor) -> LocalChunks:
    found = LocalChunks.of(local, torch.Size(description.shape), description.boxes())
    return found if description.is_saved_here else LocalChunks(found.shape, found.boxes, found.properties, writes=False)


class File:
    """What ranks have written of one tensor, as a checkpoint keeps it: by offsets, and the same offsets once."""

    def __init__(self, everyone: list[ShardDescription], whole: Tensor) -> None:
        self.blocks: dict[tuple[int, ...], Tensor] = {}
        for description in everyone:
            local = local_of(description, whole)
            chunks = chunks_of(description, local)
            for item in chunks.write_items("x", local):
                assert item.tensor_data is not None
                block = chunks.shard_at(local, item.index)
                assert block.shape == item.tensor_data.chunk.sizes
                assert item.index.offset is not None
                known = self.blocks.setdefault(tuple(item.index.offset), block)
                assert torch.equal(known, block)
        found = [ChunkStorageMetadata(torch.Size(at), block.shape) for at, block in self.blocks.items()]
        properties = LocalChunks.of(whole, whole.shape, []).properties
        self.metadata = TensorStorageMetadata(properties, whole.shape, found)

    def read(self, description: ShardDescription) -> Tensor:
        """Fill a rank's shard by torch's own plan."""
        local = torch.full(description.local_shape, torch.nan, dtype=torch.float64)
        chunks = chunks_of(description, local)
        for item in create_read_items_for_chunk_list("x", self.metadata, chunks.chunk_list()):
            assert item.storage_index.offset is not None
            source = self.blocks[tuple(item.storage_index.offset)]
            target = chunks.shard_at(local, MetadataIndex("x", item.dest_index.offset))
            target[box_index(item.dest_offsets, item.lengths)] = source[box_index(item.storage_offsets, item.lengths)]
        return local


@settings(max_examples=150)
@given(models(), arrangements())
def test_the_chunks_of_all_ranks_tile_each_tensor_once(tensors: Tensors, arrangement: Arrangement) -> None:
    everyone = descriptions(tensors, arrangement)
    assert len(everyone) == arrangement.num_ranks
    for index, shape in enumerate(tensors.shapes):
        file = File([each[index] for each in everyone], whole_of(shape, index))
        count = torch.zeros(shape, dtype=torch.int64)
        for offsets, block in file.blocks.items():
            count[box_index(offsets, tuple(block.shape))] += 1
        assert bool((count == 1).all())
        assert file.blocks  # a tensor without elements is in the checkpoint, too


@settings(max_examples=150)
@given(models(), arrangements(), arrangements())
def test_what_one_layout_saves_any_other_loads(tensors: Tensors, saved: Arrangement, loaded: Arrangement) -> None:
    before, after = descriptions(tensors, saved), descriptions(tensors, loaded)
    for index, shape in enumerate(tensors.shapes):
        whole = whole_of(shape, index)
        file = File([each[index] for each in before], whole)
        for rank in after:
            assert torch.equal(file.read(rank[index]), local_of(rank[index], whole))


def test_every_number_of_ranks_loads_what_every_other_saved() -> None:
    """1 to 16 ranks on one axis: rows that do not divide, one huge row, a single element, and none."""
    tensors = Tensors(((7, 3), (1, 23), (1,), (), (0, 3)), (None,) * 5)
    by_ranks = {ranks: descriptions(tensors, Arrangement(ranks)) for ranks in range(1, MAX_RANKS + 1)}
    for index, shape in enumerate(tensors.shapes):
        whole = whole_of(shape, index)
        files = {ranks: File([each[index] for each in found], whole) for ranks, found in by_ranks.items()}
        for saved, loaded in itertools.product(by_ranks, by_ranks):
            for rank in by_ranks[loaded]:
                assert torch.equal(files[saved].read(rank[index]), local_of(rank[index], whole))
