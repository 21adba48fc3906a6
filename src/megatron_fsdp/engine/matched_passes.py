"""Passes of ranks that may skip units: ranks agree on each one, and a rank that has none fills it in.

See Note [Ranks that skip units] in `ordered_schedule.py` for what happens inside of a pass.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import TypeAlias

import torch
from torch.distributed.fsdp import FSDPModule

from megatron_fsdp.comm.agreement import gather_over, raise_together
from megatron_fsdp.engine.engine import Engine, ForwardCall, Pass, alive, engine_of_model
from megatron_fsdp.engine.hooks import announcing_backward
from megatron_fsdp.engine.observer import Phase
from megatron_fsdp.engine.ordered_schedule import OrderedScheduler, UnitOrder
from megatron_fsdp.engine.schedule import ScheduleConfig, SyncScope
from megatron_fsdp.engine.unit import Unit
from megatron_fsdp.errors import ConfigurationError, ScheduleError
from megatron_fsdp.sharding.units import ROOT_UNIT

Report: TypeAlias = tuple[Pass, bool, tuple[SyncScope, ...]]
"""A rank's next pass, if it takes gradients, and the sync scope of each unit in its backward."""

MEETING = (
    "since ranks may skip units, each has to come to meet_ranks(model) after its passes, before it clips gradients, "
    "saves a state dict or begins a collective of its own"
)
"""The remedy for ranks that send different things, since some still run passes."""

_SWITCHES: Mapping[SyncScope, Mapping[str, bool]] = {
    SyncScope.EVERYWHERE: {"auto_sync": True, "defer_all": False},
    SyncScope.INSIDE: {"auto_sync": False, "is_last_microbatch": False, "defer_all": False},
    SyncScope.NOWHERE: {"auto_sync": False, "is_last_microbatch": False, "defer_all": True},
}


def ordered_scheduler(config: ScheduleConfig, units: Sequence[Unit], paths: Sequence[str]) -> OrderedScheduler:
    """Make the scheduler of ranks that may skip units.

    `paths`: modules in the order in which forwards call them; none: the order of registration.

    Raises:
        ConfigurationError: The paths leave out a unit, or the model has no root.
    """
    unit_of = {path: unit.index for unit in units for path in unit.modules}
    if unit_of.get("") != ROOT_UNIT:
        raise ConfigurationError(
            "ranks_may_skip_units needs one module around all units, whose forward they are filled in at; shard that "
            "module, too"
        )
    named = [unit_of[path] for path in paths if path in unit_of]
    order = tuple(dict.fromkeys(unit for unit in named or range(len(units)) if unit != ROOT_UNIT))
    if missing := [unit.label for unit in units if unit.index not in (ROOT_UNIT, *order)]:
        raise ConfigurationError(
            f"ranks_may_skip_units leaves out {len(missing)} units, such as {missing[0]}; name every module that is a "
            "unit in the order in which forwards call them, or give True"
        )
    parents = tuple(_unit_around(unit, unit_of) for unit in units)
    return OrderedScheduler(config, UnitOrder(order, parents, tuple(unit.label for unit in units)))


def _unit_around(unit: Unit, unit_of: Mapping[str, int]) -> int:
    """Return the unit around a unit's first module."""
    path = next(iter(unit.modules), "")
    while path:
        path = path.rpartition(".")[0]
        if unit_of.get(path, unit.index) != unit.index:
            return unit_of[path]
    return ROOT_UNIT


