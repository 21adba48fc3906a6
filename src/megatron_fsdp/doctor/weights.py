"""What is wrong with a weight: told by its update, which says more than its value (pure)."""

from dataclasses import dataclass, replace

from torch import Tensor

from megatron_fsdp.doctor.diagnose import Context, Diagnosis, diagnose
from megatron_fsdp.doctor.observation import Probes
from megatron_fsdp.doctor.ratios import ratio_of, tell_adam_ratio, tell_ratio
from megatron_fsdp.doctor.tolerance import Nearness, Tolerance

_UPDATE_PART = 1e-2
"""An update is a difference of nearly equal weights, so it is known to far fewer digits than they are."""


@dataclass(frozen=True)
class Update:
    """Which update of which parameter.

    Attributes:
        step: From 1.
        name: The parameter.
        before: The weight before it: expected and found.
        probes: Which parameters are frozen, and Adam's betas.
    """

    step: int
    name: str
    before: tuple[Tensor | None, Tensor | None]
    probes: Probes


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
    told = _tell_update(change, own, update.probes, step)
    if told is not None:
        return told
    return diagnose(expected, found, replace(context, earlier=((f"its value before update {step}", old),)), tolerance)


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
