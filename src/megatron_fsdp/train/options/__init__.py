"""All options of a run: a frozen dataclass by subject, whose fields are the flags, with Megatron-LM's names. Pure.

`command_line.assemble` puts them together from defaults, a preset, a configuration file and flags.
"""

from __future__ import annotations

import dataclasses
import math
import re
import types
import typing
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, get_args, get_origin

from megatron_fsdp.config.ddp_config import DistributedDataParallelConfig
from megatron_fsdp.config.ddp_config_flags import destination_of, field_meanings, flag_of
from megatron_fsdp.config.engine_options import offload_of
from megatron_fsdp.errors import ConfigurationError

# ---- fields as flags -------------------------------------------------------------------------------------------------


class Bound(NamedTuple):
    """A bound on a number: its text for messages, and its predicate."""

    words: str
    allows: Callable[[Any], bool]


_TOO_LARGE = 2**63  # below it, tensors take a size, and generators a seed, as it is
_FITS = Bound("less than 2^63", lambda value: value < _TOO_LARGE)
_NOT_NEGATIVE = Bound("a finite number, 0 or more", lambda value: 0 <= value < math.inf)

Count = Annotated[int, Bound("1 or more", lambda value: value >= 1), _FITS]
Modules = Annotated[int, Bound("from 1 to 100000", lambda value: 1 <= value <= 100_000)]  # each one is an object
Whole = Annotated[int, _NOT_NEGATIVE, _FITS]
Positive = Annotated[float, Bound("a finite number above 0", lambda value: 0 < value < math.inf)]
Duration = Annotated[float, Bound("a number above 0", lambda value: value > 0)]  # infinity undoes that of a preset
Minutes = Annotated[float, Bound("above 0, and at most 525600, a year", lambda value: 0 < value <= 525600)]
NotNegative = Annotated[float, _NOT_NEGATIVE]
Share = Annotated[float, Bound("0 or more, and less than 1", lambda value: 0 <= value < 1)]
Part = Annotated[float, Bound("a number from 0 to 1", lambda value: 0 <= value <= 1)]


@dataclass(frozen=True)
class Option:
    """One field as a flag; its name is also the key in a configuration file. Without choices, any value is possible.

    With `is_list` several values may follow the flag.
    """

    name: str
    kind: type
    bounds: tuple[Bound, ...]
    choices: tuple[Any, ...]
    default: Any
    meaning: str
    is_list: bool = False

    @property
    def flag(self) -> str:
        """The flag that turns a switch on, or precedes a value; also for switches that are on by default."""
        return "--" + self.name.replace("_", "-")

    @property
    def is_switch(self) -> bool:
        """True if it is a boolean."""
        return self.kind is bool

    @property
    def off_flags(self) -> tuple[str, ...]:
        """The flags that turn a switch off: `--no-x`, and as in Megatron-LM `--disable-x` if it is on by default.

        A switch named `no_x` has the flag `--no-x` only.
        """
        if not self.is_switch or self.name.startswith("no_"):
            return ()
        prefixes = ("--no-", "--disable-") if self.default else ("--no-",)
        return tuple(prefix + self.flag.removeprefix("--") for prefix in prefixes)

    def read(self, value: Any) -> Any:
        """Parse a text, or a value of a configuration file, into a value of the field."""
        if self.is_list:
            one = dataclasses.replace(self, is_list=False)
            return tuple(map(one.read, value if isinstance(value, list | tuple) else [value]))
        found, words = _parsed(self.kind, value), _WORDS[self.kind]
        if found is not None or self.choices:
            words = next((bound.words for bound in self.bounds if not bound.allows(found)), "")
        if words:
            raise ConfigurationError(f"invalid {self.flag} {str(value) or repr('')}: give {words}")
        return found


def options_of(cls: type) -> tuple[Option, ...]:
    """Return the fields of a dataclass as options, in their order."""
    hints, meanings = typing.get_type_hints(cls, include_extras=True), field_meanings(cls)
    return tuple(
        Option(
            field.name,
            *_kind_of(hints[field.name]),
            field.default,
            meanings.get(field.name, ""),
            is_list=get_origin(hints[field.name]) is tuple,
        )
        for field in dataclasses.fields(cls)
    )


