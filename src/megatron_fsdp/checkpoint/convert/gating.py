"""Which MLPs are gated, so that their fc1 holds two halves. Pure.

Files do not say it of a tensor. The arguments of the run do (`args.swiglu`), and the shapes do: fc1 of a gated MLP has
twice as many rows as fc2 has columns, that of any other MLP just as many.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megatron_fsdp.checkpoint.convert.names import is_fc1, leading_axes
from megatron_fsdp.errors import CheckpointError

AUTO, ALL, NONE = "auto", "all", "none"


@dataclass(frozen=True)
class Gating:
    """The answer for each fc1.

    Attributes:
        gated: Keys (in the source's spelling) of weights and biases that hold two halves.
        decisions: Module -> what was decided and why, for people.
    """

    gated: frozenset[str]
    decisions: Mapping[str, str]


def decide_gating(shapes: Mapping[str, Sequence[int]], scope: str, said: bool | None) -> Gating:
    """Decide for every fc1.

    Args:
        shapes: Model key -> shape in the source.
        scope: "auto", "all", "none", or modules separated by commas: those whose name holds one of them.
        said: `args.swiglu`, where the checkpoint says.

    Raises:
        CheckpointError: Shapes contradict what was asked for, do not settle it, or no module has the name given.
    """
    modules = {key.rpartition(".")[0] for key in shapes if is_fc1(key)}
    answers = {module: _decide(module, shapes, scope, said) for module in sorted(modules)}
    named = [] if scope in (AUTO, ALL, NONE) else [part for part in scope.split(",") if part]
    for part in named:
        if not any(_holds(module, part) for module in modules):
            raise CheckpointError(
                f"--swiglu names {part!r}, which is part of no MLP's name; there are {sorted(modules)}"
            )
    gated = frozenset(key for key in shapes if is_fc1(key) and answers[key.rpartition(".")[0]][0])
    return Gating(gated, {m: f"{'gated' if yes else 'not gated'} ({why})" for m, (yes, why) in answers.items()})


def _decide(module: str, shapes: Mapping[str, Sequence[int]], scope: str, said: bool | None) -> tuple[bool, str]:
    by_shape = _shape_test(module, shapes)
    if scope == NONE:
        return False, "--swiglu none"
    if scope not in (AUTO, ALL):
        if not any(_holds(module, part) for part in scope.split(",") if part):
            return False, f"not in --swiglu {scope}"
    elif scope == AUTO and said is False:
        return False, "args.swiglu is False"
    elif scope == AUTO and said is None:
        if by_shape is None:
            raise CheckpointError(
                f"neither the checkpoint's arguments nor shapes say whether {module} is gated; "
                "say it with --swiglu all or --swiglu none"
            )
        return by_shape, "fc1 has twice the rows of fc2's columns" if by_shape else "fc1 has the rows of fc2's columns"
    elif scope == AUTO and by_shape is False:
        return False, "args.swiglu is True, but fc1 has the rows of fc2's columns"
    if by_shape is False:
        raise CheckpointError(
            f"--swiglu {scope} asks to halve {module}, whose fc1 has as many rows as fc2 has columns: it is not gated; "
            "use --swiglu auto, or name the gated modules"
        )
    return True, "args.swiglu is True" if scope == AUTO else f"--swiglu {scope}"


def _shape_test(module: str, shapes: Mapping[str, Sequence[int]]) -> bool | None:
    """Whether the rows of fc1 are twice the columns of fc2; None where this cannot be seen."""
    fc1_key = f"{module}.weight"
    fc2_key = f"{module.removesuffix('linear_fc1')}linear_fc2.weight"
    fc1, fc2 = shapes.get(fc1_key), shapes.get(fc2_key)
    if fc1 is None or fc2 is None or len(fc1) != len(fc2) or len(fc1) != leading_axes(fc1_key) + 2:
        return None
    rows, columns = fc1[-2], fc2[-1]
    if rows not in (columns, 2 * columns):
        return None
    return rows == 2 * columns


def _holds(module: str, part: str) -> bool:
    return f".{part}." in f".{module}."
