"""Resolves options and ranks to a job: fills in everything left open, and reports every adjustment."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from megatron_fsdp.errors import ConfigurationError
from megatron_fsdp.train.learning_rate import Schedule
from megatron_fsdp.train.options.checks import check_options, check_sizes, idle_notices
from megatron_fsdp.train.options.engine_config import engine_config
from megatron_fsdp.train.options.job import EngineName, Job, Sizes, World, plan_batch
from megatron_fsdp.train.options.options import Options


def resolve(options: Options, world: World) -> Job:
    """Complete and check a run.

    Args:
        options: What was said.
        world: Ranks and hardware.

    Raises:
        ConfigurationError: Options contradict each other, do nothing, or do not fit the ranks.
    """
    notices = list(options.explained)
    options = _with_tokenizer_of_model(options, notices)
    check_options(options)
    check_backend(options, world.device_type)
    engine = _engine(options)
    sizes = _sizes(options, world)
    dtype = _dtype(options, world)
    train_iters = _require(options.training.train_iters, "--train-iters", "how many steps to train")
    micro = _require(options.training.micro_batch_size, "--micro-batch-size", "samples per rank and microbatch")
    if options.training.fp16 and (options.ddp.check_for_nan_in_grad or options.ddp.check_for_large_grads):
        raise ConfigurationError(
            "--fp16 finds the scale of the loss by gradients that overflow, which --check-for-nan-in-grad and "
            "--check-for-large-grads end the run for: leave them out"
        )
    notices += [*idle_notices(options), *_rank_notices(options, world)]
    batch = plan_batch(micro, options.training.global_batch_size, sizes.data)
    notices += batch.notices()
    return Job(
        options=_with_uniform_recompute(options),
        engine=engine,
        ddp=engine_config(options, dtype, engine, sizes, notices),
        sizes=sizes,
        batch=batch,
        dtype=dtype,
        schedule=_schedule(options, train_iters),
        train_iters=train_iters,
        seq_length=_require(options.model.seq_length, "--seq-length", "tokens of a sample"),
        load_is_optional=_load_is_optional(options, world),
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


def _rank_notices(options: Options, world: World) -> Iterator[str]:
    nproc = options.parallel.nproc
    if nproc is not None and nproc != world.ranks:
        yield f"--nproc {nproc} has no effect: {world.ranks} ranks were started"


def _with_uniform_recompute(options: Options) -> Options:
    """Drop the number of layers under the uniform method, which recomputes all blocks one by one."""
    if options.training.recompute_method != "uniform":
        return options
    return replace(options, training=replace(options.training, recompute_num_layers=None))


def _engine(options: Options) -> EngineName:
    if options.parallel.use_torch_fsdp2:
        return "torch_fsdp2"
    return "megatron_fsdp" if options.ddp.use_megatron_fsdp else "ddp"


def check_backend(options: Options, device_type: str) -> None:
    """Check that the requested backend supports the devices; torchrun's ranks call this before they join.

    Raises:
        ConfigurationError: It does not support them.
    """
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


def _dtype(options: Options, world: World) -> torch.dtype:
    training = options.training
    if training.bf16:
        return torch.bfloat16
    if training.fp16:
        return torch.float16
    return torch.bfloat16 if training.auto_bf16 and world.multiplies_bf16 else torch.float32


def _schedule(options: Options, train_iters: int) -> Schedule:
    optimizer = options.optimizer
    decay = train_iters if optimizer.lr_decay_iters is None else optimizer.lr_decay_iters
    if optimizer.lr is None:
        raise ConfigurationError("--lr is missing (largest learning rate): give it, or a --preset that has it")
    if optimizer.min_lr > optimizer.lr:
        raise ConfigurationError(f"--min-lr {optimizer.min_lr} is more than --lr {optimizer.lr}: give less")
    warmup = optimizer.lr_warmup_iters
    if optimizer.lr_warmup_fraction is not None:
        warmup = int(round(optimizer.lr_warmup_fraction * decay, 6))  # 0.58 x 100 is a little less than 58
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
    """Return whether there may be no checkpoint yet: restarted ranks, or one folder to load and save."""
    checkpoint = options.checkpoint
    return checkpoint.is_same_folder or (checkpoint.save is not None and world.restarts > 0)
