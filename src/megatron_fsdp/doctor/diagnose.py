"""From a tensor that differs to words that name the cause (pure)."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from megatron_fsdp.doctor.moved import tell_moved
from megatron_fsdp.doctor.ratios import known_ratios, ratio_of, tell_ratio
from megatron_fsdp.doctor.rounded import rounded_to
from megatron_fsdp.doctor.tolerance import Nearness, Tolerance

FEW = 8
"""So many elements may be a multiple of what they should be, or be off as rounding is, by chance."""


@dataclass(frozen=True)
class Diagnosis:
    """What is wrong with a tensor.

    Attributes:
        kind: For programs: non-finite, missing, unexpected, shape, zero, frozen, stale, not reduced, factor, moved,
            other tensor, counter, rounded, decay or unknown.
        words: For people; follows the name of the tensor in a sentence.
        ratio: Found over expected, where that is one number.
    """

    kind: str
    words: str
    ratio: float | None = None


@dataclass(frozen=True)
class Context:
    """What else is known of a tensor; everything whole and of its shape.

    Attributes:
        num_ranks: Data-parallel ranks.
        microbatches: Per step.
        what: "gradient" or "weight".
        of_ranks: Its gradient from each rank's samples alone.
        of_microbatches: Its gradient from each microbatch alone.
        earlier: What it was before, by words such as "its value before update 2"; the likeliest first.
        by_rank: What each rank found, where ranks disagree.
        others: Other tensors of the run, by name.
    """

    num_ranks: int
    microbatches: int = 1
    what: str = "gradient"
    of_ranks: tuple[Tensor, ...] = ()
    of_microbatches: tuple[Tensor, ...] = ()
    earlier: tuple[tuple[str, Tensor], ...] = ()
    by_rank: tuple[Tensor, ...] = ()
    others: Mapping[str, Tensor] = field(default_factory=dict)

    def part(self, place: Tensor | slice, num_ranks: int) -> "Context":
        """The same of some elements, of the tensor made flat, which so many ranks hold."""
        return replace(
            self,
            num_ranks=num_ranks,
            of_ranks=tuple(value.flatten()[place] for value in self.of_ranks),
            of_microbatches=tuple(value.flatten()[place] for value in self.of_microbatches),
            earlier=tuple((words, value.flatten()[place]) for words, value in self.earlier),
            by_rank=(),
            others={},
        )


def diagnose(expected: Tensor | None, found: Tensor | None, context: Context, tolerance: Tolerance) -> Diagnosis:
    """Say what is wrong with a tensor that differs.

    Args:
        expected: What one process has; None where it has none.
        found: What the sharded run has; None where it has none.
        context: What else is known.
        tolerance: How near is the same.

    Returns:
        The first explanation that fits; causes that need an exact match are tried before mere ratios.
    """
    if found is None or expected is None:
        return _diagnose_absent(found, context)
    if expected.shape != found.shape:
        words = f"has the shape {tuple(found.shape)} where one process has {tuple(expected.shape)}"
        return Diagnosis("shape", words)
    want, got = expected.double(), found.double()
    near = Nearness.around(want, tolerance)
    for explain in (*_WHOLE, _explain_part):
        diagnosis = explain(want, got, context, near)
        if diagnosis is not None:
            return diagnosis
    return Diagnosis("unknown", _tell_unknown(want, got))


Explain = Callable[[Tensor, Tensor, Context, Nearness], Diagnosis | None]


def _diagnose_absent(found: Tensor | None, context: Context) -> Diagnosis:
    if found is None:
        return Diagnosis("missing", f"is missing (None): one process has a {context.what}")
    return Diagnosis("unexpected", f"is there, where one process has no {context.what} (None)")


def _explain_non_finite(expected: Tensor, found: Tensor, context: Context, _near: Nearness) -> Diagnosis | None:
    bad = ~found.isfinite() & expected.isfinite()
    if not bool(bad.any()):
        return None
    ranks = [str(rank) for rank, value in enumerate(context.by_rank) if not bool(value.isfinite().all())]
    where = f" on rank(s) {', '.join(ranks)}" if ranks else ""
    what = "NaN" if bool(found.isnan().any()) else "infinite"
    return Diagnosis("non-finite", f"is {what} in {int(bad.sum())} of {bad.numel()} elements{where}")


def _explain_zero(expected: Tensor, found: Tensor, _context: Context, _near: Nearness) -> Diagnosis | None:
    if bool(expected.any()) and not bool(found.any()):
        return Diagnosis("zero", "is zero", 0.0)
    return None


def _explain_stale(_expected: Tensor, found: Tensor, context: Context, near: Nearness) -> Diagnosis | None:
    for words, earlier in context.earlier:
        if near.same(earlier.double(), found):
            return Diagnosis("stale", f"is stale by one step: it equals {words}")
    return None


def _explain_not_reduced(expected: Tensor, found: Tensor, context: Context, near: Nearness) -> Diagnosis | None:
    """Whether the gradient is that of one rank's samples: everywhere, or of each rank in its own shard."""
    if len(context.of_ranks) < 2:
        return None
    n = len(context.of_ranks)
    for scale, scaled in ((1.0, ""), (1.0 / n, f", divided by {n}")):
        of_ranks = [value.double() * scale for value in context.of_ranks]
        where = [~near.differing(value, found) for value in of_ranks]
        for rank, agrees in enumerate(where):
            if bool(agrees.all()):
                words = f"is not reduced over ranks: it equals the gradient of rank {rank}'s samples alone{scaled}"
                return Diagnosis("not reduced", words)
        if bool(torch.stack(where).any(0).all()) and _in_few_pieces(where):
            words = f"is not reduced over ranks: each piece equals the gradient of one rank's samples alone{scaled}"
            return Diagnosis("not reduced", f"{words} ({_tell_pieces(where)})")
    for rank, own in enumerate(context.of_ranks):
        if near.same(expected - own.double() / n, found):
            return Diagnosis("not reduced", f"lacks the gradient of rank {rank}'s samples: it is not in the sum")
    return None


