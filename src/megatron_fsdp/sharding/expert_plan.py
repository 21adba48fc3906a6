"""Identities of experts over all expert-parallel ranks, from names and shapes. Pure.

Ranks hold different experts. A checkpoint must tell them apart, and load them on another number of ranks:

* A name that counts a rank's own experts from 0 (`experts.1.w`, `experts.local_experts.1.w`, `experts.fc.weight1`) gets
  the expert's number over all ranks; the ranks' experts follow one another in the order of ranks.
* A tensor that stacks a rank's experts along its first dimension (`experts.w`, (experts, ...)) is this rank's part of
  one tensor that stacks them all. Conditions: the name has no number below `experts`, all such tensors of a module
  have the same first dimension, and the ranks' shapes agree in the others.
* Names that no two ranks share are names over all ranks already.

Everything else cannot be told apart, and is reported as a problem.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

Shape = tuple[int, ...]

_MODULE = re.compile(
    r"^(?P<container>(?:.*\.)?experts\.)(?P<between>(?:local_experts\.)?)(?P<index>\d+)(?P<after>\..+)$"
)
_GROUPED = re.compile(r"^(?P<container>(?:.*\.)?experts\.)(?P<between>.+\.(?:weight|bias))(?P<index>\d+)(?P<after>)$")
_STACKED = re.compile(r"^(?P<container>(?:.*\.)?experts\.)(?P<rest>[^.].*)$")


@dataclass(frozen=True)
class ExpertName:
    """A parameter's name, split around the number of its expert."""

    container: str  # up to and with `experts.`
    between: str  # from there to the number
    index: int
    after: str  # the rest

    def at(self, index: int) -> str:
        """Return the name of the same parameter of another expert."""
        return f"{self.container}{self.between}{index}{self.after}"

    @property
    def kind(self) -> tuple[str, str, str]:
        """The parts of the name that are the same for all experts."""
        return self.container, self.between, self.after


def parse_expert(name: str) -> ExpertName | None:
    """Split a parameter's name around the number of its expert; None if it has none."""
    found = _MODULE.match(name) or _GROUPED.match(name)
    if found is None:
        return None
    return ExpertName(found["container"], found["between"], int(found["index"]), found["after"])


def stack_container(name: str) -> str | None:
    """Return the module of a tensor of stacked experts, up to and with `experts.`; None for other names."""
    found = _STACKED.match(name)
    if found is None or any(part.isdigit() for part in found["rest"].split(".")) or parse_expert(name) is not None:
        return None
    return found["container"]


@dataclass(frozen=True)
class ExpertPlan:
    """Maps this rank's experts to those of all ranks, by name and position."""

    # number of this rank's first expert, by container, where names count from 0 on every rank
    offsets: Mapping[str, int] = field(default_factory=dict)
    # numbers over all ranks of this rank's experts, by container
    held: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    indices: Mapping[str, tuple[int, ...]] = field(default_factory=dict)  # of all experts, ascending
    names: frozenset[str] = frozenset()  # all names over all ranks
    # edges of the ranks' parts of each stacked tensor, along the first dimension
    stacks: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    rank: int = 0  # among the expert-parallel ranks
    problems: Mapping[str, str] = field(default_factory=dict)  # why a parameter cannot be told from others, by name
    # Parameters of a kind that some ranks lack, or whose expert has no number, so that a rank cannot list all
    # ranks' parameters by itself.
    unnumbered: tuple[str, ...] = ()

    def to_global(self, name: str) -> str:
        """Return the global name of this rank's parameter `name`."""
        found = parse_expert(name)
        if found is None or found.container not in self.offsets:
            return name
        return found.at(found.index + self.offsets[found.container])

    def to_local(self, name: str) -> str | None:
        """Return this rank's name of a parameter, given its global name; None for another rank's expert."""
        found = parse_expert(name)
        if found is None or found.index not in self.indices.get(found.container, ()):
            return name
        if found.index not in self.held[found.container]:
            return None
        return found.at(found.index - self.offsets.get(found.container, 0))

    def namesakes(self, name: str) -> tuple[str, ...]:
        """Return the global names of this parameter in every expert; just `name` where experts have no numbers."""
        found = parse_expert(name)
        if found is None or found.container not in self.indices:
            return (name,)
        return tuple(other for index in self.indices[found.container] if (other := found.at(index)) in self.names)


