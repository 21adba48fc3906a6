"""`DBuffer`: tensors in one flat buffer that is placed on a device mesh, and moved between placements."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.distributed import _symmetric_memory as symmetric_memory
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate

from megatron_fsdp.comm.collectives import Axis, sum_received
from megatron_fsdp.dtensor.shard_spec import ShardSpec
from megatron_fsdp.dtensor.tensor import UnevenDTensor, register_with_torch
from megatron_fsdp.engine.memory import FlatBuffer, allocate
from megatron_fsdp.errors import ConfigurationError, NotSupportedYetError, shortened
from megatron_fsdp.experimental.placement import Flat, axis_index, check_placements
from megatron_fsdp.sharding.mesh import rank_mesh_of
from megatron_fsdp.sharding.placement import Layout, held_region
from megatron_fsdp.sharding.placement import Placement as OnAxis
from megatron_fsdp.sharding.shards import BufferCut, MeshUse, ShardDescription


class DBuffer:
    """Tensors in one flat buffer on a device mesh: this rank's part of it, and moves to other placements.

    A buffer sharded over several axes is cut over the innermost first. Collectives block, on CUDA the current stream;
    all ranks along the axis call them. Their arguments are checked before anything is sent.

    Args:
        mesh: Any number of axes, with or without names.
        placements: One per axis, outermost first: `Replicate()`, `Partial("sum")`, `Partial("avg")` or `Shard(0)`.
        tensor_shapes: Of the whole tensors.
        dtype: Of all tensors.
        device: Of this rank's memory, which is zeros.

    Attributes:
        mesh: The mesh.
        placements: One per axis, with `Flat()` for `Shard(0)`.
        layout: Position of each tensor in the whole buffer: `tensor_shapes`, `tensor_to_offset`, `size`.
        offset: First element of this rank's part in the whole buffer.
        local_buffer: This rank's part, (numel,).
        dtype: Dtype of all tensors.
        device: Device of this rank's part.
        allocation_stream: The stream that the memory was allocated on; None on the CPU.

    Raises:
        ConfigurationError: Not one placement per axis, or shards that are not a suffix of the axes (a ValueError).
        NotSupportedYetError: A placement that flat buffers cannot have (a NotImplementedError).
        TypeError: Something else than a placement.
    """

    def __init__(
        self,
        mesh: DeviceMesh,
        placements: Iterable[Placement],
        tensor_shapes: Iterable[Sequence[int]],
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        self._prepare(mesh, placements, tensor_shapes)
        self._hold(allocate(False, self._region.numel, dtype, torch.device(device)))

    def _prepare(self, mesh: DeviceMesh, placements: Iterable[Placement], shapes: Iterable[Sequence[int]]) -> None:
        self.mesh = mesh
        self._axes = rank_mesh_of(mesh, {}).axes
        self.layout = plan_lcm_layout(tuple(shapes), mesh.size())
        self._place(check_placements(placements, mesh.ndim))

    def _place(self, placements: tuple[Placement, ...]) -> None:
        self.placements = placements
        on_axes = [OnAxis.SHARD if isinstance(each, Flat) else OnAxis.REPLICATE for each in placements]
        self._region = held_region(self.layout.numel, on_axes, self._axes)
        self.offset = self._region.start

    def _hold(self, local: torch.Tensor, stream: Any = None) -> None:
        self.local_buffer, self.dtype, self.device = local, local.dtype, local.device
        self._memory = FlatBuffer(self.layout, self._region, local)
        self._storage_bytes = local.untyped_storage().nbytes()
        self.allocation_stream = _current_stream(local.device) if stream is None else stream

    @classmethod
    def from_local(
        cls,
        local_buffer: torch.Tensor,
        mesh: DeviceMesh,
        placements: Iterable[Placement],
        tensor_shapes: Iterable[Sequence[int]],
        *,
        allocation_stream: Any = None,
    ) -> DBuffer:
        """Make a buffer of this rank's part, (numel,), without a copy.

        Raises:
            ConfigurationError: It is not flat, not contiguous or of another length (a ValueError).
        """
        made = cls.__new__(cls)
        made._prepare(mesh, placements, tensor_shapes)
        shape, numel = tuple(local_buffer.shape), made._region.numel
        if shape != (numel,) or not local_buffer.is_contiguous():
            raise ConfigurationError(
                f"local_buffer has shape {shape} and strides {local_buffer.stride()}; under {made.placements} this "
                f"rank holds {numel} elements, so give a contiguous tensor of shape ({numel},)"
            )
        made._hold(local_buffer, allocation_stream)
        return made

    @classmethod
    def distribute_tensors(
        cls, tensors: Iterable[torch.Tensor], mesh: DeviceMesh, placements: Iterable[Placement]
    ) -> DBuffer:
        """Copy this rank's part of whole tensors into a new buffer on the mesh's device; no communication.

        Where the buffer is `Partial`, tensors are this rank's summands. Of tensors on the meta device only shape and
        dtype are taken.

        Raises:
            ConfigurationError: No tensors, or of several dtypes (a ValueError).
        """
        given = tuple(tensors)
        dtypes = sorted({str(tensor.dtype) for tensor in given})
        if len(dtypes) != 1:
            found = f"tensors of {' and '.join(dtypes)}" if dtypes else "no tensors"
            raise ConfigurationError(f"{found} were given to distribute_tensors; give one or more of one dtype")
        made = cls(mesh, placements, [tensor.shape for tensor in given], given[0].dtype, mesh.device_type)
        made._memory.store_all([None if tensor.is_meta else tensor for tensor in given])
        return made

    # ---- tensors ----------------------------------------------------------------------------------------------------

    def get_local_tensor(self, index: int) -> torch.Tensor:
        """Return this rank's rows of a tensor, a view; none where it holds none."""
        return self._memory.local_shard(index)

    def get_dtensor(self, index: int) -> DTensor:
        """Return a tensor as a DTensor over the view `get_local_tensor`.

        Raises:
            NotSupportedYetError: The buffer is sharded along one axis and partial along another (a
                NotImplementedError).
        """
        local, shape = self.get_local_tensor(index), self.layout.tensor_shapes[index]
        cut_dims = tuple(dim for dim in reversed(range(self.mesh.ndim)) if isinstance(self.placements[dim], Flat))
        if any(isinstance(each, Partial) for each in self.placements):
            if cut_dims:
                raise NotSupportedYetError(
                    f"a buffer placed as {self.placements} gives no DTensors, which cannot be uneven shards of "
                    "summands; redistribute it first, or use get_local_tensor"
                )
            return DTensor.from_local(
                local, self.mesh, self.placements, run_check=False, shape=shape, stride=local.stride()
            )
        register_with_torch()
        use = MeshUse(tuple(self.mesh.shape), cut_dims)
        cut = BufferCut(self.layout.offsets[index], self._region.numel, use.num_shards, shape.numel())
        coordinate = tuple(axis.rank for axis in self._axes)
        return UnevenDTensor.wrap(local, ShardSpec(self.mesh, ShardDescription(tuple(shape), use, coordinate, cut)))

    # ---- memory -----------------------------------------------------------------------------------------------------

    def release_storage(self) -> None:
        """Free the memory, also of buffers that are views of it. Nobody may read it until `reallocate_storage`."""
        self.local_buffer.untyped_storage().resize_(0)

    def reallocate_storage(self) -> None:
        """Allocate released memory again, uninitialised; earlier views are valid again."""
        storage = self.local_buffer.untyped_storage()
        if not storage.nbytes():
            storage.resize_(self._storage_bytes)
            self.allocation_stream = _current_stream(self.device)

    @property
    def is_symmetric_memory(self) -> bool:
        """True if the memory is symmetric memory of torch, which the CPU has none of."""
        asks = getattr(symmetric_memory, "is_symm_mem_tensor", None)
        return self.device.type != "cpu" and asks is not None and bool(asks(self.local_buffer))

    def rendezvous(self, axis: int | str) -> None:
        """Exchange the addresses of symmetric memory with the ranks along an axis. Collective.

        Raises:
            ConfigurationError: The memory is not symmetric (a ValueError).
        """
        own = self._axes[axis_index(self.mesh, axis)]
        if not self.is_symmetric_memory:
            raise ConfigurationError(
                f"a buffer on {self.device} in no symmetric memory cannot rendezvous; allocate it in torch's, which "
                "needs CUDA, or leave the call out"
            )
        if own.group is not None:
            symmetric_memory.rendezvous(self.local_buffer, own.group)

    def cast(self, dtype: torch.dtype, *, out: DBuffer | None = None) -> DBuffer:
        """Copy into another dtype; the buffer itself where it has the dtype and `out` is None."""
        if out is None and dtype == self.dtype:
            return self
        made = self._result(self.placements, out, dtype)
        made.local_buffer.copy_(self.local_buffer)
        return made

    # ---- moves between placements -----------------------------------------------------------------------------------

    def redistribute(self, placements: Iterable[Placement], *, out: DBuffer | None = None) -> DBuffer:
        """Move to other placements, over any number of axes; collective along those that do not only scatter.

        Without `out` the result is the buffer itself where nothing changes, and a view of its memory where nothing is
        sent.

        Raises:
            NotSupportedYetError: Along an axis there is no such move: `Flat` to `Partial`, between partial sums,
                `Replicate` to a sum, or with `out` to an average (a NotImplementedError).
            ConfigurationError: `out` differs from the result in anything but values (a ValueError).
        """
        wanted = check_placements(placements, self.mesh.ndim)
        if out is not None:
            self._result(wanted, out, self.dtype)
        steps = [
            (axis, _move(old, new, out is not None))
            for axis, (old, new) in enumerate(zip(self.placements, wanted, strict=True))
            if old != new
        ]
        # Shards are of the inner axes. They grow outer axis first, since an outer rank's part of an inner shard is
        # contiguous, and are cut inner axis first, for the same reason.
        if not any(isinstance(self.placements[axis], Flat) for axis, _ in steps):
            steps.reverse()
        found = self
        for number, (axis, move) in enumerate(steps, 1):
            found = move(found, axis, wanted[axis], out if number == len(steps) else None)
        if out is not None and not steps:
            out.local_buffer.copy_(self.local_buffer)
        return found if out is None else out

    def allgather(self, axis: int | str, *, out: DBuffer | None = None) -> DBuffer:
        """All-gather the shards along an axis: `Flat` to `Replicate`. Collective."""
        number, own = self._source("allgather", axis, Flat)
        result = self._result(self._placed(number, Replicate()), out, self.dtype)
        own.all_gather(result.local_buffer, self.local_buffer, async_op=False)
        return result

    def allreduce(self, axis: int | str, *, out: DBuffer | None = None) -> DBuffer:
        """All-reduce along an axis: `Partial` to `Replicate`. Collective."""
        number, own = self._source("allreduce", axis, Partial)
        result = self._result(self._placed(number, Replicate()), out, self.dtype)
        result.local_buffer.copy_(self.local_buffer)
        own.all_reduce(result.local_buffer, async_op=False)
        self._average(number, result.local_buffer)
        return result

    def reduce_scatter(self, axis: int | str, new_placement: Placement, *, out: DBuffer | None = None) -> DBuffer:
        """Reduce-scatter along an axis: `Partial` to `Flat`; on gloo summed in rank order. Collective."""
        number, own = self._source("reduce_scatter", axis, Partial)
        result = self._result(self._placed(number, _as_target(new_placement)), out, self.dtype)
        total = result.local_buffer
        if own.exchanges_pairwise:
            received = torch.empty_like(self.local_buffer)
            own.exchange(received, self.local_buffer, async_op=False)
            total = sum_received(received, own.num_ranks)
        elif own.num_ranks > 1:
            own.reduce_scatter(total, self.local_buffer, async_op=False)
        else:
            total.copy_(self.local_buffer)
        self._average(number, total)
        if total is not result.local_buffer:
            result.local_buffer.copy_(total)
        return result

    def scatter(self, axis: int | str, new_placement: Placement, *, out: DBuffer | None = None) -> DBuffer:
        """Take this rank's shard along an axis, `Replicate` to `Flat`: a view, or a copy in `out`; local."""
        number, _ = self._source("scatter", axis, Replicate)
        view = self._view(number, _as_target(new_placement))
        if out is None:
            return view
        self._result(view.placements, out, self.dtype).local_buffer.copy_(view.local_buffer)
        return out

    def _source(self, operation: str, axis: int | str, wanted: type[Placement]) -> tuple[int, Axis]:
        """Check the placement along an axis; return the axis and its number."""
        number = axis_index(self.mesh, axis)
        if not isinstance(self.placements[number], wanted):
            raise ConfigurationError(
                f"{operation} along axis {axis!r} begins from {wanted.__name__} there, but the buffer is placed as "
                f"{self.placements}; redistribute chooses the collectives itself"
            )
        return number, self._axes[number]

    def _placed(self, axis: int, placement: Placement) -> tuple[Placement, ...]:
        return check_placements((*self.placements[:axis], placement, *self.placements[axis + 1 :]), self.mesh.ndim)

    def _moved(self, placements: tuple[Placement, ...]) -> DBuffer:
        """Return this buffer under other placements, still without memory of its own."""
        made = copy.copy(self)
        made._place(placements)
        return made

    def _view(self, axis: int, placement: Placement) -> DBuffer:
        """Return this buffer under another placement in the same memory."""
        made = self._moved(self._placed(axis, placement))
        made._hold(self._memory.view_of(made._region), self.allocation_stream)
        return made

    def _result(self, placements: tuple[Placement, ...], out: DBuffer | None, dtype: torch.dtype) -> DBuffer:
        """Return the buffer of a result: a new one, or `out` if that fits."""
        if out is None:
            made = self._moved(placements)
            made._hold(torch.empty(made._region.numel, dtype=dtype, device=self.device))
            return made
        own = {
            "mesh": self.mesh,
            "placements": placements,
            "layout": self.layout,
            "dtype": dtype,
            "device": self.device,
        }
        for name, wanted in own.items():
            given = getattr(out, name, None)
            if given != wanted:
                raise ConfigurationError(
                    f"out has {name} {shortened(str(given), 200)}, but the result {shortened(str(wanted), 200)}; make "
                    "out with the mesh, placements, tensor_shapes, dtype and device of the result"
                )
        return out

    def _average(self, axis: int, total: torch.Tensor) -> None:
        """Divide a sum along an axis by its ranks where the axis averages."""
        # Not in the collective: symmetric memory cannot average, nor can gloo in every torch.
        if self.placements[axis] == Partial("avg") and self._axes[axis].num_ranks > 1:
            total.div_(self._axes[axis].num_ranks)


