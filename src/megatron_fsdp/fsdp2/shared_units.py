"""The units of a `fully_shard` call, or of several whose modules are small, and the settings of these modules."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from megatron_fsdp.config.engine_options import MESSAGE_VARIABLE
from megatron_fsdp.engine.engine import Engine, Pass
from megatron_fsdp.engine.plans import Sharding
from megatron_fsdp.engine.schedule import SyncMode
from megatron_fsdp.engine.unit import Unit
from megatron_fsdp.errors import ConfigurationError

# Note [Small neighbours]
#
# Neighbours whose settings are equal at the first forward become one unit, as in the wrapper. Clients go on setting
# them module by module. What only moves memory holds for the unit as soon as one module asks for it. What changes
# gradients has to be set for all of its modules, one after another in any way: it takes effect when they agree, and a
# pass that begins before that is refused.


@dataclass
class Settings:
    """The settings of the modules of one call, which a client may change at any time."""

    reshard_after_forward: bool | None  # None: unless the module is the root
    reshard_after_backward: bool = True
    mode: SyncMode = field(default_factory=SyncMode)
    divisor: float | None = None  # of the sum of gradients over all ranks; None: their number
    after_reduction: Callable[[torch.Tensor], None] | None = None

    @property
    def of_gradients(self) -> dict[str, object]:
        """Those that change gradients, by the method that sets them."""
        return {
            "set_requires_gradient_sync": not self.mode.defer_all,
            "set_requires_all_reduce": self.mode.auto_sync,
            "set_gradient_divide_factor": self.divisor,
            "set_all_reduce_hook": self.after_reduction,
        }


@dataclass(eq=False)
class SharedUnits:
    """The units of one call, or the one of several calls whose modules are small neighbours.

    It has no reference to the calls, so that deleting a model frees its memory.
    """

    units: tuple[Unit, ...]  # that of the modules, then large ends of the root
    settings: Sequence[Settings]  # of each call
    mode: SyncMode  # of the units
    divisor: float | None  # in effect

    @property
    def engine(self) -> Any:
        """The engine; None before the first forward, and after it was deleted."""
        return self.units[0].engine

    def set_reshard(self) -> None:
        """Have the units resharded after a forward or a backward only if all calls ask for that."""
        if (engine := self.engine) is not None:
            after_forward = all(each.reshard_after_forward is not False for each in self.settings)
            after_backward = all(each.reshard_after_backward for each in self.settings)
            for unit in self.units:
                engine.scheduler.set_reshard(unit.index, after_forward, after_backward)

    def apply(self) -> None:
        """Have the settings that change gradients take effect, once those of all calls agree."""
        first, *others = self.settings
        if any(each.of_gradients != first.of_gradients for each in others):
            return
        vars(self.mode).update(vars(first.mode))
        for group in (group for unit in self.units for group in unit.groups):
            if (divisor := first.divisor) is not None and divisor != self.divisor:
                group.change_sharding(lambda sharding: with_factor(sharding, divisor))
            if group.gradients is not None:
                group.gradients.after_reduction = first.after_reduction
        self.divisor = first.divisor

    def check(self) -> None:
        """Raise if settings that change gradients differ between the calls."""
        first, *others = (each.of_gradients for each in self.settings)
        for number, other in enumerate(others, start=1):
            for method, value in other.items():
                if value != first[method]:
                    paths = list(self.units[0].modules)
                    raise ConfigurationError(
                        f"{method} was called with {first[method]} for {paths[0]} and with {value} for "
                        f"{paths[number]}, which are small and reduced together, as unit {self.units[0].label}; give "
                        f"all of them the same, call it before the first forward, or set {MESSAGE_VARIABLE}=0, so "
                        "that each is reduced by itself"
                    )


def check_before_passes(engine: Engine, shared: Sequence[SharedUnits]) -> None:
    """Have passes check first that calls which share a unit have equal settings. See Note [Small neighbours]."""
    begin = engine.on_pass

    def check_and_begin(begun: Pass) -> None:
        if begun is not Pass.NONE:
            for each in shared:
                each.check()
        begin(begun)

    engine.on_pass = check_and_begin


def with_factor(sharding: Sharding, divisor: float | None) -> Sharding:
    """Return a sharding whose gradients are the sum over ranks divided by `divisor`; None: as it is."""
    return sharding if divisor is None else replace(sharding, divisor=divisor)
