"""`MegatronFSDP`: the wrapper of a sharded model, which owns the engine."""

from __future__ import annotations

import inspect
import logging
import os
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any, Literal, NoReturn

import torch
from torch import nn

from megatron_fsdp.comm.agreement import Groups, agreed, all_agree
from megatron_fsdp.comm.collectives import Traffic, resolve_device
from megatron_fsdp.config.ddp_config import DistributedDataParallelConfig, ShardingStrategy
from megatron_fsdp.config.engine_options import (
    EngineOptions,
    MemoryArguments,
    OffloadArgument,
    checked_deterministic,
    engine_options_of,
    resolve_memory_options,
    resolve_offload,
    resolve_skip_order,
    resolve_verify_ranks,
    with_weight_format,
)
from megatron_fsdp.config.precision import MixedPrecisionPolicy, check_policy
from megatron_fsdp.debug.lifetimes import check_lifetimes
from megatron_fsdp.describe.description import Description
from megatron_fsdp.describe.model import MemoryUse, describe, memory_of
from megatron_fsdp.dtensor.tensor import check_conversion
from megatron_fsdp.engine.hooks import calls_of
from megatron_fsdp.engine.hooks import join as join_units
from megatron_fsdp.engine.observer import Observer
from megatron_fsdp.engine.param_group import ParameterGroup
from megatron_fsdp.engine.plans import bucket_count
from megatron_fsdp.engine.schedule import SyncMode
from megatron_fsdp.errors import ConfigurationError, NotSupportedYetError, explains_arguments, warn_caller
from megatron_fsdp.hang.watch import log_for_hangs, stop_logging_for_hangs
from megatron_fsdp.optim.grad_norm import clip_gradients
from megatron_fsdp.optim.optimizer import float32_by
from megatron_fsdp.param_and_grad_buffer import AllGatherPipeline, GradReducePipeline, ParamAndGradBuffer
from megatron_fsdp.sharding.mesh import FSDPDistributedIndex
from megatron_fsdp.state.experts import CheckpointNames
from megatron_fsdp.state.full_tensors import (
    DEFAULT_BUCKET_BYTES,
    broadcast_whole_weights,
    check_bucket_bytes,
    full_gradients,
    full_parameters,
    iter_gradients,
    iter_parameters,
    shown_in_full,
)
from megatron_fsdp.state.state_dict import load_shards
from megatron_fsdp.state.statistics import (
    ModelStatistics,
    gradient_digests,
    gradient_statistics,
    parameter_digests,
    parameter_statistics,
)
from megatron_fsdp.wrap.shard_unit import compiled_in_place, refuse_torch
from megatron_fsdp.wrap.wrap import Grouping, UnitGrouping, assemble

StateDict = dict[str, Any]

_PREFIX = "module."


logger = logging.getLogger("megatron_fsdp")