def _kind_of(hint: Any) -> tuple[type, tuple[Bound, ...], tuple[Any, ...]]:
    """Return the type of a value, its bounds, and its choices."""
    if get_origin(hint) is tuple:
        hint, *_ = get_args(hint)
    if get_origin(hint) in (typing.Union, types.UnionType):
        (hint,) = [part for part in get_args(hint) if part is not type(None)]
    if get_origin(hint) is Annotated:
        kind, *bounds = get_args(hint)
        return kind, tuple(bounds), ()
    if get_origin(hint) is Literal:
        choices = get_args(hint)
        return str, (Bound(f"one of {', '.join(choices)}", choices.__contains__),), choices
    return hint, (), ()


_WORDS: Mapping[type, str] = {
    int: "a whole number",
    float: "a finite number",
    str: "a text, in a file with quotes around it",
    Path: "a path",
    bool: "true or false",
}


def _parsed(kind: type, value: Any) -> Any:
    """Convert a text, or a value of a configuration file, to this type; None if it does not fit."""
    if kind is float and not isinstance(value, bool):
        with suppress(TypeError, ValueError, OverflowError):
            return None if math.isnan(found := float(value)) else found
    if kind is int and isinstance(value, str) and re.fullmatch(r"[+-]?\d{1,3}(_?\d){0,30}", value.strip()):
        return int(value)
    if kind is Path and isinstance(value, str | Path) and str(value) and "\0" not in str(value):
        with suppress(RuntimeError):  # there is no user of this name
            return Path(value).expanduser()
    return value if type(value) is kind else None


# ---- the options -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ModelOptions:
    """The model: a shape, or a configuration or folder of Hugging Face transformers.

    Attributes:
        num_layers: Transformer blocks.
        hidden_size: Width of the residual stream.
        ffn_hidden_size: Width of the feed-forward layer; default: 4 times the hidden size.
        num_attention_heads: Heads of attention.
        num_query_groups: Heads of keys and values, which query heads share; default: as many as there are heads.
        kv_channels: Width of a head; default: the hidden size by the number of heads.
        seq_length: Tokens of a sample.
        max_position_embeddings: Positions that the model can have; default: the length of a sample.
        position_embedding_type: Learned positions, or rotary ones.
        rotary_base: Base of the rotary frequencies.
        normalization: Of the layers.
        norm_epsilon: Added to the variance.
        qk_layernorm: Normalise queries and keys.
        swiglu: A gated feed-forward layer with SiLU, instead of GELU.
        add_bias_linear: Linear layers have a bias; `--disable-bias-linear` turns it off.
        untie_embeddings_and_output_weights: The output layer has a matrix of its own.
        init_method_std: Standard deviation of initial weights.
        make_vocab_size_divisible_by: The vocabulary of the model is rounded up to a multiple of this.
        num_experts: Experts of each block; default: none. Needs `--transformer-impl transformers`.
        moe_router_topk: Experts for each token.
        moe_ffn_hidden_size: Width of an expert; default: that of the feed-forward layer.
        transformer_impl: Whose classes: this package's decoder, or those of transformers (Llama, Mixtral), which can be
            cut over tensor-, context-, pipeline- and expert-parallel ranks. Megatron-LM's `transformer_engine` is as if
            it was left out.
        hf_config: A config.json of transformers, or a folder with one: that model with new weights.
        hf_model: A local folder of transformers: that model with its weights, on the tokens of its tokenizer.json.
    """

    num_layers: Modules | None = None
    hidden_size: Count | None = None
    ffn_hidden_size: Count | None = None
    num_attention_heads: Count | None = None
    num_query_groups: Count | None = None
    kv_channels: Count | None = None
    seq_length: Count | None = None
    max_position_embeddings: Count | None = None
    position_embedding_type: Literal["learned_absolute", "rope"] = "learned_absolute"
    rotary_base: Positive = 10000.0
    normalization: Literal["LayerNorm", "RMSNorm"] = "LayerNorm"
    norm_epsilon: Positive = 1e-5
    qk_layernorm: bool = False
    swiglu: bool = False
    add_bias_linear: bool = True
    untie_embeddings_and_output_weights: bool = False
    init_method_std: Positive = 0.02
    make_vocab_size_divisible_by: Count = 128
    num_experts: Modules | None = None
    moe_router_topk: Count = 2
    moe_ffn_hidden_size: Count | None = None
    transformer_impl: Literal["local", "transformers"] = "local"
    hf_config: Path | None = None
    hf_model: Path | None = None

    @property
    def source(self) -> Path | None:
        """The configuration or folder of transformers that gives the shape; None: the options do."""
        return self.hf_config or self.hf_model


