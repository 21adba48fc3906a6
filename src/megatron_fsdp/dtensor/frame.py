"""A frame: the description of a tensor's shards and their mesh, shared by all tensors that are cut alike."""

from __future__ import annotations

import copy
import functools
import math
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from megatron_fsdp.sharding.shards import ShardDescription, described_as_whole


class OwningUnit(NamedTuple):
    """The unit that parameters belong to, for messages.

    Attributes:
        label: Its name.
        remedy: What to do where a forward reads a weight of it without calling it.
    """

    label: str
    remedy: str


class ShardFrame:
    """The shards of a tensor on a mesh, for a parameter, its gradient and its optimizer state alike.

    Attributes:
        mesh: The ranks.
        description: The elements that each rank holds.
        placements: One per mesh dimension, as checkpoints and optimizers read them: `Shard(0)` along dimensions that
            shards are spread over, even where the cut is not torch's.
        foreign_groups: Groups of ranks that hold other tensors of the same kind, as expert-parallel ranks do; a norm of
            all gradients is reduced over them, too.
        adds_up: Whether gradients of the model are the sum over data-parallel ranks, else their mean.
        belongs: Name and unit of the parameter that it is the frame of; None where unknown.
        problem: Why such tensors can be neither saved nor loaded by torch.distributed.checkpoint; None where they can.
        is_from_file: Whether such tensors were unpickled, so that other ranks may have read the same ones.
    """

    def __init__(
        self,
        mesh: DeviceMesh,
        description: ShardDescription,
        foreign_groups: tuple[dist.ProcessGroup, ...] = (),
        adds_up: bool = False,
    ) -> None:
        self.foreign_groups = foreign_groups
        self.adds_up = adds_up
        self.problem: str | None = None
        self.is_from_file = False
        self.belongs: tuple[str, OwningUnit] | None = None
        self.mesh = mesh
        self.description = description
        self.placements = _placements(description)
        self._specs: dict[torch.dtype, Any] = {}

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        return (
            isinstance(other, ShardFrame)
            and self.description == other.description
            and self.placements == other.placements
            and self.mesh == other.mesh
        )

    def __hash__(self) -> int:
        return hash(self.description)

    @functools.cached_property
    def shape(self) -> torch.Size:
        """Shape of the global tensor."""
        return torch.Size(self.description.shape)

    @property
    def is_whole(self) -> bool:
        """Whether every rank holds all elements."""
        return self.description.is_whole

    @functools.cached_property
    def groups(self) -> tuple[dist.ProcessGroup, ...]:
        """The process groups that a reduction over all elements spans, one after another."""
        return tuple(self.mesh.get_group(dim) for dim in self.description.spread_dims)

    @functools.cached_property
    def shard_groups(self) -> tuple[dist.ProcessGroup, ...]:
        """Groups of data-parallel ranks that hold different elements; tensor-parallel ranks have one loss."""
        use = self.description.use
        return tuple(self.mesh.get_group(dim) for dim in use.shard_dims if use.sizes[dim] > 1)

    @functools.cached_property
    def copy_groups(self) -> tuple[dist.ProcessGroup, ...]:
        """Groups of data-parallel ranks that hold the same elements."""
        use = self.description.use
        others = (dim for dim in range(len(use.sizes)) if dim not in use.shard_dims and dim != use.tensor_dim)
        return tuple(self.mesh.get_group(dim) for dim in others if use.sizes[dim] > 1)

    def spec(self, dtype: torch.dtype) -> Any:
        """Return the `DTensorSpec` of a tensor of this frame."""
        found = self._specs.get(dtype)
        if found is None:
            with torch.inference_mode(False), torch.no_grad():
                local = torch.empty(self.description.local_shape, dtype=dtype, device="meta")
                stock = DTensor.from_local(
                    local,
                    self.mesh,
                    self.placements,
                    run_check=False,
                    shape=self.shape,
                    stride=torch.empty(self.shape, device="meta").stride(),
                )
            found = self._specs[dtype] = stock._spec
        return found

    def take(self, full: torch.Tensor) -> torch.Tensor:
        """Return this rank's elements of a whole tensor that broadcasts to the global shape; a view where possible."""
        description = self.description
        full = full if full.shape == self.shape else full.expand(self.shape)
        if description.tensor_cut is not None:
            start, stop = description.part_range()
            full = full.narrow(description.tensor_cut.dim, start, stop - start)
        if description.num_shards == 1:
            return full
        start, stop = description.local_range
        if description.has_whole_rows:
            row_numel = math.prod(full.shape[1:])
            return full[start // row_numel : stop // row_numel]
        return full.reshape(-1)[start:stop]

    def for_another(self) -> ShardFrame:
        """Return the frame of another tensor cut alike; shares what was computed, but not `belongs` and `problem`."""
        other = copy.copy(self)
        other.belongs = other.problem = None
        return other

    def whole_like(self, shape: torch.Size) -> ShardFrame:
        """Return the frame of another shape that every rank of this mesh holds whole."""
        if shape == self.shape:
            return self
        use = self.description.use
        frame = ShardFrame(self.mesh, described_as_whole(tuple(shape), use.sizes, self.description.coordinate))
        frame.belongs = self.belongs
        return frame

    @property
    def advice(self) -> str:
        """The end of a message about an operation that needs the whole parameter; empty where its unit is unknown."""
        if self.belongs is None:
            return ""
        name, owner = self.belongs
        return f"; {name} belongs to unit {owner.label}, whose weights are whole only while it runs: {owner.remedy}"


def _placements(description: ShardDescription) -> tuple[Placement, ...]:
    use = description.use
    found: list[Placement] = [Shard(0) if dim in use.shard_dims else Replicate() for dim in range(len(use.sizes))]
    if use.tensor_dim is not None:
        found[use.tensor_dim] = Replicate() if description.tensor_cut is None else Shard(description.tensor_cut.dim)
    return tuple(found)
