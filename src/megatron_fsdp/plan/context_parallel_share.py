"""Attention of one context-parallel rank on paper: its queries see the keys and values of all ranks.

The steps are those of `automodel.context_parallel`: keys and values travel together in one gather per layer (one
reduce-scatter of their gradients in backward), are put in order, and each of the two pieces of a sequence that the rank
has attends to them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_fsdp.errors import ConfigurationError, ParallelSizeError
from megatron_fsdp.plan.decoder_parts import DecoderParts, itemsize_of, text_config
from megatron_fsdp.plan.kernels import Kernels
from megatron_fsdp.plan.standing_collectives import gathered_rows
from megatron_fsdp.plan.workload import Exchange

_NAME = "megatron_fsdp_planned_context_parallel"
_PIECES = 2
_KNOWN_LAYER_TYPES = {"full_attention", "sliding_attention", "attention"}


def take_context_parallel_part(
    model: nn.Module, parts: DecoderParts, ranks: int, tp: int, micro_batch: int, sequence_length: int
) -> tuple[Exchange, ...]:
    """Switch a model to the attention of context-parallel ranks, in place; it then runs in `planned_attention` only.

    Args:
        model: With modules and a config of its own.
        parts: Of the model.
        ranks: Context-parallel ranks.
        tp: Tensor-parallel ranks, which share the heads.
        micro_batch: Sequences of a microbatch.
        sequence_length: Over all ranks.

    Returns:
        What is sent.

    Raises:
        ConfigurationError: Tokens of the model meet elsewhere than in causal attention.
        ParallelSizeError: The ranks do not divide the sequence.
    """
    if sequence_length % (_PIECES * ranks):
        raise ParallelSizeError(
            f"sequence_length={sequence_length} does not divide by {_PIECES * ranks} = {_PIECES} x cp; choose a "
            f"multiple, or another cp than {ranks}"
        )
    _check(model, ranks)
    own = micro_batch * (sequence_length // ranks) * _width(model, tp) * itemsize_of(model)
    model.config._attn_implementation = _NAME  # type: ignore[union-attr]  # a config of transformers
    sent = (ranks - 1) * own
    layers = [f"{parts.base}.{parts.layers}.{name}" for name, _ in _layers(model, parts)]
    return tuple(
        Exchange("cp", name, sent, in_backward, repeated_by=() if in_backward else ("full", "attention"))
        for name in layers
        for in_backward in (False, True)
    )


def _layers(model: nn.Module, parts: DecoderParts) -> Iterator[tuple[str, nn.Module]]:
    yield from model.get_submodule(f"{parts.base}.{parts.layers}").named_children()


def _width(model: nn.Module, tp: int) -> int:
    """Numbers of a token that travel: keys and values of all key heads of a rank."""
    config: Any = text_config(model)
    queries = config.num_attention_heads
    if getattr(config, "kv_lora_rank", None):  # latent attention has a key for each query
        head = config.qk_nope_head_dim + config.qk_rope_head_dim + config.v_head_dim
        return int(queries // _dividing(model, tp) * head)
    keys = getattr(config, "num_key_value_heads", None) or queries
    head = getattr(config, "head_dim", None) or config.hidden_size // queries
    return int(2 * (keys // _dividing(model, tp)) * head)


def _dividing(model: nn.Module, tp: int) -> int:
    """Ranks that share the heads: plans that gather what attention gets do not divide it."""
    plan = getattr(model, "_tp_plan", None) or {}
    return tp if any(("attn" in key or "attention" in key) and style == "colwise" for key, style in plan.items()) else 1


def _check(model: Any, ranks: int) -> None:
    config = text_config(model)
    kinds = set(getattr(config, "layer_types", None) or ()) - _KNOWN_LAYER_TYPES
    findings = {
        "its attention is not looked up in transformers' AttentionInterface": not getattr(
            model, "_supports_attention_backend", False
        ),
        "its attention is not causal": bool(getattr(config, "use_bidirectional_attention", False)),
        "it attends inside chunks (attention_chunk_size)": getattr(config, "attention_chunk_size", None) is not None,
        f"it has layers of the kinds {sorted(kinds)}": bool(kinds),
        "its layers mix tokens by convolutions": any(isinstance(part, nn.Conv1d) for part in model.modules()),
    }
    for reason, found in findings.items():
        if found:
            raise ConfigurationError(
                f"{type(model).__name__} cannot be divided over cp={ranks} ranks, since {reason}; use cp=1"
            )


@contextmanager
def planned_attention(ranks: int, kernels: Kernels) -> Iterator[None]:
    """Inside of it transformers knows the attention of models that `take_context_parallel_part` has switched.

    Args:
        ranks: Context-parallel ranks.
        kernels: Of which device; a CPU's are given masks, those of others a sign.
    """
    from transformers import AttentionInterface

    AttentionInterface.register(_NAME, partial(_attention, _Ranks(ranks, kernels == "cuda")))
    try:
        yield
    finally:
        del AttentionInterface._global_mapping[_NAME]


@dataclass(frozen=True)
class _Ranks:
    """How many, and whether kernels know by a sign that the last query sees the last key."""

    count: int
    has_sign: bool


def _attention(
    ranks: _Ranks,
    _module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    _mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """What the first rank does, which has the first and the last piece of each sequence."""
    together = gathered_rows(torch.cat([key, value], -1), ranks.count)
    pieces = [piece for part in together.chunk(ranks.count, 0) for piece in part.chunk(_PIECES, 2)]
    keys, values = torch.cat(pieces, 2).split([key.shape[-1], value.shape[-1]], -1)
    del together, pieces
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    first, last = query.chunk(_PIECES, 2)
    out = [
        _attend(piece, keys, values, end, _Scores(scale, dropout, sliding_window, softcap, ranks.has_sign))
        for piece, end in ((first, first.shape[2]), (last, keys.shape[2]))
    ]
    return torch.cat(out, 2).transpose(1, 2).contiguous(), None


@dataclass(frozen=True)
class _Scores:
    """How scores become weights."""

    scale: float
    dropout: float
    window: int | None
    softcap: float | None
    has_sign: bool


def _attend(query: Tensor, keys: Tensor, values: Tensor, end: int, scores: _Scores) -> Tensor:
    """Attention of the queries before `end`.

    Kernels that know by a sign what to leave out are given all keys: operations of causal attention are counted as if
    every query saw every key, with context parallelism and without.
    """
    groups = query.shape[1] // keys.shape[1]
    windowed = scores.window is not None and scores.window < end
    if scores.has_sign and not windowed and scores.softcap is None:
        return F.scaled_dot_product_attention(
            query, keys, values, dropout_p=scores.dropout, is_causal=True, scale=scores.scale, enable_gqa=groups > 1
        )
    begin = max(end - query.shape[2] - scores.window + 1, 0) if windowed and scores.window is not None else 0
    keys, values = keys[:, :, begin:end], values[:, :, begin:end]
    mask = torch.ones(query.shape[2], end - begin, dtype=torch.bool, device=query.device)
    plain = not windowed and scores.softcap is None
    if groups > 1 and not plain:
        keys, values = keys.repeat_interleave(groups, 1), values.repeat_interleave(groups, 1)
    if scores.softcap is None:
        return F.scaled_dot_product_attention(
            query, keys, values, mask, dropout_p=scores.dropout, scale=scores.scale, enable_gqa=plain and groups > 1
        )
    capped = torch.tanh(query @ keys.transpose(2, 3) * (scores.scale / scores.softcap)) * scores.softcap
    weights = capped.masked_fill(~mask, float("-inf")).softmax(-1, dtype=torch.float32).to(query.dtype)
    return F.dropout(weights, scores.dropout) @ values
