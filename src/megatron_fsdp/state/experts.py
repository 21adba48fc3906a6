"""Names and shards of experts that differ between ranks, in checkpoints of all ranks."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from megatron_fsdp.comm.agreement import gather_over
from megatron_fsdp.dtensor.expert_names import TRIVIAL_NAMES, ExpertNames, described
from megatron_fsdp.dtensor.shard_spec import ShardSpec
from megatron_fsdp.dtensor.tensor import UnevenDTensor
from megatron_fsdp.engine.engine import Engine
from megatron_fsdp.engine.unit import Unit
from megatron_fsdp.sharding.expert_plan import Numbering, number_parameters, plan_experts
from megatron_fsdp.sharding.mesh import RankMesh
from megatron_fsdp.sharding.shards import MeshUse, TensorParallelCut


def find_expert_names(units: Sequence[Unit], experts: RankMesh, mesh: DeviceMesh | None) -> ExpertNames:
    """Compare the experts of all expert-parallel ranks. Collective: one small message per such dimension.

    Parameters that would share a name with others in a checkpoint raise when they are saved.
    """
    if mesh is None or not experts.foreign_groups:
        return TRIVIAL_NAMES
    mine = [group for unit in units for group in unit.groups if group.plan.rank_mesh is experts]
    places = [(group, index) for group in mine for index in range(len(group.shard_specs))]
    shapes = {group.names[index]: tuple(group.shard_specs[index].shape) for group, index in places}
    rank = 0
    for others in experts.foreign_groups:  # the first one is the most significant
        rank = rank * dist.get_world_size(others) + dist.get_rank(others)
    plan = plan_experts(gather_over(experts.foreign_groups[::-1], shapes), rank)
    problems = dict(plan.problems)
    found = ExpertNames(plan)
    for group, index in places:
        name, spec = group.names[index], group.shard_specs[index]
        saved: ShardSpec | str | None = None
        if name in plan.stacks:
            saved = _stacked_spec(spec, plan.stacks[name], experts, mesh)
        elif plan.to_global(name) != name:
            saved = ShardSpec(spec.mesh, spec.description, spec.foreign_groups)
        if isinstance(saved, ShardSpec):
            found.specs[name] = spec, saved
        elif saved is not None:
            problems[name] = saved
        if name in problems or isinstance(saved, ShardSpec):
            spec.problem = _problem(name, problems.get(name))
    return found


def _problem(name: str, reason: str | None) -> str:
    clash = (
        f"{name} is another expert on other expert-parallel ranks under the same name, so a checkpoint would keep one"
    )
    if reason is None:
        return f"{clash} of them; save model.state_dict() and optimizer.state_dict(), which tell experts apart"
    return (
        f"{clash} of them, and {reason}; name experts by their index over all ranks, or by that on this rank directly "
        "below a module called experts, or stack them along the first dimension there"
    )


def _stacked_spec(spec: ShardSpec, edges: tuple[int, ...], experts: RankMesh, mesh: DeviceMesh) -> ShardSpec | str:
    """Return the shard spec of all ranks' experts in one tensor; or the reason why there is none."""
    description = spec.description
    if description.tensor_cut is not None or description.other_cuts:
        return "it is cut by tensor parallelism, too"
    if len(experts.foreign_groups) != 1:
        return "its ranks lie on several dimensions of the expert mesh"
    (group,) = experts.foreign_groups
    expert_dim = _dim_of(mesh, group)
    own = tuple(spec.mesh.mesh_dim_names or ())
    names = tuple(name for name in mesh.mesh_dim_names or () if name in (expert_dim, *own))  # as torch slices
    sizes = {expert_dim: len(edges) - 1, **dict(zip(own, description.use.sizes, strict=True))}
    places = {expert_dim: dist.get_rank(group), **dict(zip(own, description.coordinate, strict=True))}
    use = MeshUse(
        tuple(sizes[name] for name in names),
        tuple(names.index(own[dim]) for dim in description.use.shard_dims),
        tensor_dim=names.index(expert_dim),
    )
    return ShardSpec(
        mesh[names],
        replace(
            description,
            shape=(edges[-1], *description.shape[1:]),
            use=use,
            coordinate=tuple(places[name] for name in names),
            tensor_cut=TensorParallelCut(0, edges),
        ),
    )


def _dim_of(mesh: DeviceMesh, group: dist.ProcessGroup) -> str:
    return next(name for name in mesh.mesh_dim_names or () if mesh.get_group(name) is group)


# Optimizer state is numbered as if one optimizer had the experts of all ranks (`number_parameters`).

StateDict = dict[str, Any]


