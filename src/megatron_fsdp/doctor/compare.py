"""Compare two observations: the first difference in each place, in the order of causes."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property, partial

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
    """Compare a sharded run with one process; return at most one difference per place, the earliest cause first.

    `repeats` means that the device is deterministic; a resumed run must then give equal bits.
    """
    right = reference.values.items()
    pairs = {place: (want, found.values[place]) for place, want in right} | dict(found.round_trip)
    differences = (_first_difference(reference, found, place, *pair, repeats) for place, pair in pairs.items())
    return [difference for difference in differences if difference is not None]


def _first_difference(
    reference: Reference, found: Observation, place: Place, want: Values, got: Values, repeats: bool
) -> Difference | None:
    """Return the first differing tensor of a place, in the order of causes."""
    where, step = place
    allowed = reference.tolerance.at_step(step)
    if where in (INITIAL, COUNTER, LOADED) or (where == RESUMED and repeats):
        allowed = EXACT
    elif where == RESUMED:
        allowed = reference.tolerance
    elif where == GRADIENT:
        allowed = allowed.among(want.values())
    tensor_of = partial(_Tensor, reference, found, place, allowed)
    by_rank = found.disagreements.get(place, {})
    every = {**want, **got, **by_rank}
    first = [name for name in reference.backward_order if name in every] if where == GRADIENT else []
    left_out = {*first, *(reference.excused if where == BUFFER else ())}
    names = [*first, *(name for name in every if name not in left_out)]
    differing = [n for n in names if n in by_rank or tensor_of(n, want.get(n), got.get(n)).is_wrong]
    if not differing:
        return None
    name, *also = differing
    tensor = tensor_of(name, want.get(name), got.get(name))
    of_ranks = [replace(tensor, got=value) for value in by_rank.get(name, ())]
    is_missing = [own.got is None and own.want is not None for own in of_ranks]
    wrong = next((rank for rank, own in enumerate(of_ranks) if own.is_wrong or is_missing[rank]), None)
    if wrong is not None:
        tensor = of_ranks[wrong]
        kind, words, ratio = tensor.describe()
        words = f"is not the same on all ranks: on rank {wrong} it {words}"
    elif of_ranks:
        kind, words = "ranks disagree", "is not the same on all ranks, though each is within what rounding allows"
        ratio = None
    else:
        kind, words, ratio = tensor.describe()
    words += _AFTERWARDS.get(where, "")
    return Difference(where, step, name, kind, words, ratio, *tensor.worst(), tuple(also))


@dataclass(frozen=True)
class _Tensor:
    """A tensor of one process or of a checkpoint, and its counterpart of the sharded run."""

    reference: Reference
    found: Observation
    place: Place
    allowed: Tolerance
    name: str
    want: Tensor | None
    got: Tensor | None

    # ---- does it differ -----------------------------------------------------------------------------------------

    @property
    def is_wrong(self) -> bool:
        """True if the two differ."""
        want, got = self.want, self.got
        if want is None or got is None:
            # An unused parameter may have zeros instead of no gradient; an update by it would show in weights.
            is_nothing = self.place[0] == GRADIENT and got is not None and not bool(got.any())
            # Not every optimizer shows its steps.
            return want is not got and not is_nothing and self.place[0] != COUNTER
        if want.shape != got.shape or bool(self.allowed.differing(want, got, self._extra).any()):
            return True
        return self._update is not None and bool((self._update[0] > self._update[1]).any())

    @property
    def _extra(self) -> Tensor | None:
        """The tolerance that is added element by element."""
        where, step = self.place
        return self.reference.spread[step - 1].get(self.name) if where in (WEIGHT, STATE) else None

    def worst(self) -> tuple[float, float]:
        """Return the largest difference, and the tolerance there."""
        want, got = self.want, self.got
        if want is None or got is None or want.shape != got.shape or want.numel() == 0:
            return math.nan, math.nan
        error, allowed = (got.double() - want.double()).abs(), self.allowed.allowed(want, self._extra)
        if self._update is not None and not bool((error > allowed).any()):
            error, allowed = self._update
        worst = int(torch.nan_to_num(error - allowed, nan=math.inf).argmax())
        return float(error.flatten()[worst]), float(allowed.flatten()[worst])

    # ---- updates are small beside weights, so they are compared by themselves too ---------------------------------

    @cached_property
    def _changes(self) -> tuple[Tensor, Tensor] | None:
        """The update of a weight in one process, and in the sharded run."""
        (where, step), want, got = self.place, self.want, self.got
        before = (WEIGHT, step - 1) if step > 1 else (INITIAL, 0)
        old, old_got = (values[before].get(self.name) for values in (self.reference.values, self.found.values))
        if where != WEIGHT or want is None or got is None or old is None or old_got is None:
            return None
        if want.shape != got.shape or not want.numel() or not (want.is_floating_point() and got.is_floating_point()):
            return None
        return want.double() - old.double(), got.double() - old_got.double()

    @cached_property
    def _update(self) -> tuple[Tensor, Tensor] | None:
        """The error of each element's update, and its tolerance.

        The tolerance is that of updates, twice the gradients' tolerance applied to the weight before and after, and the
        rounding of two weights on either side.
        """
        if self._changes is None or self.want is None or self.got is None:
            return None
        (change, own), step = self._changes, self.place[1]
        eps = max(torch.finfo(value.dtype).eps for value in (self.want, self.got))
        size = torch.maximum(self.want.double().abs(), (self.want.double() - change).abs())
        allowed = self.reference.tolerance.at_step(step).allowed(change) + _ROUNDINGS * eps * size
        for record in self.reference.spread[max(step - 2, 0) : step]:
            allowed = allowed + 2 * record[self.name] if self.name in record else allowed
        return (own - change).abs(), allowed

    # ---- how it differs -----------------------------------------------------------------------------------------

    def describe(self) -> tuple[str, str, float | None]:
        """Describe the difference: kind, words and ratio of a `Difference`."""
        want, got = self.want, self.got
        if got is None:
            return "missing", "is missing (None), where one process has one", None
        if want is None:
            return "unexpected", "is there, where one process has none (None)", None
        if want.shape != got.shape:
            return "shape", f"has the shape {tuple(got.shape)} where one process has {tuple(want.shape)}", None
        bad = ~got.isfinite() & want.isfinite()
        if bool(bad.any()):
            what = "NaN" if bool(got.isnan().any()) else "infinite"
            return "non-finite", f"is {what} in {int(bad.sum())} of {bad.numel()} elements", None
        stale = self.reference.stale.get(self.place, {}).get(self.name)
        if stale is not None and self.allowed.agrees(stale, got):
            return "stale", f"is what the weights before update {self.place[1] - 1} give", None
        if unreduced := self._unreduced(want, got):
            return "not reduced", unreduced, None
        if not want.dim():
            ratio = float(got) / float(want) if float(want) else math.inf
            return "differs", f"is {float(got):.7g} where one process has {float(want):.7g}", ratio
        begins, (right, own) = "has", (want.double(), got.double())
        if self._changes is not None:
            begins, (right, own) = "has an update with", self._changes
        norms = float(right.norm()), float(own.norm())
        ratio = norms[1] / norms[0] if norms[0] else math.inf
        cosine = float(right.flatten() @ own.flatten()) / (norms[0] * norms[1]) if all(norms) else 0.0
        return "differs", f"{begins} {ratio:.5g} times the norm of one process, cosine {cosine:.4g}", ratio

    def _unreduced(self, want: Tensor, got: Tensor) -> str:
        """Recognise a gradient of only some ranks' samples, if the gradient of each rank is known."""
        of_ranks = self.reference.of_ranks if self.place == (GRADIENT, 1) else ()
        own = [found[self.name] for found in of_ranks if self.name in found]
        if len(own) < max(2, len(of_ranks)):
            return ""
        for scale in (1.0, 1.0 / len(own)):
            wrong = torch.stack([self.allowed.differing(value * scale, got) for value in own])
            for rank, differs in enumerate(wrong):
                if not bool(differs.any()):
                    return f"is not reduced over ranks: it equals the gradient of rank {rank}'s samples alone"
            if got.numel() > _FEW and not bool(wrong.all(0).any()):
                return "is not reduced over ranks: each shard equals the gradient of one rank's samples alone"
        for rank, value in enumerate(own):
            if self.allowed.agrees(want.double() - value.double() / len(own), got):
                return f"lacks the gradient of rank {rank}'s samples: it is not in the sum"
        return ""
