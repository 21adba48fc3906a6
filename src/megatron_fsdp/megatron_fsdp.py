"""`MegatronFSDP`: the wrapper around a sharded model. It owns the engine; the model's own code does not change."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from megatron_fsdp.arguments import CLASS_DEFAULTS, CONFIG_DEFAULTS, explains_arguments, refuse_unsupported
from megatron_fsdp.buffer.lanes import resolve_device
from megatron_fsdp.checkpoint_access import CheckpointAccess
from megatron_fsdp.distributed_data_parallel_config import DistributedDataParallelConfig
from megatron_fsdp.distributed_index import FSDPDistributedIndex
from megatron_fsdp.errors import ConfigurationError
from megatron_fsdp.hand_driven import HandDriven
from megatron_fsdp.memory_options import resolve_memory_options
from megatron_fsdp.mixed_precision import MixedPrecisionPolicy, check_policy
from megatron_fsdp.notices import warn_caller
from megatron_fsdp.parameters_access import ParametersAccess
from megatron_fsdp.placement import ShardingStrategy, resolve_strategy
from megatron_fsdp.reports import Reports
from megatron_fsdp.runtime.assemble import Switches, assemble
from megatron_fsdp.runtime.compiled import compiled_in_place
from megatron_fsdp.runtime.delayed_linear import delay_all, undelay_weight_gradients
from megatron_fsdp.runtime.grad_norm import clip_gradients
from megatron_fsdp.runtime.optimizer import watch_optimizers
from megatron_fsdp.runtime.sync import SyncMode
from megatron_fsdp.runtime.unit_grouping import Grouping, UnitGrouping
from megatron_fsdp.runtime.unseen_gradients import ReplacedParameters
from megatron_fsdp.runtime.verify_ranks import compares_steps, resolve_verify_ranks

logger = logging.getLogger("megatron_fsdp")


class MegatronFSDP(HandDriven, ParametersAccess, CheckpointAccess, Reports, nn.Module):
    """A model whose parameters, gradients and optimizer state are sharded over data-parallel ranks.

    `parameters()` yields DTensors over this rank's pieces, before and after every forward and backward; inside the
    forward of a unit its modules hold full, plain tensors. `.grad` is there after a backward that synchronises.

    Args:
        module: The model; sharded in place and kept as `.module`.
        dist_index: Mesh and process groups.
        ddp_config: Strategy and switches; None: `optim_grads_params` with both overlaps. It is not modified. Its
            `megatron_fsdp_*_dtype` fields belong to front ends that build a policy; here the policy leads. One of
            another class, such as Megatron-Core's own, is read as `DistributedDataParallelConfig.read_from` says.
        mixed_precision_policy: Dtypes of main weights, main gradients and gradient communication.
        fsdp_unit_modules: Classes or import paths of the units; None or "auto": found by themselves.
        disable_bucketing: Never cut the parameters outside of units into several buckets.
        device: Where the shards live; None: this process's device of the mesh's type.
        calculate_per_token_loss: Sum gradients over ranks, without a factor.
        init_model_with_meta_device: As in `fully_shard_model`.
        sync_model_each_microbatch: Synchronise gradients after every backward. False (the default of this class): set
            `is_last_microbatch`, call `finish_grad_sync`, or let `optimizer.step` do it.
        keep_fp8_transpose_cache: Not supported yet.
        nccl_ub: Not supported yet.
        fsdp_double_buffer: As in `fully_shard_model`; either here or in `ddp_config`.
        fsdp_db_use_persist_buf_on_alloc_fail: As `fsdp_double_buffer`.
        disable_symmetric_registration: Not supported yet.
        enable_fine_grained_param_gather_hook: Gather the modules inside units one by one, in both directions.
        enable_fine_grained_param_gather_backward_hook: Refused on its own, and implied by the former.
        fine_grained_recurse_module_types: Classes of modules that are then gathered whole, with all inside them.
        report_nan_in_param_grad: Check every gradient for NaN and infinity and raise on all ranks, with names.
        reduce_scatter_with_fp32_accumulation: Also taken from `ddp_config`.
        weight_allocator: As in `fully_shard_model`, as those that follow.
        max_gathered_units: See there.
        forward_prefetch_units: See there.
        backward_prefetch_units: See there.
        verify_ranks: See there.
        find_unused_parameters: See there.

    Raises:
        ConfigurationError: An argument, a combination or the model cannot be honoured.
        NotSupportedYetError: An argument that this version does not implement is not at its default.
    """

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
    ) -> None:
        given = dict(locals())
        refuse_unsupported(given, CLASS_DEFAULTS)
        check_policy(mixed_precision_policy)
        config, policy = _own_config(ddp_config, mixed_precision_policy, disable_bucketing)
        refuse_unsupported(vars(config), CONFIG_DEFAULTS)
        memory = resolve_memory_options(given, config)
        if memory.idle:
            warn_caller(
                f"{' and '.join(f'{name}=True' for name in memory.idle)} has no effect under "
                f"{config.data_parallel_sharding_strategy}, where every rank holds whole weights; leave it out, or use "
                "optim_grads_params (3)"
            )
        outer_strategy = resolve_strategy(config.outer_dp_sharding_strategy, "outer_dp_sharding_strategy")
        if dist_index.hsdp_outer_dp_shard and outer_strategy is not ShardingStrategy.optim:
            raise ConfigurationError(
                "dist_index has hsdp_outer_dp_shard=True, but outer_dp_sharding_strategy of ddp_config is "
                f'"{outer_strategy.name}"; set both or neither'
            )
        switches = Switches(
            strategy=resolve_strategy(config.data_parallel_sharding_strategy, "data_parallel_sharding_strategy"),
            outer_strategy=outer_strategy,
            policy=policy,
            overlap_grad_reduce=config.overlap_grad_reduce,
            overlap_param_gather=config.overlap_param_gather,
            average_in_collective=config.average_in_collective,
            calculate_per_token_loss=calculate_per_token_loss,
            check_finite=report_nan_in_param_grad or config.check_for_nan_in_grad,
            memory=memory,
            init_meta=init_model_with_meta_device,
            reduce_scatter_with_fp32_accumulation=reduce_scatter_with_fp32_accumulation
            or config.reduce_scatter_with_fp32_accumulation,
            scales_first=not config.gradient_reduce_div_fusion,
            fp32_patterns=config.param_name_patterns_for_fp32_local_accumulation,
            verify_ranks_s=resolve_verify_ranks(verify_ranks),
            verify_each_step=compares_steps(verify_ranks),
            find_unused_parameters=find_unused_parameters,
            check_large=config.check_for_large_grads,
            fuses_weight_gradients=config.gradient_accumulation_fusion,
            delays_weight_gradients=config.delay_wgrad_compute,
        )
        grouping = UnitGrouping(fsdp_unit_modules, memory)
        self._wrap(module, dist_index, config, switches, grouping, device, sync_model_each_microbatch)
        self.fsdp_unit_modules = fsdp_unit_modules
        if ddp_config is not None:
            self.ddp_config = ddp_config

    @torch.inference_mode(False)  # shards, buckets and hooks serve training, wherever they are made
    def _wrap(
        self,
        module: nn.Module,
        dist_index: FSDPDistributedIndex,
        config: DistributedDataParallelConfig,
        switches: Switches,
        grouping: Grouping,
        device: torch.device | str | int | None,
        auto_sync: bool,
    ) -> None:
        """Shard the model as was decided."""
        nn.Module.__init__(self)
        self.module = module = compiled_in_place(module)
        self.dist_index = dist_index
        self.ddp_config = self._config = config
        self._switches = switches
        self.mp_policy = switches.policy
        self._policy_after_reset: MixedPrecisionPolicy | None = None
        self.calculate_per_token_loss = switches.calculate_per_token_loss
        self.report_nan_in_param_grad = switches.check_finite
        self.microbatch_count = 0
        self._mode = SyncMode(auto_sync=auto_sync)
        mesh = dist_index.get_submesh((_shard_dim(dist_index),))
        self.device = resolve_device(device, mesh.device_type)
        if self.device.type != mesh.device_type:
            raise ConfigurationError(
                f"device={device!r} is not of the mesh's type {mesh.device_type!r}; leave it out, or build the "
                "mesh for that device type"
            )
        self._gathers_at_once = not config.fsdp_all_gather_in_start_param_sync
        replaced = ReplacedParameters(module)
        finished = weakref.WeakMethod(self._backward_finished)
        delayed = delay_all(module) if switches.delays_weight_gradients else None
        try:
            self._assembly = assemble(
                module, grouping, switches, dist_index, self.device, self._mode, _weakly(finished)
            )
        except BaseException:
            if delayed is not None:
                undelay_weight_gradients(module)
            raise
        self._engine = self._assembly.engine
        self._engine.delayed = delayed
        self._engine.replaced = replaced
        if config.megatron_fsdp_use_decoupled_grad:
            for group in self._engine.groups():
                group.decouple_gradients()
        self._bucket_numel = grouping.cut_numel(self._engine.num_ranks)
        watch_optimizers(self._engine)
        self._stamp_parameters()
        self._log_as_told()
        for line in self._assembly.plan_lines:
            logger.info(line)

    # ---- what clients read --------------------------------------------------------------------------------------

    @property
    def data_parallel_sharding_strategy(self) -> str:
        """The strategy by name."""
        return self._switches.strategy.name

    @property
    def model_auto_sync(self) -> bool:
        """Whether every backward ends with a gradient sync."""
        return self._mode.auto_sync

    @property
    def is_last_microbatch(self) -> bool:
        """What was said of the next backward; absent until it is set, as in the published package."""
        if self._mode.is_last_microbatch is None:
            raise AttributeError("is_last_microbatch has not been set")
        return self._mode.is_last_microbatch

    @is_last_microbatch.setter
    def is_last_microbatch(self, value: bool) -> None:
        self._mode.is_last_microbatch = value

    @property
    def bucket_size(self) -> int | None:
        """Elements that close a bucket of parameters outside of units; None: they are never cut."""
        return self._bucket_numel

    @property
    def is_param_fsdp_distributed(self) -> bool:
        """Whether the modules hold the sharded parameters; inside their forward and backward they do not."""
        return not self._engine.opened and not any(unit.shows_full for unit in self._engine.units)

    def get_distributed_index(self) -> FSDPDistributedIndex:
        """Mesh and process groups."""
        return self.dist_index

    # ---- forward, backward, step --------------------------------------------------------------------------------

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model."""
        return self.module(*args, **kwargs)

    def _backward_finished(self) -> None:
        if self._mode.syncs:
            self.finish_grad_sync()
        else:
            self.microbatch_count += 1

    def finish_grad_sync(self, force_all_reduce: bool = False) -> None:  # noqa: ARG002
        """Reduce everything that was deferred, wait for it, and make gradients visible as `.grad`.

        Args:
            force_all_reduce: Accepted for callers that pass it; reductions already are what the strategy needs.
        """
        self.synchronize_gradient_reduce()
        self.attach_grad_to_optimizer_state()
        self.microbatch_count = 0

    def install_optimized_model_weights(self) -> None:
        """Bring compute weights up to date with main weights; what was gathered is gathered again at its next use."""
        self._engine.install_main_weights()

    def zero_grad_buffer(self) -> None:
        """Forget all gradients, those of this rank that are not reduced yet included."""
        self._engine.clear_gradients()

    @contextmanager
    def mixed_precision_context(self, mixed_precision_policy: MixedPrecisionPolicy) -> Iterator[None]:
        """Use the `grad_comm_dtype` of another policy inside a block; main dtypes stay.

        After an error in a backward inside the block, `reset` brings the policy of before back.

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
        self.reset_mixed_precision_policy(before)

    def reset_mixed_precision_policy(self, mixed_precision_policy: MixedPrecisionPolicy) -> None:
        """Change the dtype in which gradients travel, from the next backward on.

        Args:
            mixed_precision_policy: Its `grad_comm_dtype` is taken. Main dtypes stay: each has to be None, the default
                or that of the model.

        Raises:
            ConfigurationError: The policy asks for other main dtypes (buffers of these exist already), a backward is
                under way, or deferred gradients wait for their reduction.
        """
        check_policy(mixed_precision_policy)
        old, unset = self.mp_policy, MixedPrecisionPolicy()
        for name in ("main_params_dtype", "main_grads_dtype"):
            if getattr(mixed_precision_policy, name) not in (None, getattr(unset, name), getattr(old, name)):
                raise ConfigurationError(
                    f"{mixed_precision_policy} changes {name} of {old}; only grad_comm_dtype can change after "
                    f"wrapping, so leave {name} out"
                )
        new = replace(old, grad_comm_dtype=mixed_precision_policy.grad_comm_dtype)
        self._engine.change_grad_comm_dtype(new)
        self.mp_policy = new

    def forget_pending_gradients(self, params: Iterable[nn.Parameter]) -> None:
        """Forget what was accumulated for sharded parameters and is not visible as their `.grad` yet."""
        self._engine.forget_pending_gradients(params)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear gradients as `torch.nn.Module.zero_grad` does, and forget deferred ones."""
        super().zero_grad(set_to_none)
        params = [param for group in self._engine.groups() for param in group.sharded]
        self.clear_decoupled_gradients(params, set_to_none)
        self.forget_pending_gradients(params)

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> torch.Tensor:
        """Clip the norm of all gradients together, with one small all-reduce; returns the norm before clipping.

        Takes any positive p, infinity included. `torch.nn.utils.clip_grad_norm_` works on the parameters too, but torch
        refuses infinity for ranks that own no element of some parameter. With `error_if_nonfinite` a norm that is NaN
        or infinite raises NonFiniteNormError (a RuntimeError, as torch's) on every rank and leaves gradients alone.
        """
        if not self.model_auto_sync or self.has_deferred_gradients:
            self.finish_grad_sync()
        return clip_gradients(self._engine, max_norm, norm_type, error_if_nonfinite)

    def scale_gradients(self, scaling_factor: float) -> None:
        """Multiply all gradients, visible and deferred, by a factor."""
        for group in self._engine.groups():
            if group.gradients is not None:
                group.gradients.scale(scaling_factor, group.sharded)

    def reset(self) -> None:
        """Bring every unit back to rest after an exception in forward or backward that every rank met.

        Gradients of the failed backward may have been added in part, as on one process; call `zero_grad` to drop them.
        """
        self._engine.reset()
        self._restore_policy()
        self.microbatch_count = 0

    def _restore_policy(self) -> None:
        """Return to the policy that a failed block has left to be restored."""
        before, self._policy_after_reset = self._policy_after_reset, None
        if before is not None:
            self.reset_mixed_precision_policy(before)

    # ---- parameters ---------------------------------------------------------------------------------------------

    def _replace_param_with_distributed_if_needed(self) -> None:
        for unit in self._engine.units:
            unit.install_sharded()

    def _replace_param_with_raw_if_needed(self) -> None:
        for unit in self._engine.units:
            unit.install_full()

    def is_connected(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether an optimizer was connected to this model."""
        return optimizer in self._engine.connected

    def adopt(self, optimizer: torch.optim.Optimizer) -> None:
        """Note that an optimizer is connected.

        Raises:
            ConfigurationError: It keeps parameters, besides those of its groups, from before the model was sharded.
        """
        if self._engine.replaced is not None:
            self._engine.replaced.check(optimizer)
        self._engine.connected.add(optimizer)

    def self_reference(self) -> MegatronFSDP:
        """This object itself, also when called through a weak proxy."""
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> MegatronFSDP:
        """Refuse; the shards, hooks and process groups of a model belong to it alone."""
        raise ConfigurationError(
            "a sharded model cannot be deep-copied; copy the model before sharding, and shard both"
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refuse; process groups cannot be pickled."""
        raise ConfigurationError(
            "a sharded model cannot be pickled; save model.state_dict() with torch.distributed.checkpoint instead"
        )

    def _stamp_parameters(self) -> None:
        """The one attribute on parameters: a weak reference back to this object."""
        for group in self._engine.groups():
            for param in group.sharded:
                param._megatron_fsdp_model = weakref.proxy(self)  # type: ignore[attr-defined]

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> MegatronFSDP:  # noqa: ARG002
        """Refuse to move or cast: the shards are pieces of flat buffers. Doing nothing is allowed."""
        for group in self._engine.groups():
            probe = torch.empty(0, dtype=group.plan.precision.main_params, device=group.plan.device)
            moved = fn(probe)
            if (moved.dtype, moved.device) != (probe.dtype, probe.device):
                raise ConfigurationError(
                    f"a sharded model cannot be moved or cast (from {probe.dtype} on {probe.device} to {moved.dtype} "
                    f"on {moved.device}); do that before fully_shard, or choose dtypes by MixedPrecisionPolicy"
                )
        return self


def _own_config(
    given: object, policy: MixedPrecisionPolicy, disable_bucketing: bool
) -> tuple[DistributedDataParallelConfig, MixedPrecisionPolicy]:
    """The configuration as this package writes it, and the policy with what a foreign configuration adds to it."""
    if given is None:
        return DistributedDataParallelConfig(
            data_parallel_sharding_strategy="optim_grads_params", overlap_grad_reduce=True, overlap_param_gather=True
        ), policy
    if isinstance(given, DistributedDataParallelConfig):
        return given.checked_copy(), policy
    config, notices = DistributedDataParallelConfig.read_from(given)
    for notice in notices:
        logger.info(notice)
    if disable_bucketing:  # Megatron-Core's training loop always sets a size, and disables it for some model chunks
        config.bucket_size = None
    if getattr(given, "grad_reduce_in_fp32", False) and policy.main_grads_dtype is policy.grad_comm_dtype is None:
        policy = replace(policy, main_grads_dtype=torch.float32, grad_comm_dtype=torch.float32)
    return config, policy


def _shard_dim(dist_index: FSDPDistributedIndex) -> str:
    if dist_index.dp_shard_dim is None:
        raise ConfigurationError("dist_index has dp_shard_dim=None; name the mesh dimension to shard over")
    return dist_index.dp_shard_dim


def _weakly(method: weakref.WeakMethod[Callable[[], None]]) -> Callable[[], None]:
    """Call a method for as long as its object lives."""

    def call() -> None:
        alive = method()
        if alive is not None:
            alive()

    return call
