"""Before sharding is judged: whether the model agrees with itself in one process."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from megatron_fsdp.doctor.observation import Values
from megatron_fsdp.doctor.ratios import tell_ratio
from megatron_fsdp.doctor.recording import Trainee
from megatron_fsdp.doctor.task import Part, Task
from megatron_fsdp.doctor.tolerance import Tolerance


@dataclass(frozen=True)
class SelfCheck:
    """What one process says about the model.

    Attributes:
        can_compare: Whether it repeats itself.
        is_mean: Whether the loss of a batch is that of its slices together.
        finding: What is wrong, as the name of the place and words; None if nothing is.
        losses_of_ranks: Loss of each rank's samples in step 1.
        of_ranks: Gradients of each rank's samples alone.
        of_microbatches: Gradients of each microbatch alone.
    """

    can_compare: bool
    is_mean: bool
    finding: tuple[str, str] | None
    losses_of_ranks: tuple[float, ...] = ()
    of_ranks: tuple[Values, ...] = ()
    of_microbatches: tuple[Values, ...] = ()


@dataclass(frozen=True)
class _Pass:
    loss: float
    gradients: Values


def check_itself(
    task: Task, probe: Trainee, microbatches: list[Any], num_ranks: int, tolerance: Tolerance, *, samples_meet: bool
) -> SelfCheck:
    """Run the first step's batch in several ways, without an update.

    Args:
        task: How losses add up.
        probe: The model.
        microbatches: Of the first step.
        num_ranks: Slices of each.
        tolerance: How near is the same.
        samples_meet: Whether the model is known to let samples of a batch see each other (batch normalisation).
    """
    buffers = probe.buffers()

    def run(*ranks: list[Part], seed: int = task.seed) -> _Pass:
        torch.manual_seed(seed)
        probe.put_back(buffers)
        probe.model.zero_grad()
        return _Pass(probe.backward_of_ranks(ranks), probe.gradients())

    whole = run(task.parts_whole(microbatches))
    if not math.isfinite(whole.loss):
        return unfit(f"the loss of the first step is {whole.loss} in one process already, and sharding was not judged")
    broken = first_not_finite(whole.gradients)
    if broken is not None:
        return unfit(tell_not_finite(probe.model, "gradient", broken, 1))
    random = _differing(whole, run(task.parts_whole(microbatches), seed=task.seed + 1), tolerance)
    if random is not None:
        return unfit(_tell_random(probe.model, random))
    ranks = [run(task.parts_of_rank(microbatches, rank, num_ranks)) for rank in range(num_ranks)]
    alone = [run([part]) for part in task.parts_whole(microbatches)] if task.microbatches > 1 else []
    slices = run(*task.parts_of_all(microbatches, num_ranks))
    difference = _differing(whole, slices, tolerance)
    is_mean, finding = difference is None, None
    if difference is not None and not samples_meet:
        finding = ("loss", _tell_not_mean(task, whole.loss, slices.loss, num_ranks, difference))
    return SelfCheck(
        True,
        is_mean,
        finding,
        tuple(each.loss for each in ranks),
        tuple(each.gradients for each in ranks),
        tuple(each.gradients for each in alone),
    )


def first_not_finite(values: Values) -> str | None:
    """The name of the first tensor with an element that is NaN or infinite."""
    pairs = ((name, value) for name, value in values.items() if value is not None)
    return next((name for name, value in pairs if not bool(value.isfinite().all())), None)


def tell_not_finite(model: nn.Module, what: str, name: str, step: int) -> str:
    """Words for a gradient or weight of one process that cannot be compared with."""
    is_half = any(param.dtype == torch.float16 for param in model.parameters())
    hint = " (float16 ends at 65504, and Adam's eps of 1e-8 is zero in it)" if is_half else ""
    return (
        f"the {what} of `{name}` in step {step} is not finite in one process already{hint}, and sharding was not judged"
    )


def unfit(words: str) -> SelfCheck:
    """What is said of a model that nothing can be compared with."""
    return SelfCheck(False, False, ("one process against itself", words))


def _differing(expected: _Pass, found: _Pass, tolerance: Tolerance) -> str | None:
    """What differs first; None if nothing does."""
    if not tolerance.agree_numbers(expected.loss, found.loss):
        return f"the loss is {expected.loss:.9g}, then {found.loss:.9g}"
    allowed = tolerance.among(expected.gradients.values())
    for name, want in expected.gradients.items():
        got = found.gradients.get(name)
        if (want is None) != (got is None):
            return (
                f"the gradient of `{name}` is there, then not" if got is None else f"`{name}` has no gradient, then one"
            )
        if want is not None and got is not None and not allowed.agrees(want, got):
            error = float((got.double() - want.double()).abs().max())
            return (
                f"the gradient of `{name}` changes by up to {error:.3g} (its largest element is {_largest(want):.3g})"
            )
    return None


def _largest(tensor: torch.Tensor) -> float:
    return float(tensor.double().abs().max())


def _tell_random(model: nn.Module, difference: str) -> str:
    layers = list(dict.fromkeys(_random_layers(model)))
    told = "it draws random numbers or is not deterministic"
    advice = "take the noise out of model_fn, or draw it from the samples"
    if layers:
        told = f"it draws random numbers ({', '.join(layers[:4])})"
        advice = "set dropout to 0, or put the model into eval mode in model_fn"
    return (
        f"the model does not repeat itself on the same samples: {difference}; {told}. Sharding was not judged: {advice}"
    )


def _random_layers(model: nn.Module) -> Iterator[str]:
    for name, module in model.named_modules():
        p = getattr(module, "p", 0.0)
        if module.training and "dropout" in type(module).__name__.lower() and isinstance(p, float) and p > 0:
            yield f"`{name}` is {type(module).__name__}({p:g})"


def _tell_not_mean(task: Task, whole: float, slices: float, num_ranks: int, difference: str) -> str:
    """Why losses of ranks do not make up that of the batch; sharding has no part in it."""
    told = f"from the whole batch in one process to its {num_ranks} slices together, {difference}"
    if task.reduction == "mean" and abs(slices * num_ranks - whole) <= 1e-3 * abs(whole):
        return (
            f"the loss is a sum over samples, not a mean: {told}. Gradients are averaged over ranks, so those of this "
            f"loss come out as {tell_ratio(1 / num_ranks, num_ranks, 1)}. Use a mean, or calculate_per_token_loss=True "
            'in your shard_fn with reduction="sum" here'
        )
    return (
        f"the loss is not a mean over samples: {told}. Slices may hold unequal numbers of counted tokens, or samples "
        "of a batch see each other; ranks train on the mean of their own losses"
    )
