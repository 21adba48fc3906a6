"""Parameters between `fully_shard` and the first forward: stock DTensors, cut evenly as torch's FSDP2 cuts them.

Clients fill them in three ways before they train: `to_empty` and initialisation, `load_state_dict(assign=True)` with
DTensors cut by torch, or a new parameter set in the module. All three rely on torch's cut. At the first forward they
are gathered, unit by unit, and cut again as the engine's buffers are.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard
from torch.utils.hooks import RemovableHandle

from megatron_fsdp.comm.collectives import Axis
from megatron_fsdp.dtensor.shard_spec import TensorParallelPart, local_tensor
from megatron_fsdp.dtensor.tensor import UnevenDTensor
from megatron_fsdp.engine.plans import Sharding
from megatron_fsdp.engine.unit import ParameterPlace
from megatron_fsdp.errors import ScheduleError
from megatron_fsdp.formats.tensor_extensions import extension_format, tensor_extension_of
from megatron_fsdp.sharding.mesh import RankMesh
from megatron_fsdp.sharding.weight_formats import WeightFormat

# Note [State dicts from before the first forward]
#
# A state dict of torch's FSDP2 shows the memory of the parameters, and programs keep one for a whole run (torchtitan
# saves from it). So its tensors follow: a hook notes them, weakly, and when the parameter is cut again, each becomes
# the new shard, as the parameter itself does, by `swap_tensors`.


@dataclass(frozen=True)
class EvenParameter:
    """A parameter that its modules hold as an even shard, or whole where torch cannot cut it."""

    name: str
    owners: tuple[ParameterPlace, ...]
    part: TensorParallelPart | None  # how tensor parallelism cut it before
    shape: torch.Size  # of this rank's tensor-parallel part
    sharding: Sharding
    shown: list[weakref.ref[DTensor]] = field(default_factory=list)  # in state dicts
    handles: list[RemovableHandle] = field(default_factory=list)

    def follow_state_dicts(self) -> None:
        """Register hooks on its modules: state dicts keep sharing its memory, and may hold the shards of a model."""
        for owner in self.owners:
            module = owner.module()
            assert module is not None
            note, recut = (partial(hook, owner.attribute) for hook in (self._note_shown, self._recut_loaded))
            self.handles.append(module.register_state_dict_post_hook(note))
            self.handles.append(module.register_load_state_dict_pre_hook(recut))

    def _note_shown(
        self, attribute: str, _module: nn.Module, state_dict: dict[str, Any], prefix: str, *_unused: Any
    ) -> None:
        value: Any = state_dict.get(prefix + attribute)
        if isinstance(value, DTensor) and value is not self.held:
            self.shown[:] = [each for each in self.shown if each() is not None]
            self.shown.append(weakref.ref(value))

    def _recut_loaded(
        self, attribute: str, _module: nn.Module, state_dict: dict[str, Any], prefix: str, *_unused: Any
    ) -> None:
        """Cut the shard of a model that has run as torch does; collective, as reading the tensor is."""
        value, held = state_dict.get(prefix + attribute), self.held
        if isinstance(value, UnevenDTensor) and isinstance(held, DTensor):
            whole = value.full_tensor()
            state_dict[prefix + attribute] = distribute_tensor(
                whole, held.device_mesh, held.placements, src_data_rank=None
            )

    def take_aliases(self) -> tuple[list[DTensor], bool]:
        """Forget the tensors of state dicts that share its memory, and return them; and if others share it, too."""
        if not self.handles:  # it was cut at once
            return [], False
        memory = local_tensor(self.held).untyped_storage()
        alive = [tensor for reference in self.shown if (tensor := reference()) is not None]
        found = [each for each in alive if local_tensor(each).untyped_storage()._cdata == memory._cdata]
        self.shown.clear()  # `swap_tensors` refuses tensors with weak references
        for handle in self.handles:
            handle.remove()
        # Its own tensor, and `memory`; a part of a larger memory is that of a file, say.
        own = 2 + len(found)
        is_whole = 0 < memory.nbytes() == local_tensor(self.held).nbytes
        return found, is_whole and torch._C._storage_Use_Count(memory._cdata) > own

    @property
    def held(self) -> nn.Parameter:
        """The parameter that the first of its modules holds now."""
        found = self.owners[0].parameters.get(self.owners[0].attribute)
        if found is None:
            raise ScheduleError(f"{self.name} was removed after fully_shard; change modules before they are sharded")
        return found

    def set(self, param: nn.Parameter) -> None:
        """Put a parameter into all modules that share it."""
        for owner in self.owners:
            owner.set(param)

    def gather(self) -> nn.Parameter:
        """Return the whole parameter as modules held it before `fully_shard`. Collective over the inner axis."""
        held = self.held
        if not isinstance(held, DTensor):
            return held
        local = local_tensor(held)
        if self.shape:
            axis = self.sharding.rank_mesh.axes[-1]
            local = _gathered_rows(local.to(self.sharding.device), self.shape, axis)
        whole = local if self.part is None else self.part.wrap(local)
        made = nn.Parameter(whole.detach(), requires_grad=held.requires_grad)
        made.__dict__.update(held.__dict__)
        return made

    def extension_format(self) -> tuple[int, WeightFormat] | None:
        """Return the id of a tensor extension and the format of its bytes; None for any other; may communicate."""
        owner = self.owners[0].module()
        extension = None if owner is None else tensor_extension_of(self.name, self.held, owner)
        if extension is None:
            return None
        mesh = self.sharding.rank_mesh
        inner = mesh.described_mesh if mesh.described_mesh.ndim == 1 else mesh.described_mesh[mesh.names[-1]]
        return id(self.held), extension_format(extension, self.held, inner)


def even_shard(
    param: nn.Parameter, part: TensorParallelPart | None, mesh: RankMesh, device: torch.device
) -> nn.Parameter:
    """Return this rank's even shard of a parameter, as torch's FSDP2 cuts it; no communication.

    Args:
        param: Plain, or a DTensor over tensor-parallel ranks; on the meta device, maybe, and left there.
        part: How tensor parallelism cut it.
        mesh: The data-parallel ranks.
        device: Of the shard.
    """
    axis, whole = mesh.axes[-1], local_tensor(param.detach())
    placement: Placement = Shard(0) if whole.ndim else Replicate()
    rows = torch.chunk(whole, axis.num_ranks) if whole.ndim else (whole,) * axis.num_ranks
    own = rows[axis.rank] if axis.rank < len(rows) else whole.new_empty((0, *whole.shape[1:]))
    own = own.clone() if own.is_meta else own.to(device, copy=True)
    placements: list[Placement] = [*(Replicate() for _ in mesh.axes[1:]), placement]
    shape, stride = param.shape, param.stride()
    if part is not None:
        if part.is_cut and part.placement == placement:
            placements[-1] = _StridedShard(0, split_factor=part.mesh.size())
        placements.append(part.placement)
        shape, stride = part.shape, part.stride
    made = nn.Parameter(
        DTensor.from_local(own, mesh.described_mesh, placements, run_check=False, shape=shape, stride=stride),
        requires_grad=param.requires_grad,
    )
    made.__dict__.update(param.__dict__)
    return made


def _gathered_rows(rows: torch.Tensor, shape: Sequence[int], axis: Axis) -> torch.Tensor:
    """All-gather even shards, which `torch.chunk` has made of dimension 0."""
    if axis.group is None:
        return rows
    per_rank = -(-shape[0] // axis.num_ranks)
    sent = rows.new_zeros((per_rank, *shape[1:]))
    sent[: len(rows)] = rows
    gathered = rows.new_empty((per_rank * axis.num_ranks, *shape[1:]))
    axis.all_gather(gathered, sent, async_op=False)
    return gathered[: shape[0]]
