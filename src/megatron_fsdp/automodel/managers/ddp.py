"""PyTorch's DistributedDataParallel: whole replicas."""

from __future__ import annotations

import warnings
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from megatron_fsdp.automodel.activation_checkpointing import checkpoint_layers
from megatron_fsdp.automodel.config import DDPConfig
from megatron_fsdp.automodel.managers.checks import refuse_parallel_model
from megatron_fsdp.automodel.meshes import set_up_ranks
from megatron_fsdp.errors import ConfigurationError


class _Replica(nn.parallel.DistributedDataParallel):
    """DDP that looks for parameters without a gradient, and does not complain where there are none.

    Without the search, a parameter that a batch does not use (a tower of images that skips its last layer) leaves its
    bucket unreduced: ranks step with different gradients, and the next forward fails.
    """

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """As of DDP."""
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="find_unused_parameters=True was specified")
            output: Any = nn.parallel.DistributedDataParallel.forward(self, *args, **kwargs)
            return output


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

    def parallelize(self, model: nn.Module, *, sends_weights: bool = True) -> nn.parallel.DistributedDataParallel:
        """Move a model to this rank's device and wrap it; the first rank's weights are given to all.

        Args:
            model: With memory.
            sends_weights: False: ranks have the same weights already, and the memory to send them is spared.

        Raises:
            ConfigurationError: The model is parallel already, on the meta device or wholly frozen, or
                `activation_checkpointing` is on and it has no layers.
        """
        refuse_parallel_model(model)
        if any(param.is_meta for param in model.parameters()):
            raise ConfigurationError(
                "the model is on the meta device; give DDP one with weights, or use from_pretrained"
            )
        if not any(param.requires_grad for param in model.parameters()):
            raise ConfigurationError("no parameter of the model requires a gradient; DDP has nothing to average")
        if self.config.activation_checkpointing:
            checkpoint_layers(model)
        on_device = model.to(self.device)
        ids = None if self.device.type == "cpu" else [self.device]
        return _Replica(on_device, device_ids=ids, find_unused_parameters=True, init_sync=sends_weights)