class _with_signature_of_module:  # noqa: N801 (a decorator)
    """Bind `forward` with the signature of the wrapped model; trainers choose the columns of a batch by it."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def __get__(self, wrapper: MegatronFSDP | None, owner: type | None = None) -> Any:
        return self._function if wrapper is None else _BoundForward(self._function, wrapper)


class _BoundForward:
    """Bound method `forward` of a wrapper."""

    def __init__(self, function: Callable[..., Any], wrapper: MegatronFSDP) -> None:
        self._function, self._wrapper = function, wrapper

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(self._wrapper, *args, **kwargs)

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self._wrapper.module.forward)


class MegatronFSDP(nn.Module):
    """A model whose parameters, gradients and optimizer state are sharded over data-parallel ranks.

    `parameters()` yields DTensors over this rank's shards, before and after every forward and backward; inside the
    forward of a unit its modules hold full, plain tensors. `.grad` is set by a backward that synchronises.

    Arguments that are not listed here are those of `fully_shard_model`.

    Args:
        module: The model; sharded in place and kept as `.module`.
        dist_index: Mesh and process groups.
        ddp_config: Strategy and switches, of this package's class or another such as Megatron-Core's; None:
            `optim_grads_params` with both overlaps. It is not modified. What other arguments decide is logged and left
            out (`DistributedDataParallelConfig.read_from`), so are its `megatron_fsdp_*_dtype`: the policy has
            precedence.
        mixed_precision_policy: Dtypes of main weights, main gradients and gradient communication.
        fsdp_unit_modules: Classes or import paths of the units; None or "auto": found automatically.
        disable_bucketing: Never cut the parameters outside of units into several buckets, nor add large ends to units
            that `fsdp_unit_modules` names.
        device: Device of the shards; None: this process's device of the mesh's type.
        calculate_per_token_loss: Sum gradients over ranks, without a factor.
        sync_model_each_microbatch: Synchronise gradients after every backward. False (the default of this class): set
            `is_last_microbatch`, call `finish_grad_sync`, or let `optimizer.step` do it.
        keep_fp8_transpose_cache: Keep the transposed codes that backward multiplies while weights are gathered, where
            `mixed_precision_policy` has weight_format="fp8_compute" (docs/precision.md).
        nccl_ub: As in `fully_shard_model`; either here or in `ddp_config`.
        fsdp_double_buffer: As in `fully_shard_model`; either here or in `ddp_config`.
        fsdp_db_use_persist_buf_on_alloc_fail: As `fsdp_double_buffer`.
        disable_symmetric_registration: As `nccl_ub`.
        enable_fine_grained_param_gather_hook: Gather the modules inside units one by one, in both directions.
        enable_fine_grained_param_gather_backward_hook: Refused on its own, and implied by the former.
        fine_grained_recurse_module_types: Classes of modules that are then gathered whole, with all inside them.
        report_nan_in_param_grad: Check every gradient for NaN and infinity and raise on all ranks, with names.
        reduce_scatter_with_fp32_accumulation: Also taken from `ddp_config`.

    Raises:
        ConfigurationError: An argument, a combination or the model cannot be honoured.
    """

    fsdp_unit_modules: Sequence[type[nn.Module] | str] | str | None = None
    _is_wrapped = False
    _keeps_float32_by = "mixed_precision_policy=MixedPrecisionPolicy(main_params_dtype=torch.float32)"

    @agreed("sharding the model", lambda *given, **named: _ranks_of_index(named.get("dist_index", given[2:3])))
    @explains_arguments()
    def __init__(
        self,
        module: nn.Module,
        dist_index: FSDPDistributedIndex,
        ddp_config: DistributedDataParallelConfig | None = None,
        mixed_precision_policy: MixedPrecisionPolicy = MixedPrecisionPolicy(),  # noqa: B008 (frozen)
        fsdp_unit_modules: Sequence[type[nn.Module] | str] | str | None = None,
        disable_bucketing: bool = False,
        device: torch.device | str | int | None = None,
        calculate_per_token_loss: bool = False,
        init_model_with_meta_device: bool | str = False,
        sync_model_each_microbatch: bool = False,
        keep_fp8_transpose_cache: bool = False,
        nccl_ub: bool = False,
        fsdp_double_buffer: bool = False,
        fsdp_db_use_persist_buf_on_alloc_fail: bool = False,
        disable_symmetric_registration: bool = False,
        enable_fine_grained_param_gather_hook: bool = False,
        enable_fine_grained_param_gather_backward_hook: bool = False,
        fine_grained_recurse_module_types: Sequence[type[nn.Module]] | None = None,
        report_nan_in_param_grad: bool = False,
        reduce_scatter_with_fp32_accumulation: bool = False,
        weight_allocator: str = "slots",
        max_gathered_units: int | None = None,
        forward_prefetch_units: int | None = None,
        backward_prefetch_units: int | None = None,
        verify_ranks: bool | float | str | None = None,
        find_unused_parameters: bool = False,
        deterministic: str | None = None,
        offload: OffloadArgument = None,
        ranks_may_skip_units: bool | Sequence[nn.Module] = False,
    ) -> None:
        if not isinstance(dist_index, FSDPDistributedIndex):
            raise TypeError(f"dist_index is a {type(dist_index).__name__}; give an FSDPDistributedIndex")
        check_policy(mixed_precision_policy)
        config, policy = _own_config(ddp_config, mixed_precision_policy, disable_bucketing)
        policy = with_weight_format(policy, config)
        config = replace(
            config,
            nccl_ub=nccl_ub or config.nccl_ub,
            disable_symmetric_registration=disable_symmetric_registration or config.disable_symmetric_registration,
        )
        options = engine_options_of(config, policy)
        memory = MemoryArguments(
            disable_bucketing=disable_bucketing,
            fsdp_double_buffer=fsdp_double_buffer,
            fsdp_db_use_persist_buf_on_alloc_fail=fsdp_db_use_persist_buf_on_alloc_fail,
            enable_fine_grained_param_gather_hook=enable_fine_grained_param_gather_hook,
            enable_fine_grained_param_gather_backward_hook=enable_fine_grained_param_gather_backward_hook,
            fine_grained_recurse_module_types=fine_grained_recurse_module_types,
            weight_allocator=weight_allocator,
            max_gathered_units=max_gathered_units,
            forward_prefetch_units=forward_prefetch_units,
            backward_prefetch_units=backward_prefetch_units,
        )
        options = replace(
            options,
            memory=resolve_memory_options(memory, config),
            verify_ranks_s=resolve_verify_ranks(verify_ranks),
            report_nan_in_param_grad=report_nan_in_param_grad or options.report_nan_in_param_grad,
            reduce_scatter_with_fp32_accumulation=reduce_scatter_with_fp32_accumulation
            or options.reduce_scatter_with_fp32_accumulation,
            keep_fp8_transpose_cache=keep_fp8_transpose_cache or options.keep_fp8_transpose_cache,
            calculate_per_token_loss=calculate_per_token_loss,
            init_model_with_meta_device=init_model_with_meta_device,
            find_unused_parameters=find_unused_parameters,
            deterministic=checked_deterministic(deterministic),
            offload=resolve_offload(offload, max(options.strategies)),
            skip_order=resolve_skip_order(ranks_may_skip_units, module),
        )
        if dist_index.hsdp_outer_dp_shard and options.outer_strategy is not ShardingStrategy.optim:
            raise ConfigurationError(
                "dist_index has hsdp_outer_dp_shard=True, but outer_dp_sharding_strategy of ddp_config is "
                f'"{options.outer_strategy.name}"; set both or neither'
            )
        grouping = UnitGrouping(fsdp_unit_modules, options.memory)
        # Units made in place are not merged, nor are neighbours that callers may call in another order.
        if config.megatron_fsdp_version == 2 or options.skip_order:
            grouping = replace(grouping, memory=replace(options.memory, message_bytes=0))
        self._wrap(module, dist_index, config, options, grouping, device, sync_model_each_microbatch)
        self.fsdp_unit_modules = fsdp_unit_modules
        if ddp_config is not None:
            self.ddp_config = ddp_config

    @torch.inference_mode(False)  # shards, buckets and hooks serve training, wherever they are made
    def _wrap(
        self,
        module: nn.Module,
        dist_index: FSDPDistributedIndex,
        config: DistributedDataParallelConfig,
        options: EngineOptions,
        grouping: Grouping,
        device: torch.device | str | int | None,
        auto_sync: bool,
    ) -> None:
        """Shard the model by resolved options."""
        nn.Module.__init__(self)
        if options.memory.idle:
            warn_caller("; ".join(options.memory.idle))
        self.module = module = compiled_in_place(module)
        self.dist_index = dist_index
        self.ddp_config = self._config = config
        self._options = options
        self.mp_policy = options.policy
        self._policy_after_reset: MixedPrecisionPolicy | None = None
        self.calculate_per_token_loss = options.calculate_per_token_loss
        self.report_nan_in_param_grad = options.report_nan_in_param_grad
        self._mode = SyncMode(auto_sync=auto_sync)
        assert dist_index.dp_shard_dim is not None, "an index without one is refused"
        mesh = dist_index.get_submesh(dist_index.dp_shard_dim)
        self.device = resolve_device(device, mesh.device_type)
        if self.device.type != mesh.device_type:
            raise ConfigurationError(
                f"device={device!r} is not of the mesh's type {mesh.device_type!r}; leave it out, or build the "
                "mesh for that device type"
            )
        self._engine = self._fsdp_engine = assemble(
            module,
            grouping,
            options,
            dist_index,
            self.device,
            self._mode,
            per_unit=config.megatron_fsdp_version == 2,
        )
        if options.megatron_fsdp_use_decoupled_grad:
            for group in self._engine.groups():
                group.decouple_gradients()
        self._bucket_numel = grouping.cut_numel(self._engine.rank_meshes[0].num_ranks)
        for group in self._engine.groups():
            for index, param in enumerate(group.sharded):
                marks: Any = param
                marks._megatron_fsdp_model = weakref.proxy(self)
                # Read by Megatron-Core's checkpoints, which split fused weights and their state.
                marks.megatron_fsdp_slice = slice(*group.plan.layout.range_in(index, group.weights.main.region))
                marks.megatron_fsdp_dist_index = weakref.proxy(dist_index)
        plan = self._engine.unit_plan
        count, source = len(plan.units) - 1, plan.source.removeprefix("given classes ")
        logger.info("%d unit%s (%s) beside the root", count, "" if count == 1 else "s", source)
        if any(strategy.shards_compute_weights for strategy in options.strategies):
            # `generate` of transformers then goes on until all ranks are done, and layers that it drops by chance run.
            module._is_fsdp_managed_module = True  # type: ignore[assignment]
        refuse_torch(self)
        self._is_wrapped = True

    # ---- properties that clients read ----------------------------------------------------------------------------

    @property
    def data_parallel_sharding_strategy(self) -> str:
        """Name of the sharding strategy."""
        return self._options.strategy.name

    @property
    def model_auto_sync(self) -> bool:
        """True if every backward ends with a gradient sync."""
        return self._mode.auto_sync

    @property
    def microbatch_count(self) -> int:
        """Number of backwards since the last gradient sync."""
        return self._engine.microbatch_count

    @property
    def is_last_microbatch(self) -> bool:
        """True if the next backward is the last of its step; absent until set, as in the published package."""
        if self._mode.is_last_microbatch is None:
            raise AttributeError("is_last_microbatch has not been set")
        return self._mode.is_last_microbatch

    @is_last_microbatch.setter
    def is_last_microbatch(self, value: bool) -> None:
        self._mode.is_last_microbatch = value

    @property
    def bucket_size(self) -> int | None:
        """The bucket size, in elements, of the root's parameters; None: one bucket."""
        return self._bucket_numel

    @property
    def is_param_fsdp_distributed(self) -> bool:
        """True if modules hold sharded parameters; False inside their forward and backward."""
        return not self._engine.units_in_full_context and not any(unit.is_unsharded for unit in self._engine.units)

    def get_distributed_index(self) -> FSDPDistributedIndex:
        """Return the index of mesh and process groups."""
        return self.dist_index

    # ---- attributes of the wrapped model -----------------------------------------------------------------------------

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of this object, else of the wrapped model, such as `config` or `generate`."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            module = self.__dict__.get("_modules", {}).get("module")
            if module is None or hasattr(type(self), name):  # not wrapped yet, or a property of this class has raised
                raise
        try:
            return getattr(module, name)
        except AttributeError as error:
            raise AttributeError(
                f"neither {type(self).__name__} nor the {type(module).__name__} that it wraps has an attribute "
                f"{name!r} ({error})",
                name=name,
                obj=self,
            ) from None

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute, on the wrapped model if only it has this attribute, since its forward reads it there."""
        if self._is_of_module(name):
            setattr(self.module, name, value)
        else:
            super().__setattr__(name, value)

    def __delattr__(self, name: str) -> None:
        """Delete an attribute, of the wrapped model if only it has this attribute."""
        if self._is_of_module(name):
            delattr(self.module, name)
        else:
            super().__delattr__(name)

    def _is_of_module(self, name: str) -> bool:
        """Return True if the wrapped model or its class has an attribute and this object does not."""
        if not self._is_wrapped or name == "module" or name in vars(self) or hasattr(type(self), name):
            return False
        module = self.module
        held = (vars(module), module._parameters, module._buffers, module._modules)
        return hasattr(type(module), name) or any(name in names for names in held)

    @property
    def _is_accelerate_prepared(self) -> bool:
        """True, so that `Accelerator.prepare` does not wrap the model in DistributedDataParallel."""
        accelerate = sys.modules.get("accelerate.state")
        # Not `AcceleratorState()`, which would set accelerate up where the program has not.
        known = {} if accelerate is None else accelerate.AcceleratorState._shared_state
        precision = known.get("_mixed_precision", "no")
        if precision != "no":
            raise ConfigurationError(
                f"Accelerator(mixed_precision={precision!r}) has no effect on a sharded model; leave it out, and build "
                f"the model in the dtype to compute in (float32 weights are updated by {float32_by(self)})"
            )
        return True

    @_is_accelerate_prepared.setter
    def _is_accelerate_prepared(self, _: bool) -> None:
        """Ignore assignments by accelerate."""

    # ---- forward, backward, step --------------------------------------------------------------------------------

    @_with_signature_of_module
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model."""
        return self.module(*args, **kwargs)

    def finish_grad_sync(self, force_all_reduce: bool = False) -> None:  # noqa: ARG002
        """Reduce all unreduced gradients, wait for them, and set `.grad`.

        Args:
            force_all_reduce: Accepted for callers that pass it to save gradients; each rank has those that the strategy
                gives it, and `full_gradients()` gathers them.
        """
        self._engine.finish_grad_sync()

    def install_optimized_model_weights(self) -> None:
        """Copy main weights into compute weights, which are all-gathered again at their next use."""
        self._engine.install_main_weights()

    def manual_buffer_registration(self) -> None:
        """Register communication memory with NCCL, once, at any time after wrapping. Collective.

        For `nccl_ub` with `fsdp_manual_registration` in the configuration, where wrapping does not register. Where
        nothing can be registered, `describe()` says why, and nothing happens.

        Raises:
            ConfigurationError: The configuration does not ask for it, it was done before, or the library refuses.
        """
        asked, buffers = self._options.memory.user_buffers, self._engine.user_buffers
        if asked is None or buffers is None or not asked.manual:
            raise ConfigurationError(
                "manual_buffer_registration() needs fsdp_manual_registration=True and nccl_ub=True in ddp_config; set "
                "both, or leave the call out: with nccl_ub=True alone wrapping registers"
            )
        if buffers.is_registered:
            raise ConfigurationError("communication memory is registered already; call this once")
        buffers.register()

    def zero_grad_buffer(self) -> None:
        """Clear all gradients, unreduced ones included."""
        self._engine.clear_gradients()

    @contextmanager
    def mixed_precision_context(self, mixed_precision_policy: MixedPrecisionPolicy) -> Iterator[None]:
        """Use the `grad_comm_dtype` of another policy inside a block; main dtypes do not change.

        After an error in a backward inside the block, `reset` restores the previous policy.

        Raises:
            ConfigurationError: As `reset_mixed_precision_policy`, on entry and on exit.
        """
        before = self.mp_policy
        self.reset_mixed_precision_policy(mixed_precision_policy)
        try:
            yield
        except BaseException:
            self._policy_after_reset = before
            if not self._engine.has_gradients_on_their_way:
                self._restore_policy()
            raise
        self._change_policy(before)

    def reset_mixed_precision_policy(self, mixed_precision_policy: MixedPrecisionPolicy) -> None:
        """Change the communication dtype of gradients, from the next backward on. Collective.

        Args:
            mixed_precision_policy: Its `grad_comm_dtype` is used. Main dtypes and the weight format stay: each has to
                be None, the default or that of the model.

        Raises:
            ConfigurationError: The policy asks for other main dtypes (buffers of these exist already), a backward is
                running, or deferred gradients wait for their reduction.
        """
        with all_agree("reset_mixed_precision_policy", self._engine.reaching_all) as facts:
            self._change_policy(mixed_precision_policy)
            facts["grad_comm_dtype of mixed_precision_policy"] = str(mixed_precision_policy.grad_comm_dtype)

    def _change_policy(self, mixed_precision_policy: MixedPrecisionPolicy) -> None:
        check_policy(mixed_precision_policy)
        old, unset = self.mp_policy, MixedPrecisionPolicy()
        for name in ("main_params_dtype", "main_grads_dtype", "weight_format"):
            if getattr(mixed_precision_policy, name) not in (None, getattr(unset, name), getattr(old, name)):
                raise ConfigurationError(
                    f"{mixed_precision_policy} changes {name} of {old}; only grad_comm_dtype can change after "
                    f"wrapping, so leave {name} out"
                )
        new = replace(old, grad_comm_dtype=mixed_precision_policy.grad_comm_dtype)
        self._engine.change_grad_comm_dtype(new)
        self.mp_policy = new

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear gradients as `torch.nn.Module.zero_grad` does, unreduced ones included.

        With `cuda_graph_mode` they are set to zero in place, whatever is asked: a captured step writes them there.
        """
        set_to_none = set_to_none and not self._engine.keeps_gradients
        super().zero_grad(set_to_none)
        params = [param for _, _, param in self._named_parameters()]
        self._engine.clear_decoupled_gradients(params, set_to_none)
        self._engine.drop_unsynced_gradients(params)

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> torch.Tensor:
        """Clip the norm of all gradients, with one small all-reduce; return the norm before clipping.

        Accepts any positive p, infinity included. `torch.nn.utils.clip_grad_norm_` works on the parameters too, but
        torch refuses infinity for ranks that own no element of some parameter. With `error_if_nonfinite` a norm that is
        NaN or infinite raises NonFiniteNormError (a RuntimeError, as torch's) on every rank and leaves gradients alone.
        """
        self._engine.sync_if_unreduced()
        return clip_gradients(self._engine, max_norm, norm_type, error_if_nonfinite)

    def scale_gradients(self, scaling_factor: float) -> None:
        """Multiply all gradients, unreduced ones included, by a factor."""
        self.param_and_grad_buffer.scale_gradients(scaling_factor)

    def reset(self) -> None:
        """Reshard every unit after an exception in forward or backward that every rank met.

        Gradients of the failed backward may have been added in part, as on one process; call `zero_grad` to drop them.
        """
        self._engine.reset()
        self._restore_policy()

    def _restore_policy(self) -> None:
        """Restore the policy that a failed `mixed_precision_context` has replaced."""
        before, self._policy_after_reset = self._policy_after_reset, None
        if before is not None:
            self._change_policy(before)

    # ---- parameters ---------------------------------------------------------------------------------------------

    def _replace_param_with_distributed_if_needed(self) -> None:
        for unit in self._engine.units:
            unit.to_sharded()

    def _replace_param_with_raw_if_needed(self) -> None:
        for unit in self._engine.units:
            unit.to_unsharded()

    def save_pretrained(self, *_args: Any, **_options: Any) -> None:
        """Raise: the method of transformers and peft would write this rank's shards.

        Raises:
            ConfigurationError: Always.
        """
        raise ConfigurationError(
            "save_pretrained would write the shards of one rank; call save_hf(model, folder) of "
            "megatron_fsdp.checkpoint.hf on all ranks, or save_adapter(model, folder) for the adapters of peft"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> MegatronFSDP:
        """Raise: shards, hooks and process groups cannot be copied."""
        raise ConfigurationError(
            "a sharded model cannot be deep-copied (AveragedModel does it, too); copy the model before sharding, and "
            "shard both, or average its shards with the recipe of docs/integrations.md#an-average-of-the-weights"
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Raise: process groups cannot be pickled."""
        raise ConfigurationError(
            "a sharded model cannot be pickled; save model.state_dict() with torch.distributed.checkpoint instead"
        )

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> MegatronFSDP:  # noqa: ARG002
        """Apply a function that neither moves nor casts; raise for others, since shards are views of flat buffers."""
        check_conversion(self.parameters(), fn)
        return self

    # ---- start, wait for and defer communication. Plain loops need none of this --------------------------------------

    @property
    def param_and_grad_buffer(self) -> ParamAndGradBuffer:
        """The flat buffers, for client frameworks."""
        return ParamAndGradBuffer(self._engine)

    @property
    def all_gather_pipeline(self) -> AllGatherPipeline:
        """All-gathers, for callers that start them by hand."""
        return AllGatherPipeline(self._engine)

    @property
    def grad_reduce_pipeline(self) -> GradReducePipeline:
        """Gradient reductions, for callers that start them by hand."""
        return GradReducePipeline(self._engine)

    @property
    def _largest_unit_numel(self) -> int:
        """Elements of the largest unit besides the root, padding included; the root's if it is the only unit."""
        sizes = [sum(group.plan.layout.numel for group in unit.groups) for unit in self._engine.units]
        return max(sizes[1:], default=sizes[0])

    @property
    def suggested_AG_prefetch_size(self) -> int:  # noqa: N802 (the published name)
        """Elements to prefetch: units ahead, times the largest unit; 0: no prefetching.

        Setting it gathers as many units ahead as fit, at least one for any size but 0, in both directions. The number
        of slots grows with it (and does not shrink again), unless `max_gathered_units` or a double buffer fixes it.
        """
        return self._engine.scheduler.config.forward_prefetch_units * self._largest_unit_numel

    @suggested_AG_prefetch_size.setter
    def suggested_AG_prefetch_size(self, numel: int) -> None:  # noqa: N802
        self._engine.set_prefetch(numel)

    @property
    def suggested_RS_queue_capacity(self) -> int:  # noqa: N802
        """Elements in communication buckets at a time: buckets, times the largest unit.

        Setting it changes the number of buckets: as many as fit, at least one (then every reduction is waited for
        before the next unit's gradients come).
        """
        return self._engine.executor.bucket_count * self._largest_unit_numel

    @suggested_RS_queue_capacity.setter
    def suggested_RS_queue_capacity(self, numel: int) -> None:  # noqa: N802
        engine = self._engine
        if not engine.scheduler.config.reduces_early:
            raise ConfigurationError(
                f"suggested_RS_queue_capacity={numel} has no effect with overlap_grad_reduce=False, where reductions "
                "wait for the end of backward; leave it alone or turn the overlap on"
            )
        engine.executor.set_bucket_count(bucket_count(numel, [unit.group_plans for unit in engine.units]))

    @property
    def max_gathered_units(self) -> int:
        """The most units, besides the root, that are unsharded at a time (strategy 3)."""
        return self._engine.scheduler.config.slots

    def start_grad_sync(self, *_unused: Any) -> None:
        """Reduce unreduced gradients, if any."""
        self._engine.reduce_deferred()

    def synchronize_gradient_reduce(self) -> None:
        """Wait until every gradient is reduced."""
        self._engine.reduce_deferred()

    def attach_grad_to_optimizer_state(self) -> None:
        """Set `.grad` of the sharded parameters to the reduced gradients."""
        self._engine.attach_gradients()

    def start_param_sync(self, *_unused: Any, force_sync: bool = False, force_dispatch: bool = False) -> None:  # noqa: ARG002
        """Prefetch weights of the next forward, as many as memory slots allow.

        With `fsdp_all_gather_in_start_param_sync=False` of the config they are gathered here, one unit after another,
        and no gather is in flight when this returns.

        Args:
            force_sync: Wait for them here, whatever the config says.
            force_dispatch: Accepted for callers that pass it; gathering always starts here.
        """
        self._engine.refresh_weights()
        self._engine.prefetch_weights(wait=force_sync or not self._config.fsdp_all_gather_in_start_param_sync)

    def synchronize_param_gather(self) -> None:
        """Wait for all-gathers in flight."""
        self._engine.await_weights()

    def all_gather_and_wait_parameters_ready(
        self,
        params: Iterable[nn.Parameter],
        prefetch: bool = True,  # noqa: ARG002
        prefetch_order: Any = None,  # noqa: ARG002
        wait_bucket_ready: bool = True,
        bwd: bool = False,  # noqa: ARG002
    ) -> None:
        """Unshard the units of some parameters (sharded or full ones), and wait for them.

        Args:
            params: Parameters of the units.
            prefetch: Accepted; only the given units are gathered.
            prefetch_order: Accepted; only the given units are gathered.
            wait_bucket_ready: Wait for the weights, else only start.
            bwd: Accepted; weights are the same in both directions.
        """
        self.all_gather_pipeline.all_gather_params(params, async_param_gather=not wait_bucket_ready)

    def post_forward_release_module(self, module: nn.Module, *_unused: Any) -> None:
        """Reshard a module's units, unless they are in use; never the root."""
        self.all_gather_pipeline.release_params(module.parameters())

    post_backward_release_module = post_forward_release_module

    def pre_backward(self, module: nn.Module, *_unused: Any) -> None:
        """Unshard a module's units ahead of their backward, and wait for them."""
        self.all_gather_pipeline.wait_params(module.parameters())

    def post_backward(self, module: nn.Module, *_unused: Any) -> None:
        """Reduce the gradients of a module's units that are there, without waiting for others."""
        self.grad_reduce_pipeline.reduce_gradients(module.parameters())

    def backward_dw(self) -> None:
        """Compute delayed weight gradients now, instead of at the end of backward.

        Raises:
            ConfigurationError: `delay_wgrad_compute` is off, so there are none.
        """
        if self._engine.delayed is None:
            raise ConfigurationError(
                "backward_dw was called with delay_wgrad_compute=False, where no weight gradient is delayed; set it "
                "in the configuration"
            )
        self._engine.delayed.run()

    def broadcast_params(self) -> None:
        """Broadcast the first rank's weights, if main weights are replicated (strategy 0).

        Under the other strategies each part of the main weights exists once, so there is nothing to send.
        """
        broadcast_whole_weights(self._engine)

    def join(
        self,
        module: nn.Module | None = None,
        hidden: torch.Tensor | None = None,
        order: Sequence[nn.Module] | None = None,
    ) -> torch.Tensor:
        """Join the communication of a module's units without calling it, on a rank that has no data for it.

        Call it where the other ranks call the module: it gathers what they gather, and when the gradient of the result
        comes, it gathers and reduces as their backward does, with gradients of zero.

            hidden = hidden + expert(hidden) if chosen else model.join(expert, hidden)
            loss = loss_of(model(batch)) if batch is not None else model.join()

        Args:
            module: Part of the model, or None for a whole forward (the model itself).
            hidden: What the module would be called on, or any floating-point tensor on which the loss depends; None: a
                new zero, to be added to the loss. A frozen module has a backward only where `hidden` requires grad.
            order: Modules within it in the order that their forward calls them; None: the order of registration.

        Returns:
            `hidden`, unchanged in value; without it a scalar zero.

        Raises:
            ConfigurationError: A module is not part of the model.
            ScheduleError: `hidden` cannot carry a gradient.
        """
        calls = calls_of(self._engine, self.module, module, order)
        return join_units(self._engine, calls, torch.zeros((), device=self.device) if hidden is None else hidden)

    take_part = join  # its earlier name

    def join_hook(self, **_options: Any) -> NoReturn:
        """Raise for torch's `Join`, which asks for a hook.

        Raises:
            NotSupportedYetError: Always.
        """
        raise NotSupportedYetError(
            f"torch.distributed.algorithms.join.Join cannot take {type(self).__name__}, whose ranks gather weights in "
            "each forward; leave Join out, and have ranks with fewer batches call model.join().backward() in each step "
            "that others still have a batch for"
        )

    @property
    def has_unreduced_gradients(self) -> bool:
        """True if there are unreduced gradients; the next gradient sync, or `finish_grad_sync`, reduces them."""
        return self._engine.has_unreduced_gradients

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients without reductions in this block; the next gradient sync reduces the sum.

        So does the step of a connected optimizer. Takes one full gradient in `main_grads_dtype`. The previous mode is
        restored on exit.

        Raises:
            ConfigurationError: The model is deterministic, and sums on a rank depend on the number of ranks.
        """
        if self.is_deterministic:
            raise ConfigurationError(
                f'no_sync cannot be used with deterministic="{self._options.deterministic}", because it adds up the '
                "microbatches of each rank first; accumulate with set_model_auto_sync(False) instead"
            )
        with self._mode.changed(is_last_microbatch=False, defer_all=True):
            yield

    @contextmanager
    def sync(self) -> Iterator[None]:
        """Sync gradients after every backward in this block; restore the previous mode on exit."""
        with self._mode.changed(auto_sync=True, defer_all=False):
            yield

    def set_model_auto_sync(self, sync_model: bool = True) -> None:
        """Set the mode: sync gradients after every backward, or only on request."""
        self._mode.auto_sync = sync_model

    # ---- full tensors. Every rank has to make the same calls ---------------------------------------------------------

    def full_parameters_context(
        self, module: nn.Module | None = None, *, writeback: bool = False, compute_dtype: bool = False
    ) -> AbstractContextManager[None]:
        """Put full, plain parameters into modules in this block, to read, export, run or (`writeback`) change them.

        The parameters are copies of the main weights in their main dtype, without gradients; state dicts taken inside
        hold them. Modules may be called, whole models or, under `torch.no_grad()`, with a part opened. Whatever happens
        inside, the sharded parameters are back afterwards. Memory: the copies and one group. Collective.

        Args:
            module: Open the units that own parameters of this module, and no others; None: all. Small neighbours that
                were merged into one unit are opened together.
            writeback: At the end copy the values of the copies into main and compute weights. Every rank has to write
                the same values; they are compared (one number per tensor) and nothing is copied where they differ.
                After an exception nothing is copied either.
            compute_dtype: Show the parameters in the dtype the model computes in; not with `writeback`.

        Raises:
            ScheduleError: Inside a forward or backward, or for a unit that is open already.
            ConfigurationError: `module` owns no parameter of the model; the two options exclude each other; ranks
                wrote different values, or a parameter was replaced (both on every rank).
        """
        return shown_in_full(self._engine, module, writeback, compute_dtype)

    def iter_full_tensors(
        self, bucket_bytes: int = DEFAULT_BUCKET_BYTES, what: Literal["parameters", "gradients"] = "parameters"
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Iterate over full parameters or gradients, with bounded memory.

        Args:
            bucket_bytes: The most that is held beyond the shards while no more than the latest tensor is kept; a
                tensor of more than half of it is held together with the bucket before it.
            what: "parameters": main weights in the main dtype; "gradients": the gradients, without those that are None.

        Yields:
            Canonical name (a tied one once) and tensor, in the order of units and of their flat buffers. A tensor is a
            view of its bucket; clone it to keep it without the rest. The same on every rank, and every rank has to
            iterate over all of them. Until the iterator is exhausted, closed or deleted, forwards, backwards, steps,
            syncs, saves, loads and further iterations raise a ScheduleError.

        Raises:
            ScheduleError: Inside a forward or backward, or while another iteration is open.
            ConfigurationError: An argument is out of range, or ranks have gradients for different parameters.
        """
        with all_agree("iter_full_tensors", self._engine.reaching_all) as facts:
            check_bucket_bytes(bucket_bytes)
            if what not in ("parameters", "gradients"):
                raise ConfigurationError(f"what={what!r} is unknown; give 'parameters' or 'gradients'")
            facts |= {"bucket_bytes": str(bucket_bytes), "what": what}
        tensors = iter_parameters if what == "parameters" else iter_gradients
        return tensors(self._engine, bucket_bytes)

    def parameter_statistics(self) -> ModelStatistics:
        """Return mean, std, norm, extremes, zeros and non-finite elements of all main weights. One small collective."""
        return parameter_statistics(self._engine)

    def gradient_statistics(self) -> ModelStatistics:
        """Return the same statistics of all gradients. One small collective."""
        return gradient_statistics(self._engine)

    def parameter_digests(self) -> dict[str, str]:
        """Return a digest of the main weights of each unit, 16 hexadecimal digits by the unit's label. Collective.

        It depends on every bit and on no cut: the same weights give the same digest on any ranks under any strategy.
        """
        return parameter_digests(self._engine)

    def gradient_digests(self) -> dict[str, str]:
        """Return the same digests of all gradients; None adds nothing."""
        return gradient_digests(self._engine)

    # ---- state dicts of a sharded model and of its optimizers --------------------------------------------------------

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load as `torch.nn.Module.load_state_dict` does, then install the weights.

        Accepts this rank's shards, as `state_dict()` gives them, and whole tensors that are the same on every rank, in
        any mixture; whole tensors of experts may be those of all ranks. No communication, but for DTensors that torch
        has cut, as those of FSDP2: they are gathered one after another, so that all ranks have to load them.

        Args:
            state_dict: By the names of `state_dict()`.
            strict: Refuse missing and unexpected keys. Shapes and cuts that do not fit are refused in any case.
            assign: False.

        Returns:
            What torch returns: the missing and the unexpected keys.

        Raises:
            CheckpointError: Something does not fit; lists everything. Nothing was loaded. Each rank judges what it was
                given and only ranks that were given what does not fit raise, as a state dict may be loaded by one rank
                alone; where shards come out of a file (`torch.load`) all ranks have to load them, and all raise.
            ConfigurationError: `assign` is True.
        """
        given: object = state_dict
        load = super().load_state_dict
        if not isinstance(given, Mapping):
            return load(state_dict, strict)  # torch refuses it
        return load_shards(self._engine, self, load, state_dict, strict, assign)

    @property
    def checkpoint_names(self) -> CheckpointNames:
        """The names of parameters in checkpoints (docs/checkpoints.md)."""
        return CheckpointNames(self._engine)

    # ---- read-only views of a sharded model --------------------------------------------------------------------------

    @property
    def raw_param(self) -> dict[str, nn.Parameter]:
        """The full compute parameters by canonical name; their values are valid while their unit is gathered."""
        return {name: full for name, full, _ in self._named_parameters()}

    @property
    def param_to_name(self) -> dict[nn.Parameter, str]:
        """Canonical name of every parameter object, sharded and full."""
        return {param: name for name, *both in self._named_parameters() for param in both}

    @property
    def is_deterministic(self) -> bool:
        """True if results do not depend on the number of ranks, bit for bit."""
        return self._engine.is_deterministic

    def parameter_groups(self) -> list[ParameterGroup]:
        """Return all parameter groups, in unit order."""
        return self._engine.groups()

    def _named_parameters(self) -> Iterator[tuple[str, nn.Parameter, nn.Parameter]]:
        """Yield canonical name, full and sharded parameter, in unit order."""
        for group in self._engine.groups():
            yield from zip(group.names, group.full, group.sharded, strict=True)

    def full_parameters(self) -> dict[str, torch.Tensor]:
        """All-gather all main weights, by canonical name, on every rank. Collective."""
        return full_parameters(self._engine)

    def full_gradients(self) -> dict[str, torch.Tensor | None]:
        """All-gather all gradients, by canonical name, on every rank; None where `.grad` is None. Collective."""
        return full_gradients(self._engine)

    def observe(self, observer: Observer) -> None:
        """Add an observer of every phase and collective of this model on this rank, until `stop_observing`."""
        self._engine.observers.add(observer)

    def stop_observing(self, observer: Observer) -> None:
        """Remove an observer."""
        self._engine.observers.remove(observer)

    def check_lifetimes(self) -> None:
        """Check every use of borrowed memory from now on, and poison released memory (docs/debugging.md).

        Results stay the same, bit for bit. Weights that are gathered now are gathered again at their next use.

        Raises:
            ScheduleError: A forward or backward is running.
        """
        check_lifetimes(self._engine)

    def log_for_hangs(self, folder: str | os.PathLike[str], *, timeout_s: float | None = None) -> None:
        """Log this rank's latest events, to explain a hang (docs/debugging.md). Collective.

        Args:
            folder: Where the logs of all ranks go, one file each; one that all ranks see, where there is one. `mfsdp
                hang FOLDER` reads it, at any time and from any machine.
            timeout_s: Print the explanation when nothing has happened for so many seconds while a rank communicates;
                training is not stopped. None: only when asked, and with errors of communication.

        Raises:
            ConfigurationError: On every rank, where one cannot write, or `timeout_s` is no time; or this model keeps a
                log already.
        """
        log_for_hangs(self, folder, timeout_s=timeout_s)

    def stop_logging_for_hangs(self) -> None:
        """Close the log, if there is one."""
        stop_logging_for_hangs(self)

    def describe(self) -> Description:
        """Describe units, options and memory of the model on this rank, read from live objects; no communication.

        `print(model.describe())` is for people, `.to_dict()` for programs (docs/debugging.md).
        """
        return describe(self)

    def traffic(self) -> Traffic:
        """Return the traffic that this rank has sent for this model so far."""
        return self._engine.traffic.copy()

    def traffic_by_axis(self) -> dict[str, Traffic]:
        """Return the traffic along each data-parallel axis so far, by the name of its mesh dimension."""
        return {name: traffic.copy() for name, traffic in self._engine.traffic_by_axis.items()}

    def memory(self) -> MemoryUse:
        """Return the bytes that the engine holds on this rank now."""
        return memory_of(self._engine)


def _ranks_of_index(index: object) -> Groups:
    """Return the groups of an unchecked index, or of the only element of a tuple."""
    found = index[0] if isinstance(index, tuple) and index else index
    return getattr(found, "reaching_all", ())


def _own_config(
    given: object, policy: MixedPrecisionPolicy, disable_bucketing: bool
) -> tuple[DistributedDataParallelConfig, MixedPrecisionPolicy]:
    """Return a checked copy of the configuration in this package's class, and the policy completed by it."""
    if given is None:
        return DistributedDataParallelConfig(
            data_parallel_sharding_strategy="optim_grads_params", overlap_grad_reduce=True, overlap_param_gather=True
        ), policy
    if isinstance(given, DistributedDataParallelConfig):
        given = given.checked_copy()
        given.use_megatron_fsdp = False  # whoever calls this has chosen it; no note is needed
    config, notes = DistributedDataParallelConfig.read_from(given)
    for note in notes:
        logger.info(note)
    if disable_bucketing:  # Megatron-Core's training loop always sets a size, and disables it for some model chunks
        config.bucket_size = None
    if getattr(given, "grad_reduce_in_fp32", False) and policy.main_grads_dtype is policy.grad_comm_dtype is None:
        policy = replace(policy, main_grads_dtype=torch.float32, grad_comm_dtype=torch.float32)
    return config, policy
