"""The shard spec of a tensor (`ShardSpec`): its shards and their mesh, shared by all tensors that are cut alike.

Whole tensors are gathered by it, and torch.distributed.checkpoint is told by it which boxes of a global tensor a local
tensor holds, without communication. torch asks a DTensor for its chunks, and the DTensor asks its local tensor
(`__create_chunk_list__`, `__create_write_items__`, `__get_tensor_shard__`) before it assumes an even split along dim 0.
Our shards are uneven, and may be cut inside a row. `UnevenDTensor` implements the three methods itself; for tools that
look at the local tensor they can be attached to that, too.

Tensor parallelism may have cut parameters before data parallelism shards them: then a rank's own part is sharded over
data-parallel ranks (`TensorParallelPart`). `parallelize_module` leaves parameters as DTensors over the tensor-parallel
mesh, and the modules expect them as such in forward; Megatron's own layers hold plain tensors with attributes that say
which dimension was cut.
"""

from __future__ import annotations

import copy
import functools
import itertools
import math
import sys
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from types import FrameType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from megatron_fsdp.comm.collectives import all_gather_flat, real_values
from megatron_fsdp.errors import ConfigurationError, waits_for, warn_caller
from megatron_fsdp.sharding.shards import Box, ShardDescription, TensorParallelCut, described_as_whole


class OwningUnit(NamedTuple):
    """The unit that parameters belong to, for messages."""

    label: str
    remedy: str  # what to do where a forward reads a weight of it without calling it


class ShardSpec:
    """The shards of a tensor on a mesh, for a parameter, its gradient and its optimizer state alike."""

    def __init__(
        self,
        mesh: DeviceMesh,
        description: ShardDescription,
        foreign_groups: tuple[dist.ProcessGroup, ...] = (),
        adds_up: bool = False,
    ) -> None:
        # Ranks that hold other tensors of the same kind, as expert-parallel ranks do; a norm of all gradients
        # is reduced over them, too.
        self.foreign_groups = foreign_groups
        self.adds_up = adds_up  # gradients of the model are the sum over data-parallel ranks, else their mean
        # why such tensors can be neither saved nor loaded by torch.distributed.checkpoint
        self.problem: str | None = None
        self.is_from_file = False  # they were unpickled, so that other ranks may have read the same ones
        self.belongs: tuple[str, OwningUnit] | None = None  # name and unit of the parameter that it is the spec of
        self.mesh = mesh
        self.description = description  # the elements that each rank holds
        # One per mesh dimension, as checkpoints and optimizers read them: `Shard(0)` along dimensions that
        # shards are spread over, even where the cut is not torch's.
        self.placements = _placements(description)
        self._dtensor_specs: dict[torch.dtype, Any] = {}

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        return (
            isinstance(other, ShardSpec)
            and self.description == other.description
            and self.placements == other.placements
            and self.mesh == other.mesh
        )

    def __hash__(self) -> int:
        return hash(self.description)

    def __deepcopy__(self, _memo: object) -> ShardSpec:
        # It refers to process groups, and staging of asynchronous saves copies all that a tensor refers to.
        caller: FrameType | None = sys._getframe(1)
        while caller is not None and caller.f_code.co_name != "async_save":
            caller = caller.f_back
        given = caller.f_locals.get("process_group") if caller is not None else None
        # torch's, of a model whose collectives go over gloo, as those of the save
        if caller is not None and self.mesh.device_type == "cpu" and (given or dist.group.WORLD) in self.all_groups:
            warn_caller(
                "dcp.async_save sends in a thread over the process group of the model, whose collectives it meets if "
                "the model runs before the save ends, so that ranks abort or wait; give it a group of its own: "
                'process_group=dist.new_group(backend="gloo")'
            )
        return self

    @functools.cached_property
    def shape(self) -> torch.Size:
        """Shape of the global tensor."""
        return torch.Size(self.description.shape)

    @property
    def is_whole(self) -> bool:
        """True if every rank holds all elements."""
        return self.description.is_whole

    @functools.cached_property
    def groups(self) -> tuple[dist.ProcessGroup, ...]:
        """The process groups over which a reduction over all elements goes, one after another."""
        return tuple(self.mesh.get_group(dim) for dim in self.description.spread_dims)

    @functools.cached_property
    def all_groups(self) -> tuple[dist.ProcessGroup, ...]:
        """The groups of all ranks that hold shards or replicas, tensor-parallel ones included."""
        return tuple(self.mesh.get_group(dim) for dim, size in enumerate(self.description.use.sizes) if size > 1)

    @functools.cached_property
    def shard_groups(self) -> tuple[dist.ProcessGroup, ...]:
        """The groups of data-parallel ranks that hold different elements; tensor-parallel ranks share one loss."""
        use = self.description.use
        return tuple(self.mesh.get_group(dim) for dim in use.shard_dims if use.sizes[dim] > 1)

    @functools.cached_property
    def copy_groups(self) -> tuple[dist.ProcessGroup, ...]:
        """The groups of data-parallel ranks that hold the same elements."""
        use = self.description.use
        others = (dim for dim in range(len(use.sizes)) if dim not in use.shard_dims and dim != use.tensor_dim)
        return tuple(self.mesh.get_group(dim) for dim in others if use.sizes[dim] > 1)

    def dtensor_spec(self, dtype: torch.dtype) -> Any:
        """Return the `DTensorSpec` of a tensor of this spec."""
        found = self._dtensor_specs.get(dtype)
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
            found = self._dtensor_specs[dtype] = stock._spec
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

    def for_another(self) -> ShardSpec:
        """Return the spec of another tensor cut alike; shares cached values, but not `belongs` and `problem`."""
        other = copy.copy(self)
        other.belongs = other.problem = None
        return other

    def whole_like(self, shape: torch.Size) -> ShardSpec:
        """Return the spec of a replicated tensor of another shape on this mesh."""
        if shape == self.shape:
            return self
        use = self.description.use
        spec = ShardSpec(self.mesh, described_as_whole(tuple(shape), use.sizes, self.description.coordinate))
        spec.belongs = self.belongs
        return spec

    @property
    def advice(self) -> str:
        """The advice for an operation that needs the whole parameter; empty if no forward runs and no unit is known."""
        if self.belongs is None:
            running = _running_module()
            late = "where it was sharded by one call per unit, it runs only after its context or finish_in_place"
            return f"; {running} called it: {late}" if running else ""
        name, owner = self.belongs
        reader = _running_module()
        read = f", and was read in the forward of {reader}" if reader else ""
        return (
            f"; {name} belongs to unit {owner.label}, whose weights are whole only while it runs{read}: {owner.remedy}"
        )


