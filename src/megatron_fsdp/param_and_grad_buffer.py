"""The views `param_and_grad_buffer`, `all_gather_pipeline` and `grad_reduce_pipeline`, for client frameworks.

And `make_fsdp_dtensor`, by which clients describe shards that they have cut or joined themselves.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from megatron_fsdp.comm.agreement import gather_objects, gather_over
from megatron_fsdp.dtensor.shard_spec import ShardSpec
from megatron_fsdp.dtensor.tensor import UnevenDTensor
from megatron_fsdp.engine.engine import Engine
from megatron_fsdp.engine.group_plan import local_part, part_of
from megatron_fsdp.engine.param_group import ParameterGroup
from megatron_fsdp.errors import ConfigurationError
from megatron_fsdp.sharding.mesh import FSDPDistributedIndex
from megatron_fsdp.sharding.shards import ListedCut, MeshUse, ShardDescription, TensorParallelCut
from megatron_fsdp.uneven_dtensor import update_uneven_dtensor_chunk_metadata


class _View:
    """Base class of a client's views of an engine."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine


class ParamAndGradBuffer(_View):
    """The flat buffers of a sharded model, which owns them."""

    @property
    def parameter_groups(self) -> list[ParameterGroup]:
        """All parameter groups, in unit order."""
        return self._engine.groups()

    @property
    def optimizer_named_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """The trainable sharded parameters with canonical names."""
        return [
            (name, param)
            for group in self._engine.groups()
            for name, param in zip(group.names, group.sharded, strict=True)
            if param.requires_grad
        ]

    def update_main_grads(self) -> None:
        """Set `.grad` of the sharded parameters to the reduced gradients."""
        self._engine.attach_gradients()

    def zero_grad(self) -> None:
        """Clear all gradients, unreduced ones included."""
        self._engine.clear_gradients()

    def copy_main_weights_to_model_weights(self) -> None:
        """Copy main weights into compute weights."""
        self._engine.install_main_weights()

    def scale_gradients(self, scaling_factor: float) -> None:
        """Multiply all gradients, unreduced ones included, by a factor."""
        self._engine.refuse_late("scale_gradients")
        for group in self._engine.groups():
            if group.gradients is not None:
                group.gradients.scale(scaling_factor, group.sharded)


class AllGatherPipeline(_View):
    """All-gathers of a sharded model."""

    def all_gather_params(self, params: Iterable[nn.Parameter]) -> None:
        """Start to all-gather the units of some parameters, sharded or full ones."""
        self._engine.gather_units_of(params, wait=False)

    def wait_params(self, params: Iterable[nn.Parameter]) -> None:
        """Unshard these units, and wait for them."""
        self._engine.gather_units_of(params, wait=True)

    def release_params(self, params: Iterable[nn.Parameter]) -> None:
        """Reshard these units, unless they are in use."""
        self._engine.release_units_of(params)


class GradReducePipeline(_View):
    """Gradient reductions of a sharded model."""

    def reduce_gradients(self, params: Iterable[nn.Parameter]) -> None:
        """Reduce the gradients that are there of the units of some parameters."""
        self._engine.reduce_units_of(params)

    def wait_for_previous_grad_reduce(self) -> None:
        """Reduce unreduced gradients, and wait for every reduction."""
        self._engine.flush_deferred()


def make_fsdp_dtensor(
    local_tensor: torch.Tensor,
    param: torch.Tensor,
    dist_index: FSDPDistributedIndex,
    is_sharded_param: bool = True,
    is_expert_param: bool = False,
    run_check: bool = False,  # noqa: ARG001
    update_uneven_dtensor_chunk_meta: bool = False,
    force_sync_tp_duplicated_param: bool = False,
) -> DTensor:
    """Wrap this rank's elements of a parameter as an uneven DTensor.

    Collective over the ranks that the parameter is sharded over (one small exchange of lengths per mesh dimension), so
    call it on all of them and in the same order, also where a rank holds nothing.

    Args:
        local_tensor: This rank's consecutive elements of the flattened parameter, in any shape; may be empty. The
            result shares its memory.
        param: The parameter before data parallelism cut it, for its shape: this rank's part, where tensor parallelism
            has cut it (a DTensor, or a tensor with Megatron's marks). Its values are not read.
        dist_index: Mesh and groups.
        is_sharded_param: True if it is sharded over data-parallel ranks, False if it is replicated.
        is_expert_param: True if it lies on the expert mesh.
        run_check: Accepted; lengths are always checked.
        update_uneven_dtensor_chunk_meta: Also describe the chunk on the local tensor, as state dicts have it.
        force_sync_tp_duplicated_param: Overwrite `local_tensor` by that of the first tensor-parallel rank where these
            hold the same.

    Returns:
        A DTensor of the global shape over the mesh dimensions (outer, sharding, tensor-parallel), as far as there are.

    Raises:
        ConfigurationError: The lengths of all ranks do not add up to the parameter; on all of them.
    """
    dims = tuple(dim for dim in (dist_index.dp_outer_dim, dist_index.dp_shard_dim) if dim is not None)
    tp_dim = dist_index.tp_dim
    mesh = dist_index.get_submesh(dims if tp_dim is None else (*dims, tp_dim), is_expert_param)
    tp_mesh = None if tp_dim is None else dist_index.get_submesh((tp_dim,), is_expert_param)
    part = part_of("param", param, tp_mesh)
    shards = is_sharded_param, is_sharded_param and dist_index.hsdp_outer_dp_shard
    use = MeshUse(
        sizes=tuple(mesh.mesh.shape),
        shard_dims=tuple(dim for dim, is_cut in zip(reversed(range(len(dims))), shards, strict=False) if is_cut),
        tensor_dim=None if tp_dim is None else len(dims),
    )
    held = gather_over([mesh.get_group(dim) for dim in reversed(use.shard_dims)], local_tensor.numel())
    cut = ListedCut((0, *itertools.accumulate(held)))
    whole = local_part(param)
    if cut.numel != whole.numel():
        raise ConfigurationError(
            f"the ranks hold {cut.numel} elements of a parameter of shape {tuple(whole.shape)}, which has "
            f"{whole.numel()}; give each rank its own consecutive elements"
        )
    tensor_cut = None
    if part is not None and isinstance(part.placement, Shard):
        tensor_cut = TensorParallelCut.by_chunk(part.shape[part.placement.dim], use.num_parts, part.placement.dim)
    elif force_sync_tp_duplicated_param and tp_dim is not None:
        dist.broadcast(local_tensor, group=mesh.get_group(tp_dim), group_src=0)
    description = ShardDescription(
        shape=tuple(whole.shape) if part is None else tuple(part.shape),
        use=use,
        coordinate=tuple(dist.get_rank(mesh.get_group(dim)) for dim in range(mesh.ndim)),
        cut=cut,
        tensor_cut=tensor_cut,
        other_cuts=tuple(gather_objects(cut, mesh.get_group(tp_dim))) if tensor_cut is not None else (),
    )
    made = UnevenDTensor.wrap(local_tensor.detach().view(description.local_shape), ShardSpec(mesh, description))
    if update_uneven_dtensor_chunk_meta:
        update_uneven_dtensor_chunk_metadata(made)
    return made
