"""Whatever a training loop does, the scheduler keeps its promises: random models, orders, reuse, recomputation.

A `Machine` carries out the operations on imaginary memory and checks each of them. It knows from the program, and not
from the scheduler, which units compute at the moment.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from megatron_fsdp.engine.schedule import Action, Operation, ScheduleConfig, Scheduler
from megatron_fsdp.sharding.units import ROOT_UNIT
from tests.engine.test_schedule import Play

_MAX_UNITS = 6


@dataclass(frozen=True)
class Call:
    """One call of a unit, the units it calls in turn, and what its backward does."""

    unit: int
    inner: tuple["Call", ...] = ()
    recomputes: bool = False


@dataclass(frozen=True)
class Pass:
    """A forward of the whole model and, where it trains, its backward; then perhaps an optimizer step."""

    calls: tuple[Call, ...]
    trains: bool
    skipped_gradients: frozenset[int]  # units some of whose parameters get none
    steps: bool


@dataclass(frozen=True)
class Program:
    """A model and what is done with it."""

    config: ScheduleConfig
    passes: tuple[Pass, ...]

    @property
    def nests(self) -> bool:
        """Whether any unit calls another."""
        return any(call.inner for each in self.passes for call in each.calls)


@st.composite
def programs(draw: st.DrawFn, nests: bool = False) -> Program:
    count = draw(st.integers(2, _MAX_UNITS))
    shares_slots = draw(st.booleans())
    slots = draw(st.integers(1, 3))
    config = ScheduleConfig(
        trainable=tuple(draw(st.lists(st.booleans(), min_size=count, max_size=count))),
        gathers=shares_slots or draw(st.booleans()),
        shares_slots=shares_slots,
        slots=slots,
        forward_prefetch_units=draw(st.integers(0, slots)),
        backward_prefetch_units=draw(st.integers(0, slots)),
        reduces_early=draw(st.booleans()),
        **_places(draw, count, shares_slots),
        resharded_before_step=frozenset({ROOT_UNIT})
        if shares_slots and not nests and draw(st.booleans())
        else frozenset(),
    )
    units = st.integers(1, count - 1)
    inner_units = frozenset(draw(st.sets(units, max_size=1))) if nests else frozenset()
    usual = draw(st.lists(_calls(units, inner_units), min_size=1, max_size=count + 1))
    passes = draw(st.lists(_passes(units, inner_units, tuple(usual)), min_size=1, max_size=4))
    return Program(config, tuple(passes))


def _places(draw: st.DrawFn, count: int, shares_slots: bool) -> dict[str, frozenset[int]]:
    """Units with memory of their own, and memory that is given back, which is never persistent."""
    if not shares_slots:
        return {}
    kinds = draw(st.lists(st.sampled_from(("slot", "resized", "persistent")), min_size=count, max_size=count))
    resized = frozenset(unit for unit, kind in enumerate(kinds) if unit and kind == "resized")
    root = frozenset({ROOT_UNIT}) if draw(st.booleans()) else frozenset()
    persistent = frozenset(unit for unit, kind in enumerate(kinds) if unit and kind == "persistent")
    return {"resized": resized, "without_slot": persistent, "resharded_after_backward": resized | root}


@st.composite
def _calls(draw: st.DrawFn, units: st.SearchStrategy[int], inner_units: frozenset[int]) -> Call:
    """Units that are called from inside others are never called from outside, as in a tree of modules."""
    unit = draw(units.filter(lambda unit: unit not in inner_units) if inner_units else units)
    inner = tuple(Call(called) for called in inner_units if draw(st.booleans()))
    return Call(unit, inner, recomputes=not inner_units and draw(st.booleans()))


@st.composite
def _passes(
    draw: st.DrawFn, units: st.SearchStrategy[int], inner_units: frozenset[int], usual: tuple[Call, ...]
) -> Pass:
    unusual = st.lists(_calls(units, inner_units), max_size=_MAX_UNITS).map(tuple)
    return Pass(
        calls=draw(st.just(usual) | unusual),
        trains=draw(st.booleans()),
        skipped_gradients=frozenset(draw(st.sets(units, max_size=2))),
        steps=draw(st.booleans()),
    )


@dataclass
class Machine:
    """Memory as the operations leave it."""

    config: ScheduleConfig
    place: dict[int, int | None] = field(default_factory=dict)
    under_way: set[int] = field(default_factory=set)
    computing: list[int] = field(default_factory=list)
    filled: set[int] = field(default_factory=set)
    reductions: dict[int, int] = field(default_factory=dict)
    slots_seen: set[int] = field(default_factory=set)

    def run(self, operations: tuple[Operation, ...]) -> None:
        for action, unit, slot in operations:
            if action is Action.UNSHARD:
                self._gather(unit, slot)
            elif action is Action.WAIT:
                assert unit in self.under_way, "a wait without a gather"
                self.under_way.remove(unit)
            elif action is Action.RESHARD:
                assert unit in self.place, "resharded without having been gathered"
                assert unit not in self.under_way, "resharded before it arrived"
                assert unit not in self.computing, "resharded while in use"
                del self.place[unit]
            elif action is Action.REDUCE:
                assert self.config.trainable[unit], "a frozen unit was reduced"
                self.filled.discard(unit)
                self.reductions[unit] = self.reductions.get(unit, 0) + 1

    def _gather(self, unit: int, slot: int | None) -> None:
        assert self.config.gathers, "nothing has to be gathered"
        assert unit not in self.place, "gathered twice"
        assert unit not in self.computing, "overwritten while in use"
        in_slots = self.config.shares_slots and unit != ROOT_UNIT and unit not in self.config.without_slot
        assert (slot is not None) == in_slots, "slots are for units other than the root"
        if slot is not None:
            assert slot not in self.place.values(), "two units in one slot"
            self.slots_seen.add(slot)
        self.place[unit] = slot
        self.under_way.add(unit)

    def check_ready(self, unit: int) -> None:
        """A unit that computes has its weights."""
        if self.config.gathers:
            assert unit in self.place, "computes without weights"
            assert unit not in self.under_way, "computes before its weights arrived"


@dataclass
class Theatre:
    """Plays a program to a scheduler and keeps a machine beside it."""

    program: Program
    log: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.player = Play(Scheduler(self.program.config))
        self.machine = Machine(self.program.config)

    def perform(self) -> "Theatre":
        for each in self.program.passes:
            homes = self._forward(each)
            if each.trains:
                self._backward(each, homes)
            if each.steps:
                self._feed("W")
                assert self.machine.place == {}, "stale weights were kept"
        return self

    def _feed(self, event: str) -> None:
        operations = self.player.feed(event)
        self.log += map(str, operations)
        self.machine.run(operations)

    def _begin(self, event: str, unit: int) -> None:
        self._feed(event)
        if unit not in self.machine.computing:
            self.machine.computing.append(unit)
        self._check_all_ready()

    def _check_all_ready(self) -> None:
        for unit in self.machine.computing:
            self.machine.check_ready(unit)

    def _forward(self, each: Pass) -> dict[int, int | None]:
        """Returns where each unit lay when autograd saved views of it."""
        homes: dict[int, int | None] = {}
        self._begin("F0>", ROOT_UNIT)
        for call in each.calls:
            self._forward_call(call, each.trains, homes)
        self._feed("F0<" if each.trains else "f0<")
        self.machine.computing.clear()
        return homes

    def _forward_call(self, call: Call, trains: bool, homes: dict[int, int | None]) -> None:
        self._begin(f"F{call.unit}>", call.unit)
        place = self.machine.place.get(call.unit)
        at_home = homes.setdefault(call.unit, place) == place or call.unit in self.program.config.resized
        assert not trains or at_home, "saved views lie in two places"
        for inner in call.inner:
            self._forward_call(inner, trains, homes)
        self._check_all_ready()
        self._feed(f"F{call.unit}<" if trains else f"f{call.unit}<")
        self.machine.computing.remove(call.unit)

    def _backward(self, each: Pass, homes: dict[int, int | None]) -> None:
        self.machine.reductions = {}
        self._begin("B0>", ROOT_UNIT)
        remaining = [call.unit for call in _flat(each.calls)]
        for call in reversed(each.calls):
            self._backward_call(call, each, remaining, homes)
        if self.program.config.trainable[ROOT_UNIT]:
            self.machine.filled.add(ROOT_UNIT)
        self.machine.computing.clear()
        self._feed("E")
        assert not self.machine.place.keys() & self.program.config.resharded_after_backward, "memory was not given back"
        assert self.machine.filled == set(), "gradients were left unreduced"
        self._check_reductions(each)

    def _backward_call(self, call: Call, each: Pass, remaining: list[int], homes: dict[int, int | None]) -> None:
        self._begin(f"B{call.unit}>", call.unit)
        at_home = self.machine.place.get(call.unit) == homes[call.unit] or call.unit in self.program.config.resized
        assert at_home, "saved views point elsewhere"
        if call.recomputes:
            self._feed(f"F{call.unit}>")
            self._check_all_ready()
            self._feed(f"f{call.unit}<")
        for inner in reversed(call.inner):
            self._backward_call(inner, each, remaining, homes)
        self._check_all_ready()
        remaining.remove(call.unit)
        if self.program.config.trainable[call.unit]:
            self._gradients(call.unit, each, last=call.unit not in remaining)
        self.machine.computing.remove(call.unit)

    def _gradients(self, unit: int, each: Pass, last: bool) -> None:
        self.machine.filled.add(unit)
        if last and unit not in each.skipped_gradients:
            self._feed(f"G{unit}")
        else:
            self._feed(f"g{unit}")

    def _check_reductions(self, each: Pass) -> None:
        used = {ROOT_UNIT, *(call.unit for call in _flat(each.calls))}
        expected = {unit: 1 for unit in used if self.program.config.trainable[unit]}
        assert self.machine.reductions == expected, "every used trainable unit is reduced once per backward"


def _flat(calls: tuple[Call, ...]) -> Iterator[Call]:
    for call in calls:
        yield call
        yield from _flat(call.inner)


@given(programs())
def test_no_program_can_make_the_scheduler_break_a_promise(program: Program) -> None:
    machine = Theatre(program).perform().machine
    allowed = set(range(program.config.slots)) if program.config.shares_slots else set()
    assert machine.slots_seen <= allowed


@given(programs(nests=True))
def test_units_that_call_units_break_no_promise_either(program: Program) -> None:
    machine = Theatre(program).perform().machine
    # An outer and an inner unit are in use together, which takes one slot more where only one was asked for.
    most = max(program.config.slots, 2 if program.nests else 1)
    assert machine.slots_seen <= set(range(most))
