"""Checks of options against each other and against the ranks; nothing is adjusted."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from megatron_fsdp.errors import ConfigurationError
from megatron_fsdp.optional_packages import require_installed
from megatron_fsdp.train.options import OPTIONS, ModelOptions, Options, ParallelOptions, flag_for

_TRACKERS = {"tensorboard_dir": "tensorboard", "wandb_project": "wandb"}
_ONLY_ROTARY = "--transformer-impl transformers builds Llama, Qwen3, Mixtral and Qwen3-MoE, which have"

SHAPE = ModelOptions.__dataclass_fields__.keys() - {"seq_length", "transformer_impl", "hf_config", "hf_model"}
"""Options that a configuration of transformers sets."""

NEEDS: Mapping[str, str] = {
    "hierarchical_context_parallel_sizes": "--cp-comm-type a2a+p2p",
    "num_experts": "--transformer-impl transformers",
    "rotary_base": "--position-embedding-type rope",
    "moe_router_topk moe_ffn_hidden_size": "--num-experts",
    "torch_fsdp2_no_reshard_after_forward": "--use-torch-fsdp2",
    "initial_loss_scale": "--fp16",
    "recompute_num_layers recompute_method": "--recompute-granularity full",
    "recompute_modules": "--recompute-granularity selective",
    "adam_beta1 adam_beta2 adam_eps": "--optimizer adam or muon or adamw8bit",
    "sgd_momentum": "--optimizer sgd",
    "min_lr lr_decay_iters": "--lr-decay-style linear or cosine or inverse-square-root or WSD",
    "lr_decay_samples lr_warmup_samples lr_wsd_decay_samples": "--train-samples",
    "json_key data_cache_path": "--data-path",
    "tokenizer_model": "--tokenizer-type HuggingFaceTokenizer",
    "eod_mask_loss": "--tokenizer-type byte or bpe or HuggingFaceTokenizer",
    "vocab_size": "--tokenizer-type bpe or NullTokenizer",
    "save_interval keep_last async_save no_save_optim no_save_rng max_failed_saves max_restarts": "--save",
    "finetune no_load_optim no_load_rng strict_fsdp_dtensor_load verify_integrity": "--load",
    "wandb_exp_name": "--wandb-project",
    "log_digests_interval": "--deterministic world",
    "optimizer_offload_fraction": "--optimizer-cpu-offload",
}
"""Options -> the flag (or its values) without which they have no effect: the user's are refused, a preset's dropped."""

_COUNTED = "training is counted in samples"
_OVERFLOWS = "the scale of the loss is found by gradients that overflow, which the check would end the run for"

ALTERNATIVES: tuple[tuple[str, str, str], ...] = (
    ("bf16", "fp16", "the model computes in one dtype"),
    ("train_samples", "train_iters", "both say how long to train"),
    ("train_samples", "lr_decay_iters", _COUNTED),
    ("train_samples", "lr_warmup_iters", _COUNTED),
    ("train_samples", "lr_wsd_decay_iters", _COUNTED),
    ("lr_warmup_iters", "lr_warmup_fraction", "both say how long the learning rate rises"),
    ("lr_warmup_samples", "lr_warmup_fraction", "both say how long the learning rate rises"),
    ("hf_config", "hf_model", "the folder of weights has a configuration"),
    ("use_torch_fsdp2", "use_megatron_fsdp", "one engine shards the model"),
    ("grad_reduce_in_bf16", "accumulate_allreduce_grads_in_fp32", "gradients are communicated in one dtype"),
    ("grad_reduce_in_bf16", "megatron_fsdp_grad_comm_dtype", "both say the dtype that gradients are communicated in"),
    ("calculate_per_token_loss", "ddp_average_in_collective", "the one adds up, the other averages"),
    ("deterministic", "ddp_average_in_collective", "a back end that averages adds up in an order of its own"),
    ("deterministic", "use_torch_fsdp2", "FSDP2 leaves the order of sums to the back end"),
    ("optimizer_cpu_offload", "use_torch_fsdp2", "the engine of this package moves state"),
    ("megatron_fsdp_offload", "use_torch_fsdp2", "the engine of this package moves state"),
    ("megatron_fsdp_offload", "optimizer_cpu_offload", "both choose the state in host memory"),
    ("fp16", "check_for_nan_in_loss_and_grad", _OVERFLOWS),
    ("fp16", "check_for_large_grads", _OVERFLOWS),
)
"""(option, option, why): contradictory pairs; where a preset has one and the user the other, the user's holds."""

