"""Managers, which make models parallel from a configuration and a device mesh."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Collection, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, OffloadPolicy
from torch.distributed.fsdp import MixedPrecisionPolicy as FSDP2Policy
from torch.distributed.fsdp import fully_shard as fsdp2_shard
from torch.nn.parallel.distributed import _find_tensors

from megatron_fsdp.automodel import forwards
from megatron_fsdp.automodel.architecture import find_layers, lists_of_layers
from megatron_fsdp.automodel.config import DDPConfig, FSDP2Config, MegatronFSDPConfig, MoEParallelizerConfig
from megatron_fsdp.automodel.context_parallel import enable_context_parallel
from megatron_fsdp.automodel.expert_parallel import (
    engine_mesh,
    find_experts,
    find_routers,
    parallelize_experts,
    shard_experts,
)
from megatron_fsdp.automodel.gradients import DEFERS, reshard_units
from megatron_fsdp.automodel.meshes import (
    FSDP2_AXES,
    MEGATRON_AXES,
    create_ring_ulysses_mesh,
    get_fsdp_dp_mesh,
    get_megatron_dp_axis,
    set_up_ranks,
)
from megatron_fsdp.automodel.multimodal import frozen_towers, layers_to_recompute
from megatron_fsdp.automodel.tensor_parallel import enable_async_tensor_parallel, parallelize_tensors
from megatron_fsdp.comm.agreement import all_agree, default_if_all
from megatron_fsdp.config.engine_options import ALLOCATE_ONLY
from megatron_fsdp.config.precision import MixedPrecisionPolicy
from megatron_fsdp.errors import ConfigurationError, warn_caller
from megatron_fsdp.fully_shard import fully_shard, fully_shard_model
from megatron_fsdp.megatron_fsdp import MegatronFSDP
from megatron_fsdp.optim.optimizer import KEEPS_FLOAT32_BY

_PARALLEL = (FSDPModule, MegatronFSDP, nn.parallel.DistributedDataParallel)


def _check_arguments(manager: str, config: object, kind: type, mesh: object = None, axes: object = None) -> None:
    """Raise for a config or a mesh of another strategy."""
    if not isinstance(config, kind):
        article = "an" if kind is FSDP2Config else "a"
        raise ConfigurationError(f"config is a {type(config).__name__}; give {manager} {article} {kind.__name__}")
    names = getattr(mesh, "mesh_dim_names", None)
    if names != axes:
        raise ConfigurationError(
            f"the mesh has the axes {names}, and {manager} needs {axes}; make it by create_device_mesh(config, ...)"
        )


class _Manager:
    """The base of managers: fields of the configuration are attributes, too."""

    config: Any

    def __getattr__(self, name: str) -> Any:
        """Return a field of the configuration."""
        if not name.startswith("_") and name != "config" and hasattr(self.config, name):
            return getattr(self.config, name)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    @property
    def rank(self) -> int:
        """This process's rank."""
        return dist.get_rank()

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return dist.get_world_size()


def _check_model(model: nn.Module, mesh: DeviceMesh | None) -> None:
    """Raise on all ranks (of a mesh, if there is one) if one of them was given something else than a plain model."""
    groups = () if mesh is None else default_if_all(mesh.get_all_groups()) or (None,)
    with all_agree("making the model parallel", groups):
        found = next((part for part in model.modules() if isinstance(part, _PARALLEL)), None)
        if found is not None:
            raise ConfigurationError(
                f"the model is parallel already (it has a {type(found).__name__}); give one that is not"
            )
        if mesh is not None:
            find_layers(model)


