"""Which options do nothing in which case: an error where a user gave them, silence where a preset did. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from megatron_fsdp.errors import ConfigurationError
from megatron_fsdp.train.options.options import OPTIONS, Options, flag_for


@dataclass(frozen=True)
class Idle:
    """A case in which options do nothing.

    Attributes:
        names: Of the options.
        when: Whether this is the case.
        why: The reason; follows "since".
        advice: What to do.
    """

    names: tuple[str, ...]
    when: Callable[[Options], bool]
    why: str
    advice: str = "leave it out"


def _idle(names: str, when: Callable[[Options], bool], why: str, advice: str = "leave it out") -> Idle:
    return Idle(tuple(names.split()), when, why, advice)


def _has_own_shape(options: Options) -> bool:
    return options.model.hf_config is not None or options.model.hf_model is not None


IDLE: tuple[Idle, ...] = (
    _idle(
        "moe_router_topk moe_ffn_hidden_size",
        lambda o: o.model.num_experts is None,
        "there are no experts",
        "give --num-experts, or leave it out",
    ),
    _idle(
        "expert_model_parallel_size",
        lambda o: o.parallel.expert_model_parallel_size > 1 and o.model.num_experts is None and not _has_own_shape(o),
        "there are no experts",
        "give --num-experts, or leave it out",
    ),
    _idle(
        "torch_fsdp2_no_reshard_after_forward",
        lambda o: not o.parallel.use_torch_fsdp2,
        "FSDP2 is not used",
        "give --use-torch-fsdp2, or leave it out",
    ),
    _idle(
        "initial_loss_scale", lambda o: not o.training.fp16, "the loss is not scaled", "give --fp16, or leave it out"
    ),
    _idle(
        "recompute_num_layers",
        lambda o: o.training.recompute_granularity is None,
        "nothing is recomputed",
        "give --recompute-granularity full, or leave it out",
    ),
    _idle(
        "recompute_method",
        lambda o: o.training.recompute_granularity != "full",
        "no whole blocks are recomputed",
        "give --recompute-granularity full, or leave it out",
    ),
    _idle(
        "adam_beta1 adam_beta2 adam_eps",
        lambda o: o.optimizer.optimizer == "sgd",
        "the optimizer is SGD",
        "give --optimizer adam, or leave it out",
    ),
    _idle(
        "sgd_momentum",
        lambda o: o.optimizer.optimizer == "adam",
        "the optimizer is Adam",
        "give --optimizer sgd, or leave it out",
    ),
    _idle(
        "min_lr lr_decay_iters",
        lambda o: o.optimizer.lr_decay_style == "constant",
        "the learning rate does not fall",
        "give another --lr-decay-style, or leave it out",
    ),
    _idle(
        "json_key data_cache_path",
        lambda o: o.data.data_path is None,
        "the text is the source of the Python standard library",
        "give --data-path, or leave it out",
    ),
    _idle(
        "tokenizer_model",
        lambda o: o.data.tokenizer_type != "HuggingFaceTokenizer",
        "no tokenizer is read from a file",
        "give --tokenizer-type HuggingFaceTokenizer, or leave it out",
    ),
    _idle(
        "vocab_size",
        lambda o: o.data.tokenizer_type in ("byte", "HuggingFaceTokenizer"),
        "the tokenizer has a vocabulary",
        "give --tokenizer-type bpe or NullTokenizer, or leave it out",
    ),
    _idle(
        "save_interval keep_last async_save no_save_optim no_save_rng max_failed_saves",
        lambda o: o.checkpoint.save is None,
        "there is no folder to save to",
        "give --save, or leave it out",
    ),
    _idle(
        "finetune no_load_optim no_load_rng strict_fsdp_dtensor_load verify_integrity",
        lambda o: o.checkpoint.load is None,
        "nothing is loaded",
        "give --load, or leave it out",
    ),
    _idle(
        "max_restarts",
        lambda o: o.checkpoint.save is None,
        "ranks go on from what they have saved",
        "give --save, or leave it out",
    ),
    _idle(
        "wandb_exp_name",
        lambda o: o.reporting.wandb_project is None,
        "Weights & Biases gets nothing",
        "give --wandb-project, or leave it out",
    ),
    _idle("sample_tokens", lambda o: not o.reporting.prompt, "nothing is written", "give --prompt, or leave it out"),
)
"""Every case in which options do nothing at all."""

_TOLD: tuple[Idle, ...] = (
    _idle(
        "max_position_embeddings",
        lambda o: o.model.position_embedding_type == "rope" and o.model.transformer_impl == "local",
        "rotary positions have no table",
    ),
    _idle(
        "no_load_optim no_load_rng",
        lambda o: o.checkpoint.finetune,
        "--finetune loads weights only",
    ),
    _idle("save_interval", lambda o: _is_beyond(o, o.checkpoint.save_interval), "training ends before"),
    _idle("eval_interval", lambda o: _is_beyond(o, o.training.eval_interval), "training ends before"),
    _idle("exit_interval", lambda o: _is_beyond(o, o.training.exit_interval), "training ends before"),
    _idle(
        "save save_interval exit_interval exit_duration_in_mins eval_interval",
        lambda o: o.training.skip_train,
        "--skip-train takes no step",
    ),
    _idle(
        "log_exposed_communication",
        lambda o: o.parallel.use_torch_fsdp2,
        "FSDP2 does not tell what it waits for",
    ),
)
"""Cases that usual scripts have: taken, and told."""


def _is_beyond(options: Options, interval: int | None) -> bool:
    steps = options.training.train_iters
    return interval is not None and steps is not None and interval > steps


def check_idle(options: Options) -> None:
    """Refuse what a user gave and what does nothing.

    Raises:
        ConfigurationError: Names the first such option, why it does nothing, and what to do.
    """
    for name, rule in _found(IDLE, options):
        raise ConfigurationError(f"{flag_for(name)} does nothing here, since {rule.why}: {rule.advice}")


def idle_notices(options: Options) -> Iterator[str]:
    """What was given and does nothing in a way that is usual, in words."""
    for name, rule in _found(_TOLD, options):
        yield f"{flag_for(name)} has no effect: {rule.why}"


def _found(rules: tuple[Idle, ...], options: Options) -> Iterator[tuple[str, Idle]]:
    for rule in rules:
        for name in rule.names:
            if options.is_chosen(name) and _says_something(options, name) and rule.when(options):
                yield name, rule


def _says_something(options: Options, name: str) -> bool:
    """Whether a switch differs from what it is anyway; values always say something."""
    option = OPTIONS[name]
    value = next(getattr(section, name) for section in options.sections() if hasattr(section, name))
    return not option.is_switch or value != option.default