class MatchedPasses:
    """The passes of one model, on each of which its ranks agree, so that every rank runs all passes of the others, too.

    See Note [Weak references] in `engine.py`.
    Between two syncs ranks may run different numbers of forwards and backwards; a sync (a step, a norm of gradients,
    `meet_ranks`) begins when all of them have come to it.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = weakref.ref(engine)
        self._filling = False

    def begin(self, own: Pass) -> None:
        """Agree on the next pass, and fill in those of other ranks until it is this rank's turn. Collective.

        Raises:
            ScheduleError: Ranks begin backwards that are to be reduced differently.
        """
        if self._filling:
            return
        engine = alive(self._engine)
        scheduler = engine.scheduler
        assert isinstance(scheduler, OrderedScheduler)
        while True:
            takes_gradients = own is Pass.FORWARD and torch.is_grad_enabled()
            scopes = tuple(unit.sync_scope for unit in engine.units) if own is Pass.BACKWARD else ()
            with engine.observers.during(Phase.AGREE, ROOT_UNIT):
                agreed, takes_gradients, scopes = _agreed(
                    gather_over(engine.reaching_all, (own, takes_gradients, scopes))
                )
            if agreed is Pass.FORWARD:
                scheduler.takes_gradients = takes_gradients
            if agreed is own:
                return
            self._filling = True
            try:
                if agreed is Pass.FORWARD:
                    _fill_forward(engine, takes_gradients)
                else:
                    _fill_backward(engine, scheduler, scopes)
            finally:
                self._filling = False


def _agreed(reports: Sequence[Report]) -> Report:
    """Return the pass that all ranks run next: a backward if any rank is at one, else a forward."""
    agreed = max(kind for kind, *_ in reports)
    scopes = {scopes for kind, _, scopes in reports if kind is agreed}
    if len(scopes) > 1:
        raise ScheduleError(
            "ranks began a backward that some reduce further than others (no_sync, is_last_microbatch or "
            "set_requires_gradient_sync differ); where ranks may skip units, give them the same switches"
        )
    return agreed, any(takes for kind, takes, _ in reports if kind is agreed), scopes.pop()


def _fill_forward(engine: Engine, takes_gradients: bool) -> None:
    """Run the communication of a forward that only other ranks compute."""
    with torch.inference_mode(False), torch.set_grad_enabled(takes_gradients):
        try:
            engine.pre_forward(ROOT_UNIT)
        except BaseException:
            engine.post_forward(ROOT_UNIT, needs_backward=False, failed=True)
            raise
        engine.post_forward(ROOT_UNIT, needs_backward=takes_gradients)


def _fill_backward(engine: Engine, scheduler: OrderedScheduler, scopes: Sequence[SyncScope]) -> None:
    """Run the communication of a backward that only other ranks compute, with gradients of zero."""
    call = ForwardCall(ROOT_UNIT, 0, scheduler.last_call)
    with ExitStack() as switches, torch.inference_mode(False), torch.enable_grad():
        for unit, scope in zip(engine.units, scopes, strict=True):
            switches.enter_context(unit.mode.changed(**_SWITCHES[scope]))
        announcing_backward(engine, call, torch.zeros((), device=engine.device)).backward()


def meet_ranks(model: object) -> None:
    """Wait until every rank has come here, and run the communication of passes that others still run. Collective.

    Ranks that may skip units have any number of forwards and backwards between two steps: longer generations, more
    batches of an evaluation. Call it after the backwards of a step, before gradients are read or clipped, and before
    collectives of your own, a state dict or a checkpoint; `optimizer.step` begins with it.

    Args:
        model: What `fully_shard_model` returned, or a model sharded in place, with `ranks_may_skip_units`.

    Raises:
        ConfigurationError: The model was sharded without `ranks_may_skip_units`, or by no call of this package.
    """
    try:
        if isinstance(model, FSDPModule):
            model._get_fsdp_state()._lazy_init()  # no forward may have come here yet
        engine = engine_of_model(model)
        if not isinstance(engine.scheduler, OrderedScheduler):
            raise ConfigurationError(
                "meet_ranks was given a model whose ranks call the same units; leave it out, or shard the model with "
                "ranks_may_skip_units=True"
            )
    except ConfigurationError as error:
        raise_together(error, "meet_ranks")  # others agree on a pass there
        raise
    engine.on_pass(Pass.NONE)