_IDLE_CASES: tuple[tuple[str, Callable[[Options], bool], str], ...] = (
    (
        "max_position_embeddings",
        lambda o: o.model.position_embedding_type == "rope" and o.model.transformer_impl == "local",
        "rotary positions have no table",
    ),
    ("no_load_optim no_load_rng", lambda o: o.checkpoint.finetune, "--finetune loads weights only"),
    (
        "save save_interval exit_interval exit_duration_in_mins eval_interval",
        lambda o: o.training.skip_train,
        "--skip-train takes no step",
    ),
    (
        "cp_comm_type hierarchical_context_parallel_sizes",
        lambda o: o.parallel.context_parallel_size == 1,
        "--context-parallel-size 1 leaves sequences whole",
    ),
    ("dist_ckpt_strictness", lambda o: o.checkpoint.load is None, "nothing is loaded without --load"),
    ("log_exposed_communication", lambda o: o.parallel.use_torch_fsdp2, "FSDP2 does not tell what it waits for"),
)
"""(options, when they have no effect, why): cases of common scripts, accepted with a note."""


@dataclass(frozen=True)
class Sizes:
    """Ranks of each kind of parallelism; their product is the number of ranks, experts lie across data ranks."""

    data: int
    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    expert: int = 1

    @property
    def is_data_only(self) -> bool:
        """True if there is only data parallelism."""
        return self.tensor == self.pipeline == self.context == self.expert == 1


def check_options(options: Options) -> None:
    """Check that options fit together, and that each given one has an effect; raise the first problem."""
    for check in (_wrong_source, _idle, _contradictory, _wrong_files, _wrong_model, _wrong_formats):
        for problem in check(options):
            raise ConfigurationError(problem)


def idle_notes(options: Options, train_iters: int) -> Iterator[str]:
    """Yield warnings for given options without effect, as far as that is usual."""
    for names, is_idle, why in _IDLE_CASES:
        if is_idle(options):
            yield from (f"{flag_for(name)} has no effect: {why}" for name in _chosen(options, names))
    kept = {"mla_up_proj", "moe_act"}.intersection(options.training.recompute_modules)
    if kept:
        yield (
            f"--recompute-modules {' '.join(sorted(kept))} has no effect: they keep no more than their result, or moe "
            "recomputes them"
        )
    for name in _chosen(options, "save_interval eval_interval exit_interval"):
        if options.value(name) > train_iters:
            yield f"{flag_for(name)} has no effect: training ends before"


def _chosen(options: Options, names: str) -> Iterator[str]:
    """Yield the options that the user gave, except switches set to their default."""
    for name in names.split():
        says_something = not OPTIONS[name].is_switch or options.value(name) != OPTIONS[name].default
        if options.is_chosen(name) and says_something:
            yield name


def is_met(needed: str, value_of: Callable[[str], Any]) -> bool:
    """Return True if an option has one of the values in `--flag a or b`; without values, any but none or off."""
    flag, *values = needed.split()
    value = value_of(flag[2:].replace("-", "_"))
    return not {*values}.isdisjoint(value if isinstance(value, tuple) else (value,)) if values else bool(value)


def _idle(options: Options) -> Iterator[str]:
    for names, needed in NEEDS.items():
        if not is_met(needed, options.value):
            for name in _chosen(options, names):
                yield f"{flag_for(name)} does nothing without {needed}: give both, or leave it out"


