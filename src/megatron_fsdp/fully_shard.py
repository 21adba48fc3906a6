"""The public functions: shard a model, an optimizer, or both, in one call.

The engine is imported at the first call: its DTensors take torch most of a second, which a program that only imports
this package, such as a help text or the worker of a data loader, need not wait for.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from importlib import import_module
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from megatron_fsdp.comm.agreement import Groups, agreed, all_agree, raise_together, rank_of
from megatron_fsdp.config.ddp_config import DistributedDataParallelConfig, ShardingStrategy, resolve_strategy
from megatron_fsdp.config.engine_options import OffloadArgument
from megatron_fsdp.config.precision import MixedPrecisionPolicy, check_policy
from megatron_fsdp.errors import ConfigurationError, explains_arguments, warn_caller
from megatron_fsdp.optional_packages import warn_of_namesake

if TYPE_CHECKING:
    from megatron_fsdp.engine.engine import Engine
    from megatron_fsdp.megatron_fsdp import MegatronFSDP
    from megatron_fsdp.sharding.mesh import FSDPDistributedIndex


__all__ = [
    "DistributedDataParallelConfig",
    "FSDPDistributedIndex",
    "MegatronFSDP",
    "MixedPrecisionPolicy",
    "ShardingStrategy",
    "experimental_api",
    "fully_shard",
    "fully_shard_model",
    "fully_shard_optimizer",
]

_DOING = "sharding the model"  # in messages, where a rank cannot go on
UnitModules = Sequence[type[nn.Module] | str] | str | None
_DEFAULT_POLICY = MixedPrecisionPolicy()

_Marked = TypeVar("_Marked")
_Others = ParamSpec("_Others")
_Optimizer = TypeVar("_Optimizer", bound=torch.optim.Optimizer)


def experimental_api(marked: _Marked) -> _Marked:
    """Mark a function or class whose interface may still change; return it unchanged."""
    return marked


def replace_legacy_keywords(
    mixed_precision_policy: MixedPrecisionPolicy,
    report_nan_in_param_grad: bool,
    keep_fp8_transpose_cache: bool,
    *,
    grad_reduce_in_fp32: bool | None = None,
    preserve_fp32_weights: bool | None = None,
    check_for_nan_in_grad: bool | None = None,
    keep_fp8_transpose_cache_when_using_custom_fsdp: bool | None = None,
) -> tuple[MixedPrecisionPolicy, bool, bool]:
    """Apply legacy keywords (None: not given) to the arguments that replaced them, with one warning.

    Raises:
        ConfigurationError: A legacy keyword and the argument that replaced it are both given and disagree.
    """
    policy, warned = mixed_precision_policy, []

    def contradicts(keyword: str, other: str) -> ConfigurationError:
        return ConfigurationError(f"{keyword} is deprecated and contradicts {other}; leave the former out.")

    for keyword, value, names in (
        ("grad_reduce_in_fp32", grad_reduce_in_fp32, ("main_grads_dtype", "grad_comm_dtype")),
        ("preserve_fp32_weights", preserve_fp32_weights, ("main_params_dtype",)),
    ):
        if value is None:
            continue
        dtypes = dict.fromkeys(names, torch.float32 if value else None)
        wanted, was_given = replace(policy, **dtypes), mixed_precision_policy is not _DEFAULT_POLICY
        if was_given and _with_grad_comm(wanted) != _with_grad_comm(policy):
            raise contradicts(f"{keyword}={value}", f"mixed_precision_policy={mixed_precision_policy}")
        policy, mapped = wanted, ", ".join(f"{name}={dtype}" for name, dtype in dtypes.items())
        warned.append((f"{keyword}={value}", f"mixed_precision_policy=MixedPrecisionPolicy({mapped})"))
    flags = {"report_nan_in_param_grad": report_nan_in_param_grad, "keep_fp8_transpose_cache": keep_fp8_transpose_cache}
    for keyword, value, name in (
        ("check_for_nan_in_grad", check_for_nan_in_grad, "report_nan_in_param_grad"),
        (
            "keep_fp8_transpose_cache_when_using_custom_fsdp",
            keep_fp8_transpose_cache_when_using_custom_fsdp,
            "keep_fp8_transpose_cache",
        ),
    ):
        if value is None:
            continue
        if flags[name] and not value:
            raise contradicts(f"{keyword}={value}", f"{name}={flags[name]}")
        flags[name] = value
        warned.append((f"{keyword}={value}", f"{name}={value}"))
    if warned:
        sentences = (f"{old} is deprecated and was taken as {new}; write that instead." for old, new in warned)
        warn_caller(" ".join(sentences), FutureWarning)
    return policy, *flags.values()  # type: ignore[return-value]


def _with_grad_comm(policy: MixedPrecisionPolicy) -> MixedPrecisionPolicy:
    """Return the policy with an explicit communication dtype, to compare policies."""
    return replace(policy, grad_comm_dtype=policy.grad_comm_dtype or policy.main_grads_dtype)


def _ranks_of(
    _module: object = None,
    device_mesh: object = None,
    dp_shard_dim: object = None,
    dp_outer_dim: object = None,
    tp_dim: object = None,
    *_: object,
    **__: object,
) -> Groups:
    """Return the groups of the ranks that call `fully_shard_model` together."""
    from megatron_fsdp.sharding.mesh import ranks_of

    return ranks_of(device_mesh, dp_outer_dim, dp_shard_dim, tp_dim)


@agreed(_DOING, _ranks_of)
@explains_arguments(module="give the model to shard.")
def fully_shard_model(
    module: nn.Module,
    device_mesh: DeviceMesh | None = None,
    dp_shard_dim: str | None = None,
    dp_outer_dim: str | None = None,
    tp_dim: str | None = None,
    hybrid_fsdp_group: dist.ProcessGroup | None = None,
    hybrid_fsdp_expt_group: dist.ProcessGroup | None = None,
    expt_device_mesh: DeviceMesh | None = None,
    fsdp_group_ag: dist.ProcessGroup | None = None,
    expt_fsdp_group_ag: dist.ProcessGroup | None = None,
    fsdp_unit_modules: UnitModules = None,
    zero_dp_strategy: str | int = 3,
    outer_dp_sharding_strategy: str | int = 0,
    device: torch.device | str | int | None = None,
    init_model_with_meta_device: bool | str = False,
    mixed_precision_policy: MixedPrecisionPolicy = _DEFAULT_POLICY,
    overlap_grad_reduce: bool = True,
    overlap_param_gather: bool = True,
    sync_model_each_microbatch: bool = True,
    preproc_state_dict_for_dcp_ckpt: bool = True,
    report_nan_in_param_grad: bool = False,
    average_in_collective: bool = False,
    disable_bucketing: bool = False,
    calculate_per_token_loss: bool = False,
    keep_fp8_transpose_cache: bool = False,
    nccl_ub: bool = False,
    fsdp_double_buffer: bool = False,
    fsdp_db_use_persist_buf_on_alloc_fail: bool = False,
    disable_symmetric_registration: bool = False,
    enable_fine_grained_param_gather: bool = False,
    use_decoupled_grad: bool = False,
    cuda_graph_mode: bool = False,
    maxpool_double_buffer: bool = False,
    grad_reduce_in_fp32: bool | None = None,
    preserve_fp32_weights: bool | None = None,
    check_for_nan_in_grad: bool | None = None,
    keep_fp8_transpose_cache_when_using_custom_fsdp: bool | None = None,
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
    zero_dp_strategy_experts: str | int | None = None,
) -> MegatronFSDP:
    """Shard a model over data-parallel ranks.

    Args:
        module: The model, with its parameters on one device; sharded in place and kept as `.module` of the result.
        device_mesh: The mesh; None: all ranks, on the accelerator of this process or the CPU.
        dp_shard_dim: The mesh dimension (or flattened dimension) to shard over; may be left out if there is only one.
        dp_outer_dim: The outer dimension of hybrid sharding: parameters are sharded over `dp_shard_dim` and replicated
            over this one, and gradients are reduced over it once per sync.
        tp_dim: The tensor-parallel dimension. Parameters that `parallelize_module` made DTensors over it are sharded
            further; None: the mesh dimension that these DTensors name. Without a mesh, a dimension of one rank.
        hybrid_fsdp_group: All ranks of `dp_outer_dim` and `dp_shard_dim`; required with `dp_outer_dim`.
        hybrid_fsdp_expt_group: The same for experts; made from their mesh if left out.
        expt_device_mesh: The mesh of expert parameters (`.experts.` in the name, or `allreduce=False` on the
            parameter), with the same dimension names and further ones over which experts differ
            (docs/parallel_meshes.md says what may be left out).
        fsdp_group_ag: A second group of the ranks of `dp_shard_dim`, for parameter gathers only.
        expt_fsdp_group_ag: The same for experts.
        fsdp_unit_modules: Classes or import paths of the modules to unshard and reshard as units; None or "auto": those
            that the model declares in `_no_split_modules`, else repeated blocks. Large embeddings and linear layers
            beside them become units, too.
        zero_dp_strategy: 0 or "no_shard", 1 or "optim", 2 or "optim_grads", 3 or "optim_grads_params".
        outer_dp_sharding_strategy: 0 or "no_shard": replicate over `dp_outer_dim` (HSDP); 1 or "optim": shard main
            weights and optimizer state over it, too (HFSDP).
        device: Device of the shards; None: this process's device of the mesh's type.
        init_model_with_meta_device: Initialise parameters and buffers that are on the meta device, module by module by
            `reset_parameters()`, `_reset_parameters()`, `reset_buffers()` or the model's `_init_weights(module)`,
            without the whole model in memory: bit for bit what building the model on `device` under the same seed
            gives, for any number of ranks (docs/sharded_models.md). Real tensors keep their values. "empty": only
            allocate parameters on the meta device, and leave buffers there; the caller fills both before any use.
        mixed_precision_policy: Dtypes of main weights, main gradients and gradient communication.
        overlap_grad_reduce: Reduce gradients during backward; strategies 2 and 3 always do.
        overlap_param_gather: Gather weights ahead of their use; strategy 3 always does.
        sync_model_each_microbatch: Make gradients final and visible after every backward.
        preproc_state_dict_for_dcp_ckpt: Attach chunk metadata to the tensors of state dicts, for
            torch.distributed.checkpoint. Turn it off only for a checkpoint format of your own.
        report_nan_in_param_grad: Check every gradient for NaN and infinity; raises on all ranks, with names.
        average_in_collective: Average in the collective instead of a sum and a factor.
        disable_bucketing: Never cut the parameters outside of units into several buckets, nor add large ends to units
            that `fsdp_unit_modules` names.
        calculate_per_token_loss: Sum gradients over ranks, without a factor.
        keep_fp8_transpose_cache: Keep the transposed codes that backward multiplies while weights are gathered, where
            `mixed_precision_policy` has weight_format="fp8_compute" (docs/precision.md).
        nccl_ub: Take all communication memory here, in one stretch whose blocks lie at the same offsets on every rank,
            keep it, and register it with NCCL; implies `fsdp_double_buffer`, with a buffer of its own for each unit
            that does not fit. Where nothing can be registered (gloo, one rank) a warning says so, and addresses stay
            the same all the same.
        fsdp_double_buffer: Gather into two buffers of the most common unit's size, allocated here and kept; other
            units allocate memory when they are gathered. Strategy 3; under others it only gives a warning.
        fsdp_db_use_persist_buf_on_alloc_fail: Keep a buffer for each of those other units.
        disable_symmetric_registration: Register without symmetric windows; with `nccl_ub`.
        enable_fine_grained_param_gather: Gather the modules inside units one by one.
        use_decoupled_grad: Set gradients as `param.decoupled_grad` in `main_grads_dtype`, never cast, and leave
            `.grad` None; for optimizers that read them there, Muon, LBFGS and those that step whole tensors.
        cuda_graph_mode: Allow whole steps in a CUDA graph, which is replayed: communication memory, unsharded
            weights and gradients keep their addresses, and `zero_grad` sets gradients to zero in place. Run a few
            steps before capturing (docs/memory.md).
        maxpool_double_buffer: Double buffers of the largest unit's size, which every unit fits.
        grad_reduce_in_fp32: Deprecated; sets `main_grads_dtype` and `grad_comm_dtype` of the policy.
        preserve_fp32_weights: Deprecated; sets `main_params_dtype` of the policy.
        check_for_nan_in_grad: Deprecated; now `report_nan_in_param_grad`.
        keep_fp8_transpose_cache_when_using_custom_fsdp: Deprecated; now `keep_fp8_transpose_cache`.
        reduce_scatter_with_fp32_accumulation: Exchange gradients in their own dtype (`grad_comm_dtype`) and sum them
            locally, in float32 and in rank order, on every back end. gloo does so anyway. Strategies 1 to 3.
        weight_allocator: "slots": gathered units share a few buffers that are kept. "resize": each has memory of its
            own, freed when it is released. Not part of the published API, nor are those that follow.
        max_gathered_units: The most units besides the root that are unsharded at a time, 1 or more (strategy 3); None:
            2, or as many as prefetching needs.
        forward_prefetch_units: Units to prefetch in forward; None: 1.
        backward_prefetch_units: Units to prefetch in backward; None: 1.
        verify_ranks: For debugging: compare the collectives that ranks are about to call, and raise on all ranks if
            they differ. True; or seconds to wait for a rank (300); None: as MFSDP_VERIFY_RANKS says, else off.
        find_unused_parameters: Ask all ranks at every sync which parameters any of them used, and leave `.grad` None
            where none did, as one process would; costs one small collective. False: ask until every parameter was used
            in one backward; one that goes unused after that has a zero gradient.
        deterministic: "world": gradients, their norm and the new weights are the same bits on any number of ranks if
            microbatch j of rank r is number ``j * ranks + r`` of the step and all microbatches are of one shape.
            On data-parallel axes alone, with `calculate_per_token_loss` (docs/determinism.md).
        offload: The kinds of state that are kept in host memory (pinned for CUDA): a sequence such as
            `["main_weights", "optimizer_state"]`, or a mapping of kinds to fractions, 0 to 1. The kinds are
            main_weights, optimizer_state, main_gradients and compute_weights; "all", or torch's `CPUOffloadPolicy()`,
            names them all. Results are the same (docs/memory.md).
        zero_dp_strategy_experts: The strategy of expert parameters (as `expt_device_mesh` has them; without one those
            with `.experts.` in the name); None: `zero_dp_strategy`.
        ranks_may_skip_units: Let ranks take different paths: each pass gathers and reduces all units in one order, and
            a rank that does not call a unit, or has no batch, fills it in. True: in the order of registration; or the
            modules that are units, in the order in which forwards call them (docs/debugging.md).

    Returns:
        The wrapped model.

    Raises:
        ConfigurationError: An argument, a combination or the model cannot be honoured (a ValueError).
        TypeError: `fsdp_unit_modules` is not a list of classes or import paths.
    """
    with all_agree(_DOING, _ranks_of(module, device_mesh, dp_shard_dim, dp_outer_dim, tp_dim)) as facts:
        facts["preproc_state_dict_for_dcp_ckpt"] = str(preproc_state_dict_for_dcp_ckpt)
        from megatron_fsdp.sharding.mesh import check_mesh, index_of
        from megatron_fsdp.wrap.shard_unit import check_not_wrapped

        warn_of_namesake()
        check_not_wrapped(module)
        outer_strategy = resolve_strategy(outer_dp_sharding_strategy, "outer_dp_sharding_strategy")
        name = "zero_dp_strategy_experts"
        of_experts = None if zero_dp_strategy_experts is None else resolve_strategy(zero_dp_strategy_experts, name).name
        check_policy(mixed_precision_policy)
        check_mesh(device_mesh)
        policy, report_nan_in_param_grad, keep_fp8_transpose_cache = replace_legacy_keywords(
            mixed_precision_policy,
            report_nan_in_param_grad,
            keep_fp8_transpose_cache,
            grad_reduce_in_fp32=grad_reduce_in_fp32,
            preserve_fp32_weights=preserve_fp32_weights,
            check_for_nan_in_grad=check_for_nan_in_grad,
            keep_fp8_transpose_cache_when_using_custom_fsdp=keep_fp8_transpose_cache_when_using_custom_fsdp,
        )
        config = DistributedDataParallelConfig(
            data_parallel_sharding_strategy=resolve_strategy(zero_dp_strategy).name,
            data_parallel_sharding_strategy_experts=of_experts,
            outer_dp_sharding_strategy=outer_strategy.name,
            overlap_grad_reduce=overlap_grad_reduce,
            overlap_param_gather=overlap_param_gather,
            average_in_collective=average_in_collective,
            check_for_nan_in_grad=report_nan_in_param_grad,
            keep_fp8_transpose_cache=keep_fp8_transpose_cache,
            nccl_ub=nccl_ub,
            fsdp_double_buffer=fsdp_double_buffer,
            fsdp_db_use_persist_buf_on_alloc_fail=fsdp_db_use_persist_buf_on_alloc_fail,
            disable_symmetric_registration=disable_symmetric_registration,
            reduce_scatter_with_fp32_accumulation=reduce_scatter_with_fp32_accumulation,
            megatron_fsdp_main_params_dtype=policy.main_params_dtype,
            megatron_fsdp_main_grads_dtype=policy.main_grads_dtype,
            megatron_fsdp_grad_comm_dtype=policy.grad_comm_dtype,
            megatron_fsdp_use_decoupled_grad=use_decoupled_grad,
            megatron_fsdp_cuda_graph_mode=cuda_graph_mode,
            megatron_fsdp_enable_fine_grained_param_gather=enable_fine_grained_param_gather,
            megatron_fsdp_max_pool_double_buffer=maxpool_double_buffer,
        )
        index = index_of(
            module,
            device_mesh,
            dp_shard_dim,
            dp_outer_dim=dp_outer_dim,
            tp_dim=tp_dim,
            outer_strategy=outer_strategy,
            hybrid_fsdp_group=hybrid_fsdp_group,
            hybrid_fsdp_expt_group=hybrid_fsdp_expt_group,
            expt_device_mesh=expt_device_mesh,
            fsdp_group_ag=fsdp_group_ag,
            expt_fsdp_group_ag=expt_fsdp_group_ag,
        )
    from megatron_fsdp.megatron_fsdp import MegatronFSDP

    model = MegatronFSDP(
        module,
        index,
        config,
        policy,
        fsdp_unit_modules=fsdp_unit_modules,
        disable_bucketing=disable_bucketing,
        device=device,
        calculate_per_token_loss=calculate_per_token_loss,
        init_model_with_meta_device=init_model_with_meta_device,
        sync_model_each_microbatch=sync_model_each_microbatch,
        weight_allocator=weight_allocator,
        max_gathered_units=max_gathered_units,
        forward_prefetch_units=forward_prefetch_units,
        backward_prefetch_units=backward_prefetch_units,
        verify_ranks=verify_ranks,
        find_unused_parameters=find_unused_parameters,
        deterministic=deterministic,
        offload=offload,
        ranks_may_skip_units=ranks_may_skip_units,
    )
    if not preproc_state_dict_for_dcp_ckpt:
        for unit in model._engine.units:
            for handle in unit.state_dict_handles:
                handle.remove()
    return model


def ranks_of_parameters(*holders: object) -> Groups:
    """Return the groups of the ranks of the sharded model that parameters belong to, else all ranks.

    Args:
        holders: Anything; the first that holds such a parameter counts.
    """
    for holder in holders:
        groups = getattr(holder, "param_groups", None) or ()
        params = (
            holder.parameters() if isinstance(holder, nn.Module) else (p for group in groups for p in group["params"])
        )
        for param in params:
            with suppress(AttributeError, ReferenceError):
                return _ranks_of(**vars(param._megatron_fsdp_model.dist_index))  # type: ignore[union-attr]
    return ()


_CONNECTING = "connecting the optimizer"


@agreed(_CONNECTING, lambda optimizer=None, *_, **__: ranks_of_parameters(optimizer))
@explains_arguments(optimizer="give the optimizer that was built on the parameters of the sharded model.")
def fully_shard_optimizer(optimizer: _Optimizer, preproc_state_dict_for_dcp_ckpt: bool = True) -> _Optimizer:
    """Connect an optimizer, built on a sharded model's parameters, in place. It is not stepped.

    Its `step` synchronises gradients before (where backward did not) and installs the new weights after; its parameter
    groups, their order and options stay as they are.

    Args:
        optimizer: Built on `model.parameters()` after `fully_shard_model`; on those of several models if need be.
        preproc_state_dict_for_dcp_ckpt: As in `fully_shard_model`, for the optimizer's state.

    Returns:
        The same optimizer.

    Raises:
        ConfigurationError: It has no parameters, or holds one that is not sharded, or several models and experts.
    """
    from megatron_fsdp.engine.engine import engine_of_param
    from megatron_fsdp.optim.chained import members_of
    from megatron_fsdp.optim.local_step import params_of
    from megatron_fsdp.optim.optimizer import (
        Engines,
        check_connected,
        connect_with_hooks,
        facts_of,
        float32_by,
        route_line,
    )

    _check_optimizer(optimizer)
    params = params_of(optimizer)
    if not params:
        raise ConfigurationError(
            "the optimizer has no parameters; build it on model.parameters() after fully_shard_model"
        )
    if not hasattr(params[0], _OWNER):
        raise ConfigurationError(
            "the optimizer's parameters do not belong to a sharded model; build it on model.parameters() after "
            "fully_shard_model, or hand model and optimizer to fully_shard together"
        )
    owned = [param for param in params if hasattr(param, _OWNER)]
    try:
        wrappers = {id(param._megatron_fsdp_model.module): param._megatron_fsdp_model for param in owned}
    except ReferenceError:
        raise ConfigurationError(
            "the model whose parameters the optimizer holds has been deleted; keep what fully_shard_model returned"
        ) from None
    engines = list(dict.fromkeys(map(engine_of_param, owned)))
    check_connected(optimizer, Engines(engines))
    _check_several(optimizer, engines)
    facts = facts_of(optimizer) | {"preproc_state_dict_for_dcp_ckpt": str(preproc_state_dict_for_dcp_ckpt)}
    raise_together(None, _CONNECTING, ranks_of_parameters(optimizer), facts)
    cure = float32_by(next(iter(wrappers.values())))
    is_new = connect_with_hooks(optimizer, engines, preproc_state_dict_for_dcp_ckpt, cure)
    logger = logging.getLogger("megatron_fsdp")
    if is_new and rank_of() == 0 and logger.isEnabledFor(logging.INFO):
        modules = [wrapper.module for wrapper in wrappers.values()]
        for each in members_of(optimizer):
            logger.info(route_line(each, *modules))
    return optimizer


def _check_several(optimizer: torch.optim.Optimizer, engines: Sequence[Engine]) -> None:
    """Raise if one optimizer cannot serve several models."""
    if len(engines) == 1:
        return
    if not all(engine.expert_names.is_trivial for engine in engines):
        raise ConfigurationError(
            f"the optimizer holds parameters of {len(engines)} sharded models, one with expert-parallel experts, whose "
            "state is numbered differently in checkpoints; build one optimizer for each model"
        )
    if len({optimizer in engine.connected for engine in engines}) > 1:
        raise ConfigurationError(
            "the optimizer was connected before it held parameters of another sharded model; build a new one on the "
            "parameters of all models"
        )


_OWNER = "_megatron_fsdp_model"


def _takes_arguments_of(
    shard_model: Callable[Concatenate[nn.Module, _Others], object],
) -> Callable[
    [Callable[..., tuple[MegatronFSDP, _Optimizer]]],
    Callable[Concatenate[nn.Module, _Optimizer, _Others], tuple[MegatronFSDP, _Optimizer]],
]:
    """Give a function the signature of `shard_model`, with the optimizer as second argument."""

    def decorate(
        function: Callable[..., tuple[MegatronFSDP, _Optimizer]],
    ) -> Callable[Concatenate[nn.Module, _Optimizer, _Others], tuple[MegatronFSDP, _Optimizer]]:
        own, others = (inspect.signature(each) for each in (function, shard_model))
        parameters = [*list(own.parameters.values())[:2], *list(others.parameters.values())[1:]]
        function.__signature__ = own.replace(parameters=parameters)  # type: ignore[attr-defined]
        return function

    return decorate


@agreed(_DOING, lambda *given, **named: _ranks_of(*given[:1], *given[2:], **named))
@explains_arguments(
    module="give the model and its optimizer.",
    optimizer="give the optimizer after the model, or call fully_shard_model(model) to shard a model alone.",
)
@_takes_arguments_of(fully_shard_model)
def fully_shard(  # noqa: D417 (the arguments of fully_shard_model are described there)
    module: nn.Module, optimizer: _Optimizer, *args: Any, **kwargs: Any
) -> tuple[MegatronFSDP, _Optimizer]:
    """Shard a model and the optimizer that was built on it, in one call.

    The optimizer keeps its parameter groups, their order and every option; its state, if it has any already, is sharded
    with the parameters. All other arguments are those of `fully_shard_model`.

    Args:
        module: The model.
        optimizer: Built on `module.parameters()`, on all of them or some.

    Returns:
        The wrapped model and the same optimizer.

    Raises:
        ConfigurationError: As `fully_shard_model`, or the optimizer holds a parameter that is not the model's.
    """
    from megatron_fsdp.optim.optimizer import check_before_sharding, move_to_sharded
    from megatron_fsdp.sharding.mesh import mesh_device_type
    from megatron_fsdp.wrap.shard_unit import check_not_wrapped, compiled_in_place

    bound = inspect.signature(fully_shard_model).bind(module, *args, **kwargs)
    bound.apply_defaults()
    _check_optimizer(optimizer, module)
    check_not_wrapped(module)
    module = compiled_in_place(module)
    names = {id(param): name for name, param in module.named_parameters()}
    device_mesh, of_experts = bound.arguments["device_mesh"], bound.arguments["zero_dp_strategy_experts"]
    strategies = [resolve_strategy(bound.arguments["zero_dp_strategy"])]
    strategies += [] if of_experts is None else [resolve_strategy(of_experts, "zero_dp_strategy_experts")]
    is_captured = bound.arguments["cuda_graph_mode"] and mesh_device_type(device_mesh) == "cuda"
    check_before_sharding(
        optimizer, names, are_cut=max(strategies) > ShardingStrategy.no_shard, is_captured=is_captured
    )
    # Without its decorators: ranks agree at the end of this function.
    model = inspect.unwrap(fully_shard_model)(module, *args, **kwargs)
    sharded = {
        name: param
        for group in model.parameter_groups()
        for name, param in zip(group.names, group.sharded, strict=True)
    }
    replacements = {key: sharded[name] for key, name in names.items() if name in sharded}
    for group in optimizer.param_groups:  # frozen quantised weights, which no step changes, are several others now
        group["params"][:] = [param for param in group["params"] if id(param) in replacements]
    move_to_sharded(optimizer, replacements, model._engine.shard_like)
    return model, fully_shard_optimizer(optimizer, bound.arguments["preproc_state_dict_for_dcp_ckpt"])


def _check_optimizer(optimizer: object, module: object = None) -> None:
    """Raise unless the object is an optimizer itself, whose step can be connected: no class, and no wrapper of one."""
    from megatron_fsdp.optim.optimizer import check_is_whole

    if isinstance(optimizer, nn.Module) and hasattr(module, "param_groups"):
        raise TypeError("the optimizer was given first and the model second; call fully_shard(model, optimizer)")
    if isinstance(optimizer, type):
        name = optimizer.__name__
        raise TypeError(f"{name} is a class; give an optimizer of it, built as {name}(model.parameters(), ...)")
    if not hasattr(optimizer, "param_groups"):
        raise TypeError(
            f"the optimizer is a {type(optimizer).__name__}; give a torch optimizer, built on model.parameters()"
        )
    check_is_whole(optimizer)


def __getattr__(name: str) -> Any:
    """Import a class at its first use."""
    if name not in _LATE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"megatron_fsdp.{_LATE[name]}"), name)


_LATE = {"FSDPDistributedIndex": "sharding.mesh", "MegatronFSDP": "megatron_fsdp"}
