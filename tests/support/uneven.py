"""Tensors cut in every way that sharding knows, built on real ranks from a known whole tensor."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from megatron_fsdp.dtensor.shard_spec import ShardSpec
from megatron_fsdp.dtensor.tensor import UnevenDTensor
from megatron_fsdp.sharding.shards import ListedCut, MeshUse, ShardDescription, TensorParallelCut
from tests.support.arrangements import mesh_of


@dataclass(frozen=True)
class UnevenCase:
    name: str
    shape: tuple[int, ...]  # of the global tensor
    sizes: tuple[int, ...]  # of the mesh
    shard_dims: tuple[int, ...] = ()  # mesh dims that shards are spread over, the most significant first
    fractions: tuple[float, ...] = ()  # where shards end, of a part's elements; the last one, 1, is left out
    tensor_dim: int | None = None  # mesh dim of tensor parallelism
    cut_dim: int | None = None  # tensor dim that tensor parallelism cuts
    rows: bool = False  # round shard edges to whole rows

    @property
    def num_ranks(self) -> int:
        return math.prod(self.sizes)

    def description(self, coordinate: tuple[int, ...]) -> ShardDescription:
        """Who holds what, seen from one place of the mesh."""
        use = MeshUse(self.sizes, self.shard_dims, self.tensor_dim)
        tensor_cut = None
        if self.cut_dim is not None:
            tensor_cut = TensorParallelCut.by_chunk(self.shape[self.cut_dim], use.num_parts, self.cut_dim)
        cuts = []
        for part in range(use.num_parts):
            shape = list(self.shape)
            if tensor_cut is not None:
                shape[tensor_cut.dim] = tensor_cut.edges[part + 1] - tensor_cut.edges[part]
            row = max(math.prod(shape[1:]), 1) if self.rows else 1
            numel = math.prod(shape)
            edges = [int(fraction * numel) // row * row for fraction in self.fractions]
            cuts.append(ListedCut((0, *edges, numel)))
        here = use.part_at(coordinate)
        return ShardDescription(self.shape, use, coordinate, cuts[here], tensor_cut, tuple(cuts))

    def spec(self, mesh: DeviceMesh) -> ShardSpec:
        return ShardSpec(mesh, self.description(tuple(mesh.get_coordinate() or ())))

    def whole(self, seed: int = 0) -> Tensor:
        return torch.randn(self.shape, generator=torch.Generator().manual_seed(seed))

    def tensor(self, mesh: DeviceMesh, seed: int = 0, dtype: torch.dtype = torch.float32) -> UnevenDTensor:
        """This rank's shard of the global tensor, cut out box by box."""
        spec = self.spec(mesh)
        whole = self.whole(seed).to(dtype)
        parts = [whole[box.indices].reshape(-1) for box in spec.description.boxes()]
        flat = torch.cat(parts) if parts else whole.new_empty(0)
        return UnevenDTensor.wrap(flat.view(spec.description.local_shape), spec)


CASES = [
    UnevenCase("rows", (5, 3), (2,), (0,), (0.8,), rows=True),
    UnevenCase("inside rows", (5, 3), (2,), (0,), (0.6,)),
    UnevenCase("empty shards", (2, 3), (4,), (0,), (0.0, 0.5, 0.5), rows=True),
    UnevenCase("three dims inside rows", (3, 2, 5), (3,), (0,), (0.3, 0.5)),
    UnevenCase("vector", (7,), (3,), (0,), (0.2, 0.9)),
    UnevenCase("hybrid, replicated outside", (4, 3), (2, 2), (1,), (0.4,)),
    UnevenCase("hybrid, sharded outside", (6, 3), (2, 2), (1, 0), (0.2, 0.5, 0.7)),
    UnevenCase("tensor parallel rows, sharded", (5, 3), (2, 2), (0,), (0.4,), 1, 0),
    UnevenCase("tensor parallel columns, whole rows", (5, 3), (2, 2), (0,), (0.5,), 1, 1, rows=True),
    UnevenCase("tensor parallel columns, inside rows", (4, 5), (2, 2), (0,), (0.3,), 1, 1),
    UnevenCase("tensor parallel duplicates", (4, 3), (2, 2), (0,), (0.3,), 1),
    UnevenCase("whole everywhere", (4, 3), (2,)),
    UnevenCase("no elements", (0, 3), (2,), (0,), (0.5,)),
]


def make_mesh(sizes: tuple[int, ...]) -> DeviceMesh:
    """A CPU mesh of all ranks of the process group."""
    return mesh_of(sizes, tuple(f"dim{i}" for i in range(len(sizes))))
