"""What is wrong with a weight: told by its update, which says more than its value (pure)."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megatron_fsdp.doctor.diagnose import Context, Diagnosis, diagnose
from megatron_fsdp.doctor.observation import Probes
from megatron_fsdp.doctor.ratios import ratio_of, tell_adam_ratio, tell_ratio
from megatron_fsdp.doctor.tolerance import Nearness, Tolerance

_DECAY_PART = 0.1
"""Of a decay that is told: it is smaller than the update that it is read from."""
_ROUNDINGS = 4
"""A weight before and after, on either side, each rounded once or twice by half an eps."""
_UPDATE_PART = 1e-2
"""An update is a difference of nearly equal weights, so it is known to far fewer digits than they are."""


@dataclass(frozen=True)
class Update:
    """Which update of which parameter.

    Attributes:
        step: From 1.
        name: The parameter.
        before: The weight before it: expected and found.
        probes: Frozen parameters, Adam's betas, weight decay, and what rounding of gradients makes of weights.
    """

    step: int
    name: str
    before: tuple[Tensor | None, Tensor | None]
    probes: Probes

    def part(self, place: Tensor) -> "Update":
        """The same of some elements, of the weight made flat, which one rank holds."""
        old, old_found = (None if value is None else value.flatten()[place] for value in self.before)
        spread = [record.get(self.name) for record in self.probes.spread]
        own = tuple({self.name: None if value is None else value.flatten()[place]} for value in spread)
        return replace(self, before=(old, old_found), probes=replace(self.probes, spread=own, num_ranks=1))


def diagnose_weight(
    expected: Tensor | None, found: Tensor | None, update: Update, context: Context, tolerance: Tolerance
) -> Diagnosis:
    """Say what is wrong with a weight after an update.

    Args:
        expected: The weight in one process.
        found: The weight in the sharded run.
        update: Which update.
        context: What else is known.
        tolerance: How near is the same.
    """
    step, (old, old_found) = update.step, update.before
    if expected is None or found is None or old is None or old_found is None or expected.shape != found.shape:
        return diagnose(expected, found, context, tolerance)
    if update.name in update.probes.frozen:
        return Diagnosis("frozen", f"is a frozen parameter, and has changed in update {step}")
    change, own = expected.double() - old.double(), found.double() - old_found.double()
    if bool(change.any()) and not bool(own.any()):
        return Diagnosis("stale", f"is stale by one step: it equals its value before update {step} (not updated)", 0.0)
    told = _tell_decay(change, own, update) or _tell_update(change, own, update.probes, step)
    if told is not None:
        return told
    return diagnose(expected, found, replace(context, earlier=((f"its value before update {step}", old),)), tolerance)


@dataclass(frozen=True)
class UpdateError:
    """An update that is off: by how much, and what was allowed, in its worst element, and which elements are."""

    error: float
    allowed: float
    wrong: Tensor


def wrong_update(
    expected: Tensor | None, found: Tensor | None, update: Update, tolerance: Tolerance
) -> UpdateError | None:
    """Whether an update is off, though the weight may be near enough: updates are small beside weights.

    Args:
        expected: The weight in one process, after the update.
        found: The weight in the sharded run.
        update: Which update.
        tolerance: How near is the same, of updates.

    Returns:
        None where it is right: within the tolerance of updates, twice what the gradients' tolerance makes of the
        weight before and after, and the rounding of two weights of either side.
    """
    old, old_found = update.before
    if expected is None or found is None or old is None or old_found is None or expected.shape != found.shape:
        return None
    if not expected.numel() or not (expected.is_floating_point() and found.is_floating_point()):
        return None
    error = (_change(old_found, found) - _change(old, expected)).abs()
    allowed = _allowed(expected, found, update, tolerance)
    worst = int((error - allowed).argmax())
    wrong = error > allowed
    if not bool(wrong.any()):
        return None
    return UpdateError(float(error.flatten()[worst]), float(allowed.flatten()[worst]), wrong)


def _change(old: Tensor, new: Tensor) -> Tensor:
    return new.double() - old.double()


def _allowed(expected: Tensor, found: Tensor, update: Update, tolerance: Tolerance) -> Tensor:
    old = update.before[0]
    assert old is not None
    eps = max(torch.finfo(value.dtype).eps for value in (expected, found))
    allowed = tolerance.allowed(_change(old, expected)) + _ROUNDINGS * eps * torch.maximum(
        expected.double().abs(), old.double().abs()
    )
    for record in update.probes.spread[max(update.step - 2, 0) : update.step]:
        spread = record.get(update.name)
        allowed = allowed if spread is None else allowed + 2 * spread
    return allowed


def _tell_decay(right: Tensor, own: Tensor, update: Update) -> Diagnosis | None:
    """Whether the update is off by a multiple of the weights, the same for all elements."""
    old = update.before[0]
    if old is None:
        return None
    weight, off = old.double(), own - right
    is_large = weight.abs() > 0.1 * weight.abs().max()
    if not bool(is_large.any()) or _is_multiple(right, weight):
        return None
    part = float((off / weight)[is_large].median())
    if part == 0.0 or not _is_multiple(off, weight, part, update):
        return None
    told = f"has an update that is off by {part:.3g} times the weights before it"
    decay = update.probes.decay.get(update.name, 0.0)
    if decay and abs(part / decay - 1) < _DECAY_PART:
        return Diagnosis("decay", f"{told}: weight decay is not applied")
    if decay and abs(part / decay + 1) < _DECAY_PART:
        return Diagnosis("decay", f"{told}: weight decay is applied twice")
    return Diagnosis("decay", f"{told}: weight decay (or L2) differs")


def _is_multiple(values: Tensor, weight: Tensor, part: float | None = None, update: Update | None = None) -> bool:
    """Whether values are a multiple of weights, but for rounding and what the tolerance of gradients makes of them."""
    number = ratio_of(weight, values) if part is None else part
    if number is None:
        return False
    slack = _DECAY_PART * abs(number) * weight.abs().max() + 4e-7 * weight.abs()
    for record in update.probes.spread[max(update.step - 2, 0) : update.step] if update is not None else ():
        spread = record.get(update.name) if update is not None else None
        slack = slack if spread is None else slack + 2 * spread
    return bool(((values - number * weight).abs() <= slack).all())


def _tell_update(right: Tensor, own: Tensor, probes: Probes, step: int) -> Diagnosis | None:
    """Whether the update is the right one times a number."""
    ratio = ratio_of(right, own)
    if ratio is None or abs(ratio - 1.0) < _UPDATE_PART:
        return None
    slack = _UPDATE_PART * float(right.abs().max())
    if not Nearness(_UPDATE_PART, slack).scaled(ratio).same(right * ratio, own):
        return None
    counter = tell_adam_ratio(ratio, step, probes.betas)
    if counter is not None:
        return Diagnosis("counter", f"shows that {counter}", ratio)
    told = tell_ratio(ratio, probes.num_ranks, probes.microbatches)
    return Diagnosis("factor", f"has an update that is {told}", ratio)
