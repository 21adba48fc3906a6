"""The memory that weights are gathered into: slots, kept buffers and storages that come and go, as a plan says."""

from __future__ import annotations

import torch

from megatron_fsdp.buffer.pools import Block, SlotPool
from megatron_fsdp.weight_plan import Place, WeightPlan


class WeightMemory:
    """Hands out the block of a unit and takes it back. Belongs to one model.

    Args:
        plan: Where each unit lives.
        device: Where the memory lives.

    Attributes:
        peak_bytes: The most that was held at a time.
    """

    def __init__(self, plan: WeightPlan, device: torch.device) -> None:
        self._plan = plan
        self._device = device
        self._slots = SlotPool(plan.slot_bytes, device)
        self._own: dict[int, Block] = {}
        self.peak_bytes = 0
        if plan.taken_at_once:
            for slot in range(plan.slots_used):
                self._slots.block(slot)
            for unit in plan.units_in(Place.OWN):
                self._block_of(unit)
        self._note_peak()

    def take(self, unit: int, slot: int | None) -> Block:
        """The block that a unit is gathered into.

        Args:
            unit: Index of the unit.
            slot: The slot that the scheduler gave it; matters to units that live in slots.
        """
        if self._plan.places[unit] is Place.SLOT:
            assert slot is not None
            if self._slots.has(slot):
                return self._slots.block(slot)
            block = self._slots.block(slot)
        else:
            block = self._block_of(unit)
            block.refill()
        self._note_peak()
        return block

    def give_back(self, unit: int) -> bool:
        """A unit is released; returns whether its memory is gone now."""
        if self._plan.places[unit] not in (Place.RESIZED, Place.FOR_STEP) or unit not in self._own:
            return False
        self._own[unit].empty()
        return True

    def _block_of(self, unit: int) -> Block:
        if unit not in self._own:
            self._own[unit] = Block(self._plan.gathered_bytes[unit], self._device)
        return self._own[unit]

    def _note_peak(self) -> None:
        self.peak_bytes = max(self.peak_bytes, self.held_bytes)

    @property
    def held_bytes(self) -> int:
        """Bytes held now."""
        return self._slots.held_bytes + sum(block.held_bytes for block in self._own.values())
