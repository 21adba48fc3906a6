"""Switch a model of transformers to attention over context-parallel ranks, and refuse what that cannot be right for."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from megatron_fsdp.automodel.architecture import find_layers, text_config
from megatron_fsdp.automodel.context_parallel.attention import (
    ATTRIBUTE,
    NAME,
    ContextParallel,
    context_parallel_attention,
)
from megatron_fsdp.automodel.context_parallel.layout import SequenceLayout
from megatron_fsdp.automodel.context_parallel.rotary import show_whole_length
from megatron_fsdp.checkpoint.hf.live import own_class
from megatron_fsdp.errors import ConfigurationError

_KNOWN_LAYER_TYPES = {"full_attention", "sliding_attention", "attention"}


def enable_context_parallel(model: nn.Module, cp_mesh: DeviceMesh, *, load_balance: bool = True) -> None:
    """Let the ranks of a mesh dimension share the tokens of every sequence; in place, before or after sharding.

    The model is then called with what `shard_batch` returns: `model(input_ids=..., position_ids=...)`. It returns
    logits of this rank's tokens; `unshard_sequence` puts them together. Gradients are those of the rank's tokens, so
    the context-parallel ranks have to be averaged together with the data-parallel ones.

    Nothing is kept outside of the model: its attention modules know their process group, and models on different
    meshes work side by side. What transformers keeps for good is the name of the attention function.

    Args:
        model: A causal language model of transformers, or an adapter model of peft around one. May be on the meta
            device.
        cp_mesh: One dimension, the ranks that share sequences.
        load_balance: As given to `shard_batch`.

    Raises:
        ConfigurationError: The model's attention cannot be switched, or tokens meet elsewhere than in causal
            attention (state space layers, convolutions, encoders); or the mesh has several dimensions.
    """
    from transformers import AttentionInterface, PreTrainedModel

    layout = SequenceLayout(_check_mesh(cp_mesh).size(), load_balance)
    inner = next((part for part in model.modules() if isinstance(part, PreTrainedModel)), None)
    if inner is None:
        raise ConfigurationError(
            f"a {type(model).__name__} holds no model of transformers, whose attention could be switched to context "
            "parallelism; use cp_size=1"
        )
    _refuse_unfit(inner)
    windows = getattr(text_config(inner), "sliding_window", None) is not None
    shared = ContextParallel(cp_mesh.get_group(), cp_mesh.get_local_rank(), layout, windows)
    AttentionInterface.register(NAME, context_parallel_attention)
    inner.set_attn_implementation(NAME)
    for layer in find_layers(inner).modules():
        for part in layer.modules():
            if hasattr(part, "config"):  # where transformers looks up the attention function
                setattr(part, ATTRIBUTE, shared)
    show_whole_length(inner, layout.ranks)
    model.register_forward_pre_hook(partial(_before_forward, shared), with_kwargs=True)
    model.__dict__[ATTRIBUTE] = shared


def check_call(model: nn.Module, arguments: dict[str, Any]) -> None:
    """What a forward of the model would refuse, ahead of it; nothing where it is not context parallel. Collective.

    For pipelines: there a forward that raises leaves the other stages waiting.

    Raises:
        ConfigurationError: The arguments are not those of `shard_batch`; on all ranks that share the sequences.
    """
    shared = model.__dict__.get(ATTRIBUTE)
    if shared is not None:
        _before_forward(shared, model, (), arguments)


def _check_mesh(cp_mesh: DeviceMesh) -> DeviceMesh:
    if cp_mesh.ndim != 1:
        raise ConfigurationError(
            f"cp_mesh has the dimensions {cp_mesh.mesh_dim_names}; give the one of the ranks that share sequences, "
            'such as mesh["cp"]'
        )
    return cp_mesh


def _refuse_unfit(model: Any) -> None:
    """Raise for models in which tokens would meet without this library's attention."""
    reason = _unfit(model)
    if reason is not None:
        raise ConfigurationError(
            f"{type(model).__name__} cannot be trained with context parallelism, since {reason}; use cp_size=1"
        )


def _unfit(model: Any) -> str | None:
    config = text_config(model)
    kinds = set(getattr(config, "layer_types", None) or ()) - _KNOWN_LAYER_TYPES
    convolutions = {type(part).__name__ for part in model.modules() if isinstance(part, nn.Conv1d)}
    findings = {
        "its attention is not looked up in transformers' AttentionInterface": not model._supports_attention_backend
        or not model._can_set_attn_implementation(),
        "it has parts beside the language model": config is not model.config,
        "it is an encoder and decoder": bool(getattr(config, "is_encoder_decoder", False)),
        "its attention is not causal": not getattr(config, "is_causal", True)
        or bool(getattr(config, "use_bidirectional_attention", False)),
        "it attends inside chunks (attention_chunk_size)": getattr(config, "attention_chunk_size", None) is not None,
        "its head looks at one token of the sequence, which one rank has": "Classification"
        in own_class(model).__name__,
        f"it has layers of the kinds {sorted(kinds)}": bool(kinds),
        f"its layers mix tokens by {sorted(convolutions)}": bool(convolutions),
    }
    return next((text for text, found in findings.items() if found), None)


def _before_forward(
    shared: ContextParallel, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Refuse calls that would be silently wrong on a part of the sequence."""
    call = f"{type(module).__name__} is context parallel: call it with what shard_batch returns, by keyword"
    positions = kwargs.get("position_ids")
    if len(args) > 1 or not isinstance(positions, Tensor):
        raise ConfigurationError(f"{call}; position_ids is missing, without which tokens would be taken for the first")
    for name in ("attention_mask", "past_key_values"):
        if kwargs.get(name) is not None:
            raise ConfigurationError(f"{call}; {name} is for whole sequences, leave it out")
    if kwargs.get("labels") is not None and kwargs.get("shift_labels") is None:
        raise ConfigurationError(
            f"{call}; labels alone would be shifted inside of this rank's tokens, give "
            'labels=batch["shift_labels"] and shift_labels=batch["shift_labels"], or compute the loss outside'
        )
    if kwargs.get("use_cache"):
        raise ConfigurationError(f"{call}; use_cache=True is for generation, leave it out")
    _check_positions(shared, positions)
    return args, {**kwargs, "use_cache": False}


def _check_positions(shared: ContextParallel, positions: Tensor) -> None:
    """All ranks together compare their positions with the layout; one all-reduce of one number."""
    expected = shared.layout.positions_of(shared.rank, positions.shape[-1], positions.device)
    wrong = (positions != expected).any().to(torch.int32)
    dist.all_reduce(wrong, dist.ReduceOp.MAX, group=shared.group)
    problem = (
        f"position_ids are not those of shard_batch with load_balance={shared.layout.load_balance}, as "
        "enable_context_parallel was told; cut every batch by shard_batch with the same load_balance"
    )
    if wrong.device.type == "cpu":
        if bool(wrong):
            raise ConfigurationError(problem)
    else:  # without making the host wait for the device
        torch._assert_async(wrong == 0, problem)
