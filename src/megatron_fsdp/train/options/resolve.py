"""Resolves options and ranks to a job: fills in everything left open, and reports every adjustment."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from megatron_fsdp.config.ddp_config import DistributedDataParallelConfig
from megatron_fsdp.config.strategy import ShardingStrategy
from megatron_fsdp.ddp.resolve import resolve_ddp
from megatron_fsdp.errors import ConfigurationError, NotSupportedYetError
from megatron_fsdp.train.options.checks import check_options, check_sizes, idle_notices
from megatron_fsdp.train.options.job import BatchPlan, EngineName, Job, Schedule, Sizes, World, plan_batch
from megatron_fsdp.train.options.options import DDP_FIELDS, Options, flag_for, in_flags


def resolve(options: Options, world: World) -> Job:
    """Complete and check a run."""
    notices = list(options.explained)
    options = _with_tokenizer_of_model(options, notices)
    check_options(options)
    check_backend(options, world.device_type)
    engine: EngineName = "megatron_fsdp" if options.ddp.use_megatron_fsdp else "ddp"
    engine = "torch_fsdp2" if options.parallel.use_torch_fsdp2 else engine
    sizes = _sizes(options, world)
    training = options.training
    dtype = torch.float16 if training.fp16 else torch.bfloat16 if training.bf16 else torch.float32
    micro = _require(training.micro_batch_size, "--micro-batch-size", "samples per rank and microbatch")
    batch = plan_batch(micro, training.global_batch_size, sizes.data)
    train_iters = _train_iters(options, batch)
    notices += idle_notices(options, train_iters)
    nproc = options.parallel.nproc
    if nproc is not None and nproc != world.ranks:
        notices.append(f"--nproc {nproc} has no effect: {world.ranks} ranks were started")
    notices += batch.notices()
    checkpoint = options.checkpoint
    if training.recompute_method == "uniform":  # which recomputes all blocks one by one
        options = replace(options, training=replace(training, recompute_num_layers=None))
    return Job(
        options=options,
        engine=engine,
        ddp=_engine_config(options, dtype, engine, sizes, notices),
        sizes=sizes,
        batch=batch,
        dtype=dtype,
        schedule=_schedule(options, train_iters, batch.total),
        train_iters=train_iters,
        seq_length=_require(options.model.seq_length, "--seq-length", "tokens of a sample"),
        load_is_optional=checkpoint.is_same_folder or (checkpoint.save is not None and world.restarts > 0),
        notices=tuple(notices),
        restarts=world.restarts,
    )


def _with_tokenizer_of_model(options: Options, notices: list[str]) -> Options:
    """Use the tokenizer of a model with weights, unless another is asked for."""
    folder = options.model.hf_model
    if folder is None or options.is_given("tokenizer_type"):
        return options
    place = options.data.tokenizer_model
    if place is None:
        place = folder
        notices.append(
            f"--tokenizer-type HuggingFaceTokenizer --tokenizer-model {folder}, the model's own; --tokenizer-type byte "
            "trains it on bytes"
        )
    data = replace(options.data, tokenizer_type="HuggingFaceTokenizer", tokenizer_model=place)
    return replace(options, data=data)


def _require(value: int | None, flag: str, meaning: str) -> int:
    if value is None:
        raise ConfigurationError(f"{flag} is missing ({meaning}): give it, or a --preset that has it")
    return value


def check_backend(options: Options, device_type: str) -> None:
    """Check that the requested backend supports the devices; torchrun's ranks call this before they join."""
    if options.parallel.distributed_backend == "nccl" and device_type == "cpu":
        raise ConfigurationError(
            "--distributed-backend nccl does not go with --device cpu, which it cannot reach: give gloo, or leave it "
            "out"
        )


def _sizes(options: Options, world: World) -> Sizes:
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
    check_sizes(options, sizes)
    return sizes


# ---- steps and the learning rate -------------------------------------------------------------------------------------