def _contradictory(options: Options) -> Iterator[str]:
    for first, second, why in ALTERNATIVES:
        if all(options.is_given(name) and options.value(name) not in (None, False) for name in (first, second)):
            yield (
                f"{flag_for(first)} (from the {options.origins[first]}) contradicts {flag_for(second)} (from the "
                f"{options.origins[second]}), since {why}: give one of them"
            )


def _wrong_files(options: Options) -> Iterator[str]:
    data, checkpoint = options.data, options.checkpoint
    parse_split(data.split)
    if data.tokenizer_type == "HuggingFaceTokenizer" and data.tokenizer_model is None:
        yield (
            "--tokenizer-type HuggingFaceTokenizer needs --tokenizer-model: give a tokenizer.json, or a folder with one"
        )
    if data.tokenizer_type == "NullTokenizer" and data.vocab_size is None:
        yield "--tokenizer-type NullTokenizer needs --vocab-size: give how many token ids there are"
    if data.tokenizer_type == "bpe" and data.vocab_size is not None and data.vocab_size <= 256:
        yield f"--vocab-size {data.vocab_size} is less than the 256 bytes and the end of a text: give 257 or more"
    if checkpoint.finetune and checkpoint.is_same_folder:
        yield (
            f"--finetune with one folder for --load and --save ({checkpoint.save}) would tune again from what it has "
            "saved itself, every time it is started: give another folder to --save"
        )


def parse_split(text: str) -> tuple[float, float, float]:
    """Parse `--split`: two or three numbers, in any unit.

    Returns shares, which add up to 1: to train on, to hold out, and for a later test, which is not read.
    """
    try:
        parts = [float(part) for part in text.split(",")]
    except ValueError:
        parts = []
    total = sum(parts)
    is_possible = len(parts) in (2, 3) and all(part >= 0 for part in parts) and 0 < total < math.inf
    if not is_possible or min(part / total for part in parts[:2]) <= 0:
        raise ConfigurationError(
            f"invalid --split {text}: give two numbers above 0, to train on and to hold out, such as 95,5, and "
            "a third for what is left aside, if you like"
        )
    training, held_out, aside = (part / total for part in (*parts, 0.0)[:3])
    return training, held_out, aside


def uses_transformers(model: ModelOptions) -> bool:
    """Return True if the model is one of transformers."""
    return model.transformer_impl == "transformers" or model.source is not None


def needs_transformers(options: Options) -> str | None:
    """Return the flag that requires the transformers package, if any."""
    model = options.model
    if model.source is not None:
        return "--hf-model" if model.hf_model is not None else "--hf-config"
    if uses_transformers(model):
        return "--transformer-impl transformers"
    return "--use-torch-fsdp2" if options.parallel.use_torch_fsdp2 else None


def require_there(options: Options) -> None:
    """Check that the model of the options exists, and the packages that they need (else MissingPackageError).

    Nothing is imported.
    """
    model = options.model
    if model.source is not None and not model.source.exists():
        named = flag_for("hf_model" if model.hf_model is not None else "hf_config")
        raise ConfigurationError(
            f"{named} {model.source} does not exist: give a local folder or file of transformers; nothing is "
            f"downloaded, but `hf download {model.source} --local-dir DIR` does so"
        )
    if (flag := needs_transformers(options)) is not None:
        require_installed("transformers", flag)
    for name, package in _TRACKERS.items():
        if getattr(options.reporting, name) is not None:
            require_installed(package, flag_for(name), instead="leave it out")


