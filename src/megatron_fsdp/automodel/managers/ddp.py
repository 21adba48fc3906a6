"""PyTorch's DistributedDataParallel: whole replicas."""

from __future__ import annotations

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from megatron_fsdp.automodel.activation_checkpointing import checkpoint_layers
from megatron_fsdp.automodel.config import DDPConfig
from megatron_fsdp.automodel.managers.checks import refuse_parallel_model
from megatron_fsdp.automodel.meshes import set_up_ranks
from megatron_fsdp.errors import ConfigurationError


class DDPManager:
    """Makes models parallel as a `DDPConfig` says.

    Attributes:
        config: The configuration.
        device: Where this rank computes.
    """

    def __init__(self, config: DDPConfig, device_mesh: DeviceMesh | None = None) -> None:
        """Keep what is needed.

        Args:
            config: The configuration.
            device_mesh: None, or a 1-D mesh of all ranks, which is what DDP works on.

        Raises:
            ConfigurationError: The config is of another strategy, or the mesh has several axes or leaves ranks out.
        """
        if not isinstance(config, DDPConfig):
            raise ConfigurationError(f"DDPManager takes a DDPConfig, and config is a {type(config).__name__}")
        self.config = config
        self.device = set_up_ranks(config.backend)
        if device_mesh is not None and (device_mesh.ndim != 1 or device_mesh.size() != dist.get_world_size()):
            raise ConfigurationError(
                f"DDP works on all {dist.get_world_size()} ranks, and the mesh is of the shape {device_mesh.shape}; "
                "leave device_mesh out"
            )

    def parallelize(self, model: nn.Module) -> nn.parallel.DistributedDataParallel:
        """Move a model to this rank's device and wrap it; the first rank's weights are given to all.

        Raises:
            ConfigurationError: The model is parallel already, or `activation_checkpointing` is on and it has no layers.
        """
        refuse_parallel_model(model)
        if self.config.activation_checkpointing:
            checkpoint_layers(model)
        on_device = model.to(self.device)
        ids = None if self.device.type == "cpu" else [self.device]
        return nn.parallel.DistributedDataParallel(on_device, device_ids=ids)
