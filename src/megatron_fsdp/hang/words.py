"""Ranks, units and what is done with them, in words."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from megatron_fsdp.engine.observer import Phase
from megatron_fsdp.hang.state import Doing, Operation, State
from megatron_fsdp.hang.writer import UnitFacts

_SHOWN = 4

_WAITING = {
    Phase.GATHER: "starts to gather the weights of {unit}",
    Phase.WAIT: "waits for the weights of {unit}",
    Phase.REDUCE: "starts to reduce the gradients of {unit}",
    Phase.RETIRE: "waits for the reduced gradients of {unit}",
    Phase.FINALISE: "ends its backward",
    Phase.GATHER_ACROSS: "gathers the weights of {unit} over the outer axis",
    Phase.REDUCE_ACROSS: "reduces the gradients of {unit} over the outer axis",
    Phase.AGREE: "compares notes with the other ranks",
    Phase.NORM: "waits for the norm of all gradients",
    Phase.WHOLE: "puts whole tensors together",
    Phase.FORWARD: "computes the forward of {unit}",
    Phase.BACKWARD: "computes the backward of {unit}",
    Phase.RELEASE: "releases the weights of {unit}",
    Phase.COPY: "copies a gradient of {unit}",
    Phase.INSTALL: "installs weights",
}
_DONE = {
    Phase.GATHER: "gathers {unit} ({bytes} bytes)",
    Phase.REDUCE: "reduces {unit} ({bytes} bytes)",
    Phase.GATHER_ACROSS: "gathers {unit} over the outer axis ({bytes} bytes)",
    Phase.REDUCE_ACROSS: "reduces {unit} over the outer axis ({bytes} bytes)",
    Phase.AGREE: "compares notes with the other ranks",
    Phase.NORM: "computes the norm of all gradients",
    Phase.WHOLE: "puts whole tensors together",
}
_BETWEEN = frozenset({Phase.AGREE, Phase.NORM, Phase.WHOLE, Phase.INSTALL, Phase.REDUCE, Phase.RETIRE})
_ENDS_BACKWARD = frozenset(
    {Phase.BACKWARD, Phase.COPY, Phase.REDUCE, Phase.REDUCE_ACROSS, Phase.RETIRE, Phase.FINALISE}
)
_BESIDE = frozenset({Phase.AGREE, Phase.NORM, Phase.WHOLE})
_BY_NAME = {phase.value: phase for phase in Phase}


def listed(ranks: Iterable[int]) -> str:
    """`rank 3`, or `ranks 0, 1, 4-7`."""
    spans: list[list[int]] = []
    for rank in sorted(ranks):
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    parts = [
        str(first) if first == last else f"{first}, {last}" if last == first + 1 else f"{first}-{last}"
        for first, last in spans
    ]
    return f"rank{'s' if len(spans) > 1 or (spans and spans[0][0] != spans[0][1]) else ''} {', '.join(parts)}"


def subject(ranks: Iterable[int]) -> str:
    """Some ranks in front of a verb in the singular."""
    told = listed(ranks)
    return f"each of {told}" if told.startswith("ranks") else told


def seconds(value: float) -> str:
    """A time with one decimal."""
    return f"{value:.1f} s"


def where(step: int, in_backward: bool, phase: str = "") -> str:
    """`in the forward of step 3`; steps count from 0, as optimizer steps do.

    Args:
        step: The step.
        in_backward: Whether autograd ran.
        phase: What was under way; some phases also stand between forward and backward.
    """
    if not in_backward and _BY_NAME.get(phase) in _BETWEEN:
        return f"in step {step}"
    return f"in the {'backward' if in_backward else 'forward'} of step {step}"


def after(step: int, in_backward: bool, phase: str) -> str:
    """`after the backward of step 3`, of code outside of the model.

    Args:
        step: The step.
        in_backward: Whether autograd ran when the model was last heard of.
        phase: What it did then.
    """
    last = _BY_NAME.get(phase)
    if last is Phase.INSTALL:
        return f"before the forward of step {step}"
    if in_backward or last in _ENDS_BACKWARD:
        return f"after the backward of step {step}"
    return f"in step {step}" if last in _BESIDE else f"after the forward of step {step}"


def operation_told(operation: Operation, units: Sequence[UnitFacts]) -> str:
    """What an operation does, as the predicate of a sentence about one rank."""
    phase = _BY_NAME.get(operation.phase)
    template = _DONE.get(phase, operation.phase) if phase is not None else operation.phase
    return template.format(unit=units[operation.unit].label, bytes=operation.num_bytes)


def doing_told(state: State, units: Sequence[UnitFacts]) -> str:
    """What a rank is doing, as the predicate of a sentence about it."""
    if state.doing is Doing.NOTHING_YET:
        return "has not called the model yet"
    if state.doing is Doing.ENDED:
        return "has ended its program"
    if state.doing is Doing.FAILED:
        return f"raised an error while it {phase_told(state.failed_in, state.unit, units)}"
    if state.doing is Doing.OUTSIDE:
        last = phase_told(state.phase, state.unit, units)
        return f"runs code outside of the model (the last it did there: {last}, step {state.step})"
    return f"{phase_told(state.phase, state.unit, units)} {where(state.step, state.in_backward, state.phase)}"


def phase_told(name: str, unit: int, units: Sequence[UnitFacts]) -> str:
    """What goes on in a phase, as the predicate of a sentence."""
    phase = _BY_NAME.get(name)
    template = _WAITING[phase] if phase is not None else f"is in {name} of {{unit}}"
    return template.format(unit=units[unit].label)


def unit_told(unit: UnitFacts) -> str:
    """What a unit holds."""
    names = unit.parameters
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    shown = ", ".join(names[:_SHOWN]) or "no parameters"
    count = f"{len(names)} parameter{'s' if len(names) != 1 else ''}"
    return f"{unit.label} holds {shown}{more} ({count}, {unit.num_bytes} bytes)"