def _wrong_source(options: Options) -> Iterator[str]:
    """Yield problems of a shape beside a configuration of transformers."""
    if options.model.source is None:
        return
    source = flag_for("hf_config" if options.model.hf_config is not None else "hf_model")
    said = [flag_for(name) for name in ModelOptions.__dataclass_fields__ if name in SHAPE and options.is_chosen(name)]
    if said:
        yield (
            f"{', '.join(said)}: the shape is that of {source}, so these would do nothing; leave them out, or change "
            "the configuration"
        )
    if options.is_chosen("transformer_impl") and options.model.transformer_impl == "local":
        yield f"--transformer-impl local contradicts {source}, whose classes are those of transformers: leave it out"


def _wrong_model(options: Options) -> Iterator[str]:
    """Yield problems of options that the model cannot honour, or that have no effect."""
    model, training = options.model, options.training
    if model.source is None and model.transformer_impl == "transformers":
        yield from _wrong_family(model)
    if options.parallel.use_torch_fsdp2 and options.optimizer.optimizer in ("muon", "adamw8bit"):
        yield (
            f"--optimizer {options.optimizer.optimizer} does not step the shards of --use-torch-fsdp2: give "
            "--optimizer adam or sgd, or shard with --use-megatron-fsdp"
        )
    limit, length = model.max_position_embeddings, model.seq_length
    if limit is not None and length is not None and length > limit:
        yield f"--seq-length {length} is more than --max-position-embeddings {limit}: give samples that fit"
    layers, first = model.num_layers, training.recompute_num_layers
    if training.recompute_method == "uniform" and first != 1:
        yield (
            f"--recompute-method uniform --recompute-num-layers {first} is not possible: every block is recomputed by "
            "itself; give --recompute-num-layers 1"
        )
    modules = training.recompute_modules or ("core_attn",)
    if training.recompute_granularity == "selective" and uses_transformers(model) and "core_attn" in modules:
        yield (
            "--recompute-granularity selective is not offered for models of transformers, whose attention is not cut "
            "into core and projections: give --recompute-modules mlp moe layernorm, or --recompute-granularity full"
        )
    if not uses_transformers(model) and modules != ("core_attn",):
        yield (
            f"--recompute-modules {' '.join(modules)}: the decoder of this package recomputes core_attn only; leave it "
            "out, or give --transformer-impl transformers"
        )
    if layers is not None and first is not None and first > layers:
        yield f"--recompute-num-layers {first} is more than --num-layers {layers}: give as many or fewer"


def _wrong_formats(options: Options) -> Iterator[str]:
    """Yield recipes of weights in few bits where weights travel otherwise."""
    for bits, name in (("fp8", "fp8_compute"), ("fp4", "nvfp4")):
        said = [flag_for(each) for each in _chosen(options, f"{bits}_format {bits}_recipe")]
        if said and not options.value(f"{bits}_param_gather"):
            yield (
                f"{' and '.join(said)} would do nothing: products have the format in which weights are gathered; give "
                f"--{bits}-param-gather too, or name the format (--megatron-fsdp-weight-format {name})"
            )
    if options.training.fp8_recipe == "mxfp8" and options.ddp.keep_fp8_transpose_cache:
        yield "--keep-fp8-transpose-cache would do nothing with --fp8-recipe mxfp8: leave it out, or give tensorwise"
    if options.training.fp8_recipe == "tensorwise" and options.ddp.reuse_grad_buf_for_mxfp8_param_ag:
        yield "--reuse-grad-buf-for-mxfp8-param-ag contradicts --fp8-recipe tensorwise: leave it out, or give mxfp8"


def _wrong_family(model: ModelOptions) -> Iterator[str]:
    """Yield problems of options that families of transformers built from a shape cannot vary."""
    wanted = {
        "--position-embedding-type rope": model.position_embedding_type == "rope",
        "--normalization RMSNorm": model.normalization == "RMSNorm",
        "--swiglu": model.swiglu,
    }
    if missing := " ".join(flag for flag, is_given in wanted.items() if not is_given):
        yield (
            f"{_ONLY_ROTARY} rotary positions, RMSNorm and SwiGLU only: give {missing} too, or --transformer-impl local"
        )
    if model.add_bias_linear and (model.qk_layernorm or model.num_experts is not None):
        yield f"{_ONLY_ROTARY} biases only without --qk-layernorm and --num-experts: give --disable-bias-linear"
    if model.num_experts is not None and model.moe_router_topk > model.num_experts:
        yield f"--moe-router-topk {model.moe_router_topk} is more than --num-experts {model.num_experts}: give fewer"