def _train_iters(options: Options, batch: BatchPlan) -> int:
    """Return the steps to train; of `--train-samples` those that fill whole steps, as in Megatron-LM."""
    samples = options.training.train_samples
    if samples is None:
        return _require(options.training.train_iters, "--train-iters", "how many steps to train")
    if samples < batch.total:
        raise ConfigurationError(f"--train-samples {samples} is less than the {batch.total} of one step: give more")
    return samples // batch.total


def _schedule(options: Options, train_iters: int, samples_of_step: int) -> Schedule:
    """Return the learning rate over the steps; what is said in samples may end within a step."""
    optimizer, samples = options.optimizer, options.training.train_samples
    if optimizer.lr is None:
        raise ConfigurationError("--lr is missing (largest learning rate): give it, or a --preset that has it")
    for name in ("min_lr", "lr_warmup_init"):
        if options.value(name) > optimizer.lr:
            raise ConfigurationError(
                f"{flag_for(name)} {options.value(name)} is more than --lr {optimizer.lr}: give less"
            )
    unit, words = ("iters", "steps") if samples is None else ("samples", "samples")
    decay = options.value(f"lr_decay_{unit}") or samples or train_iters
    warmup, wsd = options.value(f"lr_warmup_{unit}"), options.value(f"lr_wsd_decay_{unit}")
    if optimizer.lr_warmup_fraction is not None:
        warmup = int(round(optimizer.lr_warmup_fraction * decay, 6))  # 0.58 x 100 is a little less than 58
    if warmup >= decay:
        raise ConfigurationError(
            f"--lr-warmup-{unit} {warmup} does not end within {decay} {words}: give fewer, or more --train-{unit} or "
            f"--lr-decay-{unit}"
        )
    if optimizer.lr_warmup_init and not warmup:
        raise ConfigurationError("--lr-warmup-init does nothing without a warmup: give --lr-warmup-fraction too")
    if (optimizer.lr_decay_style == "WSD") != (wsd is not None):
        raise ConfigurationError(
            f"--lr-wsd-decay-{unit} and --lr-decay-style WSD belong together: give both or neither"
        )
    if warmup + (wsd or 0) > decay:
        raise ConfigurationError(
            f"--lr-wsd-decay-{unit} {wsd} and a warmup of {warmup} do not fit into {decay} {words}: give fewer"
        )
    rises, ends, falls = (count if samples is None else count / samples_of_step for count in (warmup, decay, wsd or 0))
    style, initial = optimizer.lr_decay_style, optimizer.lr_warmup_init
    return Schedule(optimizer.lr, optimizer.min_lr, style, rises, ends, falls, initial)


# ---- the configuration of the engine ---------------------------------------------------------------------------------


def _engine_config(
    options: Options, dtype: torch.dtype, engine: EngineName, sizes: Sizes, notices: list[str]
) -> DistributedDataParallelConfig:
    """Complete the configuration of sharding and reduction; refuse or report what has no effect with this engine."""
    config = options.ddp
    if engine == "torch_fsdp2":
        if options.optimizer.optimizer in ("muon", "adamw8bit"):
            raise ConfigurationError(
                f"--optimizer {options.optimizer.optimizer} does not step the shards of --use-torch-fsdp2: give "
                "--optimizer adam or sgd, or shard with --use-megatron-fsdp"
            )
        for name in options.origins:
            if name in DDP_FIELDS and name != "use_megatron_fsdp" and options.is_chosen(name):
                raise ConfigurationError(
                    f"{flag_for(name)} does nothing with --use-torch-fsdp2: leave it out, or shard with "
                    "--use-megatron-fsdp"
                )
        return replace(config, use_megatron_fsdp=False, data_parallel_sharding_strategy="no_shard")
    config = _gradient_dtypes(options, config, dtype, notices)
    for sentence in config.idle_settings().values():
        raise ConfigurationError(in_flags(sentence))
    if config.megatron_fsdp_use_decoupled_grad:
        raise ConfigurationError(
            "--megatron-fsdp-use-decoupled-grad puts gradients where PyTorch's optimizers do not look: leave it out"
        )
    if options.training.deterministic is not None and not sizes.is_data_only:
        raise ConfigurationError(
            "--deterministic world holds for data parallelism alone, since others cut sums inside of the model: leave "
            "their sizes at 1"
        )
    if config.megatron_fsdp_cuda_graph_mode:
        raise ConfigurationError(
            "--megatron-fsdp-cuda-graph-mode keeps memory for CUDA graphs, and this trainer captures none: leave it out"
        )
    try:
        strategy = resolve_ddp(config, sizes.data * sizes.context, 1).strategy
    except (ConfigurationError, NotSupportedYetError) as error:
        raise ConfigurationError(in_flags(str(error))) from None
    if options.parallel.init_model_with_meta_device and strategy is ShardingStrategy.no_shard:
        raise ConfigurationError(
            "--init-model-with-meta-device does nothing where every rank holds the whole model: give "
            "--use-megatron-fsdp with a sharding strategy, or leave it out"
        )
    if config.use_megatron_fsdp:
        notices += _implied(options, strategy)
    return config


