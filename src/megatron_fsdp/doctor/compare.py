"""Two observations side by side: what differs, in the order of causes (pure)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial

import torch
from torch import Tensor

from megatron_fsdp.doctor.diagnose import FEW, Context, Diagnosis, diagnose
from megatron_fsdp.doctor.difference import (
    BUFFER,
    COUNTER,
    GRADIENT,
    INITIAL,
    LOADED,
    LOSS,
    NORM,
    RESUMED,
    STATE,
    WEIGHT,
    Difference,
)
from megatron_fsdp.doctor.observation import (
    Disagreement,
    Observation,
    Probes,
    Reference,
    RoundTrip,
    StepRecord,
    Values,
)
from megatron_fsdp.doctor.ratios import is_known, tell_ratio
from megatron_fsdp.doctor.tolerance import EXACT, Tolerance
from megatron_fsdp.doctor.weights import Update, UpdateError, diagnose_weight, wrong_update


def compare(
    reference: Reference, found: Observation, tolerance: Tolerance, *, repeats: bool = True
) -> list[Difference]:
    """Compare a sharded run with one process.

    Args:
        reference: What is right.
        found: What the sharded run saw.
        tolerance: How far apart right runs may be.
        repeats: Whether the same work gives the same bits on this device; then a resumed run has to.

    Returns:
        At most one difference for each place, the earliest cause first.
    """
    right = reference.observation
    sides = _Sides(reference, found, tolerance)
    places: list[Difference | None] = [sides.tensors(INITIAL, 0, right.initial, found.initial)]
    for number, (want, got) in enumerate(zip(right.steps, found.steps, strict=True), start=1):
        places += [
            sides.loss(number, want, got),
            sides.tensors(GRADIENT, number, want.gradients, got.gradients),
            sides.norm(number, want, got),
            sides.counters(number, want, got),
            sides.tensors(WEIGHT, number, want.parameters, got.parameters),
            sides.tensors(STATE, number, want.state, got.state),
        ]
    places.append(sides.buffers(len(right.steps)))
    places += _round_trip(found.round_trip, len(right.steps), EXACT if repeats else tolerance)
    return [difference for difference in places if difference is not None]


@dataclass(frozen=True)
class _Sides:
    """Both runs, and what is allowed between them."""

    reference: Reference
    found: Observation
    tolerance: Tolerance

    def loss(self, step: int, want: StepRecord, got: StepRecord) -> Difference | None:
        allowed = self.tolerance.at_step(step)
        if allowed.agree_numbers(want.loss, got.loss):
            return None
        kind, words, ratio = self._tell_loss(step, want, got)
        return _number(LOSS, step, kind, words, ratio, want.loss, got.loss, allowed)

    def _tell_loss(self, step: int, want: StepRecord, got: StepRecord) -> tuple[str, str, float | None]:
        probes, allowed = self.reference.probes, self.tolerance.at_step(step)
        bad = [str(rank) for rank, loss in enumerate(got.losses_of_ranks) if not math.isfinite(loss)]
        if bad and math.isfinite(want.loss):
            return "non-finite", f"is not finite on rank(s) {', '.join(bad)}", None
        if step > 1 and allowed.agree_numbers(probes.stale[step - 2].loss, got.loss):
            return "stale", f"is stale by one step: it is that of the weights before update {step - 1}", None
        wrong = [
            str(rank)
            for rank, (right, own) in enumerate(zip(probes.losses_of_ranks, got.losses_of_ranks, strict=False))
            if step == 1 and not allowed.agree_numbers(right, own)
        ]
        where = f" (wrong on rank(s) {', '.join(wrong)})" if wrong else ""
        ratio = got.loss / want.loss if want.loss else math.nan
        words = f"is {got.loss:.7g} where one process has {want.loss:.7g}: {self._tell_ratio(ratio)}{where}"
        return "factor", words, ratio

    def norm(self, step: int, want: StepRecord, got: StepRecord) -> Difference | None:
        if want.norm is None or got.norm is None:
            return None
        allowed = self.tolerance.at_step(step)
        of_ranks = self._numbers_of_ranks(NORM, step, "") or (got.norm,)
        wrong = [rank for rank, norm in enumerate(of_ranks) if not allowed.agree_numbers(want.norm, norm)]
        if not wrong:
            return None
        norm = of_ranks[wrong[0]]
        ratio = norm / want.norm if want.norm else math.nan
        words = f"is {norm:.7g} where one process has {want.norm:.7g}: {self._tell_ratio(ratio)}"
        words += _on_ranks(wrong, len(of_ranks))
        return _number(NORM, step, "factor", words, ratio, want.norm, norm, allowed)

    def _tell_ratio(self, ratio: float) -> str:
        return tell_ratio(ratio, self.reference.probes.num_ranks, self.reference.probes.microbatches)

    def counters(self, step: int, want: StepRecord, got: StepRecord) -> Difference | None:
        found = {name: self._numbers_of_ranks(COUNTER, step, name) or (count,) for name, count in got.counters.items()}
        wrong_on = {
            name: [rank for rank, counted in enumerate(found.get(name, ())) if counted != count]
            for name, count in want.counters.items()
        }
        names = [name for name, ranks in wrong_on.items() if ranks]
        if not names:
            return None
        ranks, of_ranks = wrong_on[names[0]], found[names[0]]
        right, wrong = want.counters[names[0]], of_ranks[ranks[0]]
        off = "off by one: " if abs(wrong - right) == 1 else ""
        words = (
            f"is {off}{wrong:g} where one process has {right:g}, so Adam's bias correction is that of step {wrong:g}"
        )
        words += _on_ranks(ranks, len(of_ranks))
        return Difference(COUNTER, step, names[0], "counter", words, None, abs(wrong - right), 0.0, tuple(names[1:]))

    def _numbers_of_ranks(self, where: str, step: int, name: str) -> tuple[float, ...]:
        """What each rank has, where they do not have the same number."""
        for each in self.found.disagreements:
            if each.place == (where, step) and each.name == name:
                return tuple(math.nan if value is None else float(value) for value in each.by_rank)
        return ()

    def buffers(self, steps: int) -> Difference | None:
        """Buffers after the last step; statistics of batch normalisation are those of a rank's own samples."""
        excused = self.reference.probes.excused

        def compared(buffers: Values) -> Values:
            return {name: value for name, value in buffers.items() if name not in excused}

        return self.tensors(BUFFER, steps, compared(self.reference.observation.buffers), compared(self.found.buffers))

    def tensors(self, where: str, step: int, want: Values, got: Values) -> Difference | None:
        return _Tensors(self, where, step, want, got).compare()


