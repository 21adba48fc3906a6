"""Checks of options against each other, against the ranks, and against the environment; nothing is adjusted."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields

from megatron_fsdp.errors import ConfigurationError
from megatron_fsdp.train.options.job import Job, Sizes, World, parse_split
from megatron_fsdp.train.options.options import OPTIONS, ModelOptions, Options, flag_for

_SMALLEST_BPE = 257  # 256 bytes and the end of a text
_MOST_IDS = 2**31  # of the widest type that token files have, int32
_CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"
_ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
_NOT_SHAPE = ("seq_length", "transformer_impl", "hf_config", "hf_model")
_ONLY_ROTARY = "--transformer-impl transformers builds Llama, Qwen3, Mixtral and Qwen3-MoE, which have"

_NEEDS: Mapping[str, str] = {
    "moe_router_topk moe_ffn_hidden_size": "--num-experts",
    "torch_fsdp2_no_reshard_after_forward": "--use-torch-fsdp2",
    "initial_loss_scale": "--fp16",
    "recompute_num_layers recompute_method": "--recompute-granularity full",
    "adam_beta1 adam_beta2 adam_eps": "--optimizer adam",
    "sgd_momentum": "--optimizer sgd",
    "min_lr lr_decay_iters": "--lr-decay-style linear or cosine or inverse-square-root or WSD",
    "json_key data_cache_path": "--data-path",
    "tokenizer_model": "--tokenizer-type HuggingFaceTokenizer",
    "vocab_size": "--tokenizer-type bpe or NullTokenizer",
    "save_interval keep_last async_save no_save_optim no_save_rng max_failed_saves max_restarts": "--save",
    "finetune no_load_optim no_load_rng strict_fsdp_dtensor_load verify_integrity": "--load",
    "wandb_exp_name": "--wandb-project",
    "sample_tokens": "--prompt",
}
"""Options -> the flag (or its values) without which they have no effect, and are refused."""

_TOLD: tuple[tuple[str, Callable[[Options], bool], str], ...] = (
    (
        "max_position_embeddings",
        lambda o: o.model.position_embedding_type == "rope" and o.model.transformer_impl == "local",
        "rotary positions have no table",
    ),
    ("no_load_optim no_load_rng", lambda o: o.checkpoint.finetune, "--finetune loads weights only"),
    ("save_interval", lambda o: _is_beyond(o, o.checkpoint.save_interval), "training ends before"),
    ("eval_interval", lambda o: _is_beyond(o, o.training.eval_interval), "training ends before"),
    ("exit_interval", lambda o: _is_beyond(o, o.training.exit_interval), "training ends before"),
    (
        "save save_interval exit_interval exit_duration_in_mins eval_interval",
        lambda o: o.training.skip_train,
        "--skip-train takes no step",
    ),
    ("log_exposed_communication", lambda o: o.parallel.use_torch_fsdp2, "FSDP2 does not tell what it waits for"),
)
"""(options, when they have no effect, why): cases of common scripts, accepted with a notice."""

_ALTERNATIVES: tuple[tuple[str, str, str], ...] = (
    ("bf16", "fp16", "the model computes in one dtype"),
    ("lr_warmup_iters", "lr_warmup_fraction", "both say how long the learning rate rises"),
    ("hf_config", "hf_model", "the folder of weights has a configuration"),
    ("use_torch_fsdp2", "use_megatron_fsdp", "one engine shards the model"),
    ("grad_reduce_in_bf16", "accumulate_allreduce_grads_in_fp32", "gradients travel in one dtype"),
    ("grad_reduce_in_bf16", "megatron_fsdp_grad_comm_dtype", "both say the dtype that gradients travel in"),
    ("bf16", "auto_bf16", "both say the dtype that the model computes in"),
    ("fp16", "auto_bf16", "both say the dtype that the model computes in"),
)
"""(option, option, why): contradictory pairs. A preset's options were dropped before (`giving_way`)."""


def check_options(options: Options) -> None:
    """Check that options fit together, and that none is given that has no effect.

    Raises:
        ConfigurationError: Names the option, what was given, what is allowed.
    """
    for names, needed in _NEEDS.items():
        for name in _chosen(options, names):
            if not _has(options, needed):
                raise ConfigurationError(f"{flag_for(name)} does nothing without {needed}: give both, or leave it out")
    _check_alternatives(options)
    _check_data(options)
    _check_together(options)
    _check_model(options)


def idle_notices(options: Options) -> Iterator[str]:
    """Yield notices for options that were given and have no effect in a usual way."""
    for names, is_idle, why in _TOLD:
        if is_idle(options):
            yield from (f"{flag_for(name)} has no effect: {why}" for name in _chosen(options, names))


