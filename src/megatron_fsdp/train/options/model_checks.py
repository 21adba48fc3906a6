"""Checks of the options about the model against each other: what a model of one kind cannot be told. Pure."""

from __future__ import annotations

from dataclasses import fields

from megatron_fsdp.errors import ConfigurationError
from megatron_fsdp.train.options.model import ModelOptions
from megatron_fsdp.train.options.options import Options, flag_for

_NOT_SHAPE = ("seq_length", "transformer_impl", "hf_config", "hf_model")
_ONLY_ROTARY = "--transformer-impl transformers builds Llama, Qwen3, Mixtral and Qwen3-MoE, which have"


def uses_transformers(model: ModelOptions) -> bool:
    """Whether the model is one of transformers."""
    return model.transformer_impl == "transformers" or model.hf_config is not None or model.hf_model is not None


def needs_transformers(options: Options) -> str | None:
    """The flag because of which the package is needed; None: there is none."""
    model = options.model
    if model.hf_model is not None or model.hf_config is not None:
        return "--hf-model" if model.hf_model is not None else "--hf-config"
    if uses_transformers(model):
        return "--transformer-impl transformers"
    return "--use-torch-fsdp2" if options.parallel.use_torch_fsdp2 else None


def check_model(options: Options) -> None:
    """Refuse options that the model cannot honour, or that could do nothing.

    Raises:
        ConfigurationError: Names the option and what to give in place of it.
    """
    model = options.model
    if model.hf_config is not None or model.hf_model is not None:
        _check_has_no_shape(options)
    elif model.transformer_impl == "transformers":
        _check_family(model)
    else:
        if model.num_experts is not None:
            raise ConfigurationError(
                f"--num-experts {model.num_experts}: the decoder of this package has no experts; give "
                "--transformer-impl transformers"
            )
        if _is_said(options, "rotary_base") and model.position_embedding_type != "rope":
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


def _is_said(options: Options, name: str) -> bool:
    """Whether an option was said by the user; what comes from a preset gives way."""
    return options.is_given(name) and not options.origins[name].startswith("preset")


def _check_has_no_shape(options: Options) -> None:
    source = "hf_config" if options.model.hf_config is not None else "hf_model"
    shape = [field.name for field in fields(ModelOptions) if field.name not in _NOT_SHAPE]
    said = [flag_for(name) for name in shape if _is_said(options, name)]
    if said:
        raise ConfigurationError(
            f"{', '.join(said)}: the shape is that of {flag_for(source)}, so these would do nothing; leave them out, "
            "or change the configuration"
        )
    if _is_said(options, "transformer_impl") and options.model.transformer_impl == "local":
        raise ConfigurationError(
            f"--transformer-impl local contradicts {flag_for(source)}, whose classes are those of transformers: leave "
            "it out"
        )


def _check_family(model: ModelOptions) -> None:
    """The families of transformers that are built from a shape have one way to do most things."""
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
    if training.recompute_num_layers is not None and training.recompute_granularity == "selective":
        raise ConfigurationError(
            "--recompute-num-layers does nothing with --recompute-granularity selective, which is about every block: "
            "leave it out, or give --recompute-granularity full"
        )
    if training.recompute_granularity == "selective" and uses_transformers(model):
        raise ConfigurationError(
            "--recompute-granularity selective is not offered for models of transformers, whose attention is not cut "
            "into core and projections: give --recompute-granularity full"
        )
    layers, first = model.num_layers, training.recompute_num_layers
    if layers is not None and first is not None and first > layers and not (model.hf_config or model.hf_model):
        raise ConfigurationError(
            f"--recompute-num-layers {first} is more than --num-layers {layers}: give as many or fewer"
        )