def state_as_saved(
    optimizer: torch.optim.Optimizer, state_dict: StateDict, known: Mapping[int, str], names: ExpertNames
) -> StateDict:
    """Return the state dict that an optimizer of all experts would have, with this rank's part of the state."""
    local, numbering = _number(optimizer, known, names)
    if numbering.problem is not None:
        problem = (
            f"optimizer.state_dict() numbers parameters, and {numbering.problem}, so numbers mean other parameters on "
            "other ranks; save the state of each expert-parallel rank by itself"
        )
        refused = {
            key: state if isinstance(key, str) else _refused(state, problem)
            for key, state in state_dict["state"].items()
        }
        return {**state_dict, "state": refused}
    starts = list(itertools.accumulate(map(len, numbering.groups[:-1]), initial=0))
    numbers = [start + place for start, places in zip(starts, numbering.own, strict=True) for place in places]
    flat = list(itertools.chain.from_iterable(local))
    shared = {key: value for key, value in state_dict["state"].items() if isinstance(key, str)}  # of no parameter
    state = shared | {
        numbers[key]: {slot: described(names.as_saved(flat[key], value)) for slot, value in values.items()}
        for key, values in state_dict["state"].items()
        if key not in shared
    }
    groups = [
        _listing(group, range(start, start + len(every)), every)
        for group, every, start in zip(state_dict["param_groups"], numbering.groups, starts, strict=True)
    ]
    return {**state_dict, "state": state, "param_groups": groups}


def state_as_held(
    optimizer: torch.optim.Optimizer, state_dict: StateDict, known: Mapping[int, str], names: ExpertNames
) -> StateDict:
    """Invert `state_as_saved`: keep this rank's parameters, numbered as torch does here.

    A state dict that lists as many parameters as this rank has is taken as this rank's own.
    """
    local, numbering = _number(optimizer, known, names)
    saved = [list(group["params"]) for group in state_dict["param_groups"]]
    sizes = [len(each) for each in saved]
    if sizes == [len(each) for each in local]:
        positions = [list(range(size)) for size in sizes]
    elif numbering.problem is None and sizes == [len(each) for each in numbering.groups]:
        positions = numbering.own
    else:
        return state_dict  # torch raises for it
    state: dict[Any, Any] = {key: value for key, value in state_dict["state"].items() if isinstance(key, str)}
    groups, count = [], itertools.count()
    for group, keys, places, own in zip(state_dict["param_groups"], saved, positions, local, strict=True):
        numbers = [next(count) for _ in own]
        for number, place, name in zip(numbers, places, own, strict=True):
            if keys[place] in state_dict["state"]:
                values = state_dict["state"][keys[place]]
                state[number] = {slot: names.as_held(name, value) for slot, value in values.items()}
        known_names = group.get("param_names")
        groups.append(_listing(group, numbers, [known_names[place] for place in places] if known_names else []))
    return {**state_dict, "state": state, "param_groups": groups}


def _number(
    optimizer: torch.optim.Optimizer, known: Mapping[int, str], names: ExpertNames
) -> tuple[list[list[str]], Numbering]:
    """Return the names of an optimizer's parameters, by group, and their numbers among those of all ranks."""
    local = [[known[id(param)] for param in group["params"]] for group in optimizer.param_groups]
    assert names.plan is not None
    return local, number_parameters(local, names.plan)


def _listing(group: StateDict, numbers: Iterable[int], names: Sequence[str]) -> StateDict:
    """Return a parameter group with other parameters, and their names if it has names."""
    listed = {**group, "params": list(numbers)}
    return {**listed, "param_names": list(names)} if "param_names" in group else listed


def _refused(state: Mapping[str, Any], problem: str) -> StateDict:
    found: StateDict = {}
    for slot, value in state.items():
        found[slot] = value
        if isinstance(value, UnevenDTensor):
            spec = ShardSpec(value.shard_spec.mesh, value.shard_spec.description, value.shard_spec.foreign_groups)
            spec.problem = problem
            found[slot] = described(UnevenDTensor.wrap(value._local_tensor, spec))
    return found


class CheckpointNames:
    """Names and shapes of this rank's tensors in checkpoints of all ranks.

    They differ only for experts that each rank numbers from 0: those are numbered, or stacked, over all ranks there.
    Names are canonical, without the wrapper's own `module.`.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def saved(self, name: str) -> str:
        """Return the name in a checkpoint of this rank's parameter or buffer `name`."""
        return self._engine.expert_names.name_of(name)

    def held(self, name: str) -> str | None:
        """Return this rank's name of a parameter in a checkpoint; None for an expert of another rank."""
        return self._engine.expert_names.name_here(name)

    def saved_view(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Return a DTensor that is cut as parameter `name` as checkpoints describe it; it shares its memory."""
        found: torch.Tensor = self._engine.expert_names.as_saved(name, tensor)
        return found

    def of_optimizer(self, optimizer: torch.optim.Optimizer) -> list[list[str]] | None:
        """Return names by the numbers of `optimizer.state_dict()`, in groups; None if these are this rank's alone."""
        names = self._engine.expert_names
        if names.is_trivial:
            return None
        _, numbering = _number(optimizer, self._engine.sharded_names(), names)
        return None if numbering.problem is not None else numbering.groups
