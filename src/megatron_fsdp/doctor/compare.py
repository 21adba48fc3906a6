"""Compares two observations: the first difference in each place, in the order of causes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from megatron_fsdp.doctor.reference import EXACT, Reference, Tolerance
from megatron_fsdp.doctor.report import (
    BUFFER,
    COUNTER,
    GRADIENT,
    INITIAL,
    LOADED,
    RESUMED,
    STATE,
    WEIGHT,
    Difference,
)
from megatron_fsdp.doctor.training import Observation, Place, Values

_ROUNDINGS = 4
"""A weight before and after, on either side, each rounded once or twice by half an eps."""
_FEW = 8
"""Up to this many elements may each equal that of some rank by chance."""
_AFTERWARDS = {LOADED: " after saving and loading", RESUMED: " in the run that was loaded"}


def compare(reference: Reference, found: Observation, *, repeats: bool = True) -> list[Difference]:
    """Return at most one difference of a sharded run from one process for each place, the earliest cause first.

    `repeats` says that the device is deterministic; then a resumed run has to give the same bits.
    """
    right = reference.observation.values.items()
    pairs = {place: (want, found.values[place]) for place, want in right} | dict(found.round_trip)
    places = (_Tensors(reference, found, repeats, place, *pair).compare() for place, pair in pairs.items())
    return [difference for difference in places if difference is not None]


@dataclass(frozen=True)
class _Told:
    """What is said of a tensor that differs; see `Difference`."""

    kind: str
    words: str
    ratio: float | None = None


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
            words = "is not the same on all ranks, though each is within what rounding allows"
            told = _Told("ranks disagree", words)
        else:
            told = self._tell(name, value)
        on = "" if rank is None else f"is not the same on all ranks: on rank {rank} it "
        error, limit = self._worst(name, value)
        words = f"{on}{told.words}{_AFTERWARDS.get(self.where, '')}"
        return Difference(self.where, self.step, name, told.kind, words, told.ratio, error, limit, tuple(names[1:]))

    def _ordered(self) -> Iterator[str]:
        """Yield names in the order of causes: gradients as backward makes them."""
        every = dict.fromkeys([*self.want, *self.got])
        order = self.reference.backward_order if self.where == GRADIENT else ()
        yield from (name for name in order if name in every)
        excused = self.reference.excused if self.where == BUFFER else ()
        yield from (name for name in every if name not in order and name not in excused)

    # ---- does it differ -----------------------------------------------------------------------------------------

    def _is_wrong(self, name: str, got: Tensor | None) -> bool:
        want = self.want.get(name)
        if want is None or got is None:
            present = want if got is None else got
            # An unused parameter may have zeros in place of no gradient; an update by it would show in weights.
            is_nothing = want is None and self.where == GRADIENT and present is not None and not bool(present.any())
            # Not every optimizer shows its steps.
            return want is not got and not is_nothing and self.where != COUNTER
        if want.shape != got.shape or bool(self.allowed.differing(want, got, self._extra(name)).any()):
            return True
        update = self._update(name, got)
        return update is not None and bool((update[0] > update[1]).any())

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

    # ---- how it differs -----------------------------------------------------------------------------------------

    def _tell(self, name: str, got: Tensor | None) -> _Told:
        """Say how a tensor differs, by what was measured: values, norms, and other runs of one process."""
        want = self.want.get(name)
        if got is None:
            return _Told("missing", "is missing (None), where one process has one")
        if want is None:
            return _Told("unexpected", "is there, where one process has none (None)")
        if want.shape != got.shape:
            return _Told("shape", f"has the shape {tuple(got.shape)} where one process has {tuple(want.shape)}")
        bad = ~got.isfinite() & want.isfinite()
        if bool(bad.any()):
            what = "NaN" if bool(got.isnan().any()) else "infinite"
            return _Told("non-finite", f"is {what} in {int(bad.sum())} of {bad.numel()} elements")
        stale = self.reference.stale.get(self.place, {}).get(name)
        if stale is not None and self.allowed.agrees(stale, got):
            return _Told("stale", f"is what the weights before update {self.step - 1} give")
        unreduced = self._tell_unreduced(name, want, got)
        if unreduced is not None:
            return _Told("not reduced", unreduced)
        if not want.dim():
            ratio = float(got) / float(want) if float(want) else math.inf
            return _Told("differs", f"is {float(got):.7g} where one process has {float(want):.7g}", ratio)
        changes = self._changes(name, got)
        if changes is None:
            return _told_by_norms("has", want.double(), got.double())
        return _told_by_norms("has an update with", *changes)

    def _tell_unreduced(self, name: str, want: Tensor, got: Tensor) -> str | None:
        """Recognise a gradient of some ranks' samples only, where those of each rank alone are known."""
        of_ranks = [found.get(name) for found in self.reference.of_ranks] if self.place == (GRADIENT, 1) else []
        own = [value for value in of_ranks if value is not None]
        if len(own) < max(2, len(of_ranks)):
            return None
        for scale in (1.0, 1.0 / len(own)):
            wrong = torch.stack([self.allowed.differing(value * scale, got) for value in own])
            for rank, differs in enumerate(wrong):
                if not bool(differs.any()):
                    return f"is not reduced over ranks: it equals the gradient of rank {rank}'s samples alone"
            if got.numel() > _FEW and not bool(wrong.all(0).any()):
                return "is not reduced over ranks: each piece equals the gradient of one rank's samples alone"
        for rank, value in enumerate(own):
            if self.allowed.agrees(want.double() - value.double() / len(own), got):
                return f"lacks the gradient of rank {rank}'s samples: it is not in the sum"
        return None


def _told_by_norms(verb: str, want: Tensor, got: Tensor) -> _Told:
    norms = float(want.norm()), float(got.norm())
    ratio = norms[1] / norms[0] if norms[0] else math.inf
    cosine = float(want.flatten() @ got.flatten()) / (norms[0] * norms[1]) if all(norms) else 0.0
    return _Told("differs", f"{verb} {ratio:.5g} times the norm of one process, cosine {cosine:.4g}", ratio)