def _running_module() -> str:
    """Return the class of the module whose forward is on the call stack; empty if there is none."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        found = frame.f_locals.get("self")
        if frame.f_code.co_name == "forward" and isinstance(found, nn.Module):
            return type(found).__name__
        frame = frame.f_back
    return ""


def _placements(description: ShardDescription) -> tuple[Placement, ...]:
    use = description.use
    found: list[Placement] = [Shard(0) if dim in use.shard_dims else Replicate() for dim in range(len(use.sizes))]
    if use.tensor_dim is not None:
        found[use.tensor_dim] = Replicate() if description.tensor_cut is None else Shard(description.tensor_cut.dim)
    return tuple(found)


def gather_padded(flat: torch.Tensor, padded_numel: int, groups: list[dist.ProcessGroup]) -> torch.Tensor:
    """All-gather a different number of elements per rank by one padded collective per group.

    `flat` is (n,), with n at most `padded_numel`, which is the same on every rank. The last group is the most
    significant in the result, (product of group sizes, padded_numel): rows in the order of ranks, where what lies
    behind a rank's elements is undefined.
    """
    sent = flat
    if flat.numel() != padded_numel:
        sent = flat.new_empty(padded_numel)
        sent[: flat.numel()].copy_(flat)
    sent = sent.contiguous().view(torch.uint8)  # all back ends support bytes, but not all support every dtype
    for group in groups:
        received = sent.new_empty(sent.numel() * dist.get_world_size(group))
        if sent.numel():
            all_gather_flat(received, sent, group=group)
        sent = received
    return sent.view(flat.dtype).view(-1, padded_numel) if padded_numel else flat.new_empty(1, 0)


def cut_up(elements: torch.Tensor, boxes: Sequence[Box]) -> Iterator[tuple[torch.Tensor, Box]]:
    """Yield one view of flat elements per box, in the shape of the box."""
    start = 0
    for box in boxes:
        yield elements[start : start + box.numel].view(box.lengths), box
        start += box.numel


def gather_full(local: torch.Tensor, spec: ShardSpec) -> torch.Tensor:
    """All-gather the whole tensor; returns a new tensor on every rank. Collective over `spec.groups`."""
    name = "a sharded tensor" if spec.belongs is None else spec.belongs[0]
    with torch.no_grad(), waits_for(f"{name} is gathered whole (full_tensor)"):
        return _gather_parts(_gather_shards(local.detach(), spec), spec)


def _gather_shards(local: torch.Tensor, spec: ShardSpec) -> torch.Tensor:
    description = spec.description
    shape, cut = description.part_shape(), description.cut
    if cut.num_shards == 1:
        return local.reshape(shape)
    groups = [spec.mesh.get_group(dim) for dim in reversed(description.use.shard_dims)]
    rows = gather_padded(local.reshape(-1), cut.largest_numel, groups)
    part = local.new_empty(cut.numel)
    if cut.numel:
        for shard, row in enumerate(rows):
            start, stop = cut.range_of(shard)
            part[start:stop].copy_(row[: stop - start])
    return part.view(shape)


def _gather_parts(part: torch.Tensor, spec: ShardSpec) -> torch.Tensor:
    description = spec.description
    tensor_cut, use = description.tensor_cut, description.use
    if tensor_cut is None or use.tensor_dim is None:
        return part.clone() if description.num_shards == 1 else part
    shapes = [description.part_shape(index) for index in range(use.num_parts)]
    largest = max(torch.Size(shape).numel() for shape in shapes)
    rows = gather_padded(part.contiguous().view(-1), largest, [spec.mesh.get_group(use.tensor_dim)])
    full = part.new_empty(spec.shape)
    if largest:
        for index, (shape, row) in enumerate(zip(shapes, rows, strict=True)):
            start, stop = description.part_range(index)
            full.narrow(tensor_cut.dim, start, stop - start).copy_(row[: torch.Size(shape).numel()].view(shape))
    return full


@dataclass(frozen=True)
class LocalChunks:
    """The boxes of one local tensor; keeps no reference to the tensor, which may refer to this."""

    shape: torch.Size  # of the global tensor
    boxes: tuple[Box, ...]  # in the order of the local tensor's elements
    properties: TensorProperties  # of the local tensor
    writes: bool = True  # False where another rank saves the same elements in other boxes
    problem: str | None = None  # why they can be neither saved nor loaded

    @classmethod
    def of(cls, local: torch.Tensor, shape: torch.Size, boxes: Sequence[Box]) -> LocalChunks:
        """Make the chunks of a local tensor with these boxes; boxes without elements are left out."""
        return cls(shape, tuple(box for box in boxes if box.numel), TensorProperties.create_from_tensor(local))

    @classmethod
    def of_spec(cls, local: torch.Tensor, spec: ShardSpec) -> LocalChunks:
        """Make the chunks of a local tensor of a spec."""
        found = cls.of(local, spec.shape, spec.description.boxes())
        return replace(found, writes=spec.description.is_saved_here, problem=spec.problem)

    def chunk_list(self) -> list[ChunkStorageMetadata]:
        """List one chunk per box."""
        if self.problem is not None:
            raise ConfigurationError(self.problem)
        return [ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.lengths)) for box in self.boxes]

    def write_items(self, fqn: str, _tensor: object) -> list[WriteItem]:
        """List one item per box that this rank saves.

        A tensor without any element is one item all the same, or the checkpoint would not have it.
        """
        chunks = self.chunk_list()
        if not self.shape.numel():
            chunks = [ChunkStorageMetadata(torch.Size([0] * len(self.shape)), self.shape)]
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk, self.properties, self.shape),
            )
            for chunk in chunks
            if self.writes
        ]

    def shard_at(self, local: torch.Tensor | None, index: MetadataIndex) -> torch.Tensor:
        """Return the elements of one box, as a view of the local tensor."""
        if local is None:
            raise ValueError(
                f"{index.fqn} was unpickled, and only sharded tensors of a live model can be read by chunk"
            )
        if not self.shape.numel():
            return local.view(self.shape)
        first = 0
        for box in self.boxes:
            if index.offset is None or tuple(index.offset) == box.offsets:
                if tuple(local.shape) == box.lengths:
                    return local
                return local.view(-1)[first : first + box.numel].view(box.lengths)
            first += box.numel
        raise ValueError(f"{index.fqn} has no chunk at {index.offset} on this rank; it has {self.chunk_list()}")


class _ShardReader:
    """Reader of one local tensor's chunks; holds the tensor weakly, and pickles without it."""

    def __init__(self, chunks: LocalChunks, local: torch.Tensor | None) -> None:
        self._chunks = chunks
        self._local = None if local is None else weakref.ref(local)

    def __call__(self, index: MetadataIndex) -> torch.Tensor:
        return self._chunks.shard_at(self._local() if self._local is not None else None, index)

    def __reduce__(self) -> tuple[type[_ShardReader], tuple[LocalChunks, None]]:
        return _ShardReader, (self._chunks, None)


