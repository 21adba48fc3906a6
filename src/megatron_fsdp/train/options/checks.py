"""Checks of options, one by one and against each other; nothing is adjusted here. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_fsdp.errors import ConfigurationError
from megatron_fsdp.train.options.data_checks import check_data
from megatron_fsdp.train.options.idle import check_idle
from megatron_fsdp.train.options.options import DDP_FIELDS, Options, flag_for

_AT_LEAST_ONE = {
    "model": (
        "num_layers hidden_size ffn_hidden_size num_attention_heads num_query_groups kv_channels seq_length "
        "max_position_embeddings make_vocab_size_divisible_by num_experts moe_router_topk moe_ffn_hidden_size"
    ),
    "parallel": (
        "tensor_model_parallel_size pipeline_model_parallel_size context_parallel_size expert_model_parallel_size nproc"
    ),
    "training": (
        "micro_batch_size global_batch_size train_iters exit_interval recompute_num_layers eval_interval eval_iters"
    ),
    "optimizer": "lr_decay_iters lr_wsd_decay_iters",
    "data": "vocab_size",
    "checkpoint": "save_interval keep_last",
    "reporting": "log_interval sample_tokens",
}
_ABOVE_ZERO = {
    "model": "rotary_base norm_epsilon init_method_std",
    "parallel": "distributed_timeout_minutes",
    "training": "exit_duration_in_mins initial_loss_scale",
    "optimizer": "lr adam_eps",
    "reporting": "peak_tflops",
    "recovery": "hang_timeout_minutes",
}
_AT_LEAST_ZERO = {
    "training": "seed",
    "optimizer": "min_lr lr_warmup_iters weight_decay clip_grad",
    "data": "num_workers",
    "recovery": "max_restarts max_nan_steps max_failed_saves",
}
_MINUTES = {"parallel": "distributed_timeout_minutes", "recovery": "hang_timeout_minutes"}
_YEAR = 365 * 24 * 60  # timers of libraries overflow somewhere above
_TOO_LARGE = 2**63  # below it, tensors take a size, and generators a seed, as it is
_BELOW_ONE = {"optimizer": "lr_warmup_fraction adam_beta1 adam_beta2 sgd_momentum"}


def check_options(options: Options) -> None:
    """Check every number, and that no option is given that could do nothing.

    Raises:
        ConfigurationError: Names the option, what was given, what is allowed.
    """
    for name, value in _numbers(options, _AT_LEAST_ONE):
        if value < 1:
            raise ConfigurationError(f"{flag_for(name)} {value} is not possible: give 1 or more")
        if value >= _TOO_LARGE:
            raise ConfigurationError(f"{flag_for(name)} {value} is not possible: give less than 2^63")
    for name, value in _numbers(options, _ABOVE_ZERO):
        if not 0 < value < float("inf") and not (name == "exit_duration_in_mins" and value > 0):
            raise ConfigurationError(f"{flag_for(name)} {value} is not possible: give a number above 0")
    for name, value in _numbers(options, _MINUTES):
        if value > _YEAR:
            raise ConfigurationError(f"{flag_for(name)} {value} is not possible: give at most {_YEAR}, a year")
    for name, value in _numbers(options, _AT_LEAST_ZERO):
        if not 0 <= value < float("inf"):
            raise ConfigurationError(f"{flag_for(name)} {value} is not possible: give 0 or more")
    if options.training.seed >= _TOO_LARGE:
        raise ConfigurationError(f"--seed {options.training.seed} is not possible: give 0 to {_TOO_LARGE - 1}")
    for name, value in _numbers(options, _BELOW_ONE):
        if not 0 <= value < 1:
            raise ConfigurationError(f"{flag_for(name)} {value} is not possible: give 0 or more, and less than 1")
    check_idle(options)
    _check_alternatives(options)
    check_data(options)
    _check_together(options)


def _numbers(options: Options, table: dict[str, str]) -> Iterator[tuple[str, float]]:
    for section, names in table.items():
        for name in names.split():
            value = getattr(getattr(options, section), name)
            if value is not None:
                yield name, value


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
"""(option, option, why): not both. Those of a preset have given way before (`giving_way`)."""


def _check_alternatives(options: Options) -> None:
    for first, second, why in _ALTERNATIVES:
        if options.is_given(first) and options.is_given(second) and _is_on(options, first) and _is_on(options, second):
            raise ConfigurationError(
                f"{flag_for(first)} (from the {options.origins[first]}) contradicts {flag_for(second)} (from the "
                f"{options.origins[second]}), since {why}: give one of them"
            )


def _is_on(options: Options, name: str) -> bool:
    """Whether an option has a value that is not a switch turned off."""
    if name in DDP_FIELDS:
        value = getattr(options.ddp, DDP_FIELDS[name])
    else:
        value = next(getattr(section, name) for section in options.sections() if hasattr(section, name))
    return value not in (None, False)


def _check_together(options: Options) -> None:
    """Values of several options that cannot stand together."""
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
