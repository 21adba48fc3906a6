"""Optimizer state of ranks with different experts: numbered as if one optimizer had the experts of all ranks.

torch numbers the parameters of an optimizer in the order of its groups, and keys the state by these numbers. Ranks that
hold different experts would use one number for several. So each rank counts the parameters of all ranks: where its own
experts stand in its list, those of all ranks do, expert by expert, as in the model of one process.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from megatron_fsdp.dtensor.chunks import describe_chunks
from megatron_fsdp.dtensor.frame import ShardFrame
from megatron_fsdp.dtensor.tensor import UnevenDTensor
from megatron_fsdp.expert_index import ExpertPlan, parse_expert
from megatron_fsdp.runtime.expert_names import ExpertNames

StateDict = dict[str, Any]


@dataclass
class Numbering:
    """The parameters of one optimizer among those of all ranks.

    Attributes:
        groups: Names over all ranks, by parameter group.
        own: For each group the positions of this rank's parameters in it, in this rank's order.
        problem: Why there is no such list; None where there is one.
    """

    groups: list[list[str]] = field(default_factory=list)
    own: list[list[int]] = field(default_factory=list)
    problem: str | None = None


def number_parameters(groups: Sequence[Sequence[str]], plan: ExpertPlan) -> Numbering:
    """List the parameters of all ranks' optimizers; pure, the same list on every rank.

    Args:
        groups: What this rank calls its parameters, by parameter group.
        plan: Who holds which experts.
    """
    found = Numbering()
    if plan.unnumbered:
        found.problem = (
            f"expert-parallel ranks hold parameters that others have none of the kind of (such as {plan.unnumbered[0]})"
        )
    seen: set[str] = set()
    for group in groups:
        own_names = [plan.to_global(name) for name in group]
        everyone: list[str] = []
        for container, run in itertools.groupby(own_names, lambda name: _container(name, plan)):
            names = list(run)
            everyone += _expand(names, plan) if container is not None else names
        if len(set(everyone)) < len(everyone) or seen.intersection(everyone):
            found.problem = "the experts of one module are spread over several parameter groups, or not kept together"
        seen.update(everyone)
        places = {name: position for position, name in enumerate(everyone)}
        found.groups.append(everyone)
        found.own.append([places[name] for name in own_names])
    return found


def _container(name: str, plan: ExpertPlan) -> str | None:
    parsed = parse_expert(name)
    return parsed.container if parsed is not None and parsed.container in plan.indices else None


def _expand(run: Sequence[str], plan: ExpertPlan) -> list[str]:
    """The parameters of all experts, expert by expert, in place of those of this rank's."""
    namesakes = dict.fromkeys(plan.namesakes(name) for name in run)
    found = [(_index(name), order, name) for order, names in enumerate(namesakes) for name in names]
    return [name for _, _, name in sorted(found)]


def _index(name: str) -> int:
    parsed = parse_expert(name)
    return -1 if parsed is None else parsed.index


def state_as_saved(
    optimizer: torch.optim.Optimizer, state_dict: StateDict, known: Mapping[int, str], names: ExpertNames
) -> StateDict:
    """A state dict as the optimizer of all experts would give it, with this rank's part of the state.

    Args:
        optimizer: Whose it is.
        state_dict: As torch made it.
        known: Name of each sharded parameter by id.
        names: Of experts.
    """
    local = _names_of(optimizer, known)
    assert names.plan is not None
    numbering = number_parameters(local, names.plan)
    flat = list(itertools.chain.from_iterable(local))
    if numbering.problem is not None:
        problem = (
            f"optimizer.state_dict() numbers parameters, and {numbering.problem}, so numbers mean other parameters on "
            "other ranks; save the state of each expert-parallel rank by itself"
        )
        refused = {key: _refused(state, problem) for key, state in state_dict["state"].items()}
        return {**state_dict, "state": refused}
    numbers = list(_own_numbers(numbering))
    state = {
        numbers[key]: {slot: _described(names.as_saved(flat[key], value)) for slot, value in values.items()}
        for key, values in state_dict["state"].items()
    }
    groups = []
    for group, every, start in zip(state_dict["param_groups"], numbering.groups, _starts(numbering), strict=True):
        listed: StateDict = {"params": list(range(start, start + len(every)))}
        if "param_names" in group:
            listed["param_names"] = every
        groups.append({**group, **listed})
    return {**state_dict, "state": state, "param_groups": groups}


def names_as_saved(
    optimizer: torch.optim.Optimizer, known: Mapping[int, str], names: ExpertNames
) -> list[list[str]] | None:
    """Names over all ranks by the numbers of `state_as_saved`; None where there is no such list."""
    assert names.plan is not None
    numbering = number_parameters(_names_of(optimizer, known), names.plan)
    return None if numbering.problem is not None else numbering.groups


def state_as_held(
    optimizer: torch.optim.Optimizer, state_dict: StateDict, known: Mapping[int, str], names: ExpertNames
) -> StateDict:
    """The reverse of `state_as_saved`: what concerns this rank, numbered as torch does here.

    A state dict that lists as many parameters as this rank has is taken as this rank's own.
    """
    local = _names_of(optimizer, known)
    assert names.plan is not None
    numbering = number_parameters(local, names.plan)
    saved = [list(group["params"]) for group in state_dict["param_groups"]]
    sizes = [len(each) for each in saved]
    if sizes == [len(each) for each in local]:
        positions = [list(range(size)) for size in sizes]
    elif numbering.problem is None and sizes == [len(each) for each in numbering.groups]:
        positions = numbering.own
    else:
        return state_dict  # torch says what is wrong with it
    state, groups, count = {}, [], itertools.count()
    for group, keys, places, own in zip(state_dict["param_groups"], saved, positions, local, strict=True):
        numbers = [next(count) for _ in own]
        for number, place, name in zip(numbers, places, own, strict=True):
            if keys[place] in state_dict["state"]:
                values = state_dict["state"][keys[place]]
                state[number] = {slot: names.as_held(name, value) for slot, value in values.items()}
        listed: StateDict = {"params": numbers}
        if "param_names" in group:
            listed["param_names"] = [group["param_names"][place] for place in places]
        groups.append({**group, **listed})
    return {**state_dict, "state": state, "param_groups": groups}


def _names_of(optimizer: torch.optim.Optimizer, known: Mapping[int, str]) -> list[list[str]]:
    return [[known[id(param)] for param in group["params"]] for group in optimizer.param_groups]


def _starts(numbering: Numbering) -> list[int]:
    return list(itertools.accumulate(map(len, numbering.groups[:-1]), initial=0))


def _own_numbers(numbering: Numbering) -> Iterator[int]:
    for start, positions in zip(_starts(numbering), numbering.own, strict=True):
        yield from (start + position for position in positions)


def _described(value: Any) -> Any:
    if isinstance(value, UnevenDTensor) and not value.shard_frame.is_whole:
        describe_chunks(value, value.shard_frame)
    return value


def _refused(state: Mapping[str, Any], problem: str) -> StateDict:
    found: StateDict = {}
    for slot, value in state.items():
        found[slot] = value
        if isinstance(value, UnevenDTensor):
            frame = ShardFrame(value.shard_frame.mesh, value.shard_frame.description, value.shard_frame.foreign_groups)
            frame.problem = problem
            found[slot] = _described(UnevenDTensor.wrap(value._local_tensor, frame))
    return found