def _gradient_dtypes(
    options: Options, config: DistributedDataParallelConfig, dtype: torch.dtype, notices: list[str]
) -> DistributedDataParallelConfig:
    """Reduce and accumulate gradients of half-precision models in float32, unless told otherwise."""
    training = options.training
    is_float32, in_float32 = dtype == torch.float32, config.grad_reduce_in_fp32
    comm, main = config.megatron_fsdp_grad_comm_dtype, config.megatron_fsdp_main_grads_dtype
    if training.grad_reduce_in_bf16 and not options.is_given("megatron_fsdp_grad_comm_dtype"):
        comm = torch.bfloat16
        if is_float32:
            notices.append("--grad-reduce-in-bf16: gradients of a float32 model travel in bfloat16")
    elif not (options.is_given("megatron_fsdp_grad_comm_dtype") or in_float32 or is_float32):
        comm = torch.float32
    if options.is_given("accumulate_allreduce_grads_in_fp32") and not training.grad_reduce_in_bf16:
        flag = "accumulate-allreduce-grads-in-fp32"
        notices.append(
            f"--{flag if in_float32 else 'no-' + flag} has no effect of its own: gradients travel and accumulate in "
            "float32, unless --grad-reduce-in-bf16 or the flags of dtypes say something else"
        )
    if not (options.is_given("megatron_fsdp_main_grads_dtype") or in_float32 or is_float32):
        main = main or torch.float32
    sent = torch.float32 if in_float32 else comm or main or dtype
    if config.reduce_scatter_with_fp32_accumulation and sent == torch.float32:
        raise ConfigurationError(
            "--ddp-reduce-scatter-with-fp32-accumulation does nothing here, since gradients travel in float32: give "
            "--grad-reduce-in-bf16, or leave it out"
        )
    return replace(config, megatron_fsdp_grad_comm_dtype=comm, megatron_fsdp_main_grads_dtype=main)


def _implied(options: Options, strategy: ShardingStrategy) -> Iterator[str]:
    """Yield notices for options that the strategy decides, where the user set them."""
    decided = (
        ("use_distributed_optimizer", strategy > ShardingStrategy.no_shard, "shards the optimizer"),
        ("overlap_grad_reduce", strategy >= ShardingStrategy.optim_grads, "reduces gradients during backward"),
        ("overlap_param_gather", strategy >= ShardingStrategy.optim_grads_params, "gathers weights ahead"),
    )
    for name, is_decided, what in decided:
        flag = flag_for(name) if options.value(name) else f"--no-{flag_for(name)[2:]}"
        if is_decided and options.is_given(name) and (not options.value(name) or name == "use_distributed_optimizer"):
            yield f"{flag} has no effect: --data-parallel-sharding-strategy {strategy.name} {what} in any case"
