"""Any arrangement of up to 16 ranks, without ranks: chunks tile tensors, and any layout loads what any other saved."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from megatron_fsdp.comm.collectives import Axis, Traffic
from megatron_fsdp.config.ddp_config import ShardingStrategy
from megatron_fsdp.config.engine_options import EngineOptions
from megatron_fsdp.dtensor.shard_spec import LocalChunks, part_of
from megatron_fsdp.engine.plans import Sharding
from megatron_fsdp.sharding.mesh import RankMesh
from megatron_fsdp.sharding.placement import placements_for
from megatron_fsdp.sharding.shards import Box, ShardDescription
from megatron_fsdp.sharding.units import GroupKey, ParameterInfo, group_parameters

# ---- what ranks would hold: the engine's own planning, with proxies for meshes and process groups ------------------

_TENSOR_PARALLEL = {0: "column", 1: "row"}


@dataclass(frozen=True)
class Arrangement:
    """Ranks and how they share a model; 0 outer or tensor-parallel ranks: there is no such axis."""

    inner: int
    outer: int = 0
    tensor: int = 0
    strategy: int = 3
    outer_strategy: int = 0

    @property
    def num_ranks(self) -> int:
        """Of all axes together."""
        return self.inner * max(self.outer, 1) * max(self.tensor, 1)


@dataclass(frozen=True)
class Tensors:
    """The tensors of a model, whole; `cuts` are the dimensions that tensor parallelism cuts, divisible."""

    shapes: tuple[tuple[int, ...], ...]
    cuts: tuple[int | None, ...]  # None: its ranks hold the same
    frozen: bool = False


class _Mesh:
    """As much of a DeviceMesh as planning looks at, seen from one place."""

    def __init__(self, sizes: Sequence[int], place: Sequence[int]) -> None:
        self.shape = tuple(sizes)
        self.ndim = len(sizes)
        self._place = tuple(place)

    def size(self) -> int:
        return math.prod(self.shape)

    def get_coordinate(self) -> list[int]:
        return list(self._place)


def descriptions(tensors: Tensors, arrangement: Arrangement) -> list[list[ShardDescription]]:
    """For every rank what it holds of each tensor."""
    sizes = [size for size in (arrangement.outer, arrangement.inner, arrangement.tensor) if size]
    return [_on_rank(tensors, arrangement, sizes, at) for at in itertools.product(*(range(size) for size in sizes))]


def _on_rank(
    tensors: Tensors, arrangement: Arrangement, sizes: Sequence[int], at: Sequence[int]
) -> list[ShardDescription]:
    num_axes = len(sizes) - bool(arrangement.tensor)
    axes = tuple(Axis(None, place, size, Traffic()) for place, size in list(zip(at, sizes, strict=True))[:num_axes])
    tensor_mesh: Any = _Mesh([arrangement.tensor], [at[-1]]) if arrangement.tensor else None
    described: Any = _Mesh(sizes, at)
    rank_mesh = RankMesh(axes, ("dp_outer", "dp_shard")[-num_axes:], None, tensor_mesh, described)
    sharding = Sharding(
        EngineOptions(),
        rank_mesh,
        placements_for(
            ShardingStrategy(arrangement.strategy),
            ShardingStrategy(arrangement.outer_strategy) if arrangement.outer else None,
        ),
        torch.device("cpu"),
        divisor=rank_mesh.num_ranks,
    )
    params = [_parameter(shape, cut, arrangement) for shape, cut in zip(tensors.shapes, tensors.cuts, strict=True)]
    infos = [
        ParameterInfo(
            str(index), tuple(param.shape), GroupKey(param.dtype, not tensors.frozen, is_scalar=not param.shape)
        )
        for index, param in enumerate(params)
    ]
    found: dict[int, ShardDescription] = {}
    for spec in group_parameters(infos):
        indices = [int(info.name) for info in spec.parameters]
        parts = tuple(part_of(str(index), params[index], tensor_mesh) for index in indices)
        plan = sharding.plan_group(spec, parts)
        found |= {index: plan.shard_spec(position).description for position, index in enumerate(indices)}
    return [found[index] for index in range(len(infos))]


def _parameter(shape: tuple[int, ...], cut: int | None, arrangement: Arrangement) -> nn.Parameter:
    """This rank's part, marked as Megatron's tensor-parallel layers do."""
    local = list(shape)
    if cut is not None and arrangement.tensor:
        local[cut] //= arrangement.tensor
    param = nn.Parameter(torch.empty(local, device="meta"))
    if cut is not None:
        param._tensor_parallel_mode = _TENSOR_PARALLEL[cut]  # type: ignore[attr-defined]
    return param


# ---- drawn at random -------------------------------------------------------------------------------------------------

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
    pieces = [whole[box.indices].reshape(-1) for box in description.boxes()]
    return torch.cat([whole.new_empty(0), *pieces]).view(description.local_shape)


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
            there, here = (Box(at, item.lengths).indices for at in (item.storage_offsets, item.dest_offsets))
            target[here] = source[there]
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
            count[Box(offsets, tuple(block.shape)).indices] += 1
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