def plan_experts(everyone: Sequence[Mapping[str, Shape]], rank: int) -> ExpertPlan:
    """Identify the experts of all ranks."""
    numbered = [{name: found for name in each if (found := parse_expert(name))} for each in everyone]
    had = Counter(name for each in everyone for name in each)
    shared = {name for name, count in had.items() if count > 1}
    plain = [name for each, own in zip(everyone, numbered, strict=True) for name in each if name not in own]
    unnumbered = [name for name in plain if had[name] < len(everyone)]
    names = set(plain)
    offsets: dict[str, int] = {}
    held: dict[str, tuple[int, ...]] = {}
    indices: dict[str, tuple[int, ...]] = {}
    problems: dict[str, str] = {}
    for container in sorted({found.container for own in numbered for found in own.values()}):
        members = [{name: found for name, found in own.items() if found.container == container} for own in numbered]
        numbers = [sorted({found.index for found in each.values()}) for each in members]
        if shared.isdisjoint(itertools.chain.from_iterable(members)):
            starts = [0] * len(everyone)
        elif all(each == list(range(len(each))) for each in numbers):
            starts = list(itertools.accumulate(map(len, numbers[:-1]), initial=0))
            offsets[container] = starts[rank]
        else:
            message = f"expert-parallel ranks hold the experts {numbers} under {container[:-1]}, which overlap"
            problems.update(dict.fromkeys(members[rank], message))
            continue
        numbers = [[start + index for index in each] for start, each in zip(starts, numbers, strict=True)]
        held[container] = tuple(numbers[rank])
        indices[container] = tuple(sorted(itertools.chain.from_iterable(numbers)))
        kinds = [{found.kind for found in each.values()} for each in members]
        if any(each != kinds[0] for each in kinds):
            unnumbered += sorted(set(itertools.chain.from_iterable(members)))
        for start, mine in zip(starts, members, strict=True):
            names.update(found.at(found.index + start) for found in mine.values())
    stacks: dict[str, tuple[int, ...]] = {}
    for name in sorted(shared & everyone[rank].keys() - numbered[rank].keys()):
        problem = _stack_problem(everyone, name)
        if problem is None:
            stacks[name] = tuple(itertools.accumulate((each[name][0] for each in everyone), initial=0))
        else:
            problems[name] = problem
    return ExpertPlan(offsets, held, indices, frozenset(names), stacks, rank, problems, tuple(unnumbered))


def _stack_problem(everyone: Sequence[Mapping[str, Shape]], name: str) -> str | None:
    """Return the reason that a tensor is no stack of a rank's experts, or None; the same on every rank."""
    container = stack_container(name)
    if container is None:
        return "nothing in its name says which expert it is"
    if not all(name in each for each in everyone):
        return "some expert-parallel ranks do not have it"
    shapes = [each[name] for each in everyone]
    if any(not shape for shape in shapes) or len({shape[1:] for shape in shapes}) > 1:
        return f"its shapes on expert-parallel ranks are {shapes}, which are no parts along a first dimension"
    for each in everyone:
        siblings = {other: shape for other, shape in each.items() if stack_container(other) == container}
        if len({shape[:1] for shape in siblings.values()}) > 1:
            message = ", ".join(f"{other} {shape}" for other, shape in sorted(siblings.items()))
            return f"the first dimensions of {container[:-1]} differ ({message}), so they are no stacks of its experts"
    return None


# Parameters of optimizers, numbered as if one optimizer had the experts of all ranks.
#
# torch numbers the parameters of an optimizer in the order of its groups, and keys the state by these numbers. Ranks
# that hold different experts would use one number for several. So each rank counts the parameters of all ranks: where
# its own experts stand in its list, those of all ranks do, expert by expert, as in the model of one process.


@dataclass
class Numbering:
    """The parameters of one optimizer among those of all ranks."""

    groups: list[list[str]] = field(default_factory=list)  # names over all ranks, by parameter group
    # for each group the positions of this rank's parameters in it, in this rank's order
    own: list[list[int]] = field(default_factory=list)
    problem: str | None = None  # why there is no such list


def number_parameters(groups: Sequence[Sequence[str]], plan: ExpertPlan) -> Numbering:
    """List the parameters of all ranks' optimizers; the same list on every rank."""
    found = Numbering()
    if plan.unnumbered:
        found.problem = (
            f"expert-parallel ranks hold parameters that others have none of the kind of (such as {plan.unnumbered[0]})"
        )
    seen: set[str] = set()
    for group in groups:
        own_names = [plan.to_global(name) for name in group]
        everyone: list[str] = []
        for container, run in itertools.groupby(own_names, lambda name: _counted_container(name, plan)):
            names = list(run)
            everyone += _expand(names, plan) if container is not None else names
        if len(set(everyone)) < len(everyone) or seen.intersection(everyone):
            found.problem = "the experts of one module are spread over several parameter groups, or not kept together"
        seen.update(everyone)
        places = {name: position for position, name in enumerate(everyone)}
        found.groups.append(everyone)
        found.own.append([places[name] for name in own_names])
    return found


def _counted_container(name: str, plan: ExpertPlan) -> str | None:
    found = parse_expert(name)
    return found.container if found is not None and found.container in plan.indices else None


def _expand(run: Sequence[str], plan: ExpertPlan) -> list[str]:
    """List the parameters of all ranks' experts, expert by expert."""
    namesakes = dict.fromkeys(plan.namesakes(name) for name in run)
    parsed = ((parse_expert(name), order, name) for order, names in enumerate(namesakes) for name in names)
    return [name for _, _, name in sorted((each.index if each else -1, order, name) for each, order, name in parsed)]
