"""What an engine is put together from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from megatron_fsdp.runtime.memory_plan import MemoryPlan
from megatron_fsdp.runtime.sharding import Sharding
from megatron_fsdp.runtime.sync import SyncMode
from megatron_fsdp.unit.unit import Unit


@dataclass(frozen=True)
class EngineParts:
    """Everything that was decided and built before the engine.

    Attributes:
        units: All units, root first.
        memory: How memory is borrowed, and what the scheduler is told.
        mode: When gradients are reduced; shared with the wrapper.
        sharding: Which ranks share what.
        backward_finished: Called at the end of each backward, after reductions are in.
    """

    units: Sequence[Unit]
    memory: MemoryPlan
    mode: SyncMode
    sharding: Sharding
    backward_finished: Callable[[], None]