def _wrong_attention(parallel: ParallelOptions) -> Iterator[str]:
    """Yield problems of attention over context-parallel ranks."""
    types, degrees = parallel.cp_comm_type, parallel.hierarchical_context_parallel_sizes
    if len({*types}) > 1:
        yield f"--cp-comm-type {' '.join(types)}: all layers communicate alike here; give one type"
    if "a2a+p2p" in types and (len(degrees) != 2 or math.prod(degrees) != parallel.context_parallel_size):
        given = " ".join(map(str, degrees)) or "(not given)"
        yield (
            f"--cp-comm-type a2a+p2p with --hierarchical-context-parallel-sizes {given}: give two numbers, of ranks "
            "that exchange tokens for heads and of ranks that gather, whose product is --context-parallel-size "
            f"{parallel.context_parallel_size}"
        )


def wrong_sizes(options: Options, sizes: Sizes) -> Iterator[str]:
    """Yield problems of sizes with the model or other options, as far as options show them.

    Facts of a transformers configuration, such as its heads, are checked when the model is divided.
    """
    model, length, cuts_sequence = options.model, options.model.seq_length or 0, options.parallel.sequence_parallel
    if cuts_sequence and sizes.tensor == 1:
        yield "--sequence-parallel does nothing with --tensor-model-parallel-size 1: give both or neither"
    if sizes.is_data_only:
        return
    if options.training.deterministic is not None:
        yield (
            "--deterministic world holds for data parallelism alone, since others cut sums inside of the model: leave "
            "their sizes at 1"
        )
    if not uses_transformers(model):
        yield (
            "the decoder of this package is not cut over tensor-, pipeline-, context- or expert-parallel ranks: give "
            "--transformer-impl transformers, --hf-config or --hf-model"
        )
    if (ranks := sizes.data * sizes.context * sizes.tensor) % sizes.expert:
        yield (
            f"--expert-model-parallel-size {sizes.expert} does not divide the {ranks} data-parallel ranks (context- "
            "and tensor-parallel ones counted): give one that does"
        )
    if options.ddp.num_distributed_optimizer_instances > 1 and max(sizes.context, sizes.expert) > 1:
        yield (
            "--num-distributed-optimizer-instances cuts the data-parallel ranks, which context-parallel ones "
            f"({sizes.context}) are among and expert-parallel ones ({sizes.expert}) lie across: give one instance, or "
            "no such ranks"
        )
    if sizes.context > 1:
        yield from _wrong_attention(options.parallel)
    if sizes.context > 1 and length % (2 * sizes.context):
        yield (
            f"--seq-length {length} is no multiple of twice --context-parallel-size {sizes.context}, since ranks take "
            f"two pieces of a sequence each: give a multiple of {2 * sizes.context}"
        )
    if cuts_sequence and length % sizes.tensor:
        yield (
            f"--seq-length {length} is no multiple of --tensor-model-parallel-size {sizes.tensor}, over which "
            "--sequence-parallel cuts it: give a multiple"
        )
    if model.source is None and model.num_layers is not None and model.num_layers < sizes.pipeline:
        yield (
            f"--pipeline-model-parallel-size {sizes.pipeline} is more than --num-layers {model.num_layers}: every "
            "stage needs a layer"
        )
    if model.source is None and sizes.expert > 1 and (model.num_experts is None or model.num_experts % sizes.expert):
        yield (
            f"--expert-model-parallel-size {sizes.expert} does not divide --num-experts {model.num_experts}: give a "
            "number of experts that it divides"
        )