def _in_few_pieces(where: list[Tensor]) -> bool:
    """Whether each rank's piece can be one stretch, as shards are: no more changes of rank than ranks."""
    return len(_pieces(where)) <= len(where)


def _pieces(where: list[Tensor]) -> list[tuple[int, int]]:
    """The longest stretches that one rank explains: (rank, end) in order; greedy, so as few as can be."""
    flat = [agrees.flatten() for agrees in where]
    start, total, pieces = 0, flat[0].numel(), list[tuple[int, int]]()
    while start < total and len(pieces) <= len(where):
        ends = []
        for agrees in flat:
            wrong = (~agrees[start:]).nonzero()
            ends.append(start + int(wrong[0]) if len(wrong) else total)
        rank = max(range(len(ends)), key=ends.__getitem__)
        pieces.append((rank, ends[rank]))
        start = ends[rank]
    return pieces


def _tell_pieces(where: list[Tensor]) -> str:
    told, start = [], 0
    for rank, end in _pieces(where):
        told.append(f"elements {start}..{end - 1}: rank {rank}")
        start = end
    return ", ".join(told)


def _explain_microbatch(_expected: Tensor, found: Tensor, context: Context, near: Nearness) -> Diagnosis | None:
    for number, value in enumerate(context.of_microbatches, start=1):
        if len(context.of_microbatches) > 1 and near.same(value.double(), found):
            return Diagnosis("not accumulated", f"equals the gradient of microbatch {number} alone")
    return None


def _explain_factor(expected: Tensor, found: Tensor, context: Context, near: Nearness) -> Diagnosis | None:
    ratio = ratio_of(expected, found)
    if ratio is None or abs(ratio - 1.0) < near.part or ratio == 0.0:
        return None
    # Near a known ratio that one is tried first: rounding moves the fitted one.
    tried = [value for value, _ in known_ratios(context.num_ranks, context.microbatches)] + [-1.0, ratio]
    for value in tried:
        if near.scaled(value).same(expected * value, found):
            words = f"is {tell_ratio(value, context.num_ranks, context.microbatches)}"
            rounded = None if value != ratio else _explain_rounded(expected, found, context, near)
            if rounded is not None and expected.numel() <= FEW:
                words += f", or {rounded.words}: {expected.numel()} element(s) cannot tell"
            return Diagnosis("factor", words, value)
    return None


def _explain_rounded(expected: Tensor, found: Tensor, context: Context, _near: Nearness) -> Diagnosis | None:
    sizes = torch.stack([expected.abs(), *(value.double().abs() for value in context.of_ranks)])
    # Each of n terms is off by eps / 2 of the largest, the sum of the first k of them by k times that, and so is their
    # mean: eps / 2 * (1 + (2 + ... + n) / n + 1) in all.
    times = (len(context.of_ranks) + 5) / 4 if context.of_ranks else 1.0
    dtype = rounded_to(expected, found, sizes.amax(0), must_be_exact=context.what != "gradient", times=times)
    if dtype is None:
        return None
    name = str(dtype).removeprefix("torch.")
    where = "communicated or kept in a coarser dtype"
    if dtype is torch.float32:
        where = "kept in float32 by main_params_dtype, as fully_shard does unless told, or communicated in it"
    return Diagnosis("rounded", f"is right, but rounded as {name} would ({where})")


def _explain_moved(expected: Tensor, found: Tensor, context: Context, near: Nearness) -> Diagnosis | None:
    words = tell_moved(expected, found, context.num_ranks, near)
    return None if words is None else Diagnosis("moved", words)


def _explain_other(_expected: Tensor, found: Tensor, context: Context, near: Nearness) -> Diagnosis | None:
    for name, value in context.others.items():
        if value.shape == found.shape and near.same(value.double(), found):
            return Diagnosis("other tensor", f"has the values of `{name}`")
    return None


def _explain_part(expected: Tensor, found: Tensor, context: Context, near: Nearness) -> Diagnosis | None:
    """The same explanations for the stretch of elements that differ, where the rest is right."""
    want, got = expected.flatten(), found.flatten()
    places = near.differing(want, got).nonzero().flatten()
    if len(places) == 0:
        return None
    first, last = int(places[0]), int(places[-1]) + 1
    if last - first == len(want) or last - first < 2:
        return None
    piece = slice(first, last)
    inside = context.part(piece, context.num_ranks)
    for explain in _WHOLE:
        diagnosis = explain(want[piece], got[piece], inside, near)
        if diagnosis is not None:
            words = f"is right but for elements {first}..{last - 1} of {len(want)}; that piece {diagnosis.words}"
            return Diagnosis(diagnosis.kind, words, diagnosis.ratio)
    return None


_WHOLE: tuple[Explain, ...] = (
    _explain_non_finite,
    _explain_stale,
    _explain_not_reduced,
    _explain_zero,
    _explain_microbatch,
    _explain_moved,
    _explain_other,
    _explain_factor,
    _explain_rounded,
)


def _tell_unknown(expected: Tensor, found: Tensor) -> str:
    want, got = expected.flatten(), found.flatten()
    norms = float(want.norm()), float(got.norm())
    ratio = norms[1] / norms[0] if norms[0] else float("inf")
    cosine = float(want @ got) / (norms[0] * norms[1]) if norms[0] and norms[1] else 0.0
    return f"fits no simple cause (norm {ratio:.4g} times what it should be, cosine {cosine:.4g})"
