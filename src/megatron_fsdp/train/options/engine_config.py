"""Completes the configuration of the engine: fills in dtypes, refuses or reports what has no effect."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from megatron_fsdp.config.ddp_config import DistributedDataParallelConfig
from megatron_fsdp.config.ddp_config_flags import flag_of
from megatron_fsdp.config.strategy import ShardingStrategy
from megatron_fsdp.ddp.resolve import resolve_ddp
from megatron_fsdp.errors import ConfigurationError, NotSupportedYetError
from megatron_fsdp.train.options.job import EngineName, Sizes
from megatron_fsdp.train.options.options import DDP_FIELDS, Options, flag_for, in_flags

_UNREGISTERED = "buffers are not registered with NCCL by this version"


def engine_config(
    options: Options, dtype: torch.dtype, engine: EngineName, sizes: Sizes, notices: list[str]
) -> DistributedDataParallelConfig:
    """Complete the configuration of sharding and reduction.

    Args:
        options: What was said.
        dtype: What the model computes in.
        engine: Which shards.
        sizes: Ranks of each kind.
        notices: Takes what was adjusted, in words.

    Raises:
        ConfigurationError: A field does nothing with this engine, contradicts another, or does not fit the ranks.
    """
    config = options.ddp
    if engine == "torch_fsdp2":
        _refuse_all(options)
        return replace(config, use_megatron_fsdp=False, data_parallel_sharding_strategy="no_shard")
    config = _gradient_dtypes(options, _without_registration(config, notices), dtype, notices)
    for sentence in config.idle_settings().values():
        raise ConfigurationError(in_flags(sentence))
    if config.megatron_fsdp_use_decoupled_grad:
        raise ConfigurationError(
            "--megatron-fsdp-use-decoupled-grad puts gradients where PyTorch's optimizers do not look: leave it out"
        )
    try:
        resolved = resolve_ddp(config, sizes.data * sizes.context, 1)
    except (ConfigurationError, NotSupportedYetError) as error:
        raise ConfigurationError(in_flags(str(error))) from None
    _check_meta_device(options, resolved.strategy)
    notices += _implied(options, resolved.strategy)
    return config


def _refuse_all(options: Options) -> None:
    for name in options.origins:
        if name in DDP_FIELDS and name != "use_megatron_fsdp" and options.is_chosen(name):
            raise ConfigurationError(
                f"{flag_for(name)} does nothing with --use-torch-fsdp2: leave it out, or shard with --use-megatron-fsdp"
            )


def _without_registration(config: DistributedDataParallelConfig, notices: list[str]) -> DistributedDataParallelConfig:
    """Drop NCCL buffer registration, which this version does not have."""
    if not config.nccl_ub:
        return config
    doubled = "; gathered weights lie in two buffers that are kept, as with --fsdp-double-buffer"
    notices.append(f"--use-nccl-ub: {_UNREGISTERED}{doubled}")
    names = [name for name in ("fsdp_manual_registration", "disable_symmetric_registration") if getattr(config, name)]
    notices += [f"{flag_of(name)} has no effect: {_UNREGISTERED}" for name in names]
    return replace(config, nccl_ub=False, fsdp_manual_registration=False, disable_symmetric_registration=False)


def _gradient_dtypes(
    options: Options, config: DistributedDataParallelConfig, dtype: torch.dtype, notices: list[str]
) -> DistributedDataParallelConfig:
    """Reduce and accumulate gradients of half-precision models in float32, unless told otherwise."""
    training = options.training
    if training.grad_reduce_in_bf16 and not options.is_given("megatron_fsdp_grad_comm_dtype"):
        comm: torch.dtype | None = torch.bfloat16
        if dtype == torch.float32 and not training.auto_bf16:
            notices.append("--grad-reduce-in-bf16: gradients of a float32 model travel in bfloat16")
        if dtype == torch.float32 and training.auto_bf16:
            comm = None  # hardware that cannot multiply a dtype need not send it
            if options.is_chosen("grad_reduce_in_bf16"):
                notices.append("--grad-reduce-in-bf16 has no effect: --auto-bf16 found no bfloat16 on this hardware")
    elif options.is_given("megatron_fsdp_grad_comm_dtype") or config.grad_reduce_in_fp32 or dtype == torch.float32:
        comm = config.megatron_fsdp_grad_comm_dtype
    else:
        comm = torch.float32
    if options.is_given("accumulate_allreduce_grads_in_fp32") and not training.grad_reduce_in_bf16:
        flag = "accumulate-allreduce-grads-in-fp32"
        notices.append(
            f"--{flag if config.grad_reduce_in_fp32 else 'no-' + flag} has no effect of its own: gradients travel and "
            "accumulate in float32, unless --grad-reduce-in-bf16 or the flags of dtypes say something else"
        )
    main = config.megatron_fsdp_main_grads_dtype
    if main is None and not options.is_given("megatron_fsdp_main_grads_dtype") and not config.grad_reduce_in_fp32:
        main = torch.float32 if dtype != torch.float32 else None
    sent = torch.float32 if config.grad_reduce_in_fp32 else comm or main or dtype
    if config.reduce_scatter_with_fp32_accumulation and sent == torch.float32:
        raise ConfigurationError(
            "--ddp-reduce-scatter-with-fp32-accumulation does nothing here, since gradients travel in float32: give "
            "--grad-reduce-in-bf16, or leave it out"
        )
    return replace(config, megatron_fsdp_grad_comm_dtype=comm, megatron_fsdp_main_grads_dtype=main)


def _check_meta_device(options: Options, strategy: ShardingStrategy) -> None:
    if options.parallel.init_model_with_meta_device and strategy is ShardingStrategy.no_shard:
        raise ConfigurationError(
            "--init-model-with-meta-device does nothing where every rank holds the whole model: give "
            "--use-megatron-fsdp with a sharding strategy, or leave it out"
        )


def _implied(options: Options, strategy: ShardingStrategy) -> Iterator[str]:
    """Yield notices for options that the strategy decides, where the user set them."""
    config = options.ddp
    if not config.use_megatron_fsdp:
        return
    shown = f"--data-parallel-sharding-strategy {strategy.name}"
    if options.is_given("use_distributed_optimizer") and strategy is not ShardingStrategy.no_shard:
        if config.use_distributed_optimizer:
            yield f"--use-distributed-optimizer has no effect of its own: {shown} shards the optimizer"
        else:
            yield f"--no-use-distributed-optimizer has no effect: {shown} shards the optimizer"
    early = strategy >= ShardingStrategy.optim_grads
    if options.is_given("overlap_grad_reduce") and early and not config.overlap_grad_reduce:
        yield f"--no-overlap-grad-reduce has no effect: {shown} reduces gradients during backward in any case"
    ahead = strategy is ShardingStrategy.optim_grads_params
    if options.is_given("overlap_param_gather") and ahead and not config.overlap_param_gather:
        yield f"--no-overlap-param-gather has no effect: {shown} gathers weights ahead in any case"