def _chosen(options: Options, names: str) -> Iterator[str]:
    """Yield the options that the user gave, except switches set to their default."""
    for name in names.split():
        says_something = not OPTIONS[name].is_switch or options.value(name) != OPTIONS[name].default
        if options.is_chosen(name) and says_something:
            yield name


def _has(options: Options, needed: str) -> bool:
    """Return whether an option has one of the values in `--flag a or b`; without values, any but none or off."""
    flag, *values = needed.split()
    value = options.value(flag[2:].replace("-", "_"))
    return value in values if values else value not in (None, False, "")


def _is_beyond(options: Options, interval: int | None) -> bool:
    steps = options.training.train_iters
    return interval is not None and steps is not None and interval > steps


def _check_alternatives(options: Options) -> None:
    for first, second, why in _ALTERNATIVES:
        if all(options.is_given(name) and options.value(name) not in (None, False) for name in (first, second)):
            raise ConfigurationError(
                f"{flag_for(first)} (from the {options.origins[first]}) contradicts {flag_for(second)} (from the "
                f"{options.origins[second]}), since {why}: give one of them"
            )


def _check_together(options: Options) -> None:
    """Refuse values of several options that contradict each other."""
    training, checkpoint = options.training, options.checkpoint
    if checkpoint.finetune and checkpoint.is_same_folder:
        raise ConfigurationError(
            f"--finetune with one folder for --load and --save ({checkpoint.save}) would tune again from what it has "
            "saved itself, every time it is started: give another folder to --save"
        )
    if checkpoint.ckpt_format != "fsdp_dtensor":
        raise ConfigurationError(
            f"--ckpt-format {checkpoint.ckpt_format} is not written or read in training: leave it at "
            "fsdp_dtensor, and convert a torch_dist checkpoint first with tools/checkpoint/checkpoint_inspector.py"
        )
    if training.calculate_per_token_loss and options.ddp.average_in_collective:
        raise ConfigurationError(
            "--calculate-per-token-loss contradicts --ddp-average-in-collective: the one adds up, the other averages; "
            "give one of them"
        )
    layers = training.recompute_num_layers
    if training.recompute_method == "uniform" and layers != 1:
        raise ConfigurationError(
            f"--recompute-method uniform --recompute-num-layers {layers} is not possible: every block is recomputed by "
            "itself; give --recompute-num-layers 1"
        )


def _check_data(options: Options) -> None:
    """Check split, tokenizer and number of tokens; files are checked later."""
    data = options.data
    parse_split(data.split)
    kind = data.tokenizer_type
    if kind == "HuggingFaceTokenizer" and data.tokenizer_model is None:
        raise ConfigurationError(
            "--tokenizer-type HuggingFaceTokenizer needs --tokenizer-model: give a tokenizer.json, or a folder with one"
        )
    if kind == "NullTokenizer" and data.vocab_size is None:
        raise ConfigurationError("--tokenizer-type NullTokenizer needs --vocab-size: give how many token ids there are")
    if kind == "bpe" and data.vocab_size is not None and data.vocab_size < _SMALLEST_BPE:
        raise ConfigurationError(
            f"--vocab-size {data.vocab_size} is less than the 256 bytes and the end of a text: give {_SMALLEST_BPE} or "
            "more"
        )
    if data.vocab_size is not None and data.vocab_size > _MOST_IDS:
        raise ConfigurationError(f"invalid --vocab-size {data.vocab_size}: give at most {_MOST_IDS}")
    _check_ids(options)


def _check_ids(options: Options) -> None:
    """Refuse what token ids alone cannot give: text, or a known end of one."""
    if options.data.tokenizer_type != "NullTokenizer":
        return
    if options.data.data_path is None:
        raise ConfigurationError(
            "--tokenizer-type NullTokenizer needs --data-path: give the prefix of a .bin and .idx, or an .npy"
        )
    if options.data.eod_mask_loss:
        raise ConfigurationError(
            "--eod-mask-loss does nothing with --tokenizer-type NullTokenizer, which knows no end of a text: leave it "
            "out, or give the tokenizer that made the ids"
        )
    prompt, ids = options.reporting.prompt, options.data.vocab_size or 0
    if options.is_given("prompt") and not all(word.isdecimal() for word in prompt.split()):
        raise ConfigurationError(
            f"--prompt {prompt!r} is no token ids, and --tokenizer-type NullTokenizer knows no text: give numbers with "
            "spaces between them, or leave it out"
        )
    if options.is_given("prompt") and any(int(word) >= ids for word in prompt.split()):
        raise ConfigurationError(f"--prompt {prompt!r} has ids that --vocab-size {ids} does not: give 0 to {ids - 1}")


