"""PyTorch's FSDP2, with what may lie below it: expert, tensor and context parallelism, recomputation, compilation."""

from __future__ import annotations

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import OffloadPolicy

from megatron_fsdp.automodel.accumulation import remember_deferral
from megatron_fsdp.automodel.activation_checkpointing import checkpoint_layers
from megatron_fsdp.automodel.architecture import find_layers
from megatron_fsdp.automodel.config import FSDP2Config
from megatron_fsdp.automodel.context_parallel import enable_context_parallel
from megatron_fsdp.automodel.expert_parallel import parallelize_experts, shard_experts
from megatron_fsdp.automodel.forwards import compile_forward, run_under_autocast
from megatron_fsdp.automodel.fsdp2_units import chain_prefetches, policy_between_layers, shard_by_layers
from megatron_fsdp.automodel.managers.checks import refuse_parallel_model
from megatron_fsdp.automodel.meshes import FSDP2_AXES, get_fsdp_dp_mesh
from megatron_fsdp.automodel.packed_sequence import assume_no_packed_sequences
from megatron_fsdp.automodel.tensor_parallel import enable_async_tensor_parallel, parallelize_tensors
from megatron_fsdp.errors import ConfigurationError, ParallelSizeError, warn_caller

_OF_TENSORS = ("sequence_parallel", "tp_plan", "enable_async_tensor_parallel")


class FSDP2Manager:
    """Makes models parallel as a `FSDP2Config` says.

    Attributes:
        config: The configuration.
        device_mesh: (pp, dp_replicate, dp_shard, cp, tp) of `create_device_mesh`.
        moe_mesh: (ep_shard, ep), or None without expert parallelism.
    """

    def __init__(self, config: FSDP2Config, device_mesh: DeviceMesh, moe_mesh: DeviceMesh | None = None) -> None:
        """Keep what is needed.

        Raises:
            ConfigurationError: The config is of another strategy, or the mesh lacks an axis.
        """
        if not isinstance(config, FSDP2Config):
            raise ConfigurationError(f"FSDP2Manager takes an FSDP2Config, and config is a {type(config).__name__}")
        names = getattr(device_mesh, "mesh_dim_names", None)
        if names != FSDP2_AXES:
            raise ConfigurationError(
                f"FSDP2Manager takes a mesh of the axes {FSDP2_AXES}, and this one has {names}; make it by "
                "create_device_mesh(config, ...)"
            )
        self.config = config
        self.device_mesh = device_mesh
        self.moe_mesh = moe_mesh

    def parallelize(self, model: nn.Module) -> nn.Module:
        """Make a model parallel in place; the model may be on the meta device, and is then to be filled afterwards.

        Order: experts, tensors, sequences, recomputation, compilation, shards, prefetching. With one rank on an axis
        nothing of that axis happens; shards and dtypes are the same for one rank as for many.

        Args:
            model: A decoder of transformers, or a stage of one.

        Returns:
            The same model.

        Raises:
            ConfigurationError: The model is parallel already, has no layers or does not fit a size.
        """
        config, mesh = self.config, self.device_mesh
        if self.moe_mesh is not None and mesh["tp"].size() > 1:
            raise ParallelSizeError(
                f"ep_size={self.moe_mesh['ep'].size()} with tp_size={mesh['tp'].size()}: tensor-parallel ranks share "
                "the experts out by themselves, so give one of the two"
            )
        refuse_parallel_model(model)
        if config.offload_policy is not None and config.offload_policy.pin_memory and mesh.device_type == "cpu":
            raise ConfigurationError(
                "offload_policy pins memory, for which there is no accelerator here; give "
                "CPUOffloadPolicy(pin_memory=False)"
            )
        find_layers(model)
        if config.patch_is_packed_sequence:
            assume_no_packed_sequences(model)
        experts = parallelize_experts(model, self.moe_mesh["ep"]) if self.moe_mesh is not None else []
        self._divide_tensors(model)
        if mesh["cp"].size() > 1:
            enable_context_parallel(model, mesh["cp"])
        if config.activation_checkpointing:
            checkpoint_layers(model)
        self.maybe_compile(model)
        if config.autocast_dtype is not None:
            run_under_autocast(model, mesh.device_type, config.autocast_dtype)
        self._shard(model, experts)
        remember_deferral(model, config.defer_fsdp_grad_sync)
        return model

    def maybe_compile(self, model: nn.Module) -> None:
        """Compile the forward of each decoder layer where the configuration asks for it."""
        asynchronous = self.config.enable_async_tensor_parallel and self.device_mesh["tp"].size() > 1
        if self.config.enable_compile or asynchronous:
            for layer in find_layers(model).modules():
                compile_forward(layer)

    def _divide_tensors(self, model: nn.Module) -> None:
        config, mesh = self.config, self.device_mesh["tp"]
        if mesh.size() == 1:
            idle = [name for name in _OF_TENSORS if getattr(config, name)]
            if idle:
                warn_caller(
                    f"{' and '.join(idle)} of FSDP2Config: no effect with tp_size=1; give tp_size, or leave it out"
                )
            return
        parallelize_tensors(model, mesh, plan=config.tp_plan, sequence_parallel=config.sequence_parallel)
        if config.enable_async_tensor_parallel:
            enable_async_tensor_parallel(mesh)

    def _shard(self, model: nn.Module, experts: list[str]) -> None:
        config = self.config
        assert config.mp_policy is not None  # __post_init__ sets it
        layer_policy = policy_between_layers(config.mp_policy, config.autocast_dtype is not None)
        has_stages = self.device_mesh["pp"].size() > 1
        if self.moe_mesh is not None:
            shard_experts(
                model,
                experts,
                self.moe_mesh["ep_shard"],
                mp_policy=layer_policy,
                offload_policy=config.offload_policy or OffloadPolicy(),
                reshard_after_forward=not has_stages,
                gradient_divisor=self.moe_mesh.size(),
            )
        lists = shard_by_layers(
            model,
            get_fsdp_dp_mesh(self.device_mesh),
            mp_policy=config.mp_policy,
            layer_policy=layer_policy,
            offload_policy=config.offload_policy,
            stays_gathered=has_stages,
        )
        if config.enable_fsdp2_prefetch:
            for units in lists:
                chain_prefetches(units, config.fsdp2_forward_prefetch_depth, config.fsdp2_backward_prefetch_depth)
