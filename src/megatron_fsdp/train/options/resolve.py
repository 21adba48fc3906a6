"""From options and ranks to a job: everything left open is filled in, every adjustment is told. Pure."""

from __future__ import annotations

from dataclasses import replace

import torch

from megatron_fsdp.distributed_data_parallel_config import DistributedDataParallelConfig
from megatron_fsdp.errors import ConfigurationError
from megatron_fsdp.train.learning_rate import Schedule
from megatron_fsdp.train.options.batch import plan_batch
from megatron_fsdp.train.options.checks import check_options
from megatron_fsdp.train.options.job import EngineName, Job, Sizes, World
from megatron_fsdp.train.options.options import DDP_FIELDS, Options

_UNREGISTERED = "buffers are not registered with NCCL by this version"


def resolve(options: Options, world: World) -> Job:
    """Complete and check a run.

    Args:
        options: What was said.
        world: Ranks and hardware.

    Raises:
        ConfigurationError: Options contradict each other, do nothing, or do not fit the ranks.
    """
    check_options(options)
    notices = list(options.explained)
    engine = _engine(options)
    sizes = _sizes(options, world, engine)
    dtype = _dtype(options, world)
    train_iters = _require(options.training.train_iters, "--train-iters", "how many steps to train")
    micro = _require(options.training.micro_batch_size, "--micro-batch-size", "samples per rank and microbatch")
    if options.training.calculate_per_token_loss and options.ddp.average_in_collective:
        raise ConfigurationError(
            "--calculate-per-token-loss contradicts --ddp-average-in-collective: the one adds up, the other averages; "
            "give one of them"
        )
    if options.is_given("gradient_accumulation_fusion"):
        notices.append("gradient accumulation fusion is off, as it always is in this version")
    return Job(
        options=options,
        engine=engine,
        ddp=_ddp(options, dtype, engine, notices),
        sizes=sizes,
        batch=plan_batch(micro, options.training.global_batch_size, sizes.data),
        dtype=dtype,
        schedule=_schedule(options, train_iters),
        train_iters=train_iters,
        seq_length=_require(options.model.seq_length, "--seq-length", "tokens of a sample"),
        load_is_optional=_load_is_optional(options, world),
        notices=tuple(notices),
        restarts=world.restarts,
    )


def _require(value: int | None, flag: str, meaning: str) -> int:
    if value is None:
        raise ConfigurationError(f"{flag} is missing ({meaning}): give it, or a --preset that has it")
    return value


def _engine(options: Options) -> EngineName:
    if options.parallel.use_torch_fsdp2 and not options.origins.get("use_torch_fsdp2", "").startswith("preset"):
        return "torch_fsdp2"
    return "megatron_fsdp" if options.ddp.use_megatron_fsdp else "ddp"


