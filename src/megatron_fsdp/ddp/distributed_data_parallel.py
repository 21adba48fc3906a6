"""`DistributedDataParallel`: Megatron-style data parallelism by buckets, driven by its configuration."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import ClassVar

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from megatron_fsdp.comm.agreement import Groups, agreed, all_agree
from megatron_fsdp.comm.collectives import real_values
from megatron_fsdp.config.ddp_config import DistributedDataParallelConfig, ShardingStrategy
from megatron_fsdp.config.engine_options import (
    OffloadArgument,
    checked_deterministic,
    engine_options_of,
    resolve_offload,
    resolve_verify_ranks,
)
from megatron_fsdp.ddp.buckets import BucketScheduler, GatherMode, plan_buckets
from megatron_fsdp.ddp.engine import BucketEngine, Readers
from megatron_fsdp.ddp.megatron_core import MegatronCalls, takes_core_arguments
from megatron_fsdp.ddp.resolve import ResolvedDDP, resolve_ddp
from megatron_fsdp.dtensor.shard_spec import local_tensor
from megatron_fsdp.engine.engine import Engine
from megatron_fsdp.engine.hooks import register_hooks
from megatron_fsdp.engine.plans import ModelSharding, parameter_info
from megatron_fsdp.engine.schedule import ScheduleConfig
from megatron_fsdp.engine.unit import Unit
from megatron_fsdp.errors import ConfigurationError, explains_arguments
from megatron_fsdp.sharding.mesh import FSDPDistributedIndex, check_mesh, mesh_and_dim, ranks_of, tensor_parallel_dim
from megatron_fsdp.sharding.units import UnitPlan, aliases_in
from megatron_fsdp.wrap.shard_unit import check_not_wrapped
from megatron_fsdp.wrap.wrap import Grouping

logger = logging.getLogger("megatron_fsdp")


@dataclass(frozen=True)
class BucketGrouping(Grouping):
    """`Grouping` of parameters into buckets."""

    bucket_numel: int | None  # elements that close a bucket; None: one bucket for each kind of parameter
    gather_mode: GatherMode  # when changed weights are gathered

    engine_type: ClassVar[type[Engine]] = BucketEngine

    def plan(self, module: nn.Module, sharding: ModelSharding) -> UnitPlan:
        """Plan the buckets."""
        aliases = aliases_in(module.named_parameters(remove_duplicate=False))
        infos = [parameter_info(name, param, sharding) for name, param in module.named_parameters()]
        alone = {name for name, param in module.named_parameters() if getattr(param, "shared_embedding", False)}
        plan = plan_buckets(infos, type(module).__name__, aliases, self.bucket_numel, alone)
        return replace(plan, source=f"{plan.source}, weights gathered {self.gather_mode.value}")

    def make_scheduler(self, config: ScheduleConfig, units: Sequence[Unit]) -> BucketScheduler:
        """Make the scheduler of buckets."""
        counts = [sum(len(group.sharded) for group in unit.groups) for unit in units]
        return BucketScheduler(config, counts, self.gather_mode)

    def connect(self, engine: Engine, root: nn.Module | None) -> None:
        """Register the hooks that drive the engine."""
        assert isinstance(engine, BucketEngine)
        assert root is not None
        if engine.waits_for_readers:  # before the engine's: each hook is prepended, and readers have to run after those
            Readers(engine, root).register()
        register_hooks(engine, root)


def _ranks_of(
    *given: object, device_mesh: object = None, dp_dim: object = None, tp_dim: object = None, **_: object
) -> Groups:
    """Return the groups of the ranks that make a constructor call."""
    return ranks_of(given[3] if len(given) > 3 else device_mesh, dp_dim, tp_dim)


class DistributedDataParallel(MegatronCalls):
    """A model replicated over data-parallel ranks, with gradients reduced bucket by bucket during backward.

        config = DistributedDataParallelConfig(use_distributed_optimizer=True, overlap_grad_reduce=True)
        model = DistributedDataParallel(config, module)
        optimizer = DistributedOptimizer(torch.optim.AdamW(model.parameters()), model)

    The same engine as in `MegatronFSDP`, with everything that wrapper offers (checkpoints, `full_parameters_context`,
    `clip_grad_norm_`, reports); parameters are grouped by size, in backward order, instead of by module. Plain
    loops need no further call: gradients are final when `backward` returns. Megatron's training loop and schedules may
    call what they call of Megatron-Core's class, and build this one as that: `(transformer_config, ddp_config, module,
    disable_bucketing, pg_collection)` (docs/migration.md).

    Between steps modules hold the sharded parameters (DTensors, over whole tensors where nothing is sharded); inside
    the model's forward and backward they hold full, plain tensors, views of the bucket's contiguous buffer.

    A bucket is reduced when all its gradients have come, and never before those behind it, so ranks cannot disagree on
    the order. A parameter that gets no gradient holds its bucket, and those in front of it, back until backward ends.

    Arguments that are not listed here are those of `fully_shard_model`.

    Args:
        config: The configuration; read once, never written to. Fields set after construction count.
        module: The model; sharded in place and kept as `.module`.
        device_mesh: The mesh; None: all ranks, on the accelerator of this process or the CPU.
        dp_dim: The data-parallel dimension of the mesh (or a flattened one); may be left out where there is only one.
        tp_dim: The tensor-parallel dimension, as in `fully_shard_model`.
        expt_device_mesh: The mesh of experts, as in `fully_shard_model`.
        disable_bucketing: One bucket for each kind of parameter.
        calculate_per_token_loss: Sum gradients over ranks, without a factor.
        fsdp_unit_modules: The units, with `use_megatron_fsdp`; else refused.
        device: Device of the buffers; None: this process's device of the mesh's type.
        sync_model_each_microbatch: Make gradients final after every backward; False: when `finish_grad_sync` is called.
        offload: The offloaded kinds of state, as in `fully_shard_model`.

    Attributes:
        ddp_config: The caller's configuration; nothing reads it after wrapping.
        resolved: The resolved configuration.

    Raises:
        ConfigurationError: The configuration, an argument or the model cannot be honoured.
        NotSupportedYetError: A field that this version does not implement is not at its default.
    """

    _keeps_float32_by = (
        "DistributedDataParallelConfig(megatron_fsdp_main_params_dtype=torch.float32, grad_reduce_in_fp32=True)"
    )

    @takes_core_arguments
    @agreed("sharding the model", _ranks_of)
    @explains_arguments()
    def __init__(
        self,
        config: DistributedDataParallelConfig,
        module: nn.Module,
        device_mesh: DeviceMesh | None = None,
        *,
        dp_dim: str | None = None,
        tp_dim: str | None = None,
        expt_device_mesh: DeviceMesh | None = None,
        disable_bucketing: bool = False,
        calculate_per_token_loss: bool = False,
        init_model_with_meta_device: bool | str = False,
        fsdp_unit_modules: Sequence[type[nn.Module] | str] | str | None = None,
        device: torch.device | str | int | None = None,
        sync_model_each_microbatch: bool = True,
        find_unused_parameters: bool = False,
        verify_ranks: bool | float | str | None = None,
        deterministic: str | None = None,
        offload: OffloadArgument = None,
    ) -> None:
        with all_agree("sharding the model", ranks_of(device_mesh, dp_dim, tp_dim)), real_values():
            if not isinstance(config, DistributedDataParallelConfig):
                raise TypeError(
                    f"config is a {type(config).__name__}; DistributedDataParallel takes a "
                    "DistributedDataParallelConfig first and the model second"
                )
            check_not_wrapped(module)
            check_mesh(device_mesh)
            mesh, dim = mesh_and_dim(device_mesh, dp_dim, tp_dim, "dp_dim")
            index = FSDPDistributedIndex(
                mesh, dim, tp_dim=tp_dim or tensor_parallel_dim(module, mesh), expt_device_mesh=expt_device_mesh
            )
        resolved = _resolve_together(config, module, index, disable_bucketing)
        instances = resolved.config.num_distributed_optimizer_instances
        if instances > 1:
            index = _cut_into_instances(index, instances, resolved.outer_strategy)
        if resolved.config.use_megatron_fsdp:
            super().__init__(
                module,
                index,
                resolved.engine_config,
                resolved.policy,
                fsdp_unit_modules,
                disable_bucketing,
                device,
                calculate_per_token_loss,
                init_model_with_meta_device,
                sync_model_each_microbatch,
                verify_ranks=verify_ranks,
                find_unused_parameters=find_unused_parameters,
                deterministic=deterministic,
                offload=offload,
            )
        else:
            if fsdp_unit_modules is not None:
                raise ConfigurationError(
                    f"fsdp_unit_modules={fsdp_unit_modules!r} has no effect without use_megatron_fsdp=True, where "
                    "buckets are made by size; set that or leave it out"
                )
            verify_ranks_s = resolve_verify_ranks(verify_ranks)
            asked = resolved.config
            options = engine_options_of(resolved.engine_config, resolved.policy)
            options = replace(
                options,
                offload=resolve_offload(offload, options.strategy),
                # Ranks that are compared wait for one another, so reductions start where they all do: at the end.
                overlap_grad_reduce=asked.overlap_grad_reduce and not verify_ranks_s,
                numel_multiple=resolved.numel_multiple,
                # Where nothing overlaps, buckets travel at points that all ranks share.
                own_groups=asked.overlap_grad_reduce or asked.overlap_param_gather,
                calculate_per_token_loss=calculate_per_token_loss,
                init_model_with_meta_device=init_model_with_meta_device,
                verify_ranks_s=verify_ranks_s,
                find_unused_parameters=find_unused_parameters,
                deterministic=checked_deterministic(deterministic),
            )
            grouping = BucketGrouping(resolved.bucket_numel, resolved.gather_mode)
            self._wrap(module, index, resolved.engine_config, options, grouping, device, sync_model_each_microbatch)
            self._bucket_numel = resolved.bucket_numel
        self.resolved = resolved
        self.ddp_config = config
        self._engine.config, self._engine.config_notes = resolved.config, resolved.notes
        for note in resolved.notes:
            logger.info(note)


def _resolve_together(
    config: DistributedDataParallelConfig, module: nn.Module, index: FSDPDistributedIndex, disable_bucketing: bool
) -> ResolvedDDP:
    """Resolve the configuration before groups are made, with the same result or error on all ranks."""
    group = index.get_dp_group()
    trainable = sum(local_tensor(param).numel() for param in module.parameters() if param.requires_grad)
    with all_agree("resolving DistributedDataParallelConfig", index.reaching_all) as facts:
        resolved = resolve_ddp(config, 1 if group is None else group.size(), trainable, disable_bucketing)
        facts |= {field.name: repr(getattr(resolved.config, field.name)) for field in fields(config)}
    return resolved


_INSTANCES = "_instances"
_SHARD = "_shard"


@real_values()
def _cut_into_instances(
    index: FSDPDistributedIndex, instances: int, outer_strategy: ShardingStrategy
) -> FSDPDistributedIndex:
    """Split the data-parallel dimension of an index in two. Makes process groups: collective over the mesh.

    Neighbouring ranks form an instance: of 8 ranks in 2 instances, the first four shard one optimizer.
    """
    dim = index.dp_shard_dim
    assert dim is not None
    experts = index.expt_device_mesh
    return FSDPDistributedIndex(
        _cut(index.device_mesh, dim, instances),
        dim + _SHARD,
        dim + _INSTANCES,
        index.tp_dim,
        index.fsdp_group,
        index.expt_fsdp_group,
        hsdp_outer_dp_shard=outer_strategy is ShardingStrategy.optim,
        expt_device_mesh=None if experts is None else _cut(experts, dim, instances),
    )


def _cut(mesh: DeviceMesh, dim: str, instances: int) -> DeviceMesh:
    names = mesh.mesh_dim_names or ()
    if dim not in names:
        raise ConfigurationError(
            f"num_distributed_optimizer_instances={instances} cuts the mesh dimension {dim!r}, which is not one of "
            f"{names} (a flattened dimension cannot be cut); name another one or use one instance"
        )
    size = mesh.size(names.index(dim))
    if size % instances:
        raise ConfigurationError(
            f"num_distributed_optimizer_instances={instances} does not divide the {size} ranks of mesh dimension "
            f"{dim!r}; give a divisor"
        )
    cut: DeviceMesh = mesh._unflatten(
        names.index(dim), (instances, size // instances), (dim + _INSTANCES, dim + _SHARD)
    )
    return cut
