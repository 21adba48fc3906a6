"""Compares two observations: the first difference in each place, in the order of causes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from megatron_fsdp.doctor.diagnose import EXACT, Context, Diagnosis, Tolerance, diagnose
from megatron_fsdp.doctor.reference import Reference
from megatron_fsdp.doctor.report import (
    BUFFER,
    COUNTER,
    GRADIENT,
    INITIAL,
    LOADED,
    LOSS,
    RESUMED,
    STATE,
    WEIGHT,
    Difference,
)
from megatron_fsdp.doctor.training import Observation, Place, Values

_ROUNDINGS = 4
"""A weight before and after, on either side, each rounded once or twice by half an eps."""
_AFTERWARDS = {LOADED: " after saving and loading", RESUMED: " in the run that was loaded"}
_UPDATE = Tolerance(1e-2)
"""For diagnosing an update: a difference of nearly equal weights has few significant digits."""


def compare(reference: Reference, found: Observation, *, repeats: bool = True) -> list[Difference]:
    """Compare a sharded run with one process.

    Args:
        reference: The run of one process.
        found: The sharded run.
        repeats: Whether the device is deterministic; then a resumed run has to give the same bits.

    Returns:
        At most one difference for each place, the earliest cause first.
    """
    right = reference.observation.values.items()
    pairs = {place: (want, found.values[place]) for place, want in right} | dict(found.round_trip)
    places = (_Tensors(reference, found, repeats, place, *pair).compare() for place, pair in pairs.items())
    return [difference for difference in places if difference is not None]


@dataclass(frozen=True)
class _Tensors:
    """The tensors of one place of a run: those of one process, or that were saved, and those of the sharded run."""

    reference: Reference
    found: Observation
    repeats: bool
    place: Place
    want: Values
    got: Values

    @property
    def where(self) -> str:
        return self.place[0]

    @property
    def step(self) -> int:
        return self.place[1]

    @cached_property
    def allowed(self) -> Tolerance:
        """The tolerance between both sides."""
        if self.where in (INITIAL, COUNTER, LOADED):
            return EXACT
        if self.where == RESUMED:
            return EXACT if self.repeats else self.reference.tolerance
        allowed = self.reference.tolerance.at_step(self.step)
        return allowed.among(self.want.values()) if self.where == GRADIENT else allowed

    @cached_property
    def by_rank(self) -> Mapping[str, tuple[Tensor | None, ...]]:
        """The tensors on which ranks disagree: the value of each rank."""
        return self.found.disagreements.get(self.place, {})

    def compare(self) -> Difference | None:
        """Return the first tensor that differs, in the order of causes."""
        names = [name for name in self._ordered() if name in self.by_rank or self._is_wrong(name, self.got.get(name))]
        if not names:
            return None
        name = names[0]
        rank = self._wrong_rank(name)
        value = self.got.get(name) if rank is None else self.by_rank[name][rank]
        if name in self.by_rank and rank is None:
            told = Diagnosis(
                "ranks disagree", "is not the same on all ranks, though each is within what rounding allows"
            )
        else:
            told = self._explain(name, value)
            if rank is not None:
                told = replace(told, words=f"is not the same on all ranks: on rank {rank} it {told.words}")
            told = replace(told, words=told.words + _AFTERWARDS.get(self.where, "") + self._tell_owners(names))
        error, limit = self._worst(name, value)
        return Difference(
            self.where, self.step, name, told.kind, told.words, told.ratio, error, limit, tuple(names[1:])
        )

    def _ordered(self) -> Iterator[str]:
        """Yield names in the order of causes: gradients as backward makes them, then frozen weights before others."""
        every = dict.fromkeys([*self.want, *self.got])
        if self.where == GRADIENT:
            order = self.reference.backward_order
            yield from (name for name in order if name in every)
            yield from (name for name in every if name not in order)
        else:
            compared = [n for n in every if self.where != BUFFER or n not in self.reference.excused]
            yield from sorted(compared, key=lambda name: name not in self.reference.frozen)

    # ---- does it differ -----------------------------------------------------------------------------------------

    def _is_wrong(self, name: str, got: Tensor | None) -> bool:
        want = self.want.get(name)
        if want is None or got is None:
            present = want if got is None else got
            # An unused parameter may have zeros in place of no gradient; an update by it would show in weights.
            is_nothing = want is None and self.where == GRADIENT and present is not None and not bool(present.any())
            # Not every optimizer shows its steps.
            return want is not got and not is_nothing and self.where != COUNTER
        if want.shape != got.shape:
            return True
        return bool(self._wrong_elements(name, got).any())

    def _wrong_elements(self, name: str, got: Tensor) -> Tensor:
        """Return which elements differ from those of one process; both tensors have the same shape."""
        want = self.want[name]
        assert want is not None
        wrong, update = self.allowed.differing(want, got, self._extra(name)), self._update(name, got)
        return wrong if update is None else wrong | (update[0] > update[1])

    def _wrong_rank(self, name: str) -> int | None:
        """Return the first rank whose value is wrong, where ranks disagree."""
        values = enumerate(self.by_rank.get(name, ()))
        return next((rank for rank, value in values if value is None or self._is_wrong(name, value)), None)

    def _extra(self, name: str) -> Tensor | None:
        """Return the tolerance added element by element."""
        return self.reference.spread[self.step - 1].get(name) if self.where in (WEIGHT, STATE) else None

    def _worst(self, name: str, got: Tensor | None) -> tuple[float, float]:
        """Return the largest difference, and the tolerance there."""
        want = self.want.get(name)
        if want is None or got is None or want.shape != got.shape or want.numel() == 0:
            return math.nan, math.nan
        error, allowed = (got.double() - want.double()).abs(), self.allowed.allowed(want, self._extra(name))
        update = self._update(name, got)
        if update is not None and not bool((error > allowed).any()):
            error, allowed = update
        worst = int(torch.nan_to_num(error - allowed, nan=math.inf).argmax())
        return float(error.flatten()[worst]), float(allowed.flatten()[worst])

    # ---- updates are small beside weights, so they are compared by themselves too ---------------------------------

    def _changes(self, name: str, got: Tensor | None) -> tuple[Tensor, Tensor] | None:
        """Return how much an update changed a weight in one process, and in the sharded run."""
        before = (WEIGHT, self.step - 1) if self.step > 1 else (INITIAL, 0)
        old, old_got = (run.values[before].get(name) for run in (self.reference.observation, self.found))
        want = self.want.get(name)
        if self.where != WEIGHT or want is None or got is None or old is None or old_got is None:
            return None
        if want.shape != got.shape or not want.numel() or not (want.is_floating_point() and got.is_floating_point()):
            return None
        return want.double() - old.double(), got.double() - old_got.double()

    def _update(self, name: str, got: Tensor | None) -> tuple[Tensor, Tensor] | None:
        """Return how far the update of each element is off, and its tolerance.

        That is the tolerance of updates, twice the gradients' tolerance applied to the weight before and after, and the
        rounding of two weights on either side.
        """
        changes, want = self._changes(name, got), self.want.get(name)
        if changes is None or want is None or got is None:
            return None
        change, own = changes
        eps = max(torch.finfo(value.dtype).eps for value in (want, got))
        size = torch.maximum(want.double().abs(), (want.double() - change).abs())
        allowed = self.reference.tolerance.at_step(self.step).allowed(change) + _ROUNDINGS * eps * size
        for record in self.reference.spread[max(self.step - 2, 0) : self.step]:
            spread = record.get(name)
            allowed = allowed if spread is None else allowed + 2 * spread
        return (own - change).abs(), allowed

    # ---- causes -------------------------------------------------------------------------------------------------

    def _explain(self, name: str, got: Tensor | None) -> Diagnosis:
        want, context = self.want.get(name), self._context(name)
        is_frozen = name in self.reference.frozen
        if self.where == GRADIENT and is_frozen:
            return Diagnosis("frozen", "belongs to a frozen parameter, which has none in one process: it is trained")
        if self.where == COUNTER and want is not None and got is not None:
            return Diagnosis("counter", f"is {float(got):g} where one process has {float(want):g}")
        changes = self._changes(name, got)
        if changes is None:
            told = diagnose(want, got, context, self.allowed)
            hint = ": as where ranks draw weights from seeds of their own"
            is_drawn = self.where == INITIAL and told.kind == "unknown"
            return replace(told, words=told.words + hint) if is_drawn else self._with_wrong_ranks(told)
        if is_frozen:
            return Diagnosis("frozen", f"is a frozen parameter, and has changed in update {self.step}")
        if bool(changes[0].any()) and not bool(changes[1].any()):
            words = f"is stale by one step: it equals its value before update {self.step} (not updated)"
            return Diagnosis("stale", words, 0.0)
        told = diagnose(want, got, context, self.allowed)
        if told.kind not in ("factor", "unknown"):
            return told
        told = diagnose(*changes, replace(context, what="update", stale=None), _UPDATE)
        return replace(told, words=f"has an update that {told.words}")

    def _with_wrong_ranks(self, told: Diagnosis) -> Diagnosis:
        """Name the ranks whose loss is wrong, if the tensor is a loss."""
        if self.where != LOSS or not self.found.losses_of_ranks:
            return told
        losses = self.found.losses_of_ranks[self.step - 1]
        wrong = [rank for rank, loss in enumerate(losses) if not math.isfinite(loss)]
        if self.step == 1 and not wrong:
            pairs = zip(self.reference.losses_of_ranks, losses, strict=False)
            wrong = [rank for rank, (right, own) in enumerate(pairs) if not self.allowed.agree_numbers(right, own)]
        return replace(told, words=f"{told.words} (wrong on rank(s) {', '.join(map(str, wrong))})") if wrong else told

    def _tell_owners(self, names: Sequence[str]) -> str:
        """Name the ranks whose shards hold everything that differs, unless all do."""
        ranks, owners = set[int](), self.found.owners
        for name in names:
            want, got = self.want.get(name), self.got.get(name)
            owner = owners.get(name.partition(": ")[0])
            if want is None or got is None or owner is None or want.shape != got.shape or want.numel() != len(owner):
                return ""
            ranks |= set(owner[self._wrong_elements(name, got).flatten()].unique().tolist())
        if len(ranks) == self.reference.num_ranks or (
            len(names) == 1 and len(owners[names[0].partition(": ")[0]].unique()) == 1
        ):
            return ""  # where one rank holds the only one that differs, either may be the cause
        return f" (whatever differs there is in the shard of rank(s) {', '.join(map(str, sorted(ranks)))})"

    def _context(self, name: str) -> Context:
        reference, at = self.reference, "that of" if self.where == LOSS else "the gradient at"
        of_ranks = [found.get(name) for found in reference.of_ranks] if self.place == (GRADIENT, 1) else []
        known = tuple(value for value in of_ranks if value is not None)
        return Context(
            reference.num_ranks,
            reference.microbatches,
            {GRADIENT: GRADIENT, WEIGHT: WEIGHT, INITIAL: WEIGHT}.get(self.where, "value"),
            known if len(known) == len(of_ranks) else (),
            reference.stale.get(self.place, {}).get(name),
            f"{at} the weights before update {self.step - 1}",
        )