def shard_by_layers(
    model: nn.Module,
    mesh: DeviceMesh,
    *,
    mp_policy: FSDP2Policy,
    offload_policy: CPUOffloadPolicy | None,
    layer_policy: FSDP2Policy | None = None,
    reshard_after_forward: bool | None = None,
    whole: Collection[nn.Module] = (),
    replicated: Collection[nn.Module] = (),
) -> list[list[FSDPModule]]:
    """Shard each member of each list of layers, and the rest (embeddings, last norm, head) as the root; in place.

    The mesh is 1-D, or 2-D with the replicas first. `layer_policy` has the dtypes of the layers if they differ from the
    root's. `reshard_after_forward` is for the layers; None: all but the last of each list. Pipelines want False: their
    microbatches would gather layers again and again. Modules inside of `whole` have no units of their own, and those in
    `replicated` are not sharded at all. Returns the units of each list, in order.
    """
    options: dict[str, Any] = {"mesh": mesh}
    if offload_policy is not None:
        options["offload_policy"] = offload_policy
    inside = {layer for tower in (*whole, *replicated) for layer in tower.modules()}
    lists = [list(found.children()) for found in lists_of_layers(model) if found not in inside]
    if ignored := {param for tower in replicated for param in tower.parameters()}:
        options["ignored_params"] = ignored
    for layers in lists:
        for layer in layers:
            reshards = layer is not layers[-1] if reshard_after_forward is None else reshard_after_forward
            fsdp2_shard(layer, mp_policy=layer_policy or mp_policy, reshard_after_forward=reshards, **options)
    fsdp2_shard(model, mp_policy=mp_policy, reshard_after_forward=False, **options)
    model.register_forward_pre_hook(_allocate_outside_inference_mode, prepend=True)
    model.register_forward_hook(_reshard_after_evaluation)
    return [[layer for layer in layers if isinstance(layer, FSDPModule)] for layers in lists]


def _allocate_outside_inference_mode(model: nn.Module, _: Any) -> None:
    """Allocate FSDP2's memory outside inference mode, so that training can write to it later."""
    if not torch.is_inference_mode_enabled() or getattr(model, "_has_room", False):
        return
    with torch.inference_mode(mode=False):
        for unit in model.modules():
            if isinstance(unit, FSDPModule):
                unit.unshard()
                unit.reshard()
    settable: Any = model
    settable._has_room = True


def _reshard_after_evaluation(model: nn.Module, *_: Any) -> None:
    """Reshard after evaluation.

    FSDP2 leaves the root and the last layer gathered: `model.parameters()` then shows whole tensors, and an optimizer
    that is built on them would train nothing.
    """
    if not torch.is_grad_enabled():
        reshard_units(model)


def _chain_prefetches(units: Sequence[FSDPModule], forward_depth: int, backward_depth: int) -> None:
    """Prefetch the next units of a list in forward, and the previous ones in backward."""
    for index, unit in enumerate(units):
        if forward_depth and (ahead := list(units[index + 1 : index + 1 + forward_depth])):
            unit.set_modules_to_forward_prefetch(ahead)
        if backward_depth and (behind := list(reversed(units[max(index - backward_depth, 0) : index]))):
            unit.set_modules_to_backward_prefetch(behind)