def carry_description(source: torch.Tensor, target: torch.Tensor) -> None:
    """Copy a local tensor's chunk functions to its copy, for the copy's own elements."""
    described = vars(source).get("__get_tensor_shard__")
    if isinstance(described, _ShardReader):
        _attach(target, described._chunks)
    elif described is not None:
        raise ConfigurationError(
            "a local tensor carries chunk functions of another library, which would hand out its own elements and not "
            "those of a copy; save it in the foreground"
        )


def describe_chunks(tensor: DTensor, spec_or_boxes: ShardSpec | Sequence[Box]) -> DTensor:
    """Attach chunk functions to the local tensor of a DTensor; return the DTensor."""
    local = tensor._local_tensor
    if isinstance(spec_or_boxes, ShardSpec):
        chunks = LocalChunks.of_spec(local, spec_or_boxes)
    else:
        chunks = LocalChunks.of(local, tensor.shape, spec_or_boxes)
    _attach(local, chunks)
    return tensor


def no_write_items(_fqn: str, _tensor: object) -> list[WriteItem]:
    """Return no write items."""
    return []


def _attach(local: torch.Tensor, chunks: LocalChunks) -> None:
    local.__create_chunk_list__ = chunks.chunk_list  # type: ignore[attr-defined]
    local.__create_write_items__ = chunks.write_items  # type: ignore[attr-defined]
    local.__get_tensor_shard__ = _ShardReader(chunks, local)  # type: ignore[attr-defined]


