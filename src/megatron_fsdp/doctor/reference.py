"""The reference run of one process on the whole batch: its values, their tolerance, and the values of known faults."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from megatron_fsdp.doctor.report import BUFFER, GRADIENT, INITIAL, LOSS, STATE, WEIGHT, Difference, few
from megatron_fsdp.doctor.training import Place, Task, Trainee, Values, number, slices_of_ranks
from megatron_fsdp.errors import ConfigurationError

# ---- how far rounding may move a tensor ------------------------------------------------------------------------------

_BY_DTYPE = {torch.float64: 1e-10, torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 3e-2}
"""float32: sums of some thousands of terms in another order, each rounded to 6e-8. The 16-bit dtypes: a few units in
the last place (1e-3 and 8e-3) of the largest element."""
_GROWTH = 4.0
"""Growth of the tolerance from one update to the next."""
_FLOOR = 0.1
"""Of the tolerance, for the largest element of the whole gradient: see `Tolerance.among`."""


@dataclass(frozen=True)
class Tolerance:
    """|found - expected| <= part * (|expected| + largest |expected| of the tensor) + floor + extra."""

    part: float  # of the element, and of the largest element of its tensor
    floor: float = 0.0

    def at_step(self, step: int) -> Tolerance:
        """Return the tolerance of a step, counted from 1: four times as much after every update."""
        growth = _GROWTH ** (max(step, 1) - 1)
        return Tolerance(self.part * growth, self.floor * growth)

    def among(self, values: Iterable[Tensor]) -> Tolerance:
        """Add a floor for gradients: a tenth of the tolerance of the backward pass's largest gradient element.

        A gradient that is zero in exact arithmetic (for example of a bias before a normalisation) is the rounding error
        of terms that cancel. Its own size is no reference; the terms are about as large as other gradients of the pass,
        and so is their rounding. The tolerance is some hundred times the rounding of one operation (float32: 1e-5 and
        6e-8), so a tenth of it leaves room for sums of many terms. The floor hides errors below 1e-6 of the largest
        element in float32 (5e-4 in float16, 3e-3 in bfloat16): a factor of 2 in a tensor of 1e-4 times the largest is a
        hundred times that.
        """
        sizes = [value.double().abs().nan_to_num(0.0, 0.0) for value in values if value.numel()]
        return replace(self, floor=self.part * _FLOOR * max((float(size.max()) for size in sizes), default=0.0))

    def allowed(self, expected: Tensor, extra: Tensor | None = None) -> Tensor:
        """Return the allowed difference of each element in float64, `extra` included."""
        size = expected.double().abs()
        largest = size.max() if size.numel() else size.sum()
        allowed = self.part * (size + largest) + self.floor
        return allowed if extra is None else allowed + extra

    def differing(self, expected: Tensor, found: Tensor, extra: Tensor | None = None) -> Tensor:
        """Return a mask of the elements that differ; NaN equals only NaN."""
        want, got = expected.double(), found.double()
        is_near = (got - want).abs() <= self.allowed(want, extra)
        return ~(is_near | (got == want) | (got.isnan() & want.isnan()))

    def agrees(self, expected: Tensor, found: Tensor) -> bool:
        """Return True if shapes are equal and no element differs."""
        return expected.shape == found.shape and not bool(self.differing(expected, found).any())


EXACT = Tolerance(0.0)


# ---- the values of one process --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Reference:
    """The values of the one process."""

    tolerance: Tolerance  # how far a correct run may be from it
    values: Mapping[Place, Values]  # the right ones, in the order of causes; empty where nothing can be compared
    finding: Difference | None = None  # a fault of the model or its loss, if any
    notes: tuple[str, ...] = ()  # remarks that are no fault
    backward_order: tuple[str, ...] = ()  # parameters in the order in which their gradients came
    of_ranks: tuple[Values, ...] = ()  # gradients of each rank's samples alone, in step 1
    # losses and gradients at the weights before the last update, of each step after the first
    stale: Mapping[Place, Values] = field(default_factory=dict)
    # the change of a weight, or of optimizer state, in each step when gradients change by rounding
    spread: tuple[Values, ...] = ()
    # buffers that differ between ranks in right runs: statistics of batch normalisation
    excused: frozenset[str] = frozenset()


class _NotComparableError(Exception):
    """Raised when a model cannot be compared; the message has the reason."""


def run_reference(task: Task, num_ranks: int, device: torch.device) -> Reference:
    """Train one process on the batches of `num_ranks` ranks."""
    run = _OneProcess(task, num_ranks, device)
    try:
        return run.result()
    except _NotComparableError as unfit:
        finding = Difference("one process against itself", 0, "", "not repeatable", str(unfit))
        return Reference(run.tolerance, {}, finding, notes=run.notes({}))


@dataclass(frozen=True)
class _Pass:
    """Loss and gradients of one forward and backward."""

    loss: float
    gradients: Values


class _OneProcess:
    """Two copies of the model in one process: one is trained, the other (the probe) runs variants."""

    def __init__(self, task: Task, num_ranks: int, device: torch.device) -> None:
        self.task, self.num_ranks, self.device = task, num_ranks, device
        self.probe = Trainee(*task.build(device), task)
        self.trainee = Trainee(*task.build(device), task)
        self.tolerance = self._tolerance()
        self.batch_norms = [n for n, module in self.probe.model.named_modules() if isinstance(module, _BatchNorm)]

    def _tolerance(self) -> Tolerance:
        params = dict(self.probe.model.named_parameters())
        complex_name = next((name for name, param in params.items() if param.is_complex()), None)
        if complex_name is not None:
            raise ConfigurationError(f"`{complex_name}` is complex; only real parameters can be compared")
        if self.task.tolerance is not None:
            return Tolerance(self.task.tolerance)
        coarsest = max((_BY_DTYPE.get(param.dtype, 0.0) for param in params.values()), default=0.0)
        return Tolerance(coarsest or _BY_DTYPE[torch.float32])

    def result(self) -> Reference:
        """Check the model against itself, then train it."""
        initial = self.trainee.parameters()
        self._require_repeatable_build(initial)
        microbatches = self.task.microbatches_of(1, self.num_ranks, self.device)
        whole = self._require_repeatable_pass(microbatches)
        of_each = slices_of_ranks(microbatches, self.num_ranks)
        of_ranks = tuple(self._try([of_rank]).gradients for of_rank in of_each)
        slices = self._try(of_each, self.task.share_of_rank(self.num_ranks))
        not_a_mean = _differing(whole, slices, self.tolerance)
        order: list[str] = []  # of parameters, as their gradients come
        for name, param in self.trainee.named_parameters():
            if param.requires_grad:
                param.register_post_accumulate_grad_hook(lambda _param, name=name: order.append(name))
        values, stale = self._train(initial, by_slices=not_a_mean is not None)
        # A batch norm normalises by the samples of a rank, so such a loss is no mean, and nothing is wrong with it.
        finding = None
        if not_a_mean is not None and not self.batch_norms:
            words = _explain_not_mean(self.task, whole.loss, slices.loss, self.num_ranks, not_a_mean)
            finding = Difference("loss", 0, "", "not a mean", words)
        return Reference(
            tolerance=self.tolerance,
            values=values,
            finding=finding,
            notes=self.notes(values),
            backward_order=tuple(dict.fromkeys(order)),
            of_ranks=of_ranks,
            stale=stale,
            spread=self._spread(values, of_ranks, stale),
            excused=frozenset(
                f"{layer}.{buffer}".lstrip(".")
                for layer in self.batch_norms
                for buffer in ("running_mean", "running_var")
            ),
        )

    def notes(self, values: Mapping[Place, Values]) -> tuple[str, ...]:
        """Return remarks on the model, and on the training values that exist."""
        found = []
        if self.batch_norms:
            found.append(
                "the model has batch normalisation: each rank normalises by its own samples, so it is compared with "
                "one process that does the same slice by slice; running_mean and running_var differ between ranks and "
                "are not compared"
            )
        frozen = sum(not param.requires_grad for param in self.probe.model.parameters())
        if frozen:
            found.append(f"{frozen} parameters are frozen, and have to stay as they are")
        gradients = [each for (where, _), each in values.items() if where == GRADIENT]
        trained = [name for name, param in self.trainee.named_parameters() if param.requires_grad]
        names = [name for name in trained if gradients and all(name not in each for each in gradients)]
        if names:
            found.append(
                f"{len(names)} trainable parameter(s) got no gradient in one process: {few(names)}; they are unused, "
                "or cut off from the loss (by detach or no_grad)"
            )
        return tuple(found)

    # ---- does it repeat itself ----------------------------------------------------------------------------------

    def _require_repeatable_build(self, initial: Values) -> None:
        again = self.probe.parameters()
        for name, value in initial.items():
            if name not in again or not EXACT.agrees(value, again[name]):
                raise _NotComparableError(
                    f"model_fn gives `{name}` other values each time, though torch.manual_seed is called before; draw "
                    "them from torch's generator, or load them"
                )

    def _require_repeatable_pass(self, microbatches: list[object]) -> _Pass:
        whole = self._try([microbatches])
        self._require_finite(1, "the first step", whole.loss, {"gradient": whole.gradients})
        again = self._try([microbatches], seed=self.task.seed + 1)
        random = _differing(whole, again, self.tolerance)
        if random is not None:
            raise _NotComparableError(
                f"the model does not repeat itself on the same samples: {random}; it draws random numbers (dropout) or "
                "is not deterministic. Sharding was not judged: set dropout to 0, put the model into eval mode in "
                "model_fn, or draw the noise from the samples"
            )
        return whole

    def _require_finite(self, step: int, when: str, loss: float, kinds: Mapping[str, Values]) -> None:
        if not math.isfinite(loss):
            raise _NotComparableError(
                f"the loss of {when} is {loss} in one process already, and sharding was not judged"
            )
        is_half = any(param.dtype == torch.float16 for param in self.probe.model.parameters())
        hint = " (float16 ends at 65504, and Adam's eps of 1e-8 is zero in it)" if is_half else ""
        for kind, values in kinds.items():
            for name, value in values.items():
                if not bool(value.isfinite().all()):
                    raise _NotComparableError(
                        f"the {kind} of `{name}` in step {step} is not finite in one process already{hint}, and "
                        "sharding was not judged"
                    )

    def _try(self, ranks: Sequence[Sequence[Any]], share: float = 1.0, seed: int | None = None) -> _Pass:
        """Run forward and backward on the probe, and restore its buffers."""
        buffers = self.probe.buffers()
        torch.manual_seed(self.task.seed if seed is None else seed)
        self.probe.model.zero_grad()
        found = _Pass(self.probe.backward(ranks, share), self.probe.gradients())
        self.probe.put_back(buffers)
        return found

    # ---- the right values ---------------------------------------------------------------------------------------

    def _train(self, initial: Values, *, by_slices: bool) -> tuple[dict[Place, Values], dict[Place, Values]]:
        """Run all steps; return their values, and those of each later step under the weights before the last update."""
        task, trainee = self.task, self.trainee
        values, stale = dict[Place, Values]({(INITIAL, 0): initial}), dict[Place, Values]()
        weights, share = [initial], task.share_of_rank(self.num_ranks) if by_slices else 1.0
        for step in range(1, task.steps + 1):
            microbatches = task.microbatches_of(step, self.num_ranks, self.device)
            ranks = slices_of_ranks(microbatches, self.num_ranks) if by_slices else [microbatches]
            if step > 1:
                self.probe.put_back({**trainee.buffers(), **weights[-2]})
                found = self._try(ranks, share)
                stale |= {(LOSS, step): {"": number(found.loss)}, (GRADIENT, step): found.gradients}
            record = trainee.step(step, ranks, share)
            kinds = {"gradient": record[GRADIENT, step], "weight": record[WEIGHT, step]}
            self._require_finite(step, f"step {step}", float(record[LOSS, step][""]), kinds)
            values |= record
            weights.append(record[WEIGHT, step])
        return values | {(BUFFER, task.steps): trainee.buffers()}, stale

    def _spread(
        self, values: Mapping[Place, Values], of_ranks: Sequence[Values], stale: Mapping[Place, Values]
    ) -> tuple[Values, ...]:
        """Measure the change of weights and optimizer state when gradients change by rounding.

        Adam divides a gradient by its own size: if that is only rounding, the update may have either sign. Elements
        that no sample reaches (a row of an embedding) have a gradient of exactly zero and are left alone: they are zero
        in other gradients of the same samples too.
        """
        spread: list[dict[str, Tensor]] = [{} for _ in range(self.task.steps)]
        for sign in (1.0, -1.0):
            trainee = Trainee(*self.task.build(self.device), self.task)
            for step in range(1, self.task.steps + 1):
                gradients = values[GRADIENT, step]
                others = of_ranks if step == 1 else [stale[GRADIENT, step]]
                allowed = self.tolerance.at_step(step).among(gradients.values())
                for name, param in trainee.named_parameters():
                    if name in gradients:
                        grad = gradients[name]
                        alike = [grad, *(found[name] for found in others if name in found)]
                        is_reached = torch.stack([each != 0 for each in alike]).any(0)
                        shift = sign * allowed.allowed(grad) * is_reached
                        param.grad = (grad.double() + shift).to(param.device, param.dtype)
                if self.task.max_norm is not None:
                    nn.utils.clip_grad_norm_(trainee.model.parameters(), self.task.max_norm)
                trainee.optimizer.step()
                trainee.optimizer.zero_grad()
                rights = {**values[WEIGHT, step], **values[STATE, step]}
                for name, value in {**trainee.parameters(), **trainee.optimizer_state()[1]}.items():
                    if name in rights:
                        moved = (value.double() - rights[name].double()).abs()
                        spread[step - 1][name] = torch.maximum(moved, spread[step - 1].get(name, moved))
        return tuple(spread)


def _differing(expected: _Pass, found: _Pass, tolerance: Tolerance) -> str | None:
    """Describe the first difference; None if there is none."""
    if not tolerance.agrees(number(expected.loss), number(found.loss)):
        return f"the loss is {expected.loss:.9g}, then {found.loss:.9g}"
    allowed = tolerance.among(expected.gradients.values())
    for name in {**expected.gradients, **found.gradients}:
        want, got = expected.gradients.get(name), found.gradients.get(name)
        if want is None or got is None:
            return f"the gradient of `{name}` is there only once"
        if not allowed.agrees(want, got):
            error, largest = (float(each.double().abs().max()) for each in (got.double() - want.double(), want))
            return f"the gradient of `{name}` changes by up to {error:.3g} (its largest element is {largest:.3g})"
    return None


def _explain_not_mean(task: Task, whole: float, slices: float, num_ranks: int, difference: str) -> str:
    """Explain that per-rank losses do not average to the batch loss, sharded or not."""
    change = f"from the whole batch in one process to its {num_ranks} slices together, {difference}"
    if task.reduction == "mean" and abs(slices * num_ranks - whole) <= 1e-3 * abs(whole):
        return (
            f"the loss is a sum over samples, not a mean: {change}. Gradients are averaged over ranks, so those of "
            f"this loss come out as 1/{num_ranks} of what they should be. Use a mean, or calculate_per_token_loss=True "
            'in your shard_fn with reduction="sum" here'
        )
    return (
        f"the loss is not a mean over samples: {change}. Slices may hold unequal numbers of counted tokens, or samples "
        "of a batch see each other; ranks train on the mean of their own losses"
    )
