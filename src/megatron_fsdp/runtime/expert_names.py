"""Experts that differ between ranks, as a checkpoint of all ranks sees them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from megatron_fsdp.dtensor.frame import ShardFrame
from megatron_fsdp.dtensor.tensor import UnevenDTensor
from megatron_fsdp.expert_index import ExpertPlan, plan_experts
from megatron_fsdp.runtime.domain import Domain
from megatron_fsdp.shard_description import MeshUse, TensorParallelCut
from megatron_fsdp.unit.param_group import ParameterGroup


class ExpertNames:
    """Names over all ranks, and the shards of all ranks' experts together, for one model.

    Attributes:
        plan: Who holds which experts; None where no ranks hold other experts.
    """

    def __init__(self, plan: ExpertPlan | None = None) -> None:
        self.plan = plan
        self._own: dict[str, ShardFrame] = {}
        self._saved: dict[str, ShardFrame] = {}

    @property
    def is_trivial(self) -> bool:
        """Whether nothing has another name or shape in a checkpoint."""
        return self.plan is None

    def add(self, name: str, own: ShardFrame, saved: ShardFrame) -> None:
        """Note how a parameter of this rank is saved."""
        self._own[name], self._saved[name] = own, saved

    def name_of(self, name: str) -> str:
        """The name in a checkpoint of what this rank calls `name`."""
        return name if self.plan is None else self.plan.to_global(name)

    def name_here(self, name: str) -> str | None:
        """The reverse of `name_of`; None for an expert of another rank."""
        return name if self.plan is None else self.plan.to_local(name)

    def frame_of(self, name: str, own: ShardFrame) -> ShardFrame:
        """The frame in which a parameter is saved."""
        return self._saved.get(name, own)

    def as_saved(self, name: str, value: Any) -> Any:
        """A tensor that is cut as parameter `name`, as it is to be saved or loaded; it shares its memory."""
        return _reframed(value, self._own.get(name), self._saved.get(name))

    def as_held(self, name: str, value: Any) -> Any:
        """The reverse: what was loaded, as it is held; of a whole tensor of all experts this rank's part."""
        own, saved = self._own.get(name), self._saved.get(name)
        if own is None or saved is None:
            return value
        if isinstance(value, torch.Tensor) and not isinstance(value, DTensor):
            cut = saved.description.tensor_cut
            if value.shape == saved.shape != own.shape and cut is not None:
                start, stop = saved.description.part_range()
                return value.narrow(cut.dim, start, stop - start)
        return _reframed(value, saved, own)


def _reframed(value: Any, old: ShardFrame | None, new: ShardFrame | None) -> Any:
    if old is None or new is None or not isinstance(value, UnevenDTensor) or value.shard_frame != old:
        return value
    return UnevenDTensor.wrap(value._local_tensor, new)


def find_expert_names(groups: Sequence[ParameterGroup], experts: Domain, mesh: DeviceMesh) -> ExpertNames:
    """Compare the experts of all expert-parallel ranks. Collective: one small message per such dimension.

    Parameters that would be saved under one name with others say so when that is tried.

    Args:
        groups: All parameter groups.
        experts: The ranks of experts.
        mesh: The expert mesh as it was given.
    """
    if not experts.foreign_groups:
        return ExpertNames()
    mine = [group for group in groups if group.plan.spec.key.is_expert]
    places = [(group, index) for group in mine for index in range(len(group.frames))]
    shapes = {group.names[index]: tuple(group.frames[index].shape) for group, index in places}
    everyone, rank = _ask_everyone(shapes, experts.foreign_groups)
    plan = plan_experts(everyone, rank)
    problems = dict(plan.problems)
    found = ExpertNames(plan)
    for group, index in places:
        name, frame = group.names[index], group.frames[index]
        if name in plan.stacks:
            stacked = _stacked_frame(frame, plan.stacks[name], experts, mesh)
            if isinstance(stacked, str):
                problems[name] = stacked
            else:
                found.add(name, frame, stacked)
        elif plan.to_global(name) != name:
            found.add(name, frame, ShardFrame(frame.mesh, frame.description, frame.foreign_groups))
        if name in problems or found.frame_of(name, frame) is not frame:
            frame.problem = _problem(name, problems.get(name))
    return found


def _problem(name: str, reason: str | None) -> str:
    told = (
        f"{name} is another expert on other expert-parallel ranks under the same name, so a checkpoint would keep one"
    )
    if reason is None:
        return f"{told} of them; save model.state_dict() and optimizer.state_dict(), which tell experts apart"
    return (
        f"{told} of them, and {reason}; name experts by their index over all ranks, or by that on this rank directly "
        "below a module called experts, or stack them along the first dimension there"
    )


def _ask_everyone(
    mine: Mapping[str, tuple[int, ...]], groups: Sequence[dist.ProcessGroup]
) -> tuple[list[Mapping[str, tuple[int, ...]]], int]:
    """What every expert-parallel rank has, and this one's place among them; the first group is the most significant."""
    everyone: list[Mapping[str, tuple[int, ...]]] = [mine]
    rank = 0
    for group in reversed(groups):
        answers: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(answers, everyone, group=group)
        rank += dist.get_rank(group) * len(everyone)
        everyone = [each for answer in answers for each in answer]
    return everyone, rank


def _stacked_frame(frame: ShardFrame, edges: tuple[int, ...], experts: Domain, mesh: DeviceMesh) -> ShardFrame | str:
    """The frame of all ranks' experts in one tensor; or why there is none."""
    description = frame.description
    if description.tensor_cut is not None or description.other_cuts:
        return "it is cut by tensor parallelism, too"
    if len(experts.foreign_groups) != 1:
        return "its ranks lie on several dimensions of the expert mesh"
    (group,) = experts.foreign_groups
    foreign = _dim_of(mesh, group)
    own = tuple(frame.mesh.mesh_dim_names or ())
    names = tuple(name for name in mesh.mesh_dim_names or () if name in (foreign, *own))  # torch slices in this order
    sizes = {foreign: len(edges) - 1, **dict(zip(own, description.use.sizes, strict=True))}
    places = {foreign: dist.get_rank(group), **dict(zip(own, description.coordinate, strict=True))}
    use = MeshUse(
        tuple(sizes[name] for name in names),
        tuple(names.index(own[dim]) for dim in description.use.shard_dims),
        tensor_dim=names.index(foreign),
    )
    return ShardFrame(
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