_Move = Callable[[DBuffer, int, Placement, DBuffer | None], DBuffer]
_MOVES: dict[tuple[type, type], _Move] = {
    (Flat, Replicate): lambda found, axis, _new, out: found.allgather(axis, out=out),
    (Partial, Replicate): lambda found, axis, _new, out: found.allreduce(axis, out=out),
    (Partial, Flat): lambda found, axis, new, out: found.reduce_scatter(axis, new, out=out),
    (Replicate, Flat): lambda found, axis, new, out: found.scatter(axis, new, out=out),
    (Replicate, Partial): lambda found, axis, new, _out: found._view(axis, new),  # the mean of equal values
}


def _move(source: Placement, target: Placement, has_out: bool) -> _Move:
    """Return the move between two placements of one axis."""
    move = _MOVES.get((type(source), type(target)))
    if move is None or (isinstance(target, Partial) and (has_out or target.reduce_op != "avg")):
        raise NotSupportedYetError(
            f"a buffer cannot move from {source!r} to {target!r} along an axis{' into out' if has_out else ''}; it can "
            'from Shard(0) to Replicate and back, from Partial to both, and from Replicate to Partial("avg") '
            "without out"
        )
    return move


def _as_target(placement: Placement) -> Placement:
    if placement != Flat():
        raise NotSupportedYetError(f"the target {placement!r} is not supported; a buffer is scattered to Shard(0) only")
    return placement


