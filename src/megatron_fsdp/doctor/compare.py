"""Two observations side by side: what differs, in the order of causes (pure)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megatron_fsdp.doctor.diagnose import Context, Diagnosis, diagnose
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
from megatron_fsdp.doctor.observation import Disagreement, Observation, Reference, RoundTrip, StepRecord, Values
from megatron_fsdp.doctor.ratios import tell_ratio
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
        allowed = self.tolerance.at_step(max(step, 1)) if where != INITIAL else EXACT
        ranks = {each.name: each for each in self.found.disagreements if each.place == (where, step)}
        if where == GRADIENT:
            allowed = allowed.among(want.values())
        spread = self.reference.probes.spread[step - 1] if where in (WEIGHT, STATE) else {}
        names = [
            name
            for name in self._ordered(where, want, got)
            if name in ranks
            or _differs(want.get(name), got.get(name), allowed, spread.get(name), where)
            or (where == WEIGHT and self._wrong_update(step, name, want, got))
        ]
        if not names:
            return None
        name = names[0]
        diagnosis = self._diagnose(where, step, name, want, got, ranks.get(name), allowed, spread.get(name))
        value = got.get(name)
        if name in ranks:
            wrong = _wrong_ranks(ranks[name], want.get(name), allowed, spread.get(name))
            value = ranks[name].by_rank[wrong[0]] if wrong else _farthest(ranks[name], want.get(name))
        error, limit = _worst(want.get(name), value, allowed, spread.get(name))
        wrong_update = self._wrong_update(step, name, want, got) if where == WEIGHT else None
        if wrong_update is not None and error <= limit:
            error, limit = wrong_update.error, wrong_update.allowed
        return Difference(
            where, step, name, diagnosis.kind, diagnosis.words, diagnosis.ratio, error, limit, tuple(names[1:])
        )

    def _wrong_update(self, step: int, name: str, want: Values, got: Values) -> UpdateError | None:
        update = Update(step, name, self._before(step, name), self.reference.probes)
        return wrong_update(want.get(name), got.get(name), update, self.tolerance.at_step(step))

    def _ordered(self, where: str, want: Values, got: Values) -> Iterator[str]:
        """Names in the order of causes: gradients as backward makes them, then frozen weights before others."""
        probes = self.reference.probes
        every = dict.fromkeys([*want, *got])
        if where == GRADIENT:
            yield from (name for name in probes.backward_order if name in every)
            yield from (name for name in every if name not in probes.backward_order)
        else:
            yield from sorted(every, key=lambda name: name not in probes.frozen)

    def _diagnose(
        self,
        where: str,
        step: int,
        name: str,
        want: Values,
        got: Values,
        ranks: Disagreement | None,
        tolerance: Tolerance,
        extra: Tensor | None,
    ) -> Diagnosis:
        by_rank = tuple(value for value in ranks.by_rank if value is not None) if ranks is not None else ()
        context = self._context(where, step, name, got, by_rank)

        def explain(value: Tensor | None) -> Diagnosis:
            expected = want.get(name)
            if where == WEIGHT:
                update = Update(step, name, self._before(step, name), self.reference.probes)
                return diagnose_weight(expected, value, update, context, tolerance)
            if where == GRADIENT and name in self.reference.probes.frozen:
                return Diagnosis(
                    "frozen", "belongs to a frozen parameter, which has none in one process: it is trained"
                )
            return diagnose(expected, value, context, tolerance)

        if ranks is None:
            return explain(got.get(name))
        return _explain_ranks(ranks, want.get(name), explain, tolerance, extra)

    def _before(self, step: int, name: str) -> tuple[Tensor | None, Tensor | None]:
        """A weight before the update: expected and found."""
        if step == 1:
            return self.reference.observation.initial.get(name), self.found.initial.get(name)
        right, found = self.reference.observation.steps[step - 2], self.found.steps[step - 2]
        return right.parameters.get(name), found.parameters.get(name)

    def _context(self, where: str, step: int, name: str, got: Values, by_rank: tuple[Tensor, ...]) -> Context:
        probes = self.reference.probes
        earlier = list[tuple[str, Tensor]]()
        of_ranks: tuple[Tensor, ...] = ()
        of_microbatches: tuple[Tensor, ...] = ()
        if where == GRADIENT and step > 1:
            stale = probes.stale[step - 2].gradients.get(name)
            earlier += [] if stale is None else [(f"the gradient at the weights before update {step - 1}", stale)]
            previous = self.reference.observation.steps[step - 2].gradients.get(name)
            earlier += [] if previous is None else [(f"the gradient of step {step - 1}", previous)]
        elif where == GRADIENT:
            of_ranks = _all_or_none(values.get(name) for values in probes.of_ranks)
            of_microbatches = _all_or_none(values.get(name) for values in probes.of_microbatches)
        elif where == STATE and step > 1:
            before = self.reference.observation.steps[step - 2].state.get(name)
            earlier += [] if before is None else [(f"its value before update {step}", before)]
        others = {
            other: value for other, value in self._right(where, step).items() if other != name and value is not None
        }
        what = GRADIENT if where == GRADIENT else WEIGHT if where in (WEIGHT, INITIAL) else "value"
        context = Context(probes.num_ranks, probes.microbatches, what, of_ranks, of_microbatches, tuple(earlier))
        return replace(context, by_rank=by_rank, others=others if got.get(name) is not None else {})

    def _right(self, where: str, step: int) -> Mapping[str, Tensor | None]:
        right = self.reference.observation
        if where == INITIAL:
            return right.initial
        if where == GRADIENT:
            return right.steps[step - 1].gradients
        return right.steps[step - 1].parameters if where == WEIGHT else {}


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
