"""A flat buffer: one contiguous local tensor, the layout of the whole buffer, and the region that is on this rank."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megatron_fsdp.sharding.layout import Layout
from megatron_fsdp.sharding.placement import Region


class FlatBuffer:
    """This rank's part of all tensors of a layout, in one flat local tensor.

    Attributes:
        layout: Where each tensor lies in the full buffer.
        region: The elements of the full buffer that are here.
        local: These elements, (region.numel,).
    """

    def __init__(
        self,
        layout: Layout,
        region: Region,
        dtype: torch.dtype,
        device: torch.device,
        memory: torch.Tensor | None = None,
    ) -> None:
        """Allocate zeros, or use `memory` (region.numel,), which holds some."""
        self.layout = layout
        self.region = region
        self.local = torch.zeros(region.numel, dtype=dtype, device=device) if memory is None else memory

    @classmethod
    def slice_of(cls, whole: FlatBuffer, region: Region) -> FlatBuffer:
        """Return a part of a buffer as a buffer of its own that shares the memory."""
        part = cls.__new__(cls)
        part.layout, part.region = whole.layout, region
        part.local = whole.view_of(region)
        return part

    @property
    def is_whole(self) -> bool:
        """Whether everything is here."""
        return self.region.numel == self.layout.numel

    def view_of(self, region: Region) -> torch.Tensor:
        """Return the elements of a region inside of this one, a view (region.numel,)."""
        return self.local[region.within(self.region)]

    def piece(self, index: int) -> torch.Tensor:
        """Return the part of tensor `index` that is here, a view, maybe empty.

        The full shape where everything is here; else (rows, *rest) or, where rows are cut, (elements,).
        """
        return piece_view(self.layout, self.region, self.local, index)

    def pieces(self) -> list[torch.Tensor]:
        """Return the pieces of all tensors."""
        return [self.local[start:stop].view(shape) for start, stop, shape in self.layout.pieces_in(self.region)]

    def store_all(self, tensors: Sequence[torch.Tensor | None]) -> None:
        """Copy this region's part of full tensors, casting to this buffer's dtype; skip those that are None."""
        pieces, parts = [], []
        for index, (piece, tensor) in enumerate(zip(self.pieces(), tensors, strict=True)):
            if tensor is None or not piece.numel():
                continue
            if not tensor.is_contiguous():  # flattening copies, so one at a time
                self.store(index, tensor)
                continue
            start, stop = self.layout.range_in(index, self.region)
            pieces.append(piece.view(-1))
            parts.append(tensor.detach().view(-1)[start:stop])
        if pieces:
            torch._foreach_copy_(pieces, parts)

    def store(self, index: int, tensor: torch.Tensor) -> None:
        """Copy this region's part of a full tensor, casting to this buffer's dtype."""
        start, stop = self.layout.range_in(index, self.region)
        self.piece(index).view(-1).copy_(tensor.detach().reshape(-1)[start:stop])


def full_view(layout: Layout, full: torch.Tensor, index: int) -> torch.Tensor:
    """Return tensor `index`, in its own shape, as a view of a full flat buffer (numel,)."""
    start, stop = layout.tensor_range(index)
    return full[start:stop].view(layout.shapes[index])


def piece_view(layout: Layout, region: Region, local: torch.Tensor, index: int) -> torch.Tensor:
    """Return a region's part of tensor `index`, as a view of the region's memory (region.numel,)."""
    start, stop, shape = layout.pieces_in(region)[index]
    return local[start:stop].view(shape)


def padding_ranges(layout: Layout) -> tuple[tuple[int, int], ...]:
    """Return the ranges (start, stop) of the full buffer that belong to no tensor."""
    taken = sorted(layout.tensor_range(index) for index in range(len(layout.shapes)))
    gaps, cursor = [], 0
    for start, stop in taken:
        if stop == start:
            continue
        if start > cursor:
            gaps.append((cursor, start))
        cursor = stop
    if cursor < layout.numel:
        gaps.append((cursor, layout.numel))
    return tuple(gaps)
