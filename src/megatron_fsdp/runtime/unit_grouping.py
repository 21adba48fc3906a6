"""What becomes a unit of the engine, and who tells it when: by module here, and by other rules elsewhere."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import nn
from torch.utils.hooks import RemovableHandle

from megatron_fsdp.fine_grained import refine_units
from megatron_fsdp.memory_options import MemoryOptions
from megatron_fsdp.runtime.engine import Engine
from megatron_fsdp.runtime.engine_parts import EngineParts
from megatron_fsdp.runtime.hooks import register_hooks
from megatron_fsdp.runtime.sharding import Sharding
from megatron_fsdp.units import UnitPlan, find_units


class Grouping(Protocol):
    """Which parameters are gathered and reduced together, and what tells the engine when."""

    def plan(self, module: nn.Module, sharding: Sharding) -> UnitPlan:
        """The units of a model, the root first; the model is only read.

        Raises:
            ConfigurationError: The model cannot be cut like that.
        """
        ...

    def cut_numel(self, num_ranks: int) -> int | None:
        """Where to cut the root's parameters into groups, in elements; None: never."""
        ...

    def make_engine(self, parts: EngineParts) -> Engine:
        """The engine, without hooks."""
        ...

    def connect(self, engine: Engine, modules: Mapping[int, nn.Module]) -> Sequence[RemovableHandle]:
        """Register the hooks; `modules` are those of the units that are modules, by index."""
        ...


@dataclass(frozen=True)
class UnitGrouping:
    """Units are modules, and their forwards and backwards tell the engine when.

    Attributes:
        unit_modules: What to look for as units.
        memory: How memory is borrowed.
    """

    unit_modules: Sequence[type[nn.Module] | str] | str | None
    memory: MemoryOptions

    def plan(self, module: nn.Module, sharding: Sharding) -> UnitPlan:  # noqa: ARG002
        """See `Grouping`."""
        plan = find_units(module, self.unit_modules)
        self.memory.check_plan(len(plan.units) - 1)
        return refine_units(module, plan, self.memory.whole_types) if self.memory.fine_grained else plan

    def cut_numel(self, num_ranks: int) -> int | None:
        """See `Grouping`."""
        return self.memory.bucket_numel_on(num_ranks)

    def make_engine(self, parts: EngineParts) -> Engine:
        """See `Grouping`."""
        return Engine(parts)

    def connect(self, engine: Engine, modules: Mapping[int, nn.Module]) -> Sequence[RemovableHandle]:
        """See `Grouping`."""
        return register_hooks(engine, modules)