@dataclass(frozen=True)
class ParallelOptions:
    """Ranks and engines, besides the fields of `DistributedDataParallelConfig`.

    Attributes:
        tensor_model_parallel_size: Ranks that each matrix is cut over.
        pipeline_model_parallel_size: Ranks that the layers are divided over.
        context_parallel_size: Ranks that each sequence is cut over.
        cp_comm_type: Attention over these ranks, the same in all layers: p2p and all_gather gather keys and values, a2a
            exchanges tokens for heads (Ulysses), a2a+p2p does both; default: they are gathered.
        hierarchical_context_parallel_sizes: With a2a+p2p: how many ranks exchange, and how many gather.
        expert_model_parallel_size: Ranks that the experts are divided over.
        sequence_parallel: Cut activations between layers along the sequence, over the tensor-parallel ranks.
        use_torch_fsdp2: Shard by PyTorch's FSDP2 instead of this package's engine.
        torch_fsdp2_no_reshard_after_forward: Keep weights gathered from forward to backward, with FSDP2: more memory,
            fewer gathers.
        init_model_with_meta_device: Build the model without memory, and initialise shard by shard.
        device: Where to run; auto is the accelerator if there is one.
        nproc: Processes to start where torchrun did not start this one; default: one per accelerator, or two on a CPU.
        distributed_backend: Of the process group; auto fits the device.
        distributed_timeout_minutes: How long a collective may take; a run that hangs ends then, with what is known.
    """

    tensor_model_parallel_size: Count = 1
    pipeline_model_parallel_size: Count = 1
    context_parallel_size: Count = 1
    cp_comm_type: tuple[Literal["p2p", "all_gather", "a2a", "a2a+p2p"], ...] = ()
    hierarchical_context_parallel_sizes: tuple[Count, ...] = ()
    expert_model_parallel_size: Count = 1
    sequence_parallel: bool = False
    use_torch_fsdp2: bool = False
    torch_fsdp2_no_reshard_after_forward: bool = False
    init_model_with_meta_device: bool = False
    device: Literal["auto", "cpu", "cuda"] = "auto"
    nproc: Count | None = None
    distributed_backend: Literal["auto", "nccl", "gloo"] = "auto"
    distributed_timeout_minutes: Minutes = 10.0

    @property
    def ulysses_degree(self) -> int:
        """The context-parallel ranks that exchange tokens for heads."""
        if self.context_parallel_size > 1 and "a2a+p2p" in self.cp_comm_type:
            return self.hierarchical_context_parallel_sizes[0]
        return self.context_parallel_size if "a2a" in self.cp_comm_type else 1


@dataclass(frozen=True)
class TrainingOptions:
    """Batches, precision, evaluation, and the end of training.

    Attributes:
        micro_batch_size: Samples per rank and microbatch.
        global_batch_size: Samples of an optimizer step, over all ranks; default: one microbatch of each data-parallel
            rank. Any number of ranks trains on the same samples: what does not come out even is filled up with samples
            that do not count.
        train_iters: Optimizer steps, those of the runs that this one continues included.
        train_samples: Samples to train on, instead of the steps: as many steps as they fill. Those of the learning
            rate are then counted in samples, too.
        exit_interval: End after a step that is a multiple of this.
        exit_duration_in_mins: End after a step at which this many minutes of training have passed in all.
        seed: Fixes the initial weights, the order of the data and what is dropped.
        bf16: Compute in bfloat16.
        fp16: Compute in float16, with a scaled loss.
        initial_loss_scale: Where the scale of the loss begins.
        grad_reduce_in_bf16: Reduce gradients in bfloat16 instead of float32; they accumulate in float32 anyway.
        calculate_per_token_loss: Every token counts alike, instead of every sample; gradients are summed over ranks.
        deterministic: Give the same bits of losses, gradients and weights on any number of data-parallel ranks.
        recompute_granularity: Recompute whole blocks, or the core of attention, in backward.
        recompute_method: With granularity full: block recomputes the first blocks, uniform all of them, one by one.
        recompute_num_layers: How many of the first blocks to recompute, with granularity full; default: all. With
            method uniform it is 1, the blocks that are recomputed together.
        recompute_modules: With granularity selective: parts of each block to recompute; default: core_attn. Models of
            transformers take the others; those in parentheses keep no more than their result anyway: (mla_up_proj),
            (moe_act).
        fp8_format: Of gathered float8 weights, which are e4m3 in both; with `--fp8-param-gather`.
        fp8_recipe: Scale of gathered weights: one of a tensor, or of every 32 elements (the weight format `mxfp8`);
            with `--fp8-param-gather`. Default: tensorwise.
        fp4_format: Of gathered weights in 4 bits; with `--fp4-param-gather`.
        fp4_recipe: Their scales; with `--fp4-param-gather`.
        eval_interval: Steps between evaluations; default: none before the end.
        eval_iters: Global batches of held-out text for each evaluation.
        skip_train: Only evaluate.
    """

    micro_batch_size: Count | None = None
    global_batch_size: Count | None = None
    train_iters: Count | None = None
    train_samples: Count | None = None
    exit_interval: Count | None = None
    exit_duration_in_mins: Duration | None = None
    seed: Whole = 1234
    bf16: bool = False
    fp16: bool = False
    initial_loss_scale: Positive = 2.0**32
    grad_reduce_in_bf16: bool = False
    calculate_per_token_loss: bool = False
    deterministic: Literal["world"] | None = None
    recompute_granularity: Literal["full", "selective"] | None = None
    recompute_method: Literal["uniform", "block"] | None = None
    recompute_num_layers: Count | None = None
    recompute_modules: tuple[
        Literal["core_attn", "mlp", "moe", "shared_experts", "layernorm", "mla_up_proj", "moe_act"], ...
    ] = ()
    fp8_format: Literal["e4m3", "hybrid"] | None = None
    fp8_recipe: Literal["tensorwise", "mxfp8"] | None = None
    fp4_format: Literal["e2m1"] | None = None
    fp4_recipe: Literal["nvfp4"] | None = None
    eval_interval: Count | None = None
    eval_iters: Count = 2
    skip_train: bool = False


