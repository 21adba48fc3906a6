"""The views `param_and_grad_buffer`, `all_gather_pipeline` and `grad_reduce_pipeline`, for client frameworks.

And `make_fsdp_dtensor`, by which clients describe shards that they have cut or joined themselves.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from enum import Enum

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from megatron_fsdp.comm.agreement import gather_objects, gather_over
from megatron_fsdp.dtensor.shard_spec import ShardSpec, part_of
from megatron_fsdp.dtensor.tensor import UnevenDTensor
from megatron_fsdp.engine.engine import Engine
from megatron_fsdp.engine.param_group import ParameterGroup
from megatron_fsdp.errors import ConfigurationError
from megatron_fsdp.sharding.mesh import FSDPDistributedIndex
from megatron_fsdp.sharding.shards import ListedCut, MeshUse, ShardDescription, TensorParallelCut
from megatron_fsdp.sharding.units import ROOT_UNIT
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


class PrefetchOrder(Enum):
    """The order in which units are prefetched."""

    FORWARD_PASS_ORDER = 0
    BACKWARD_PASS_ORDER = 1


class _Pipeline(_View):
    """Base class of views that count parameter groups; a bucket of the published package is one of them."""

    @property
    def num_buckets(self) -> int:
        """Number of parameter groups."""
        return len(self._engine.groups())

    def _params_of(self, bucket_id: int) -> list[nn.Parameter]:
        groups = self._engine.groups()
        if not 0 <= bucket_id < len(groups):
            raise ConfigurationError(f"bucket_id={bucket_id!r} is none of the model's; give 0 to {len(groups) - 1}")
        return list(groups[bucket_id].sharded)


class AllGatherPipeline(_Pipeline):
    """All-gathers of a sharded model."""

    def all_gather_params(
        self,
        params: Iterable[nn.Parameter],
        prefetch: bool = False,
        prefetch_order: PrefetchOrder = PrefetchOrder.FORWARD_PASS_ORDER,
        suggested_AG_prefetch_size: int | None = None,  # noqa: N803 (the published name)
        async_param_gather: bool = True,
        outer_fsdp_group_param_gather: bool = False,  # noqa: ARG002
        bwd: bool = False,  # noqa: ARG002
    ) -> None:
        """Start to all-gather the units of some parameters, sharded or full ones.

        Args:
            params: Parameters of the units.
            prefetch: Then start those of the next units too, as far as there are slots.
            prefetch_order: Which units are the next.
            suggested_AG_prefetch_size: Prefetch so many elements, at least one unit; None: one unit.
            async_param_gather: Do not wait for the units of `params`.
            outer_fsdp_group_param_gather: Accepted; weights are gathered over all ranks that hold a part.
            bwd: Accepted; weights are the same in both directions.
        """
        engine = self._engine
        given = [unit.index for unit in engine.units_of(params)]
        event = engine.scheduler.prefetch_requested if async_param_gather else engine.scheduler.weights_requested
        for index in given:
            engine.executor.run(event(index))
        if not prefetch:
            return
        forward = prefetch_order is PrefetchOrder.FORWARD_PASS_ORDER
        ahead = engine.units[max(given) + 1 :] if forward else engine.units[: min(given)][::-1]
        left = suggested_AG_prefetch_size or 1
        for unit in ahead:
            if left <= 0:
                break
            engine.executor.run(engine.scheduler.prefetch_requested(unit.index))
            left -= sum(param.numel() for group in unit.groups for param in group.sharded)

    def wait_params(self, params: Iterable[nn.Parameter]) -> None:
        """Unshard these units, and wait for them."""
        self.all_gather_params(params, async_param_gather=False)

    def release_params(self, params: Iterable[nn.Parameter]) -> None:
        """Reshard these units, unless they are in use; never the root."""
        engine = self._engine
        for unit in engine.units_of(params):
            if unit.index != ROOT_UNIT:
                engine.executor.run(engine.scheduler.reshard_requested(unit.index))

    def async_bucket_gather(self, bucket_id: int, bwd: bool = False) -> None:  # noqa: ARG002
        """Start to all-gather the unit of a parameter group."""
        self.all_gather_params(self._params_of(bucket_id))

    def wait_bucket_ready(self, bucket_id: int, bwd: bool = False, empty_ok: bool = False) -> None:  # noqa: ARG002
        """Wait for the unit of a parameter group.

        Raises:
            ConfigurationError: It is not being gathered; with `empty_ok` nothing happens then.
        """
        params = self._params_of(bucket_id)
        (unit,) = self._engine.units_of(params)
        if self._engine.scheduler.is_gathered(unit.index):
            self.wait_params(params)
        elif not empty_ok:
            raise ConfigurationError(
                f"bucket {bucket_id} is not being gathered; call async_bucket_gather({bucket_id}) first"
            )

    def release_bucket(self, bucket_id: int, bwd: bool = False, lazy: bool = False) -> None:  # noqa: ARG002
        """Reshard the unit of a parameter group, unless it is in use."""
        self.release_params(self._params_of(bucket_id))

    def reset(self, preserve_non_fsdp_units: bool = True) -> None:
        """Wait for all-gathers and reshard all units that are not in use, the root only where it is not preserved."""
        engine = self._engine
        engine.await_weights()
        if preserve_non_fsdp_units:
            self.release_params(param for group in engine.groups() for param in group.sharded)
        else:
            engine.executor.run(engine.scheduler.weights_may_have_changed())


class GradReducePipeline(_Pipeline):
    """Gradient reductions of a sharded model."""

    def reduce_gradients(
        self,
        params: Iterable[nn.Parameter],
        suggested_queue_capacity: int | None = None,  # noqa: ARG002
        outer_fsdp_group_grad_reduce: bool = False,  # noqa: ARG002
    ) -> None:
        """Reduce the gradients that are there of the units of some parameters.

        Args:
            params: Parameters of the units.
            suggested_queue_capacity: Accepted; `suggested_RS_queue_capacity` of the model bounds what is in reduction.
            outer_fsdp_group_grad_reduce: Accepted; the sync mode says how far gradients are reduced.
        """
        engine = self._engine
        for unit in engine.units_of(params):
            # Those that have not come count as zero.
            if any(group.gradients is not None and group.gradients.is_filling for group in unit.groups):
                engine.executor.run(engine.scheduler.gradients_ready(unit.index))

    def wait_for_previous_grad_reduce(
        self,
        suggested_queue_size: int = 1,  # noqa: ARG002
        suggested_queue_capacity: int | None = None,  # noqa: ARG002
    ) -> None:
        """Reduce unreduced gradients, and wait for every reduction, however many may be left in flight."""
        self._engine.reduce_deferred()

    def reset(self) -> None:
        """Wait for every reduction that is in flight."""
        self._engine.executor.retire_all()


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
        sizes=tuple(mesh.shape),
        shard_dims=tuple(dim for dim, is_cut in zip(reversed(range(len(dims))), shards, strict=False) if is_cut),
        tensor_dim=None if tp_dim is None else len(dims),
    )
    held = gather_over([mesh.get_group(dim) for dim in reversed(use.shard_dims)], local_tensor.numel())
    cut = ListedCut((0, *itertools.accumulate(held)))
    whole = param._local_tensor if isinstance(param, DTensor) else param
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
