"""One process on the whole batch: what is right, and what would be wrong in a known way."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from megatron_fsdp.doctor.observation import Observation, Probes, Reference, StaleStep, StepRecord, Values
from megatron_fsdp.doctor.recording import Trainee
from megatron_fsdp.doctor.selfcheck import SelfCheck, check_itself, first_not_finite, tell_not_finite, unfit
from megatron_fsdp.doctor.task import Part, Task
from megatron_fsdp.doctor.tolerance import EXACT, Tolerance, tolerance_of
from megatron_fsdp.errors import ConfigurationError


def run_reference(task: Task, num_ranks: int, device: torch.device) -> tuple[Reference, SelfCheck, Tolerance]:
    """Train one process as all ranks together should.

    Args:
        task: What to train.
        num_ranks: For how many ranks it stands.
        device: Where.

    Returns:
        What it saw, what it found out about the model itself, and how far a right run may be from it.
    """
    probe = Trainee(*task.build(device), task)
    tolerance = _tolerance(task, probe.model)
    notes = _notes(probe.model)
    first = task.microbatches_of(1, num_ranks, device)
    has_batch_norm = any(isinstance(module, _BatchNorm) for module in probe.model.modules())
    trainee = Trainee(*task.build(device), task)
    initial = trainee.parameters()
    changing = _first_changing(probe.parameters(), initial)
    if changing is None:
        check = check_itself(task, probe, first, num_ranks, tolerance, samples_meet=has_batch_norm)
    else:
        check = unfit(
            f"model_fn gives `{changing}` other values each time, though torch.manual_seed is called before; draw them "
            "from torch's generator, or load them"
        )
    order = _watch_backward(trainee)
    unjudged = Reference(Observation(initial, (), {}), Probes(num_ranks, task.microbatches, frozenset(), ()), notes)
    if not check.can_compare:
        return unjudged, check, tolerance
    steps, stale = _train(task, trainee, probe, num_ranks, device, by_slices=not check.is_mean)
    broken = _tell_broken(trainee.model, steps)
    if broken is not None:
        return unjudged, unfit(broken), tolerance
    observation = Observation(initial, steps, trainee.buffers())
    probes = Probes(
        num_ranks=num_ranks,
        microbatches=task.microbatches,
        frozen=frozenset(name for name, param in trainee.named_parameters() if not param.requires_grad),
        backward_order=tuple(dict.fromkeys(order)),
        losses_of_ranks=check.losses_of_ranks,
        of_ranks=check.of_ranks,
        of_microbatches=check.of_microbatches,
        stale=stale,
        spread=_spread(task, steps, _other_gradients(check, stale), device, tolerance),
        betas=_betas(trainee.optimizer),
        excused=_statistics(trainee),
        decay=_decay(trainee),
    )
    return Reference(observation, probes, notes + _tell_untrained(trainee, steps)), check, tolerance


def _first_changing(once: Values, again: Values) -> str | None:
    """The first weight that a second build made differently."""
    pairs = ((name, value, again.get(name)) for name, value in once.items())
    return next((name for name, a, b in pairs if a is not None and (b is None or not EXACT.agrees(a, b))), None)


def _tolerance(task: Task, model: nn.Module) -> Tolerance:
    complex_names = [name for name, param in model.named_parameters() if param.is_complex()]
    if complex_names:
        raise ConfigurationError(f"`{complex_names[0]}` is complex; only real parameters can be compared")
    if task.part_allowed is not None:
        return Tolerance(task.part_allowed)
    return tolerance_of(param.dtype for param in model.parameters() if param.is_floating_point())


def _notes(model: nn.Module) -> tuple[str, ...]:
    found = []
    if any(isinstance(module, _BatchNorm) for module in model.modules()):
        found.append(
            "the model has batch normalisation: each rank normalises by its own samples, so it is compared with one "
            "process that does the same slice by slice; running_mean and running_var differ between ranks and are not "
            "compared"
        )
    frozen = [name for name, param in model.named_parameters() if not param.requires_grad]
    if frozen:
        found.append(f"{len(frozen)} parameters are frozen, and have to stay as they are")
    return tuple(found)


def _tell_untrained(trainee: Trainee, steps: tuple[StepRecord, ...]) -> tuple[str, ...]:
    """A note on parameters that no backward reached."""
    trained = [name for name, param in trainee.named_parameters() if param.requires_grad]
    names = [name for name in trained if all(step.gradients[name] is None for step in steps)]
    if not names:
        return ()
    shown = ", ".join(f"`{name}`" for name in names[:3]) + (", ..." if len(names) > 3 else "")
    told = f"{len(names)} trainable parameter(s) got no gradient in one process: {shown}; "
    return (told + "they are unused, or cut off from the loss (by detach or no_grad)",)


def _train(
    task: Task, trainee: Trainee, probe: Trainee, num_ranks: int, device: torch.device, *, by_slices: bool
) -> tuple[tuple[StepRecord, ...], tuple[StaleStep, ...]]:
    """All steps, and beside each after the first what it would be with the weights before the last update."""
    steps, stale = list[StepRecord](), list[StaleStep]()
    before = trainee.parameters()
    for number in range(1, task.steps + 1):
        microbatches = task.microbatches_of(number, num_ranks, device)
        ranks = task.parts_of_all(microbatches, num_ranks) if by_slices else [task.parts_whole(microbatches)]
        if number > 1:
            probe.put_back(trainee.buffers())
            stale.append(_stale_step(probe, before, ranks))
            before = steps[-1].parameters
        steps.append(trainee.step(ranks, lambda loss: (loss, ())))
    return tuple(steps), tuple(stale)


def _tell_broken(model: nn.Module, steps: tuple[StepRecord, ...]) -> str | None:
    """Words for the first value of one process that is not finite."""
    for number, record in enumerate(steps, start=1):
        if not math.isfinite(record.loss):
            return f"the loss of step {number} is {record.loss} in one process already, and sharding was not judged"
        for what, values in (("gradient", record.gradients), ("weight", record.parameters)):
            name = first_not_finite(values)
            if name is not None:
                return tell_not_finite(model, what, name, number)
    return None


def _stale_step(probe: Trainee, weights: Values, ranks: list[list[Part]]) -> StaleStep:
    with torch.no_grad():
        for name, param in probe.named_parameters():
            value = weights[name]
            if value is not None:
                param.copy_(value)
    probe.model.zero_grad()
    return StaleStep(probe.backward_of_ranks(ranks), probe.gradients())


def _spread(
    task: Task,
    steps: tuple[StepRecord, ...],
    others: list[tuple[Values, ...]],
    device: torch.device,
    tolerance: Tolerance,
) -> tuple[Mapping[str, Tensor | None], ...]:
    """How far weights and optimizer state move when gradients change by what rounding may change, up and down.

    Adam divides a gradient by its own size: where that is no more than rounding, the update may have either sign.
    What no sample reaches (a row of an embedding) has a gradient of zero without any rounding, and is left alone: it is
    zero in the `others` too, further gradients of the samples of each step.
    """
    spread: list[dict[str, Tensor | None]] = [{} for _ in steps]
    for sign in (1.0, -1.0):
        trainee = Trainee(*task.build(device), task)
        for number, record in enumerate(steps, start=1):
            allowed = tolerance.at_step(number).among(record.gradients.values())
            for name, param in trainee.named_parameters():
                grad = record.gradients[name]
                if grad is not None:
                    further = [values.get(name) for values in others[number - 1]]
                    is_reached = torch.stack([each != 0 for each in (grad, *further) if each is not None]).any(0)
                    shift = sign * allowed.allowed(grad) * is_reached
                    param.grad = (grad.double() + shift).to(param.device, param.dtype)
            if task.max_norm is not None:
                nn.utils.clip_grad_norm_(trainee.model.parameters(), task.max_norm)
            trainee.optimizer.step()
            trainee.optimizer.zero_grad()
            rights = {**record.parameters, **record.state}
            for name, value in {**trainee.parameters(), **trainee.optimizer_state()[1]}.items():
                right = rights.get(name)
                if value is None or right is None:
                    continue
                moved, known = (value.double() - right.double()).abs(), spread[number - 1].get(name)
                spread[number - 1][name] = moved if known is None else torch.maximum(known, moved)
    return tuple(spread)


def _other_gradients(check: SelfCheck, stale: tuple[StaleStep, ...]) -> list[tuple[Values, ...]]:
    """Gradients of the same samples in other ways, for each step."""
    return [check.of_ranks, *((step.gradients,) for step in stale)]


def _decay(trainee: Trainee) -> dict[str, float]:
    """What part of a weight its decay takes off in one update, by name: learning rate times weight decay."""
    parts = {
        id(param): float(group["lr"]) * float(group.get("weight_decay", 0.0))
        for group in trainee.optimizer.param_groups
        for param in group["params"]
        if "lr" in group
    }
    return {name: parts.get(id(param), 0.0) for name, param in trainee.named_parameters()}


def _statistics(trainee: Trainee) -> frozenset[str]:
    """Running statistics of batch normalisation, by name; what a module of another kind calls so is no such."""
    layers = [name for name, module in trainee.model.named_modules() if isinstance(module, _BatchNorm)]
    return frozenset(
        f"{layer}.{buffer}" if layer else buffer for layer in layers for buffer in ("running_mean", "running_var")
    )


def _watch_backward(trainee: Trainee) -> list[str]:
    """A list that fills with the names of parameters in the order in which their gradients come."""
    order: list[str] = []
    for name, param in trainee.named_parameters():
        if param.requires_grad:
            param.register_post_accumulate_grad_hook(lambda _param, name=name: order.append(name))
    return order


def _betas(optimizer: torch.optim.Optimizer) -> tuple[float, float] | None:
    betas = optimizer.param_groups[0].get("betas")
    if not isinstance(betas, tuple | list) or len(betas) != 2:
        return None
    return float(betas[0]), float(betas[1])
