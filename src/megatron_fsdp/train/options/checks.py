"""Checks of options against each other; nothing is adjusted here. Pure."""

from __future__ import annotations

from megatron_fsdp.errors import ConfigurationError
from megatron_fsdp.train.options.data_checks import check_data
from megatron_fsdp.train.options.idle import check_idle
from megatron_fsdp.train.options.options import DDP_FIELDS, Options, flag_for


def check_options(options: Options) -> None:
    """Check that options fit together, and that none is given that could do nothing.

    Raises:
        ConfigurationError: Names the option, what was given, what is allowed.
    """
    check_idle(options)
    _check_alternatives(options)
    check_data(options)
    _check_together(options)


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
