"""What of `transformers.TrainingArguments` a model that is parallel already cannot honour."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch.distributed as dist
from torch import nn

from megatron_fsdp.automodel.config import MegatronFSDPConfig
from megatron_fsdp.errors import ConfigurationError

OPTIMIZERS = frozenset({"adamw_torch", "adamw_torch_fused", "sgd", "adagrad", "rmsprop"})
"""Of `TrainingArguments.optim`: those of torch, which update each element by itself."""

_WRAPS = "the model is parallel already; leave it out, and choose by distributed_config of from_pretrained"
_DTYPES = "dtypes are those of the model; give dtype to from_pretrained, or mp_policy or autocast_dtype of FSDP2Config"
_DDP = "it has no effect on a model that is wrapped already; leave it out"

_REFUSED: Mapping[str, str] = {
    "deepspeed": _WRAPS,
    "fsdp": _WRAPS,
    "parallelism_config": _WRAPS,
    "fp16": _DTYPES,
    "bf16": _DTYPES,
    "fp16_full_eval": _DTYPES,
    "bf16_full_eval": _DTYPES,
    "activation_checkpointing": "give activation_checkpointing to the strategy's config",
    "gradient_checkpointing": "give activation_checkpointing to the strategy's config",
    "torch_compile": "give enable_compile to FSDP2Config",
    "use_liger_kernel": "layers are changed before sharding; patch the classes of transformers before from_pretrained",
    "auto_find_batch_size": "ranks that run out of memory alone cannot start anew; give a batch size that fits",
    "enable_jit_checkpoint": "signals reach ranks at different steps; use save_steps",
    "push_to_hub": "nothing is uploaded; upload the folder that save_model wrote",
    "label_smoothing_factor": "transformers would not know whether labels are to be shifted; give compute_loss_func",
    "neftune_noise_alpha": "it is not tested with sharded embeddings; leave it out",
}
"""Fields that must be off (None, False, empty), and what to do."""

_MUST_BE_NONE = ("ddp_find_unused_parameters", "ddp_bucket_cap_mb", "ddp_broadcast_buffers", "ddp_static_graph")


def check_model(model: Any) -> None:
    """Refuse a model that `ShardedTrainer` cannot train.

    Raises:
        ConfigurationError: It is not of `from_pretrained` or `from_config`, or its ranks do not all read other data.
    """
    context = getattr(model, "mesh_context", None)
    if context is None:
        raise ConfigurationError(
            f"model is a {type(model).__name__} without mesh_context; give what from_pretrained or from_config of "
            "megatron_fsdp.automodel returned"
        )
    if context.sizes.dp != dist.get_world_size() or not isinstance(model, nn.Module):
        raise ConfigurationError(
            f"ShardedTrainer shares data out over all {dist.get_world_size()} ranks, and the model has dp_size="
            f"{context.sizes.dp}; leave tp_size, cp_size and pp_size at 1, or write the loop yourself"
        )
    config = model.distributed_config
    if isinstance(config, MegatronFSDPConfig) and config.calculate_per_token_loss:
        raise ConfigurationError(
            "Trainer scales losses for gradients that are averaged, and calculate_per_token_loss=True sums them; set "
            "it to False: losses are per token all the same (average_tokens_across_devices)"
        )


def check_arguments(args: Any, model: Any, options: Mapping[str, Any]) -> None:
    """Refuse arguments that would do something else than they say.

    Args:
        args: `TrainingArguments`.
        model: Checked already.
        options: Other arguments of the trainer.

    Raises:
        ConfigurationError: Names the argument.
    """
    for name, advice in _REFUSED.items():
        value = getattr(args, name, None)
        if value:
            raise ConfigurationError(f"TrainingArguments.{name}={value!r} is not supported: {advice}")
    for name in _MUST_BE_NONE:
        if getattr(args, name, None) is not None:
            raise ConfigurationError(f"TrainingArguments.{name}={getattr(args, name)!r} is not supported: {_DDP}")
    if getattr(args.accelerator_config, "gradient_accumulation_kwargs", None):
        raise ConfigurationError(
            "accelerator_config.gradient_accumulation_kwargs is not supported; give gradient_accumulation_steps"
        )
    if options.get("model_init") is not None:
        raise ConfigurationError("model_init is not supported; give the model that from_pretrained returned")
    is_own = (
        options.get("optimizer_cls_and_kwargs") is not None or (options.get("optimizers") or (None,))[0] is not None
    )
    optimizer = str(getattr(args.optim, "value", args.optim))
    if not is_own and optimizer not in OPTIMIZERS:
        raise ConfigurationError(
            f"TrainingArguments.optim={optimizer!r} is not supported; give one of {', '.join(sorted(OPTIMIZERS))}, or "
            "optimizers=(an optimizer that is built on model.parameters(), None)"
        )
    if args.n_gpu > 1 or args.world_size != dist.get_world_size():
        raise ConfigurationError(
            f"TrainingArguments sees {args.world_size} processes with {args.n_gpu} devices each, and there are "
            f"{dist.get_world_size()} ranks; start with torchrun, one process per device"
        )
    device = model.mesh_context.device
    if args.device.type != device.type:
        raise ConfigurationError(
            f"TrainingArguments computes on {args.device.type} and the model is on {device.type}; set use_cpu="
            f"{device.type == 'cpu'}"
        )