@dataclass(frozen=True)
class OptimizerOptions:
    """Optimizer, clipping and the schedule of the learning rate.

    Attributes:
        optimizer: AdamW, SGD with momentum, Muon for matrices (with updates as large as those of AdamW) and AdamW for
            the rest, or AdamW with moments of 8 bits.
        lr: Largest learning rate.
        min_lr: Smallest learning rate, at the end of the decay.
        lr_decay_style: How it falls after the warmup.
        lr_decay_iters: Step at which it has fallen all the way; default: the last one.
        lr_decay_samples: The same in samples, with `--train-samples`.
        lr_warmup_iters: Steps in which it rises.
        lr_warmup_samples: The same in samples, with `--train-samples`.
        lr_warmup_fraction: The same, as a share of the steps of the decay.
        lr_warmup_init: Where it begins to rise.
        lr_wsd_decay_iters: Steps of the fall at the end, with style WSD.
        lr_wsd_decay_samples: The same in samples, with `--train-samples`.
        weight_decay: Of matrices; biases, norms and embeddings have none.
        adam_beta1: Average of gradients.
        adam_beta2: Average of their squares.
        adam_eps: Added to the root of the second average.
        sgd_momentum: Momentum of SGD.
        clip_grad: Largest norm of all gradients; 0: they are not scaled.
        optimizer_cpu_offload: Main weights, main gradients and optimizer state are offloaded to host memory, where the
            optimizer steps.
        optimizer_offload_fraction: The share of the model whose state is there; the rest stays on the device.
        megatron_fsdp_offload: Kinds of state to keep in host memory, main_weights, optimizer_state or compute_weights,
            each alone or as KIND=FRACTION; with main weights go their gradients and their state.
    """

    optimizer: Literal["adam", "sgd", "muon", "adamw8bit"] = "adam"
    lr: Positive | None = None
    min_lr: NotNegative = 0.0
    lr_decay_style: Literal["constant", "linear", "cosine", "inverse-square-root", "WSD"] = "linear"
    lr_decay_iters: Count | None = None
    lr_decay_samples: Count | None = None
    lr_warmup_iters: Whole = 0
    lr_warmup_samples: Whole = 0
    lr_warmup_fraction: Share | None = None
    lr_warmup_init: NotNegative = 0.0
    lr_wsd_decay_iters: Count | None = None
    lr_wsd_decay_samples: Count | None = None
    weight_decay: NotNegative = 0.01
    adam_beta1: Share = 0.9
    adam_beta2: Share = 0.999
    adam_eps: Positive = 1e-8
    sgd_momentum: Share = 0.9
    clip_grad: NotNegative = 1.0
    optimizer_cpu_offload: bool = False
    optimizer_offload_fraction: Part = 1.0
    megatron_fsdp_offload: tuple[str, ...] = ()

    @property
    def planned_name(self) -> str:
        """The planner's name of the optimizer."""
        names = {"adam": "adamw-fused", "sgd": "momentum" if self.sgd_momentum else "sgd"}
        return names.get(self.optimizer, self.optimizer)


