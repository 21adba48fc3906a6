"""Parameters as they come to be sharded: parts of what tensor parallelism has cut, or of a tensor class of their own.

Tensor parallelism may have cut parameters before data parallelism shards them: then a rank's own part is sharded over
data-parallel ranks. `parallelize_module` leaves parameters as DTensors over the tensor-parallel mesh, and the modules
expect them as such in forward; Megatron's own layers hold plain tensors with attributes that say which dimension was
cut.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor import Placement as TensorPlacement

from megatron_fsdp.comm.axis import real_values
from megatron_fsdp.errors import ConfigurationError
from megatron_fsdp.sharding.shards import TensorParallelCut


@dataclass(frozen=True)
class TensorParallelPart:
    """How one parameter is placed on the tensor-parallel ranks.

    Attributes:
        mesh: The one-dimensional tensor-parallel mesh.
        placement: `Shard(dim)` or `Replicate()`.
        shape: Shape of the parameter over all tensor-parallel ranks.
        stride: Stride of the parameter over all tensor-parallel ranks.
        is_dtensor: Whether the modules hold it as a DTensor, else as a plain tensor.
    """

    mesh: DeviceMesh
    placement: TensorPlacement
    shape: torch.Size
    stride: tuple[int, ...]
    is_dtensor: bool

    @property
    def is_cut(self) -> bool:
        """Whether ranks hold different parts."""
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
        """Return the gradient of this rank's part, and finish a sum over ranks that autograd has left open."""
        if not isinstance(grad, DTensor):
            return grad
        if tuple(grad.placements) != (self.placement,):
            grad = grad.redistribute(placements=[self.placement])
        local = grad.to_local()
        return local.wait() if isinstance(local, AsyncCollectiveTensor) else local


def local_part(param: torch.Tensor) -> torch.Tensor:
    """Return a parameter's own memory on this rank: the local tensor of a DTensor, the values of a guest, or itself."""
    if isinstance(param, DTensor):
        return param._local_tensor
    return plain_values(param) if is_guest(param) else param


GATHER_METHODS = ("fsdp_pre_all_gather", "fsdp_post_all_gather")
"""The extension of FSDP2 by which a tensor class encodes its shards and wraps what was gathered."""


def is_guest(param: torch.Tensor) -> bool:
    """Return whether the class of a parameter gathers in its own way (`megatron_fsdp.engine.guests`)."""
    return any(hasattr(type(param), method) for method in GATHER_METHODS)


def plain_values(guest: torch.Tensor) -> torch.Tensor:
    """Return the one plain tensor that a guest flattens into."""
    (inner,), _ = guest.__tensor_flatten__()  # type: ignore[attr-defined]
    values: torch.Tensor = getattr(guest, inner)
    return values


def part_of(name: str, param: torch.Tensor, mesh: DeviceMesh | None) -> TensorParallelPart | None:
    """Describe how tensor parallelism cut a parameter.

    Returns:
        None for a plain tensor without tensor-parallel ranks.

    Raises:
        ConfigurationError: It is a DTensor over another mesh, or with a placement that is neither a plain `Shard` nor
            `Replicate`.
    """
    if isinstance(param, DTensor):
        return _part_of_dtensor(name, param, mesh)
    if mesh is None or mesh.size() == 1:
        return None
    dim = _partition_dim(param)
    shape = list(param.shape)
    if dim is not None:
        shape[dim] *= mesh.size()
    placement: TensorPlacement = Replicate() if dim is None else Shard(dim)
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
    if own.ndim != 1 or own.mesh.tolist() != mesh.mesh.tolist():
        raise ConfigurationError(
            f"{name} is a DTensor over the ranks {own.mesh.tolist()}, but tp_dim has the ranks {mesh.mesh.tolist()} "
            "here; parallelize modules over exactly the tensor-parallel mesh, and leave data parallelism to fully_shard"
        )
    placement = param.placements[0]
    if type(placement) not in (Shard, Replicate):
        raise ConfigurationError(f"{name} is placed as {placement} over tensor-parallel ranks; use Shard or Replicate")
    return TensorParallelPart(own, placement, param.shape, tuple(param.stride()), is_dtensor=True)


def _partition_dim(param: torch.Tensor) -> int | None:
    """Return the dimension that Megatron's layers mark as cut over tensor-parallel ranks, or None."""
    mode = getattr(param, "_tensor_parallel_mode", None)
    if mode in ("column", "row"):
        return 0 if mode == "column" else 1
    dim = getattr(param, "partition_dim", -1)
    return int(dim) if getattr(param, "tensor_model_parallel", False) and dim >= 0 else None