@dataclass(frozen=True)
class TensorParallelPart:
    """Placement of one parameter on the tensor-parallel ranks."""

    mesh: DeviceMesh  # one-dimensional, tensor-parallel
    placement: Placement  # `Shard(dim)` or `Replicate()`
    shape: torch.Size  # over all tensor-parallel ranks
    stride: tuple[int, ...]  # over all tensor-parallel ranks
    is_dtensor: bool  # whether the modules hold it as a DTensor, else as a plain tensor

    @property
    def is_cut(self) -> bool:
        """True if tensor-parallel ranks hold different parts."""
        return isinstance(self.placement, Shard) and self.mesh.size() > 1

    def shapes_by_rank(self, local_shape: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
        """Return the shape of every rank's part, given this rank's; uneven where the dimension is not divisible."""
        if not isinstance(self.placement, Shard):
            return (local_shape,) * self.mesh.size()
        dim = self.placement.dim
        edges = TensorParallelCut.by_chunk(self.shape[dim], self.mesh.size(), dim).edges
        return tuple(
            (*local_shape[:dim], stop - start, *local_shape[dim + 1 :]) for start, stop in itertools.pairwise(edges)
        )

    def wrap(self, local: torch.Tensor) -> torch.Tensor:
        """Wrap this rank's part as the modules expect it: as a DTensor, or not at all."""
        if not self.is_dtensor:
            return local
        return DTensor.from_local(
            local, self.mesh, [self.placement], run_check=False, shape=self.shape, stride=self.stride
        )

    def local_gradient(self, grad: torch.Tensor) -> torch.Tensor:
        """Return the gradient of this rank's part; reduce it over ranks where autograd has left it partial."""
        if not isinstance(grad, DTensor):
            return grad
        if tuple(grad.placements) != (self.placement,):
            grad = grad.redistribute(placements=[self.placement])
        local = grad.to_local()
        return local.wait() if isinstance(local, AsyncCollectiveTensor) else local


def local_tensor(param: torch.Tensor) -> torch.Tensor:
    """Return a parameter's memory on this rank: a DTensor's local tensor, an extension's values, or itself."""
    if isinstance(param, DTensor):
        return param._local_tensor
    return plain_values(param) if is_tensor_extension(param) else param


GATHER_METHODS = ("fsdp_pre_all_gather", "fsdp_post_all_gather")
"""The extension of FSDP2 by which a tensor class encodes its shards and wraps the gathered tensors."""


def is_tensor_extension(param: torch.Tensor) -> bool:
    """Return True if the class of a parameter gathers in its own way (`megatron_fsdp.formats.tensor_extensions`)."""
    return any(hasattr(type(param), method) for method in GATHER_METHODS)


def plain_values(extension: torch.Tensor) -> torch.Tensor:
    """Return the one plain tensor that an extension flattens into."""
    (inner,), _ = extension.__tensor_flatten__()  # type: ignore[attr-defined]
    values: torch.Tensor = getattr(extension, inner)
    return values


def part_of(name: str, param: torch.Tensor, mesh: DeviceMesh | None) -> TensorParallelPart | None:
    """Return the tensor-parallel part that a parameter is; None for a plain tensor without tensor-parallel ranks.

    DTensors over another mesh, and placements that are neither a plain `Shard` nor `Replicate`, are refused.
    """
    if isinstance(param, DTensor):
        return _part_of_dtensor(name, param, mesh)
    if mesh is None or mesh.size() == 1:
        return None
    dim = partition_dim(param)
    shape = list(param.shape)
    if dim is not None:
        shape[dim] *= mesh.size()
    placement: Placement = Replicate() if dim is None else Shard(dim)
    stride = torch.empty(shape, device="meta").stride()
    return TensorParallelPart(mesh, placement, torch.Size(shape), tuple(stride), is_dtensor=False)


@real_values()
def _part_of_dtensor(name: str, param: DTensor, mesh: DeviceMesh | None) -> TensorParallelPart:
    if mesh is None:
        raise ConfigurationError(
            f"{name} is a DTensor over the mesh dimensions {param.device_mesh.mesh_dim_names} already; pass "
            "device_mesh with that dimension and name it by tp_dim"
        )
    own = param.device_mesh
    if own != mesh and (own.ndim != 1 or own.mesh.tolist() != mesh.mesh.tolist()):
        raise ConfigurationError(
            f"{name} is a DTensor over the ranks {own.mesh.tolist()}, but tp_dim has the ranks {mesh.mesh.tolist()} "
            "here; parallelize modules over exactly the tensor-parallel mesh, and leave data parallelism to fully_shard"
        )
    placement = param.placements[0]
    if type(placement) not in (Shard, Replicate):
        raise ConfigurationError(f"{name} is placed as {placement} over tensor-parallel ranks; use Shard or Replicate")
    return TensorParallelPart(own, placement, param.shape, tuple(param.stride()), is_dtensor=True)


def partition_dim(param: torch.Tensor) -> int | None:
    """Return the dimension that Megatron's layers mark as cut over tensor-parallel ranks, or None."""
    mode = getattr(param, "_tensor_parallel_mode", None)
    if mode in ("column", "row"):
        return 0 if mode == "column" else 1
    dim = getattr(param, "partition_dim", -1)
    return int(dim) if getattr(param, "tensor_model_parallel", False) and dim >= 0 else None
