"""Checks of options, one by one and against each other; nothing is adjusted here. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_fsdp.errors import ConfigurationError
from megatron_fsdp.train.options.options import Options, flag_for

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
_BELOW_ONE = {"optimizer": "lr_warmup_fraction adam_beta1 adam_beta2 sgd_momentum"}

_NEEDS: tuple[tuple[str, str, str], ...] = (
    ("save_interval", "save", "there is no folder to save to"),
    ("keep_last", "save", "there is no folder to save to"),
    ("async_save", "save", "there is no folder to save to"),
    ("no_save_optim", "save", "there is no folder to save to"),
    ("no_save_rng", "save", "there is no folder to save to"),
    ("max_failed_saves", "save", "there is no folder to save to"),
    ("max_restarts", "save", "ranks go on from what they have saved"),
    ("finetune", "load", "nothing is loaded"),
    ("no_load_optim", "load", "nothing is loaded"),
    ("no_load_rng", "load", "nothing is loaded"),
    ("strict_fsdp_dtensor_load", "load", "nothing is loaded"),
    ("verify_integrity", "load", "nothing is loaded"),
    ("recompute_num_layers", "recompute_granularity", "nothing is recomputed"),
    ("moe_router_topk", "num_experts", "there are no experts"),
    ("moe_ffn_hidden_size", "num_experts", "there are no experts"),
    ("tokenizer_model", "tokenizer_type", "tokens are bytes"),
    ("torch_fsdp2_reshard_after_forward", "use_torch_fsdp2", "FSDP2 is not used"),
    ("initial_loss_scale", "fp16", "the loss is not scaled"),
    ("sample_tokens", "prompt", "nothing is written"),
)
"""(option, option that it needs, why): the first alone does nothing."""


def check_options(options: Options) -> None:
    """Check every number, and that no option is given that could do nothing.

    Raises:
        ConfigurationError: Names the option, what was given, what is allowed.
    """
    for name, value in _numbers(options, _AT_LEAST_ONE):
        if value < 1:
            raise ConfigurationError(f"{flag_for(name)} {value} is not possible: give 1 or more")
    for name, value in _numbers(options, _ABOVE_ZERO):
        if not 0 < value < float("inf") and not (name == "exit_duration_in_mins" and value > 0):
            raise ConfigurationError(f"{flag_for(name)} {value} is not possible: give a number above 0")
    for name, value in _numbers(options, _AT_LEAST_ZERO):
        if not 0 <= value < float("inf"):
            raise ConfigurationError(f"{flag_for(name)} {value} is not possible: give 0 or more")
    for name, value in _numbers(options, _BELOW_ONE):
        if not 0 <= value < 1:
            raise ConfigurationError(f"{flag_for(name)} {value} is not possible: give 0 or more, and less than 1")
    _check_needed(options)
    _check_alternatives(options)
    if options.checkpoint.ckpt_format != "fsdp_dtensor":
        raise ConfigurationError(
            f"--ckpt-format {options.checkpoint.ckpt_format} is not written or read in training: leave it at "
            "fsdp_dtensor, and convert a torch_dist checkpoint first with tools/checkpoint/checkpoint_inspector.py"
        )
    if options.training.gradient_accumulation_fusion:
        raise ConfigurationError(
            "--gradient-accumulation-fusion is not there yet: give --no-gradient-accumulation-fusion, or leave it out"
        )


def _numbers(options: Options, table: dict[str, str]) -> Iterator[tuple[str, float]]:
    for section, names in table.items():
        for name in names.split():
            value = getattr(getattr(options, section), name)
            if value is not None:
                yield name, value


def _check_needed(options: Options) -> None:
    for name, needed, why in _NEEDS:
        if options.is_given(name) and not options.is_given(needed):
            raise ConfigurationError(
                f"{flag_for(name)} does nothing without {flag_for(needed)}, since {why}: give both or neither"
            )


_ALTERNATIVES: tuple[tuple[str, str, str], ...] = (
    ("bf16", "fp16", "the model computes in one dtype"),
    ("lr_warmup_iters", "lr_warmup_fraction", "both say how long the learning rate rises"),
    ("hf_config", "hf_model", "the folder of weights has a configuration"),
    ("hf_config", "num_layers", "the configuration has a shape"),
    ("hf_model", "num_layers", "the folder has a shape"),
    ("use_torch_fsdp2", "use_megatron_fsdp", "one engine shards the model"),
    ("grad_reduce_in_bf16", "accumulate_allreduce_grads_in_fp32", "gradients travel in one dtype"),
    ("grad_reduce_in_bf16", "megatron_fsdp_grad_comm_dtype", "both say the dtype that gradients travel in"),
)
"""(option, option, why): not both, unless one of them only comes from a preset, which then gives way."""


def _check_alternatives(options: Options) -> None:
    for first, second, why in _ALTERNATIVES:
        said = [options.origins.get(name, "").partition(" ")[0] for name in (first, second)]
        on = [bool(_value(options, name)) for name in (first, second)]
        if all(said) and "preset" not in said and all(on):
            raise ConfigurationError(f"{flag_for(first)} contradicts {flag_for(second)}, since {why}: give one of them")


def _value(options: Options, name: str) -> object:
    for section in (options.model, options.parallel, options.training, options.optimizer, options.ddp):
        if hasattr(section, name):
            return getattr(section, name)
    return options.ddp.grad_reduce_in_fp32 if name == "accumulate_allreduce_grads_in_fp32" else None
