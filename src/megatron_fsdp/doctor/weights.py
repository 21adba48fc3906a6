"""What is wrong with a weight: told by its update, which says more than its value (pure)."""

from dataclasses import replace

from torch import Tensor

from megatron_fsdp.doctor.diagnose import Context, Diagnosis, diagnose
from megatron_fsdp.doctor.observation import Probes
from megatron_fsdp.doctor.ratios import ratio_of, tell_adam_ratio, tell_ratio
from megatron_fsdp.doctor.tolerance import Nearness, Tolerance

_UPDATE_PART = 1e-2
"""An update is a difference of nearly equal weights, so it is known to far fewer digits than they are."""


def diagnose_weight(
    expected: Tensor | None,
    found: Tensor | None,
    before: tuple[Tensor | None, Tensor | None],
    context: Context,
    probes: Probes,
    tolerance: Tolerance,
    *,
    step: int,
    name: str,
) -> Diagnosis:
    """Say what is wrong with a weight after an update.

    Args:
        expected: The weight in one process.
        found: The weight in the sharded run.
        before: Both before the update.
        context: What else is known.
        probes: Which parameters are frozen, and Adam's betas.
        tolerance: How near is the same.
        step: Which update.
        name: Which parameter.
    """
    old, old_found = before
    if expected is None or found is None or old is None or old_found is None or expected.shape != found.shape:
        return diagnose(expected, found, context, tolerance)
    if name in probes.frozen:
        return Diagnosis("frozen", f"is a frozen parameter, and has changed in update {step}")
    update, own = expected.double() - old.double(), found.double() - old_found.double()
    if bool(update.any()) and not bool(own.any()):
        return Diagnosis("stale", f"is stale by one step: it equals its value before update {step} (not updated)", 0.0)
    told = _tell_update(update, own, probes, step)
    if told is not None:
        return told
    return diagnose(expected, found, replace(context, earlier=((f"its value before update {step}", old),)), tolerance)


def _tell_update(update: Tensor, own: Tensor, probes: Probes, step: int) -> Diagnosis | None:
    """Whether the update is the right one times a number."""
    ratio = ratio_of(update, own)
    if ratio is None or abs(ratio - 1.0) < _UPDATE_PART:
        return None
    slack = _UPDATE_PART * float(update.abs().max())
    if not Nearness(_UPDATE_PART, slack).scaled(ratio).same(update * ratio, own):
        return None
    counter = tell_adam_ratio(ratio, step, probes.betas)
    if counter is not None:
        return Diagnosis("counter", f"shows that {counter}", ratio)
    told = tell_ratio(ratio, probes.num_ranks, probes.microbatches)
    return Diagnosis("factor", f"has an update that is {told}", ratio)