@dataclass(frozen=True)
class DataOptions:
    """The source of the text, and its division into samples.

    Attributes:
        data_path: A text file, a folder of texts or JSONL, a folder of Hugging Face `datasets`, or the prefix of
            Megatron's .bin and .idx; default: the source of the Python standard library.
        json_key: The field of JSONL lines and of datasets that holds the text.
        tokenizer_type: Tokens are bytes; or pieces learned from the text on the spot; or those of `--tokenizer-model`;
            or the data are token ids already. With `--hf-model` those of its folder are the default.
        tokenizer_model: A tokenizer.json, or a folder with one.
        vocab_size: How many pieces to learn; with token ids, how many there are.
        split: Parts of the text to train on and to hold out, such as `95,5`.
        data_cache_path: Folder for token files, which later runs use again; default: in the folder of results.
        eod_mask_loss: The end of a text is not learned.
        num_workers: Processes of each rank that prepare batches ahead; 0: none.
    """

    data_path: Path | None = None
    json_key: str = "text"
    tokenizer_type: Literal["byte", "bpe", "HuggingFaceTokenizer", "NullTokenizer"] = "byte"
    tokenizer_model: Path | None = None
    vocab_size: Count | None = None
    split: str = "95,5"
    data_cache_path: Path | None = None
    eod_mask_loss: bool = False
    num_workers: Whole = 0


_STRICT = ("assume_ok_unexpected", "raise_unexpected", "raise_all")


@dataclass(frozen=True)
class CheckpointOptions:
    """Saving a run, and resuming it.

    Attributes:
        save: Folder for checkpoints: one at the end, and one when the run is interrupted (Ctrl-C, SIGTERM,
            SIGUSR1). Ranks that are started again (`torchrun --max-restarts`) go on from the latest one by themselves.
        save_interval: Save after every so many steps, too.
        keep_last: How many checkpoints to keep; default: all.
        async_save: Write checkpoints while training goes on.
        no_save_optim: Save no optimizer state.
        no_save_rng: Save no random states.
        load: Go on from the latest checkpoint in this folder, or from this checkpoint. May be the folder of `--save`,
            which then need not hold one yet.
        finetune: Load weights only, and begin at step 0; --save is another folder.
        no_load_optim: Load no optimizer state: the optimizer begins anew.
        no_load_rng: Load no random states.
        strict_fsdp_dtensor_load: Refuse a checkpoint that does not fit, instead of loading what fits.
        dist_ckpt_strictness: What to do about a checkpoint that does not fit: all values but the first three load what
            fits, as `--no-strict-fsdp-dtensor-load`, and the header names the rest.
        verify_integrity: Compare everything in a checkpoint with its checksums before it is loaded; those that it
            has, or where the flag is given, those that it must have.
        ckpt_format: The only one that training writes and reads; `mfsdp checkpoint convert` makes it of a torch_dist
            checkpoint.
        dump_param_to_param_group_map: Write which parameter group each parameter belongs to into this folder, for the
            converter.
    """

    save: Path | None = None
    save_interval: Count | None = None
    keep_last: Count | None = None
    async_save: bool = False
    no_save_optim: bool = False
    no_save_rng: bool = False
    load: Path | None = None
    finetune: bool = False
    no_load_optim: bool = False
    no_load_rng: bool = False
    strict_fsdp_dtensor_load: bool = True
    dist_ckpt_strictness: Literal[
        "assume_ok_unexpected",
        "raise_unexpected",
        "raise_all",
        "log_unexpected",
        "log_all",
        "return_unexpected",
        "return_all",
        "ignore_all",
    ] = "assume_ok_unexpected"
    verify_integrity: bool = True
    ckpt_format: Literal["fsdp_dtensor"] = "fsdp_dtensor"
    dump_param_to_param_group_map: Path | None = None

    @property
    def is_strict(self) -> bool:
        """True if a checkpoint that does not fit is refused."""
        return self.strict_fsdp_dtensor_load and self.dist_ckpt_strictness in _STRICT

    @property
    def is_same_folder(self) -> bool:
        """True if there is one folder to load from and to save to, as of a job that is restarted again and again."""
        return self.save is not None and self.load is not None and self.save.resolve() == self.load.resolve()