def uses_transformers(model: ModelOptions) -> bool:
    """Return whether the model is one of transformers."""
    return model.transformer_impl == "transformers" or model.source is not None


def needs_transformers(options: Options) -> str | None:
    """Return the flag that requires the transformers package; None: there is none."""
    model = options.model
    if model.source is not None:
        return "--hf-model" if model.hf_model is not None else "--hf-config"
    if uses_transformers(model):
        return "--transformer-impl transformers"
    return "--use-torch-fsdp2" if options.parallel.use_torch_fsdp2 else None


def _check_model(options: Options) -> None:
    """Refuse options that the model cannot honour, or that have no effect."""
    model = options.model
    if model.source is not None:
        _check_has_no_shape(options)
    elif model.transformer_impl == "transformers":
        _check_family(model)
    else:
        if model.num_experts is not None:
            raise ConfigurationError(
                f"--num-experts {model.num_experts}: the decoder of this package has no experts; give "
                "--transformer-impl transformers"
            )
        if options.is_chosen("rotary_base") and model.position_embedding_type != "rope":
            raise ConfigurationError(
                f"--rotary-base {model.rotary_base} does nothing with learned positions: give "
                "--position-embedding-type rope, or leave it out"
            )
    limit, length = model.max_position_embeddings, model.seq_length
    if limit is not None and length is not None and length > limit:
        raise ConfigurationError(
            f"--seq-length {length} is more than --max-position-embeddings {limit}: give samples that fit"
        )
    _check_recomputation(options)


def _check_has_no_shape(options: Options) -> None:
    source = "hf_config" if options.model.hf_config is not None else "hf_model"
    shape = [field.name for field in fields(ModelOptions) if field.name not in _NOT_SHAPE]
    said = [flag_for(name) for name in shape if options.is_chosen(name)]
    if said:
        raise ConfigurationError(
            f"{', '.join(said)}: the shape is that of {flag_for(source)}, so these would do nothing; leave them out, "
            "or change the configuration"
        )
    if options.is_chosen("transformer_impl") and options.model.transformer_impl == "local":
        raise ConfigurationError(
            f"--transformer-impl local contradicts {flag_for(source)}, whose classes are those of transformers: leave "
            "it out"
        )


def _check_family(model: ModelOptions) -> None:
    """Refuse what families of transformers that are built from a shape cannot vary."""
    wanted = {
        "--position-embedding-type rope": model.position_embedding_type != "rope",
        "--normalization RMSNorm": model.normalization != "RMSNorm",
        "--swiglu": not model.swiglu,
    }
    missing = [flag for flag, is_missing in wanted.items() if is_missing]
    if missing:
        raise ConfigurationError(
            f"{_ONLY_ROTARY} rotary positions, RMSNorm and SwiGLU only: give {' '.join(missing)} too, or "
            "--transformer-impl local"
        )
    if model.add_bias_linear and (model.qk_layernorm or model.num_experts is not None):
        raise ConfigurationError(
            f"{_ONLY_ROTARY} biases only without --qk-layernorm and --num-experts: give --disable-bias-linear"
        )
    if model.num_experts is not None and model.moe_router_topk > model.num_experts:
        raise ConfigurationError(
            f"--moe-router-topk {model.moe_router_topk} is more than --num-experts {model.num_experts}: give as many "
            "or fewer"
        )


def _check_recomputation(options: Options) -> None:
    training, model = options.training, options.model
    if training.recompute_granularity == "selective" and uses_transformers(model):
        raise ConfigurationError(
            "--recompute-granularity selective is not offered for models of transformers, whose attention is not cut "
            "into core and projections: give --recompute-granularity full"
        )
    layers, first = model.num_layers, training.recompute_num_layers
    if layers is not None and first is not None and first > layers and model.source is None:
        raise ConfigurationError(
            f"--recompute-num-layers {first} is more than --num-layers {layers}: give as many or fewer"
        )


