"""This engine with one thing changed, to stand beside the whole of it in the same run.

An optimisation is switched off by an option of `fully_shard`, or by a part of the engine that is replaced while the
contender is built and in each of its steps. Where an option or a part is not there (another version of the engine),
building fails, and the contender takes no part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from unittest import mock

MAIN = "ours-3"
DEFERRED = "ours-3-deferred"
HOST = "ours-3-host"


@dataclass(frozen=True)
class Variant:
    """Strategy 3 with something changed."""

    options: Mapping[str, object] = field(default_factory=dict)  # further arguments of `fully_shard`
    around: Callable[[], AbstractContextManager[object]] = nullcontext  # surrounds building and every step
    defers: bool = False  # whether only the last of several microbatches is reduced


PLAIN: Mapping[str, Variant] = {
    DEFERRED: Variant(defers=True),
    HOST: Variant({"homes": "host"}),
}
"""Variants that are no optimisation switched off."""


@dataclass(frozen=True)
class Optimisation:
    """One thing that is done to be fast or small."""

    name: str  # of the contender that goes without it
    title: str
    without: Variant  # that contender; it differs from the engine in nothing else


def _nothing(*_: object) -> None:
    """In place of something that is found."""


@contextmanager
def no_local_step() -> Iterator[None]:
    """Optimizers step on DTensors."""
    from megatron_fsdp.optim import local_step

    with mock.patch.dict(local_step._SHARDED_STATE, clear=True):
        yield


@contextmanager
def no_exchange() -> Iterator[None]:
    """Gradients are reduced by the back end's own reduce-scatter."""
    from megatron_fsdp.comm.axis import Axis

    with mock.patch.object(Axis, "exchanges_pairwise", property(lambda _axis: False)):
        yield


@contextmanager
def no_kept_slots() -> Iterator[None]:
    """Units that are still gathered when backward begins are gathered again."""
    from megatron_fsdp.engine.schedule import Scheduler

    begin = Scheduler.backward_begins

    def backward_begins(self: Scheduler, *arguments: Any) -> tuple[Any, ...]:
        others = () if self.in_backward or not self.config.gathers else range(1, len(self._units))
        released = [operation for other in others for operation in self._release(other)]
        return (*released, *begin(self, *arguments))

    with mock.patch.object(Scheduler, "backward_begins", backward_begins):
        yield


@contextmanager
def no_overlap() -> Iterator[None]:
    """Whoever launches a collective waits for it there and then."""
    from megatron_fsdp.comm.lanes import HostLane

    submit = HostLane.submit
    with mock.patch.object(
        HostLane, "submit", lambda self, launch, *rest, **more: submit(self, partial(_at_once, launch), *rest, **more)
    ):
        yield


def _at_once(launch: Callable[[bool], Any], _async_op: bool) -> None:
    launch(False)


def no_returned_gradients() -> AbstractContextManager[object]:
    """Main gradients keep their memory when they are cleared."""
    return mock.patch("megatron_fsdp.engine.gradients.MainGradient.release", _nothing)


_NO_PREFETCH = {"forward_prefetch_units": 0, "backward_prefetch_units": 0}

OPTIMISATIONS: tuple[Optimisation, ...] = (
    Optimisation("no-exchange", "reduce-scatter of minimal bytes", Variant(around=no_exchange)),
    Optimisation("no-prefetch", "next unit gathered ahead", Variant(_NO_PREFETCH)),
    Optimisation("no-overlap", "collectives beside compute", Variant(around=no_overlap)),
    Optimisation("no-kept-slots", "units gathered last in forward stay for backward", Variant(around=no_kept_slots)),
    Optimisation("no-slots", "gathered units in slots that are kept", Variant({"weight_allocator": "resize"})),
    Optimisation(
        "no-returned-gradients",
        "main gradients give their memory back while cleared",
        Variant(around=no_returned_gradients),
    ),
    Optimisation("no-local-step", "optimizer steps without DTensors", Variant(around=no_local_step)),
)
"""All that can be switched off, in the order of the table."""


def variants() -> dict[str, Variant]:
    """Return all of them by name."""
    return {**PLAIN, **{each.name: each.without for each in OPTIMISATIONS}}


def ablation() -> tuple[str, ...]:
    """Return the contenders of an ablation: each optimisation's without it and with it."""
    return MAIN, *(each.name for each in OPTIMISATIONS)