@dataclass(frozen=True)
class ReportingOptions:
    """The output of a run: lines, files and trackers.

    Attributes:
        out: Folder for results; default: below `runs/`, named after the run or the date.
        log_interval: Steps between lines of the log's files, and where it is given, between those that are shown, of
            which there is one every five seconds otherwise.
        log_params_norm: Measure the norm of all weights after each step.
        log_num_zeros_in_grad: Count the zeros in the gradients of each step.
        log_digests_interval: Write digests of the gradients and weights of each unit every so many steps, which
            `mfsdp replay` compares.
        logging_level: Least level of messages of Python's loggers that are shown, such as 10 for all; default: 20, and
            only those of this package.
        log_exposed_communication: Measure in one step of each interval how much communication was waited for.
        tensorboard_dir: Folder for TensorBoard; default: none.
        wandb_project: Project for Weights & Biases; default: none.
        wandb_exp_name: Name of the run there; default: they choose one.
        peak_tflops: What one device could do, in 10^12 operations per second, for MFU; default: by the device's name
            where that is known, else no MFU is shown.
    """

    out: Path | None = None
    log_interval: Count = 5
    log_params_norm: bool = False
    log_num_zeros_in_grad: bool = False
    log_digests_interval: Count | None = None
    logging_level: Whole | None = None
    log_exposed_communication: bool = True
    tensorboard_dir: Path | None = None
    wandb_project: str | None = None
    wandb_exp_name: str | None = None
    peak_tflops: Positive | None = None


@dataclass(frozen=True)
class RecoveryOptions:
    """The limits of failures, and restarts.

    Attributes:
        max_restarts: How often all ranks are started again after one died, where torchrun did not start them.
        max_nan_steps: Steps in a row whose loss or gradient may be NaN or infinite; each is skipped and counted, and
            the run ends at one more.
        max_failed_saves: Saves in a row that may fail, as on a full disk; the run ends at one more.
    """

    max_restarts: Whole = 0
    max_nan_steps: Whole = 3
    max_failed_saves: Whole = 3


DDP_FIELDS: Mapping[str, str] = {
    destination_of(name): name for name in DistributedDataParallelConfig.__dataclass_fields__
}
"""From the key of an option to the field of `DistributedDataParallelConfig` that it sets."""


@dataclass(frozen=True)
class Options:
    """The user's options, section by section, with defaults.

    Attributes:
        ddp: How to shard and to reduce.
        origins: For every option that was said, by its name: `command line`, `config FILE` or `preset NAME`.
        explained: Flags that were given and have no effect, with the reason.
    """

    model: ModelOptions = field(default_factory=ModelOptions)
    parallel: ParallelOptions = field(default_factory=ParallelOptions)
    training: TrainingOptions = field(default_factory=TrainingOptions)
    optimizer: OptimizerOptions = field(default_factory=OptimizerOptions)
    data: DataOptions = field(default_factory=DataOptions)
    checkpoint: CheckpointOptions = field(default_factory=CheckpointOptions)
    reporting: ReportingOptions = field(default_factory=ReportingOptions)
    recovery: RecoveryOptions = field(default_factory=RecoveryOptions)
    ddp: DistributedDataParallelConfig = field(default_factory=DistributedDataParallelConfig)
    origins: Mapping[str, str] = field(default_factory=dict)
    explained: tuple[str, ...] = ()

    def is_given(self, name: str) -> bool:
        """Return True if an option was set by any origin."""
        return name in self.origins

    def is_chosen(self, name: str) -> bool:
        """Return True if the user set an option, rather than a preset."""
        return not self.origins.get(name, "preset").startswith("preset")

    @property
    def offload(self) -> dict[str, float]:
        """The engine's `offload` argument."""
        if self.optimizer.optimizer_cpu_offload:
            return {"main_weights": self.optimizer.optimizer_offload_fraction}
        return offload_of(self.optimizer.megatron_fsdp_offload)

    def value(self, name: str) -> Any:
        """Return the value of an option, by its name."""
        if name in DDP_FIELDS:
            return getattr(self.ddp, DDP_FIELDS[name])
        return next(getattr(section, name) for section in vars(self).values() if hasattr(section, name))


SECTIONS: Mapping[str, type] = {
    name: cls for name, cls in typing.get_type_hints(Options).items() if cls.__module__ == __name__
}
"""The attributes of `Options` with their classes, but for `ddp`."""

OPTIONS: Mapping[str, Option] = {option.name: option for cls in SECTIONS.values() for option in options_of(cls)}
"""Every option of the sections, by its name."""


def flag_for(name: str) -> str:
    """Return the flag of an option."""
    return OPTIONS[name].flag if name in OPTIONS else flag_of(DDP_FIELDS[name])