def _sizes(options: Options, world: World, engine: EngineName) -> Sizes:
    parallel = options.parallel
    tensor, pipeline = parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size
    context, expert = parallel.context_parallel_size, parallel.expert_model_parallel_size
    others = tensor * pipeline * context
    if world.ranks % others:
        raise ConfigurationError(
            f"{world.ranks} ranks cannot be cut into tensor {tensor} x pipeline {pipeline} x context {context} = "
            f"{others}: give sizes whose product divides the ranks"
        )
    sizes = Sizes(world.ranks // others, tensor, pipeline, context, expert)
    if (sizes.data * context) % expert:
        raise ConfigurationError(
            f"--expert-model-parallel-size {expert} does not divide the {sizes.data * context} data-parallel ranks "
            "(context-parallel ones counted): give one that does"
        )
    _check_sizes(options, sizes, engine)
    return sizes


def _check_sizes(options: Options, sizes: Sizes, engine: EngineName) -> None:
    """Which engine and which model can be cut how."""
    if sizes.is_data_only:
        if options.parallel.sequence_parallel:
            raise ConfigurationError(
                "--sequence-parallel does nothing with --tensor-model-parallel-size 1: give both or neither"
            )
        return
    model = options.model
    if model.transformer_impl == "local" and model.hf_config is None and model.hf_model is None:
        raise ConfigurationError(
            "the decoder of this package is not cut over tensor-, pipeline-, context- or expert-parallel ranks: give "
            "--transformer-impl transformers, --hf-config or --hf-model"
        )
    if engine == "ddp":
        raise ConfigurationError(
            "buckets (without --use-megatron-fsdp) know no parallelism but that of the data here: give "
            "--use-megatron-fsdp or --use-torch-fsdp2"
        )
    if engine == "megatron_fsdp" and (sizes.pipeline > 1 or sizes.expert > 1):
        raise ConfigurationError(
            f"--use-megatron-fsdp goes with tensor- and context-parallel ranks, not with pipeline {sizes.pipeline} or "
            f"expert {sizes.expert} in the trainer: give --use-torch-fsdp2 for those"
        )
    if options.parallel.sequence_parallel and sizes.tensor == 1:
        raise ConfigurationError(
            "--sequence-parallel does nothing with --tensor-model-parallel-size 1: give both or neither"
        )


def _dtype(options: Options, world: World) -> torch.dtype:
    training = options.training
    if training.bf16:
        return torch.bfloat16
    if training.fp16:
        return torch.float16
    return torch.bfloat16 if training.auto_bf16 and world.multiplies_bf16 else torch.float32


def _ddp(options: Options, dtype: torch.dtype, engine: EngineName, notices: list[str]) -> DistributedDataParallelConfig:
    """The configuration of the engine: dtypes of gradients filled in, what cannot have an effect taken out and told."""
    config = options.ddp
    if engine == "torch_fsdp2":
        given = [name for name in options.origins if name in DDP_FIELDS and name != "use_megatron_fsdp"]
        given = [name for name in given if not options.origins[name].startswith("preset")]
        if given:
            raise ConfigurationError(
                f"--{given[0].replace('_', '-')} does nothing with --use-torch-fsdp2: leave it out, or shard with "
                "--use-megatron-fsdp"
            )
        return replace(config, use_megatron_fsdp=False, data_parallel_sharding_strategy="no_shard")
    if not config.nccl_ub and (config.fsdp_manual_registration or config.disable_symmetric_registration):
        name = "fsdp-manual-registration" if config.fsdp_manual_registration else "disable-symmetric-registration"
        raise ConfigurationError(f"--{name} does nothing without --use-nccl-ub: give both or neither")
    if config.nccl_ub:
        doubled = "; gathered weights lie in two buffers that are kept, as with --fsdp-double-buffer"
        notices.append(f"--use-nccl-ub: {_UNREGISTERED}{doubled}")
        if config.fsdp_manual_registration:
            notices.append(f"--fsdp-manual-registration has no effect: {_UNREGISTERED}")
        if config.disable_symmetric_registration:
            notices.append(f"--disable-symmetric-registration has no effect: {_UNREGISTERED}")
        config = replace(config, nccl_ub=False, fsdp_manual_registration=False, disable_symmetric_registration=False)
    return _gradient_dtypes(options, config, dtype, notices)


def _gradient_dtypes(
    options: Options, config: DistributedDataParallelConfig, dtype: torch.dtype, notices: list[str]
) -> DistributedDataParallelConfig:
    """Gradients of half-precision models travel and accumulate in float32, unless something else was said."""
    training = options.training
    if training.grad_reduce_in_bf16 and not options.is_given("megatron_fsdp_grad_comm_dtype"):
        comm: torch.dtype | None = torch.bfloat16
        if dtype == torch.float32 and not training.auto_bf16:
            notices.append("--grad-reduce-in-bf16: gradients of a float32 model travel in bfloat16")
        if dtype == torch.float32 and training.auto_bf16:
            comm = None  # what the hardware cannot multiply it need not send
    elif options.is_given("megatron_fsdp_grad_comm_dtype") or config.grad_reduce_in_fp32 or dtype == torch.float32:
        comm = config.megatron_fsdp_grad_comm_dtype
    else:
        comm = torch.float32
    main = config.megatron_fsdp_main_grads_dtype
    if main is None and not options.is_given("megatron_fsdp_main_grads_dtype") and not config.grad_reduce_in_fp32:
        main = torch.float32 if dtype != torch.float32 else None
    return replace(config, megatron_fsdp_grad_comm_dtype=comm, megatron_fsdp_main_grads_dtype=main)


def _schedule(options: Options, train_iters: int) -> Schedule:
    optimizer = options.optimizer
    decay = train_iters if optimizer.lr_decay_iters is None else optimizer.lr_decay_iters
    if optimizer.lr is None:
        raise ConfigurationError("--lr is missing (largest learning rate): give it, or a --preset that has it")
    if optimizer.min_lr > optimizer.lr:
        raise ConfigurationError(f"--min-lr {optimizer.min_lr} is more than --lr {optimizer.lr}: give less")
    warmup = optimizer.lr_warmup_iters
    if optimizer.lr_warmup_fraction is not None and not options.origins.get("lr_warmup_iters", "").startswith("c"):
        warmup = int(optimizer.lr_warmup_fraction * decay)
    if warmup >= decay:
        raise ConfigurationError(
            f"--lr-warmup-iters {warmup} does not end within {decay} steps: give fewer, or more --train-iters or "
            "--lr-decay-iters"
        )
    wsd = optimizer.lr_wsd_decay_iters
    if (optimizer.lr_decay_style == "WSD") != (wsd is not None):
        raise ConfigurationError("--lr-wsd-decay-iters and --lr-decay-style WSD belong together: give both or neither")
    if wsd is not None and warmup + wsd > decay:
        raise ConfigurationError(
            f"--lr-wsd-decay-iters {wsd} and a warmup of {warmup} do not fit into {decay} steps: give fewer"
        )
    return Schedule(optimizer.lr, optimizer.min_lr, optimizer.lr_decay_style, warmup, decay, wsd or 0)


def _load_is_optional(options: Options, world: World) -> bool:
    """Whether this job may be its own first run: restarted ranks, or the same folder to load and to save."""
    save, load = options.checkpoint.save, options.checkpoint.load
    is_same = save is not None and load is not None and save.resolve() == load.resolve()
    return is_same or (save is not None and world.restarts > 0)
