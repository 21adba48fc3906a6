"""The two weight buffers of a parameter group: what compute uses and what the optimizer updates.

    main weight  -> copied, cast ->  its part of the compute weight  -> gathered over the outer axis ->
    what one inner rank stands for  -> gathered over the inner axis ->  full compute weight

A step whose region does not grow is left out.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megatron_fsdp.buffer.collectives import Axis
from megatron_fsdp.buffer.flat_buffer import FlatBuffer, full_view
from megatron_fsdp.layout import Layout
from megatron_fsdp.mixed_precision import ResolvedPrecision
from megatron_fsdp.placement import Placement, Placements
from megatron_fsdp.region import held_region


class WeightBuffers:
    """Compute weights and main weights; one memory where dtype and placement allow it.

    Attributes:
        compute: In the compute dtype. Sharded under strategy 3, else full (and, under 1 and 2, up to date only in
            this rank's part between an optimizer step and the next gather).
        main: In the main dtype. Full under strategy 0, else this rank's part.
        whole: (numel,) the full compute weights, where inner ranks share the memory of them; else None.
    """

    def __init__(
        self,
        layout: Layout,
        axes: Sequence[Axis],
        placements: Placements,
        precision: ResolvedPrecision,
        device: torch.device,
    ) -> None:
        self._axes = tuple(axes)
        self.whole: torch.Tensor | None = None
        part = None
        held = held_region(layout.numel, placements.compute_weight, axes)
        shared = axes[-1].shared if held.numel < layout.numel else None
        if shared is not None:
            self.whole = shared.whole(layout.numel, precision.compute)
            part = shared.part_of(self.whole, held.start, held.stop)
        self.compute = FlatBuffer(layout, held, precision.compute, device, part)
        region = held_region(layout.numel, placements.main_weight, axes)
        self.shares_memory = not precision.has_main_copy
        if not self.shares_memory:
            self.main = FlatBuffer(layout, region, precision.main_params, device)
        elif region == self.compute.region:
            self.main = self.compute
        else:
            self.main = FlatBuffer.slice_of(self.compute, region)
        inner_only = [Placement.REPLICATE] * (len(axes) - 1) + [placements.main_weight[-1]]
        self._inner_region = held_region(layout.numel, inner_only, axes)
        self._sent = self.compute.part(self._inner_region)
        self._seen_version = -1

    def make_main(self, precision: ResolvedPrecision) -> bool:
        """Begin to hold main weights of their own, with the values of now, where their dtype asks for it.

        Returns:
            Whether that was done.
        """
        if not precision.has_main_copy:
            return False
        shared = self.main
        self.main = FlatBuffer(shared.layout, shared.region, precision.main_params, shared.local.device)
        self.main.local.copy_(shared.local)
        self.shares_memory = False
        return True

    def store(self, index: int, tensor: torch.Tensor) -> None:
        """Take the initial value of tensor `index`, full and in any dtype, into both buffers."""
        self.compute.store(index, tensor)
        if not self.shares_memory:
            self.main.store(index, tensor)

    def store_all(self, tensors: Sequence[torch.Tensor | None]) -> None:
        """Take the initial values of all tensors but those that are None, in few calls."""
        self.compute.store_all(tensors)
        if not self.shares_memory:
            self.main.store_all(tensors)

    @property
    def main_changed(self) -> bool:
        """Whether the memory of the main weights was written to since `note_seen`.

        Where weights are gathered in place, around the main weights, this cannot tell, and says no.
        """
        gathered_in_place = self.shares_memory and self.main is not self.compute
        return not gathered_in_place and self.main.local._version != self._seen_version

    def note_seen(self) -> None:
        """Take the memory of the main weights, as it is now, for installed."""
        self._seen_version = self.main.local._version

    def install(self) -> None:
        """Copy main weights into compute weights, with the cast; nothing moves between ranks."""
        if not self.shares_memory:
            self.compute.part(self.main.region).copy_(self.main.local)

    def gather_across(self) -> torch.distributed.Work | None:
        """Start bringing an inner rank's part of the compute weights up to date, in place, from the outer ranks."""
        return self._axes[0].all_gather(self._sent, self.compute.part(self.main.region))

    def gather_into(self, full: torch.Tensor) -> torch.distributed.Work | None:
        """Start gathering compute weights into `full` (numel,), from the inner ranks."""
        return self._axes[-1].all_gather(full, self._sent)

    def full_view(self, full: torch.Tensor, index: int) -> torch.Tensor:
        """Tensor `index` as a view of gathered weights that share no version counter with the buffer.

        Gathering writes into memory that autograd saved views of; the bytes are the same again when backward reads
        them, so the write must not count as a modification.
        """
        return full_view(self.compute.layout, full, index).data
