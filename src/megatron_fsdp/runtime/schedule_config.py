"""What the scheduler is told when it is made. Pure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ScheduleConfig:
    """What the scheduler has to know of a model and a strategy.

    Attributes:
        trainable: For each unit, root first, whether it has parameters that take gradients.
        gathers: Whether compute weights have to be gathered at all (strategies 1 to 3 on more than one rank).
        shares_slots: Whether gathered weights live in slots (strategy 3); else each unit has its own full buffer.
        slots: Units other than the root that can be gathered at a time, at least 1.
        prefetch_forward: How many units to gather ahead in forward.
        prefetch_backward: How many units to gather ahead in backward.
        reduces_early: Whether a unit is reduced as soon as its gradients are there; else when the backward is over.
        homeless: Units with memory of their own: a slot only counts how many are gathered, and any will do.
        private: Units with memory of their own that is kept: they take no slot and give way to nobody.
        returned: Units, or the root, that are released when a backward is over, because their memory is given back.
        returned_before_step: The same of the last backward before the weights change, as far as that can be foretold.
    """

    trainable: tuple[bool, ...]
    gathers: bool = True
    shares_slots: bool = True
    slots: int = 2
    prefetch_forward: int = 1
    prefetch_backward: int = 1
    reduces_early: bool = True
    homeless: frozenset[int] = frozenset()
    private: frozenset[int] = frozenset()
    returned: frozenset[int] = frozenset()
    returned_before_step: frozenset[int] = frozenset()