def check_sizes(options: Options, sizes: Sizes) -> None:
    """Refuse sizes that the model or other options rule out, as far as options tell.

    What only the configuration of a model of transformers tells, such as its heads, is checked when it is built.

    Raises:
        ConfigurationError: Names the size and what to give in place of it.
    """
    if options.parallel.sequence_parallel and sizes.tensor == 1:
        raise ConfigurationError(
            "--sequence-parallel does nothing with --tensor-model-parallel-size 1: give both or neither"
        )
    if sizes.is_data_only:
        return
    if not uses_transformers(options.model):
        raise ConfigurationError(
            "the decoder of this package is not cut over tensor-, pipeline-, context- or expert-parallel ranks: give "
            "--transformer-impl transformers, --hf-config or --hf-model"
        )
    if sizes.expert > 1 and sizes.tensor > 1:
        raise ConfigurationError(
            f"--expert-model-parallel-size {sizes.expert} does not go with --tensor-model-parallel-size "
            f"{sizes.tensor}, whose ranks share out the experts by themselves: give one of the two"
        )
    if options.ddp.num_distributed_optimizer_instances > 1 and sizes.context > 1:
        raise ConfigurationError(
            "--num-distributed-optimizer-instances cuts the data-parallel ranks, which context-parallel ones "
            f"({sizes.context}) are among: give one instance, or --context-parallel-size 1"
        )
    if options.ddp.num_distributed_optimizer_instances > 1 and sizes.expert > 1:
        raise ConfigurationError(
            "--num-distributed-optimizer-instances cuts the data-parallel ranks, which expert-parallel ones "
            f"({sizes.expert}) lie across: give one instance, or --expert-model-parallel-size 1"
        )
    _check_divides(options, sizes)


def _check_divides(options: Options, sizes: Sizes) -> None:
    model, length = options.model, options.model.seq_length
    if length is not None and length % (2 * sizes.context) and sizes.context > 1:
        raise ConfigurationError(
            f"--seq-length {length} is no multiple of twice --context-parallel-size {sizes.context}, since ranks take "
            f"two pieces of a sequence each: give a multiple of {2 * sizes.context}"
        )
    if options.parallel.sequence_parallel and length is not None and length % sizes.tensor:
        raise ConfigurationError(
            f"--seq-length {length} is no multiple of --tensor-model-parallel-size {sizes.tensor}, over which "
            "--sequence-parallel cuts it: give a multiple"
        )
    if model.source is not None:
        return
    if model.num_layers is not None and model.num_layers < sizes.pipeline:
        raise ConfigurationError(
            f"--pipeline-model-parallel-size {sizes.pipeline} is more than --num-layers {model.num_layers}: every "
            "stage needs a layer"
        )
    if sizes.expert > 1 and (model.num_experts is None or model.num_experts % sizes.expert):
        raise ConfigurationError(
            f"--expert-model-parallel-size {sizes.expert} does not divide --num-experts {model.num_experts}: give a "
            "number of experts that it divides"
        )


def check_environment(environment: Mapping[str, str], job: Job, world: World) -> tuple[str, ...]:
    """Check the environment variables that the user guide warns of.

    Args:
        environment: Such as `os.environ`.
        job: The run.
        world: Ranks and hardware.

    Returns:
        What has no effect, or costs speed, in words.

    Raises:
        ConfigurationError: A variable has a value that a flag of the run cannot live with; names both.
    """
    return (*_connections(environment, job, world), *_allocator(environment, job, world))


def _connections(environment: Mapping[str, str], job: Job, world: World) -> Iterator[str]:
    value = environment.get(_CONNECTIONS)
    shards = job.engine != "ddp"
    if value is not None and world.device_type != "cuda":
        yield f"{_CONNECTIONS}={value} has no effect on {world.device_type}"
        return
    if value == "1" and shards:
        flag = "--use-megatron-fsdp" if job.engine == "megatron_fsdp" else "--use-torch-fsdp2"
        raise ConfigurationError(
            f"{_CONNECTIONS}=1 puts all kernels into one queue, where gathers and reductions of {flag} wait behind "
            f"compute: `unset {_CONNECTIONS}`, or give 8 or more"
        )
    if shards and world.needs_one_connection and (job.sizes.tensor > 1 or job.sizes.context > 1):
        yield (
            f"{_CONNECTIONS} is {value or 'not set'}, as full sharding wants it; tensor- and context-parallel ranks "
            "would rather have 1 on this hardware (before Blackwell), and may be a little slower"
        )


def _allocator(environment: Mapping[str, str], job: Job, world: World) -> Iterator[str]:
    for name in _ALLOCATOR:
        settings = [part.strip().lower() for part in environment.get(name, "").split(",")]
        if "expandable_segments:true" not in settings or not job.options.ddp.nccl_ub:
            continue
        if world.device_type == "cuda":
            raise ConfigurationError(
                f"{name}={environment[name]} contradicts --use-nccl-ub: memory that NCCL registers must not grow; "
                "leave expandable_segments:True or --use-nccl-ub out"
            )
        yield f"{name}={environment[name]} has no effect on {world.device_type}"
