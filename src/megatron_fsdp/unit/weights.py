"""The two weight buffers of a parameter group: what compute uses and what the optimizer updates."""

from __future__ import annotations

import torch

from megatron_fsdp.buffer.collectives import Axis
from megatron_fsdp.buffer.flat_buffer import FlatBuffer, full_view
from megatron_fsdp.layout import Layout
from megatron_fsdp.mixed_precision import ResolvedPrecision
from megatron_fsdp.placement import Placement


class WeightBuffers:
    """Compute weights and main weights; one memory where dtype and placement allow it.

    Attributes:
        compute: In the compute dtype. Sharded under strategy 3, else full (and, under 1 and 2, up to date only in
            this rank's part between an optimizer step and the next gather).
        main: In the main dtype. Full under strategy 0, else this rank's part.
    """

    def __init__(
        self,
        layout: Layout,
        axis: Axis,
        placements: tuple[Placement, Placement],
        precision: ResolvedPrecision,
        device: torch.device,
    ) -> None:
        compute_placement, main_placement = placements
        self.compute = FlatBuffer(layout, axis, compute_placement, precision.compute, device)
        self.shares_memory = not precision.has_main_copy
        if not self.shares_memory:
            self.main = FlatBuffer(layout, axis, main_placement, precision.main_params, device)
        elif compute_placement is main_placement:
            self.main = self.compute
        else:
            self.main = FlatBuffer.slice_of(self.compute)
        self._seen_version = -1

    def store(self, index: int, tensor: torch.Tensor) -> None:
        """Take the initial value of tensor `index`, full and in any dtype, into both buffers."""
        self.compute.store(index, tensor)
        if not self.shares_memory:
            self.main.store(index, tensor)

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
            target = self.compute.part if self.main.placement is Placement.SHARD else self.compute.local
            target.copy_(self.main.local)

    def gather_into(self, full: torch.Tensor) -> torch.distributed.Work | None:
        """Start gathering compute weights into `full` (numel,)."""
        return self.compute.gather_into(full)

    def full_view(self, full: torch.Tensor, index: int) -> torch.Tensor:
        """Tensor `index` as a view of gathered weights that share no version counter with the buffer.

        Gathering writes into memory that autograd saved views of; the bytes are the same again when backward reads
        them, so the write must not count as a modification.
        """
        return full_view(self.compute.layout, full, index).data
