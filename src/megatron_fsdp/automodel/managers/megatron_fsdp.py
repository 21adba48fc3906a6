"""This package's own engine, with tensor and context parallelism below it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from megatron_fsdp.automodel.activation_checkpointing import checkpoint_mlps
from megatron_fsdp.automodel.architecture import find_layers
from megatron_fsdp.automodel.config import MegatronFSDPConfig
from megatron_fsdp.automodel.context_parallel import enable_context_parallel
from megatron_fsdp.automodel.managers.checks import refuse_parallel_model
from megatron_fsdp.automodel.meshes import MEGATRON_AXES, get_megatron_dp_axis
from megatron_fsdp.automodel.tensor_parallel import parallelize_tensors
from megatron_fsdp.config.precision import MixedPrecisionPolicy
from megatron_fsdp.engine.wrap import EMPTY
from megatron_fsdp.errors import ConfigurationError, warn_caller
from megatron_fsdp.fully_shard import fully_shard, fully_shard_model
from megatron_fsdp.megatron_fsdp import MegatronFSDP


class MegatronFSDPManager:
    """Makes models parallel as a `MegatronFSDPConfig` says.

    Attributes:
        config: The configuration.
        device_mesh: (dp, cp, tp) of `create_device_mesh`.
    """

    def __init__(self, config: MegatronFSDPConfig, device_mesh: DeviceMesh) -> None:
        """Keep what is needed.

        Raises:
            ConfigurationError: The config is of another strategy, or the mesh lacks an axis.
        """
        if not isinstance(config, MegatronFSDPConfig):
            raise ConfigurationError(
                f"MegatronFSDPManager takes a MegatronFSDPConfig, and config is a {type(config).__name__}"
            )
        names = getattr(device_mesh, "mesh_dim_names", None)
        if names != MEGATRON_AXES:
            raise ConfigurationError(
                f"MegatronFSDPManager takes a mesh of the axes {MEGATRON_AXES}, and this one has {names}; make it by "
                "create_device_mesh(config, ...)"
            )
        self.config = config
        self.device_mesh = device_mesh

    def parallelize(
        self, model: nn.Module, optimizer: torch.optim.Optimizer | None = None, *, leaves_empty: bool = False
    ) -> tuple[MegatronFSDP, torch.optim.Optimizer | None]:
        """Make a model parallel; with one rank it is wrapped all the same, so dtypes do not depend on the ranks.

        Args:
            model: A decoder of transformers; on the meta device only with `init_fsdp_with_meta_device`.
            optimizer: Built on the model's parameters, to be sharded along; not with `tp_size` > 1, where tensors are
                divided first, under a new identity. None: build it on the returned model's parameters and give it to
                `fully_shard_optimizer`.
            leaves_empty: Give what is on the meta device memory and no values, and leave buffers there.

        Returns:
            The wrapped model and the optimizer.

        Raises:
            ConfigurationError: The model is parallel already, has no layers or does not fit a size.
        """
        mesh = self.device_mesh
        refuse_parallel_model(model)
        find_layers(model)
        if mesh["tp"].size() > 1:
            if optimizer is not None:
                raise ConfigurationError(
                    "an optimizer cannot be taken along with tp_size > 1, since its parameters are divided into new "
                    "ones; build it on the returned model's parameters and call fully_shard_optimizer"
                )
            parallelize_tensors(model, mesh["tp"], sequence_parallel=self.config.sequence_parallel)
        elif self.config.sequence_parallel:
            warn_caller(
                "sequence_parallel of MegatronFSDPConfig: no effect with tp_size=1; give tp_size, or leave it out"
            )
        if mesh["cp"].size() > 1:
            enable_context_parallel(model, mesh["cp"])
        if self.config.activation_checkpointing:
            checkpoint_mlps(model)
        arguments = dict(self.engine_arguments())
        if leaves_empty:
            arguments["init_model_with_meta_device"] = EMPTY
        if optimizer is None:
            return fully_shard_model(model, **arguments), None
        return fully_shard(model, optimizer, **arguments)

    def engine_arguments(self) -> Mapping[str, Any]:
        """The arguments of `fully_shard_model` that the configuration stands for."""
        config = self.config
        policy = MixedPrecisionPolicy(
            main_params_dtype=torch.float32 if config.preserve_fp32_weights else None,
            main_grads_dtype=torch.float32 if config.grad_reduce_in_fp32 else None,
            grad_comm_dtype=None,
        )
        return {
            "device_mesh": self.device_mesh,
            "dp_shard_dim": get_megatron_dp_axis(self.device_mesh),
            "tp_dim": "tp",
            "fsdp_unit_modules": config.megatron_fsdp_unit_modules,
            "zero_dp_strategy": config.zero_dp_strategy,
            "init_model_with_meta_device": config.init_fsdp_with_meta_device,
            "mixed_precision_policy": policy,
            "overlap_grad_reduce": config.overlap_grad_reduce,
            "overlap_param_gather": config.overlap_param_gather,
            "report_nan_in_param_grad": config.check_for_nan_in_grad,
            "average_in_collective": config.average_in_collective,
            "disable_bucketing": config.disable_bucketing,
            "calculate_per_token_loss": config.calculate_per_token_loss,
            "keep_fp8_transpose_cache": config.keep_fp8_transpose_cache,
            "nccl_ub": config.nccl_ub,
            "fsdp_double_buffer": config.fsdp_double_buffer,
        }
