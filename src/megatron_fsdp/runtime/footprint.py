"""What a wrapped model holds and costs, read off the live objects."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_fsdp.accounting import GroupFootprint
from megatron_fsdp.buffer.shared_memory import SharedMemory
from megatron_fsdp.runtime.engine import Engine


@dataclass(frozen=True)
class MemoryUse:
    """Bytes that the engine holds on this rank.

    Attributes:
        compute_weight_bytes: Compute weights at rest.
        main_weight_bytes: Main weights that are memory of their own.
        main_grad_bytes: Main gradients while there are any: from a backward until they are cleared.
        transient_peak_bytes: The most that gathered weights have taken, and communication buckets and scratch as far
            as taken.
        gathered_bytes: What gathered weights take now; slots count whether or not they are in use.
        shared_bytes: What lies in memory that ranks of one machine share, of this rank and now: its weights and
            buckets, which are part of the numbers above, and what is copied there to be sent. No allocator of torch
            counts it.
        copied_bytes: The last of these alone.
    """

    compute_weight_bytes: int
    main_weight_bytes: int
    main_grad_bytes: int
    transient_peak_bytes: int
    gathered_bytes: int
    shared_bytes: int = 0
    copied_bytes: int = 0

    @property
    def persistent_bytes(self) -> int:
        """Bytes held between steps, without optimizer state."""
        return self.compute_weight_bytes + self.main_weight_bytes + self.main_grad_bytes


def memory_of(engine: Engine) -> MemoryUse:
    """Add up the engine's buffers."""
    groups = engine.groups()
    return MemoryUse(
        sum(group.weights.compute.local.nbytes for group in groups),
        sum(group.weights.main.local.nbytes for group in groups if not group.weights.shares_memory),
        sum(group.gradients.main.num_bytes for group in groups if group.gradients is not None),
        engine.executor.transient_bytes,
        engine.executor.weight_memory.held_bytes,
        sum(shared.held_bytes for shared in _shared_memories(engine)),
        sum(shared.copied_bytes for shared in _shared_memories(engine)),
    )


def _shared_memories(engine: Engine) -> list[SharedMemory]:
    domains = (engine.dense,) if engine.experts is None else (engine.dense, engine.experts)
    return [axis.shared for domain in domains for axis in domain.axes if axis.shared is not None]


def footprints_of(engine: Engine) -> tuple[GroupFootprint, ...]:
    """What the formulas of `megatron_fsdp.accounting` take, one entry per parameter group."""
    return tuple(group.plan.footprint(unit.index) for unit in engine.units for group in unit.groups)
