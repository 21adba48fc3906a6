"""The memory of a group's main gradient: there from the first reduction until no parameter shows a gradient any more.

Between `zero_grad` and the next reduction no gradient means anything, and that is where forward takes the most. The
memory goes back to the allocator then and comes again, beneath the same tensors, so that whoever knows them (the
optimizer does) still does. Where somebody has kept a gradient, as torch allows, it is left to them and a new one begun.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch
from torch.distributed.tensor import DTensor

from megatron_fsdp.buffer.flat_buffer import FlatBuffer, gaps_of
from megatron_fsdp.layout import Layout
from megatron_fsdp.region import Region

_OWN_REFERENCES = 3  # to a DTensor of ours while it is looked at: the list, the variable, the argument


class MainGradient:
    """This rank's part of the accumulated gradients of a group, and the DTensors that show its pieces.

    Args:
        layout: Where each tensor lies in the whole gradient.
        region: Which elements of that are here.
        dtype: What is accumulated in.
        device: Where it lives.
    """

    def __init__(self, layout: Layout, region: Region, dtype: torch.dtype, device: torch.device) -> None:
        self._layout = layout
        self.region = region
        self.dtype = dtype
        self.device = device
        self._buffer: FlatBuffer | None = None
        self._gaps: list[torch.Tensor] | None = None  # found when first asked for
        self.views: list[DTensor | None] = [None] * len(layout.shapes)

    @property
    def is_whole(self) -> bool:
        """Whether every element of the gradient is here."""
        return self.region.numel == self._layout.numel

    @property
    def num_bytes(self) -> int:
        """What it takes while it is there."""
        return self.region.numel * self.dtype.itemsize

    @property
    def held_bytes(self) -> int:
        """What it takes now."""
        return 0 if self._buffer is None else self._buffer.local.untyped_storage().nbytes()

    @property
    def local(self) -> torch.Tensor:
        """All elements, (region.numel,); with any content where there was no memory before."""
        return self._there().local

    def piece(self, index: int) -> torch.Tensor:
        """What is here of tensor `index`, a view; content as for `local`."""
        return self._there().piece(index)

    def view(self, index: int, describe: Callable[[int, torch.Tensor], DTensor]) -> DTensor:
        """The same as a DTensor, made once."""
        found = self.views[index]
        if found is None:
            found = self.views[index] = describe(index, self.piece(index))
        return found

    def take_back(self, index: int, grad: torch.Tensor) -> bool:
        """Take in what became of a gradient that was handed out as a copy in another dtype, or was replaced.

        Elements that are still the rounded ones keep what was rounded off. Versions would not tell: torch's operations
        on lists of DTensors, such as those of its gradient clipping, count nowhere.

        Returns:
            Whether tensor `index` counts from now on: True.
        """
        piece, found = self.piece(index), _local(grad)
        piece.copy_(torch.where(piece.to(found.dtype) == found, piece, found.to(piece.dtype)))
        return True

    def add(self, index: int, grad: torch.Tensor, counts: bool) -> bool:
        """Add a gradient of the sharded parameter itself, which is final on this rank.

        Args:
            index: Which tensor.
            grad: Its gradient, a DTensor or this rank's part.
            counts: Whether there is something to add to.

        Returns:
            Whether it counts from now on: True.
        """
        piece = self.piece(index)
        if counts:
            piece.add_(_local(grad))
        else:
            piece.copy_(_local(grad))
        return True

    def clear_gaps(self) -> torch.Tensor:
        """All elements, with zeros where no tensor lies."""
        buffer = self._there()
        if self._gaps is None:
            self._gaps = gaps_of(buffer)
        if self._gaps:
            torch._foreach_zero_(self._gaps)
        return buffer.local

    def release(self) -> None:
        """Give the memory back. To be called when no element counts and nothing that writes here is under way."""
        if not self.held_bytes:
            return
        assert self._buffer is not None
        if self._is_ours_alone(self._buffer):
            self._buffer.local.untyped_storage().resize_(0)
        else:
            self._buffer, self._gaps = None, None
            self.views = [None] * len(self.views)

    def _there(self) -> FlatBuffer:
        if self._buffer is None:
            self._buffer = FlatBuffer(self._layout, self.region, self.dtype, self.device)
        elif self.num_bytes and not self.held_bytes:
            self._buffer.local.untyped_storage().resize_(self.num_bytes)
        return self._buffer

    def _is_ours_alone(self, buffer: FlatBuffer) -> bool:
        """Whether no tensor besides our own refers to the memory, and nobody holds one of our DTensors."""
        storage = buffer.local.untyped_storage()
        ours = 2 + sum(view is not None for view in self.views) + len(self._gaps or ())  # `local` and `storage`
        if torch._C._storage_Use_Count(storage._cdata) != ours:
            return False
        for view in self.views:
            if view is not None and (sys.getrefcount(view) > _OWN_REFERENCES or _is_kept(view)):
                return False
        return True


def _is_kept(view: DTensor) -> bool:
    """Whether something that is not Python, such as a graph of autograd, or a name of its own refers to a DTensor."""
    in_other_places: int = view._use_count() - 1  # type: ignore[attr-defined]  # torch's own, without hints
    return in_other_places > 0 or sys.getrefcount(view._local_tensor) > 2  # the DTensor and the argument


def _local(grad: torch.Tensor) -> torch.Tensor:
    return grad.to_local() if isinstance(grad, DTensor) else grad