@dataclass(frozen=True)
class _Tensors:
    """The tensors of one place of a run, on both sides.

    Attributes:
        sides: Both runs.
        where: What kind of value.
        step: Optimizer step, from 1; 0 before the first.
        want: What one process has.
        got: What the sharded run has.
    """

    sides: _Sides
    where: str
    step: int
    want: Values
    got: Values

    @property
    def probes(self) -> Probes:
        return self.sides.reference.probes

    @cached_property
    def allowed(self) -> Tolerance:
        """How far apart they may be."""
        allowed = EXACT if self.where == INITIAL else self.sides.tolerance.at_step(max(self.step, 1))
        return allowed.among(self.want.values()) if self.where == GRADIENT else allowed

    @cached_property
    def ranks(self) -> Mapping[str, Disagreement]:
        """Those that ranks hold different values of."""
        place = self.where, self.step
        return {each.name: each for each in self.sides.found.disagreements if each.place == place}

    def compare(self) -> Difference | None:
        """The first that differs, in the order of causes; one of more elements where the first has too few to tell."""
        names = [name for name in self._ordered() if name in self.ranks or self._is_wrong(name)]
        if not names:
            return None
        name, told = names[0], self._diagnose(names[0], names)
        if self._may_be_chance(name, told):
            name = next((each for each in names if _numel(self.want.get(each)) > FEW), name)
            told = self._diagnose(name, names)
        error, limit = self._worst(name)
        also = tuple(each for each in names if each != name)
        return Difference(self.where, self.step, name, told.kind, told.words, told.ratio, error, limit, also)

    def _ordered(self) -> Iterator[str]:
        """Names in the order of causes: gradients as backward makes them, then frozen weights before others."""
        every = dict.fromkeys([*self.want, *self.got])
        if self.where == GRADIENT:
            yield from (name for name in self.probes.backward_order if name in every)
            yield from (name for name in every if name not in self.probes.backward_order)
        else:
            yield from sorted(every, key=lambda name: name not in self.probes.frozen)

    def _extra(self, name: str) -> Tensor | None:
        """What is allowed besides."""
        return self.probes.spread[self.step - 1].get(name) if self.where in (WEIGHT, STATE) else None

    def _is_wrong(self, name: str) -> bool:
        pair = self.want.get(name), self.got.get(name)
        return _differs(*pair, self.allowed, self._extra(name), self.where) or self._wrong_update(name) is not None

    def _wrong_update(self, name: str) -> UpdateError | None:
        if self.where != WEIGHT:
            return None
        tolerance = self.sides.tolerance.at_step(self.step)
        return wrong_update(self.want.get(name), self.got.get(name), self._update(name), tolerance)

    def _update(self, name: str) -> Update:
        return Update(self.step, name, self._before(name), self.probes)

    def _before(self, name: str) -> tuple[Tensor | None, Tensor | None]:
        """A weight before the update: expected and found."""
        right, found = self.sides.reference.observation, self.sides.found
        if self.step == 1:
            return right.initial.get(name), found.initial.get(name)
        return right.steps[self.step - 2].parameters.get(name), found.steps[self.step - 2].parameters.get(name)

    def _worst(self, name: str) -> tuple[float, float]:
        """The largest difference, and what was allowed there."""
        want, extra, value = self.want.get(name), self._extra(name), self.got.get(name)
        if name in self.ranks:
            wrong = _wrong_ranks(self.ranks[name], want, self.allowed, extra)
            value = self.ranks[name].by_rank[wrong[0]] if wrong else _farthest(self.ranks[name], want)
        error, limit = _worst(want, value, self.allowed, extra)
        update = self._wrong_update(name)
        return (update.error, update.allowed) if update is not None and error <= limit else (error, limit)

    # ---- causes -------------------------------------------------------------------------------------------------

    def _may_be_chance(self, name: str, told: Diagnosis) -> bool:
        """Whether a tensor has so few elements that they fit the cause that was found by chance."""
        named = told.kind == "factor" and is_known(told.ratio, self.probes.num_ranks, self.probes.microbatches)
        return (
            _numel(self.want.get(name)) <= FEW and told.kind in ("factor", "rounded", "decay", "unknown") and not named
        )

    def _diagnose(self, name: str, names: Sequence[str]) -> Diagnosis:
        if name in self.ranks:
            explain = partial(self._explain, name)
            told = _explain_ranks(self.ranks[name], self.want.get(name), explain, self.allowed, self._extra(name))
        else:
            told = self._with_shards(name, names, self._explain(name, self.got.get(name)))
        if self.where == INITIAL and told.kind == "unknown":
            return replace(told, words=f"{told.words}: as where ranks draw weights from seeds of their own")
        return told

    def _explain(self, name: str, found: Tensor | None, place: Tensor | None = None) -> Diagnosis:
        """The cause; from the elements of one rank in the flat tensor only, where a place is given."""
        expected, context = self.want.get(name), self._context(name)
        if place is not None and expected is not None and found is not None:
            expected, found, context = expected.flatten()[place], found.flatten()[place], context.part(place, 1)
        if self.where == WEIGHT:
            update = self._update(name) if place is None else self._update(name).part(place)
            return diagnose_weight(expected, found, update, context, self.allowed)
        if self.where == GRADIENT and name in self.probes.frozen:
            return Diagnosis("frozen", "belongs to a frozen parameter, which has none in one process: it is trained")
        return diagnose(expected, found, context, self.allowed)

    def _with_shards(self, name: str, names: Sequence[str], told: Diagnosis) -> Diagnosis:
        """With the ranks whose shards hold everything that differs, where not all do; told by these where need be."""
        owners = self.sides.found.owners
        wrong_on = dict[str, set[int]]()
        for each in names:
            wrong, owner = self._wrong(each), owners.get(each.partition(": ")[0])
            if wrong is None or owner is None or wrong.shape != owner.shape:
                return told
            wrong_on[each] = set(owner[wrong].unique().tolist())
        ranks = set().union(*wrong_on.values())
        own = owners[name.partition(": ")[0]]
        if len(ranks) == self.probes.num_ranks or (len(names) == 1 and len(own.unique()) == 1):
            return told  # where one rank holds the only one that differs, either may be the cause
        of_ranks = f"rank(s) {', '.join(map(str, sorted(ranks)))}"
        if told.kind in ("moved", "not reduced"):  # which names ranks itself
            return told
        if told.kind != "unknown":
            return replace(told, words=f"{told.words} (whatever differs there is in the shard of {of_ranks})")
        first = min(wrong_on[name])
        told = self._explain(name, self.got.get(name), own == first)
        return replace(told, words=f"is wrong in the shard of {of_ranks} only: what rank {first} holds {told.words}")

    def _wrong(self, name: str) -> Tensor | None:
        """Which elements are wrong, flat; None where one of the sides has none or another shape."""
        want, got = self.want.get(name), self.got.get(name)
        if want is None or got is None or want.shape != got.shape:
            return None
        update, wrong = self._wrong_update(name), self.allowed.differing(want, got, self._extra(name))
        return (wrong if update is None else wrong | update.wrong).flatten()

    def _context(self, name: str) -> Context:
        probes, step, steps = self.probes, self.step, self.sides.reference.observation.steps
        earlier = list[tuple[str, Tensor]]()
        of_ranks: tuple[Tensor, ...] = ()
        of_microbatches: tuple[Tensor, ...] = ()
        if self.where == GRADIENT and step > 1:
            stale = probes.stale[step - 2].gradients.get(name)
            earlier += [] if stale is None else [(f"the gradient at the weights before update {step - 1}", stale)]
            previous = steps[step - 2].gradients.get(name)
            earlier += [] if previous is None else [(f"the gradient of step {step - 1}", previous)]
        elif self.where == GRADIENT:
            of_ranks = _all_or_none(values.get(name) for values in probes.of_ranks)
            of_microbatches = _all_or_none(values.get(name) for values in probes.of_microbatches)
        elif self.where == STATE and step > 1:
            before = steps[step - 2].state.get(name)
            earlier += [] if before is None else [(f"its value before update {step}", before)]
        by_rank = self.ranks[name].by_rank if name in self.ranks else ()
        others = {other: value for other, value in self._right().items() if other != name and value is not None}
        what = GRADIENT if self.where == GRADIENT else WEIGHT if self.where in (WEIGHT, INITIAL) else "value"
        return Context(
            probes.num_ranks,
            probes.microbatches,
            what,
            of_ranks,
            of_microbatches,
            tuple(earlier),
            tuple(value for value in by_rank if value is not None),
            others if self.got.get(name) is not None else {},
        )

    def _right(self) -> Values:
        """What may have been taken for a tensor by mistake."""
        return self.want if self.where in (INITIAL, GRADIENT, WEIGHT) else {}


