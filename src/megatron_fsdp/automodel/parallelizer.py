"""Models made parallel from a `MeshContext`: by a parallelizer of their own class, or by the managers."""

from __future__ import annotations

import dataclasses
import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from megatron_fsdp.automodel.config import DDPConfig, FSDP2Config, MegatronFSDPConfig
from megatron_fsdp.automodel.managers import DDPManager, FSDP2Manager, MegatronFSDPManager
from megatron_fsdp.automodel.meshes import MeshContext
from megatron_fsdp.comm.agreement import Groups, agreed, default_if_all
from megatron_fsdp.errors import ConfigurationError, ParallelSizeError
from megatron_fsdp.fully_shard import fully_shard_optimizer as connect
from megatron_fsdp.megatron_fsdp import MegatronFSDP


class ModelParallelizer:
    """Makes models parallel by the managers; a model class may have its own as the attribute `parallelizer`."""

    def parallelize(self, model: nn.Module, mesh_context: MeshContext, /) -> nn.Module:
        """Make a model parallel in place.

        Args:
            model: A decoder of transformers, in memory or on the meta device.
            mesh_context: With `strategy_config`, and the meshes of that strategy.

        Returns:
            The same model with FSDP2, else the wrapper around it.

        Raises:
            TypeError: `strategy_config` is no strategy.
            ConfigurationError: The strategy needs a mesh, and there is none.
        """
        config: Any = mesh_context.strategy_config
        if not isinstance(config, FSDP2Config | MegatronFSDPConfig | DDPConfig):
            raise TypeError(
                f"strategy_config is a {type(config).__name__}; give an FSDP2Config, a MegatronFSDPConfig or a "
                "DDPConfig"
            )
        if mesh_context.activation_checkpointing is not False:
            config = dataclasses.replace(config, activation_checkpointing=mesh_context.activation_checkpointing)
        mesh = mesh_context.device_mesh
        if isinstance(config, DDPConfig):
            made: nn.Module = DDPManager(config).parallelize(model)
        elif mesh is None:
            raise ConfigurationError(
                f"{type(config).__name__} needs a device_mesh, and the context has none; use "
                "MeshContext.build(config, ...)"
            )
        else:
            experts = mesh_context.moe_mesh, mesh_context.moe_parallel_config
            if isinstance(config, MegatronFSDPConfig):
                made, _ = MegatronFSDPManager(config, mesh, *experts).parallelize(model)
            else:
                made = FSDP2Manager(config, mesh, *experts).parallelize(model)
        if mesh_context.reapply_trainability is not None:
            mesh_context.reapply_trainability(made)
        return made


def get_model_parallelizer(model: nn.Module) -> Any:
    """Return the `parallelizer` of a model's class, else the one that all models share.

    Raises:
        TypeError: It has no method `parallelize`.
    """
    found = getattr(type(model), "parallelizer", None)
    found = _SHARED if found is None else found
    if not callable(getattr(found, "parallelize", None)):
        raise TypeError(
            f"{type(model).__name__}.parallelizer is a {type(found).__name__} without parallelize(model, "
            "mesh_context); give it that method"
        )
    return found


_SHARED = ModelParallelizer()


def _ranks_of(_model: object = None, mesh_context: object = None) -> Groups:
    mesh = getattr(mesh_context, "device_mesh", None)
    return () if mesh is None else default_if_all(mesh.get_all_groups()) or (None,)


@agreed("making the model parallel", _ranks_of)
def parallelize_model(model: nn.Module, mesh_context: MeshContext) -> nn.Module:
    """Make a model parallel by its parallelizer, as `ModelParallelizer.parallelize` says."""
    made: nn.Module = get_model_parallelizer(model).parallelize(model, mesh_context)
    return made


def derive_unit_modules(model: nn.Module) -> list[type[nn.Module]]:
    """Return the classes that a model names in `_no_split_modules` and has.

    Raises:
        ConfigurationError: It names none, or has none of them.
    """
    names = set(getattr(model, "_no_split_modules", None) or ())
    found = {type(module): None for module in model.modules() if type(module).__name__ in names}
    if not found:
        raise ConfigurationError(
            f"{type(model).__name__} has no module of the classes in _no_split_modules ({sorted(names) or 'none'}); "
            "name the units in megatron_fsdp_unit_modules"
        )
    return list(found)


def compile_parallelized_model(model: nn.Module, mesh_context: MeshContext) -> nn.Module:  # noqa: ARG001
    """Return the model, whose layers `parallelize_model` has compiled if `FSDP2Config.enable_compile` is set."""
    return model


def fully_shard_optimizer(
    model: nn.Module, optimizer: torch.optim.Optimizer, preproc_state_dict_for_dcp_ckpt: bool = True
) -> torch.optim.Optimizer:
    """Connect an optimizer to a model of `MegatronFSDPConfig`, whose parameters may have lost their marks.

    Optimizers of other models need nothing.
    """
    if not isinstance(model, MegatronFSDP):
        return optimizer
    for param in model.parameters():
        param._megatron_fsdp_model = weakref.proxy(model)  # type: ignore[attr-defined]
    return connect(optimizer, preproc_state_dict_for_dcp_ckpt)


def maybe_shard_optimizer(
    model_part: nn.Module, optimizer: torch.optim.Optimizer, config: object, *, allow: bool = True
) -> torch.optim.Optimizer:
    """Connect an optimizer as `fully_shard_optimizer` does, if the strategy is a `MegatronFSDPConfig`.

    Raises:
        ParallelSizeError: It would have to be connected on several ranks, and `allow` is False.
    """
    if not isinstance(config, MegatronFSDPConfig):
        return optimizer
    if not allow and dist.get_world_size() > 1:
        raise ParallelSizeError(
            "the optimizer cannot be connected to a model of MegatronFSDPConfig on several ranks (allow=False); use "
            "FSDP2Config, or one rank"
        )
    return fully_shard_optimizer(model_part, optimizer)
