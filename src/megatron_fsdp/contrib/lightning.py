"""Lightning's `ModelParallelStrategy` that shards by itself, for `Trainer` and `Fabric` (docs/integrations.md).

Checkpoints, precision, clipping and loops are Lightning's. Importing this module registers "megatron_fsdp" as a name.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.constants import default_pg_timeout
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from megatron_fsdp.errors import ConfigurationError
from megatron_fsdp.fsdp2 import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from megatron_fsdp.optional_packages import require
from megatron_fsdp.sharding.units import find_units

require("lightning", "megatron_fsdp.contrib.lightning")

from lightning.fabric.strategies import STRATEGY_REGISTRY  # noqa: E402 - checked before
from lightning.fabric.strategies.model_parallel import ModelParallelStrategy as FabricStrategy  # noqa: E402
from lightning.pytorch.strategies import StrategyRegistry  # noqa: E402
from lightning.pytorch.strategies.model_parallel import ModelParallelStrategy as TrainerStrategy  # noqa: E402

Dtype = Literal["bfloat16", "float16", "float32"] | None
STEPS = ("training_step", "validation_step", "test_step", "predict_step")


class _ShardsUnits:
    """Mixin of both strategies: the arguments of `fully_shard`, and the call that shards."""

    def __init__(
        self,
        fsdp_unit_modules: Sequence[type[nn.Module] | str] | None = None,
        num_replicas: int = 1,
        reshard_after_forward: bool | None = None,
        param_dtype: Dtype = None,
        reduce_dtype: Dtype = None,
        offload: bool = False,
        save_distributed_checkpoint: bool = True,
        process_group_backend: str | None = None,
        timeout: timedelta | None = default_pg_timeout,
    ) -> None:
        super().__init__(  # type: ignore[call-arg]  # of one of Lightning's
            tensor_parallel_size=1,
            save_distributed_checkpoint=save_distributed_checkpoint,
            process_group_backend=process_group_backend,
            timeout=timeout,
            **self._function(),
        )
        self._unit_modules, self._num_replicas = fsdp_unit_modules, num_replicas
        named = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32, None: None}
        self._options: dict[str, Any] = {
            "reshard_after_forward": reshard_after_forward,
            "mp_policy": MixedPrecisionPolicy(named[param_dtype], named[reduce_dtype]),
            "offload_policy": CPUOffloadPolicy() if offload else OffloadPolicy(),
        }

    def _function(self) -> dict[str, Any]:
        """Return the argument that Fabric's strategy has, and the trainer's has not."""
        return {}

    def setup_environment(self: Any) -> None:
        """Join the ranks, all of which read data of their own."""
        self._data_parallel_size = self.num_nodes * self.num_processes
        super().setup_environment()  # type: ignore[misc]

    def _shard(self: Any, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        """Shard the units of a module, then the module, unless that is done."""
        if isinstance(module, FSDPModule):
            return module
        ranks, replicas = mesh.size(), self._num_replicas
        if replicas < 1 or ranks % replicas:
            raise ConfigurationError(f"num_replicas={replicas} does not divide the {ranks} ranks; give one that does")
        shape, names = ((replicas, ranks // replicas), ("replicate", "shard")) if replicas > 1 else ((ranks,), ("dp",))
        options = {**self._options, "mesh": init_device_mesh(mesh.device_type, shape, mesh_dim_names=names)}
        plan = find_units(module, self._unit_modules)
        shared = {name for _, name in plan.aliases}  # weights of several modules, which stay with the root
        for unit in plan.units[1:]:
            if shared.isdisjoint(unit.parameters):
                fully_shard(module.get_submodule(unit.name), **options)
        return fully_shard(module, **options)


class MegatronFSDPStrategy(_ShardsUnits, TrainerStrategy):
    """Shards a `LightningModule`: `Trainer(strategy="megatron_fsdp")`, or an instance where arguments are needed.

    It is Lightning's `ModelParallelStrategy`, in which `configure_model` also shards the module, as the root.

    Args:
        fsdp_unit_modules: Classes or import paths of the modules to gather as units; None: those that the model
            declares, or repeated blocks, and large embeddings and heads.
        num_replicas: Groups of ranks that each hold all shards (HSDP).
        reshard_after_forward: As of `fully_shard`.
        param_dtype: Dtype to compute in; None: that of the parameters.
        reduce_dtype: Dtype of reductions; None: `param_dtype`.
        offload: Keep weights, gradients and optimizer state in host memory.
        save_distributed_checkpoint: Save a folder of `torch.distributed.checkpoint`; False: one file.
        process_group_backend: As of Lightning.
        timeout: As of Lightning.
    """

    def setup_environment(self) -> None:
        """Join the ranks, and have `configure_model` shard the module once its own is done."""
        super().setup_environment()
        module: Any = self.lightning_module
        configure = module.configure_model

        def configure_and_shard() -> None:
            configure()
            if not isinstance(module, FSDPModule):
                self._shard(module, self.device_mesh)
                for name in STEPS:  # which Lightning calls, and not forward
                    register_fsdp_forward_method(module, name)

        module.configure_model = configure_and_shard


class FabricMegatronFSDPStrategy(_ShardsUnits, FabricStrategy):
    """Shards models of `Fabric`: `Fabric(strategy="megatron_fsdp")`, or an instance where arguments are needed.

    It is Lightning's `ModelParallelStrategy` with its function given. Build optimizers after `Fabric.setup(model)`.
    Arguments are those of `MegatronFSDPStrategy`.
    """

    def _function(self) -> dict[str, Any]:
        return {"parallelize_fn": self._shard}


StrategyRegistry.register("megatron_fsdp", MegatronFSDPStrategy)
STRATEGY_REGISTRY.register("megatron_fsdp", FabricMegatronFSDPStrategy)