def divide(
    model: nn.Module, config: FSDP2Config | MegatronFSDPConfig, mesh: DeviceMesh, moe_mesh: DeviceMesh | None
) -> list[str]:
    """Divide experts, tensors and sequences over ranks, on axes with several; return the names of divided experts."""
    experts = [] if moe_mesh is None else list(find_experts(model, moe_mesh["ep"].size()))
    options = ("sequence_parallel", "tp_plan", "enable_async_tensor_parallel")
    chosen = [name for name in options if getattr(config, name, None)]
    if mesh["tp"].size() > 1:
        plan = config.tp_plan if isinstance(config, FSDP2Config) else None
        parallelize_tensors(model, mesh["tp"], plan=plan, sequence_parallel=config.sequence_parallel, apart=experts)
        if "enable_async_tensor_parallel" in chosen:
            enable_async_tensor_parallel(mesh["tp"])
    elif chosen:
        warn_caller(
            f"{' and '.join(chosen)} of {type(config).__name__}: no effect with tp_size=1; give tp_size, or leave it "
            "out"
        )
    if moe_mesh is not None:
        same_tokens = mesh["tp"] if mesh["tp"].size() > 1 else None
        parallelize_experts(model, moe_mesh["ep"], same_tokens, as_dtensors=isinstance(config, FSDP2Config))
    ranks, degree = mesh["cp"], config.ulysses_degree
    if degree > 1:
        ranks = create_ring_ulysses_mesh(mesh, ring_degree=ranks.size() // degree, ulysses_degree=degree)
    if ranks.size() > 1:
        enable_context_parallel(model, ranks)
    return experts


class FSDP2Manager(_Manager):
    """Makes models parallel by an `FSDP2Config`.

    Attributes:
        config: The configuration.
        device_mesh: (pp, dp_replicate, dp_shard, cp, tp) of `create_device_mesh`.
        moe_mesh: (ep_shard, ep), or None without expert parallelism.
        moe_parallel_config: How experts are sharded; None: as all other layers.

    Raises:
        ConfigurationError: The config is of another strategy, or the mesh lacks an axis.
    """

    def __init__(
        self,
        config: FSDP2Config,
        device_mesh: DeviceMesh,
        moe_mesh: DeviceMesh | None = None,
        moe_parallel_config: MoEParallelizerConfig | None = None,
    ) -> None:
        _check_arguments("FSDP2Manager", config, FSDP2Config, device_mesh, FSDP2_AXES)
        self.config = config
        self.device_mesh = device_mesh
        self.moe_mesh = moe_mesh
        self.moe_parallel_config = moe_parallel_config

    def parallelize(self, model: nn.Module) -> nn.Module:
        """Make a model parallel in place; a model on the meta device has to be filled afterwards.

        Order: tensors, experts, sequences, recomputation, compilation, shards, prefetching. An axis of one rank is
        skipped; shards and dtypes are the same for one rank as for many.

        Args:
            model: A decoder of transformers, or a stage of one.

        Returns:
            The same model.

        Raises:
            ConfigurationError: The model is parallel already, has no layers or does not fit a size.
        """
        config, mesh = self.config, self.device_mesh
        _check_model(model, mesh)
        if config.offload_policy is not None and config.offload_policy.pin_memory and mesh.device_type == "cpu":
            raise ConfigurationError(
                "offload_policy pins memory, for which there is no accelerator here; give "
                "CPUOffloadPolicy(pin_memory=False)"
            )
        if config.patch_is_packed_sequence:
            forwards.assume_no_packed_sequences(model)
        experts = divide(model, config, mesh, self.moe_mesh)
        if config.activation_checkpointing:
            recomputed = layers_to_recompute(model, config.activation_checkpointing_scope)
            is_selective = config.activation_checkpointing == "selective"
            kept = _routers_to_keep(model, experts, self.moe_parallel_config)
            forwards.checkpoint_layers(model, is_selective=is_selective, layers=recomputed, kept=kept)
        self.maybe_compile(model)
        if config.autocast_dtype is not None:
            forwards.run_under_autocast(model, mesh.device_type, config.autocast_dtype)
        self._shard(model, experts)
        setattr(model, DEFERS, config.defer_fsdp_grad_sync)
        return model

    def maybe_compile(self, model: nn.Module) -> None:
        """Compile the forward of each decoder layer if the configuration asks for it."""
        asynchronous = self.config.enable_async_tensor_parallel and self.device_mesh["tp"].size() > 1
        if self.config.enable_compile or asynchronous:
            for layer in find_layers(model).modules():
                # The forward, not the module: its hooks stay eager, and no `_orig_mod` enters names.
                layer.forward = torch.compile(layer.forward)

    def _shard(self, model: nn.Module, experts: list[str]) -> None:
        config = self.config
        assert config.mp_policy is not None  # __post_init__ sets it
        # Under FSDP2 each unit casts its own outputs. With float32 outputs of the last layer and a head that computes
        # in bfloat16, the head would fail, so layers return their compute dtype; the next one would cast anyway.
        # Under autocast, which makes products fit, they hand on output_dtype: the residual stream is kept in float32.
        layer_policy = config.mp_policy
        if config.autocast_dtype is None and layer_policy.output_dtype is not None:
            layer_policy = dataclasses.replace(layer_policy, output_dtype=layer_policy.param_dtype)
        reshards = config.reshard_after_forward
        if reshards is None and self.device_mesh["pp"].size() > 1:
            reshards = False
        if self.moe_mesh is not None:
            of_experts = self.moe_parallel_config
            shard_experts(
                model,
                experts,
                self.moe_mesh["ep_shard"],
                mp_policy=(of_experts.mp_policy if of_experts else None) or layer_policy,
                offload_policy=config.offload_policy or OffloadPolicy(),
                reshard_after_forward=of_experts.reshard_after_forward if of_experts else reshards is not False,
                gradient_divisor=self.moe_mesh.size() // self.device_mesh["tp"].size(),
            )
        where, towers = config.multimodal.frozen_sharding, frozen_towers(model)
        if where == "replicate":
            _check_replicas(towers, config.mp_policy.param_dtype)
        lists = shard_by_layers(
            model,
            get_fsdp_dp_mesh(self.device_mesh),
            mp_policy=config.mp_policy,
            layer_policy=layer_policy,
            offload_policy=config.offload_policy,
            reshard_after_forward=reshards,
            whole=towers if where == "root" else (),
            replicated=towers if where == "replicate" else (),
        )
        if config.enable_fsdp2_prefetch:
            for units in lists:
                _chain_prefetches(units, config.fsdp2_forward_prefetch_depth, config.fsdp2_backward_prefetch_depth)


def _routers_to_keep(
    model: nn.Module, experts: Sequence[str], moe_parallel_config: MoEParallelizerConfig | None
) -> list[nn.Module]:
    """Return the routers whose products are not to be recomputed."""
    keeps = moe_parallel_config is not None and moe_parallel_config.ignore_router_for_ac
    return find_routers(model, experts) if keeps else []


def _check_replicas(towers: Sequence[nn.Module], dtype: torch.dtype | None) -> None:
    """Raise for towers whose dtype is not that of their inputs: FSDP2 casts only modules that it shards."""
    found = {param.dtype for tower in towers for param in tower.parameters()} - {dtype}
    if dtype is not None and found:
        raise ConfigurationError(
            f"distributed.multimodal.frozen_sharding='replicate' keeps frozen towers in {found.pop()}, but their "
            f"inputs are cast to mp_policy.param_dtype={dtype}; load the model in that dtype, or use 'root'"
        )


class MegatronFSDPManager(_Manager):
    """Makes models parallel by a `MegatronFSDPConfig`.

    Attributes:
        config: The configuration.
        device_mesh: (dp, cp, tp) of `create_device_mesh`.
        moe_mesh: (ep_shard, ep), or None without expert parallelism.
        moe_parallel_config: Only `ignore_router_for_ac` counts.

    Raises:
        ConfigurationError: The config is of another strategy, the mesh lacks an axis, or `moe_parallel_config` sets
            what only FSDP2 does.
    """

    def __init__(
        self,
        config: MegatronFSDPConfig,
        device_mesh: DeviceMesh,
        moe_mesh: DeviceMesh | None = None,
        moe_parallel_config: MoEParallelizerConfig | None = None,
    ) -> None:
        _check_arguments("MegatronFSDPManager", config, MegatronFSDPConfig, device_mesh, MEGATRON_AXES)
        of_experts = moe_parallel_config or MoEParallelizerConfig()
        if of_experts.mp_policy is not None or of_experts.reshard_after_forward:
            raise ConfigurationError(
                "moe_parallel_config sets mp_policy or reshard_after_forward, which are FSDP2's; under "
                "MegatronFSDPConfig experts have the dtypes of all weights, so leave both out, or set "
                "zero_dp_strategy_experts"
            )
        self.config = config
        self.device_mesh = device_mesh
        self.moe_mesh = moe_mesh
        self.moe_parallel_config = moe_parallel_config

    def parallelize(
        self, model: nn.Module, optimizer: torch.optim.Optimizer | None = None, *, leaves_empty: bool = False
    ) -> tuple[MegatronFSDP, torch.optim.Optimizer | None]:
        """Make a model parallel; one rank is wrapped too, so that dtypes do not depend on the ranks.

        Args:
            model: A decoder of transformers; on the meta device only with `init_fsdp_with_meta_device`.
            optimizer: Built on the model's parameters, to be sharded along; not with `tp_size` or `ep_size` > 1, where
                tensors are divided first, under a new identity. None: build it on the returned model's parameters and
                give it to `fully_shard_optimizer`.
            leaves_empty: Give what is on the meta device memory and no values, and leave buffers there.

        Returns:
            The wrapped model and the optimizer.

        Raises:
            ConfigurationError: The model is parallel already, has no layers or does not fit a size.
        """
        mesh = self.device_mesh
        _check_model(model, mesh)
        if optimizer is not None and (mesh["tp"].size() > 1 or self.moe_mesh is not None):
            raise ConfigurationError(
                f"an optimizer cannot be given with {'tp_size' if self.moe_mesh is None else 'ep_size'} > 1, which "
                "replaces its parameters; build it on the returned model's parameters and call fully_shard_optimizer"
            )
        if mesh["cp"].size() > 1 and self.config.deterministic is not None:
            raise ConfigurationError(
                f'deterministic="{self.config.deterministic}" cannot hold with cp_size={mesh["cp"].size()}: '
                "context parallelism cuts the sums over a sequence; leave cp_size out"
            )
        experts = divide(model, self.config, mesh, self.moe_mesh)
        if self.config.activation_checkpointing is True:
            forwards.checkpoint_mlps(model)
        elif self.config.activation_checkpointing:
            is_selective = self.config.activation_checkpointing == "selective"
            kept = _routers_to_keep(model, experts, self.moe_parallel_config)
            forwards.checkpoint_layers(model, is_selective=is_selective, kept=kept)
        setattr(model, KEEPS_FLOAT32_BY, "MegatronFSDPConfig(preserve_fp32_weights=True, grad_reduce_in_fp32=True)")
        arguments = self.engine_arguments()
        if leaves_empty:
            arguments["init_model_with_meta_device"] = ALLOCATE_ONLY
        if optimizer is None:
            return fully_shard_model(model, **arguments), None
        return fully_shard(model, optimizer, **arguments)

    def engine_arguments(self) -> dict[str, Any]:
        """Return the arguments of `fully_shard_model` for the configuration."""
        config = self.config
        policy = MixedPrecisionPolicy(
            main_params_dtype=torch.float32 if config.preserve_fp32_weights else None,
            main_grads_dtype=torch.float32 if config.grad_reduce_in_fp32 else None,
            grad_comm_dtype=None,
            weight_format=config.weight_format,
        )
        dim = get_megatron_dp_axis(self.device_mesh)
        return {
            "device_mesh": self.device_mesh,
            "expt_device_mesh": None if self.moe_mesh is None else engine_mesh(self.moe_mesh, dim),
            "dp_shard_dim": dim,
            "tp_dim": "tp",
            "fsdp_unit_modules": config.megatron_fsdp_unit_modules,
            "zero_dp_strategy": config.zero_dp_strategy,
            "zero_dp_strategy_experts": config.zero_dp_strategy_experts,
            "init_model_with_meta_device": config.init_fsdp_with_meta_device,
            "mixed_precision_policy": policy,
            "overlap_grad_reduce": config.overlap_grad_reduce,
            "overlap_param_gather": config.overlap_param_gather,
            "report_nan_in_param_grad": config.check_for_nan_in_grad or config.report_nan_in_param_grad,
            "average_in_collective": config.average_in_collective,
            "disable_bucketing": config.disable_bucketing,
            "calculate_per_token_loss": config.calculate_per_token_loss,
            "keep_fp8_transpose_cache": config.keep_fp8_transpose_cache,
            "nccl_ub": config.nccl_ub,
            "fsdp_double_buffer": config.fsdp_double_buffer,
            "deterministic": config.deterministic,
            "offload": config.offload,
        }


class _Replica(nn.parallel.DistributedDataParallel):
    """A DDP that looks in its first forward, unless it does in each, for parameters that get no gradient.

    Such a parameter (of an image tower that skips its last layer) leaves its bucket unreduced: ranks step with
    different gradients, and the next forward fails or waits for ever.
    """

    _is_checked = False

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run DDP's forward."""
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="find_unused_parameters=True was specified")
            output: Any = nn.parallel.DistributedDataParallel.forward(self, *args, **kwargs)
        searches = self.find_unused_parameters or self.static_graph
        if not (self._is_checked or searches) and torch.is_grad_enabled() and self.training:
            self._is_checked = True
            with all_agree("looking for parameters without a gradient", (self.process_group,)):
                self._refuse_unused(output)
        return output

    def _refuse_unused(self, output: Any) -> None:
        waiting = [tensor.grad_fn for tensor in _find_tensors(output) if tensor.grad_fn is not None]
        reached: set[Any] = set(waiting)
        while waiting:
            ahead = {node for node, _ in waiting.pop().next_functions if node is not None} - reached
            reached |= ahead
            waiting += ahead
        used = {id(node.variable) for node in reached if hasattr(node, "variable")}
        unused = [
            name for name, param in self.module.named_parameters() if param.requires_grad and id(param) not in used
        ]
        if unused and used:
            raise ConfigurationError(
                f"{len(unused)} trainable parameters had no part in the first output, so they get no gradient: "
                f"{', '.join(unused[:8])}; set DDPConfig.find_unused_parameters=True, or freeze them"
            )