def _explain_ranks(
    ranks: Disagreement,
    expected: Tensor | None,
    explain: Callable[[Tensor | None], Diagnosis],
    tolerance: Tolerance,
    extra: Tensor | None,
) -> Diagnosis:
    """The cause on the first rank that is wrong, of a tensor that is not the same on all of them."""
    wrong = _wrong_ranks(ranks, expected, tolerance, extra)
    if not wrong:
        return Diagnosis("ranks disagree", "is not the same on all ranks, though each is within what rounding allows")
    told = explain(ranks.by_rank[wrong[0]])
    words = f"is not the same on all ranks: on rank {wrong[0]} it {told.words}"
    return Diagnosis(told.kind, words, told.ratio)


def _wrong_ranks(ranks: Disagreement, expected: Tensor | None, tolerance: Tolerance, extra: Tensor | None) -> list[int]:
    return [
        rank
        for rank, value in enumerate(ranks.by_rank)
        if value is None or expected is None or not tolerance.agrees(expected, value, extra)
    ]


def _numel(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.numel()


def _farthest(ranks: Disagreement, expected: Tensor | None) -> Tensor | None:
    """The value of the rank that is farthest off, though within what is allowed."""

    def distance(value: Tensor | None) -> float:
        if value is None or expected is None or value.shape != expected.shape or not value.numel():
            return 0.0
        return float((value.double() - expected.double()).abs().max())

    return max(ranks.by_rank, key=distance)


def _differs(want: Tensor | None, got: Tensor | None, allowed: Tolerance, extra: Tensor | None, where: str) -> bool:
    if want is None or got is None:
        present = want if got is None else got
        # A parameter that nobody used may have zeros in place of no gradient; an update by it would show in weights.
        is_nothing = where == GRADIENT and present is not None and not bool(present.any())
        return want is not got and not (is_nothing and want is None)
    return not allowed.agrees(want, got, extra)


def _worst(want: Tensor | None, got: Tensor | None, tolerance: Tolerance, extra: Tensor | None) -> tuple[float, float]:
    """The largest difference, and what was allowed there."""
    if want is None or got is None or want.shape != got.shape or want.numel() == 0:
        return math.nan, math.nan
    error = (got.double() - want.double()).abs()
    allowed = tolerance.allowed(want, extra)
    place = int(torch.nan_to_num(error - allowed, nan=math.inf).argmax())
    return float(error.flatten()[place]), float(allowed.flatten()[place])


def _on_ranks(wrong: list[int], num_ranks: int) -> str:
    return f" (on rank(s) {', '.join(map(str, wrong))})" if len(wrong) < num_ranks else ""


def _number(
    where: str, step: int, kind: str, words: str, ratio: float | None, want: float, got: float, allowed: Tolerance
) -> Difference:
    limit = float(allowed.allowed(torch.tensor(want, dtype=torch.float64)))
    return Difference(where, step, "", kind, words, ratio, abs(got - want), limit)


def _round_trip(trip: RoundTrip | None, steps: int, resumed: Tolerance) -> list[Difference | None]:
    if trip is None:
        return []
    return [
        _compare_copies(LOADED, 0, trip.saved, trip.loaded, EXACT),
        _compare_copies(RESUMED, steps + 1, trip.went_on, trip.resumed, resumed),
    ]


def _compare_copies(where: str, step: int, want: Values, got: Values, tolerance: Tolerance) -> Difference | None:
    names = [
        name for name in dict.fromkeys([*want, *got]) if _differs(want.get(name), got.get(name), tolerance, None, "")
    ]
    if not names:
        return None
    name = names[0]
    told = diagnose(want.get(name), got.get(name), Context(1, what="value"), tolerance)
    words = f"{told.words} after saving and loading" if where == LOADED else f"{told.words} in the run that was loaded"
    error, limit = _worst(want.get(name), got.get(name), tolerance, None)
    return Difference(where, step, name, told.kind, words, told.ratio, error, limit, tuple(names[1:]))


def _all_or_none(values: Iterable[Tensor | None]) -> tuple[Tensor, ...]:
    found = tuple(values)
    return tuple(value for value in found if value is not None) if all(value is not None for value in found) else ()