def _current_stream(device: torch.device) -> Any:
    return None if device.type in ("cpu", "meta") else torch.get_device_module(device).current_stream(device)


# The published layout of flat buffers, by the least common multiple of row lengths. Pure; the engine pads less.


class LcmLayout(Layout):
    """A layout by multiples of the least common multiple of all row lengths, with its published names."""

    @property
    def tensor_shapes(self) -> tuple[torch.Size, ...]:
        """Shape of each tensor."""
        return tuple(map(torch.Size, self.shapes))

    @property
    def tensor_to_offset(self) -> tuple[int, ...]:
        """First element of each tensor in the whole buffer."""
        return self.offsets

    @property
    def size(self) -> int:
        """Elements of the whole buffer, padding included."""
        return self.numel


def plan_lcm_layout(shapes: Sequence[Sequence[int]], num_ranks: int) -> LcmLayout:
    """Lay tensors out so that equal shards over any of the ranks' axes cut between rows.

    A chunk is the least common multiple of all row lengths. Tensors of a chunk or more are a number of chunks and a
    remainder of rows; in the gap behind one remainder lies that of the next tensor where it fits, just before its own
    chunks. Shorter tensors fill the gaps, the longest first, and go to the end where they fit in none.
    """
    numels = [math.prod(shape) for shape in shapes]
    rows = [max(1, math.prod(shape[1:])) for shape in shapes]
    chunk = math.lcm(*rows)
    offsets, gaps, position = [0] * len(numels), list[tuple[int, int]](), 0
    waiting = [index for index, numel in enumerate(numels) if numel >= chunk]
    while waiting:
        index = waiting.pop(0)
        offsets[index] = position
        stop = position + numels[index]
        position = _round_up(stop, chunk)
        for other in waiting:
            if 0 < numels[other] % chunk <= position - stop:
                waiting.remove(other)
                offsets[other] = position - numels[other] % chunk
                gaps.append((stop, offsets[other]))
                position = offsets[other] + numels[other]
                break
        else:
            gaps.append((stop, position))
    for index in sorted((i for i, numel in enumerate(numels) if numel < chunk), key=lambda i: -numels[i]):
        # At a multiple of its row, no edge of a shard, a multiple of the chunk, can cut inside a row.
        for place, (first, stop) in enumerate(gaps):
            start = _round_up(first, rows[index])
            if start + numels[index] <= stop:
                gaps[place] = (start + numels[index], stop)
                break
        else:
            start = _round_up(position, rows[index])
            position = start + numels[index]
        offsets[index] = start
    shard_numel = _round_up(position, chunk * num_ranks) // num_ranks
    return LcmLayout(tuple(tuple(map(int, shape)) for shape in shapes), tuple(offsets), num_ranks, shard_numel)


def _round_up(position: int, step: int) -> int:
    return -(-position // step) * step