class DDPManager(_Manager):
    """Makes models parallel by a `DDPConfig`.

    Attributes:
        config: The configuration.
        device: Where this rank computes.
    """

    def __init__(self, config: DDPConfig, device_mesh: DeviceMesh | None = None) -> None:
        """Store and check the arguments.

        Args:
            config: The configuration.
            device_mesh: None, or a 1-D mesh of all ranks, which is what DDP works on.

        Raises:
            ConfigurationError: The config is of another strategy, or the mesh has several axes or leaves ranks out.
        """
        _check_arguments("DDPManager", config, DDPConfig)
        self.config = config
        self.device = set_up_ranks(config.backend)
        if device_mesh is not None and (device_mesh.ndim != 1 or device_mesh.size() != dist.get_world_size()):
            raise ConfigurationError(
                f"DDP uses all {dist.get_world_size()} ranks, but device_mesh has the shape {device_mesh.shape}; "
                "leave device_mesh out"
            )

    def parallelize(self, model: nn.Module, *, sends_weights: bool = True) -> nn.parallel.DistributedDataParallel:
        """Move a model to this rank's device and wrap it; all ranks get the first rank's weights.

        Args:
            model: With memory.
            sends_weights: False: ranks have the same weights already, and the memory to send them is spared.

        Raises:
            ConfigurationError: The model is parallel already, on the meta device or wholly frozen, or
                `activation_checkpointing` is on and it has no layers.
        """
        _check_model(model, None)
        if any(param.is_meta for param in model.parameters()):
            raise ConfigurationError(
                "the model is on the meta device; give DDP one with weights, or use from_pretrained"
            )
        if not any(param.requires_grad for param in model.parameters()):
            raise ConfigurationError("no parameter of the model requires a gradient; DDP has nothing to average")
        config = self.config
        if config.activation_checkpointing:
            recomputed = layers_to_recompute(model, config.activation_checkpointing_scope)
            is_selective = config.activation_checkpointing == "selective"
            forwards.checkpoint_layers(model, is_selective=is_selective, layers=recomputed)
        if config.autocast_dtype is not None:
            forwards.run_under_autocast(model, self.device.type, config.autocast_dtype)
        on_device = model.to(self.device)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="`broadcast_buffers` is deprecated")
            return _Replica(
                on_device,
                device_ids=None if self.device.type == "cpu" else [self.device],
                find_unused_parameters=config.find_unused_parameters and not config.static_graph,
                static_graph=config.static_graph,
                broadcast_buffers=config.broadcast_buffers,
                bucket_cap_mb=config.bucket_cap_mb,
                gradient_as_bucket_view=config.gradient_as_bucket_view,
                init_sync=sends_weights,
            )
