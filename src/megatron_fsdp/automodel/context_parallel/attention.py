"""Causal attention of the tokens of one rank over those of all context-parallel ranks, as transformers calls it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import _functional_collectives as collectives
from torch.nn.attention.bias import causal_lower_right
from torch.utils._python_dispatch import _disable_current_modes

from megatron_fsdp.automodel.context_parallel.layout import SequenceLayout
from megatron_fsdp.errors import ConfigurationError

NAME = "megatron_fsdp_context_parallel"
"""The name of this attention in transformers' registry."""

ATTRIBUTE = "context_parallel"
"""The attribute of attention modules that holds their `ContextParallel`."""

_CHANGES_THE_MATH = (
    "s_aux",
    "position_bias",
    "cache",
    "block_table",
    "cu_seq_lens_q",
    "head_mask",
    "output_attentions",
)
"""What some models hand to their attention function and this one does not compute."""

_gather = getattr(collectives, "all_gather_single_autograd", None) or collectives.all_gather_tensor_autograd
"""Gather forward, reduce-scatter of the sum backward; torch has renamed it."""


@dataclass(frozen=True, eq=False)
class ContextParallel:
    """What the attention modules of one model know of the ranks that share their sequences.

    Attributes:
        group: These ranks.
        rank: Of this process in the group.
        layout: Which tokens each rank has.
        has_windows: Whether some layers attend to a sliding window.
    """

    group: dist.ProcessGroup
    rank: int
    layout: SequenceLayout
    has_windows: bool

    def __deepcopy__(self, memo: dict[int, Any]) -> ContextParallel:
        """Copies of a model share the process group, which cannot be copied."""
        return self


@dataclass(frozen=True)
class _Math:
    """How scores become outputs, for all pieces alike."""

    scale: float
    dropout: float
    window: int | None
    softcap: float | None


def context_parallel_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attend from this rank's tokens to all tokens before them, on whichever rank they are.

    Keys and values travel together: one gather in the forward, one reduce-scatter in the backward. No mask of the
    whole sequence is made: each of the rank's pieces attends to the keys up to its own end, so that fused kernels do
    what is needed and no more.

    Args:
        module: The attention module; has the attribute that `enable_context_parallel` sets.
        query: (batch, heads, tokens of this rank, head size), rotated by positions in the whole sequence.
        key: (batch, key heads, tokens of this rank, head size); key heads divide heads.
        value: (batch, key heads, tokens of this rank, value size).
        attention_mask: Must be None.
        scaling: Of the scores; None: 1 / sqrt(head size).
        dropout: Probability, of attention weights.
        sliding_window: How many tokens a token sees, itself included; None: all.
        softcap: Scores become `softcap * tanh(scores / softcap)`; None: they stay.
        kwargs: What else transformers hands over; what would change the result is refused.

    Returns:
        (batch, tokens of this rank, heads, value size), and None in place of attention weights.

    Raises:
        ConfigurationError: The model asks for what this function does not compute; the same on every rank.
    """
    shared = getattr(module, ATTRIBUTE, None)
    if not isinstance(shared, ContextParallel):
        raise ConfigurationError(
            f"a {type(module).__name__} uses the attention of context parallelism but was not prepared for it; call "
            "enable_context_parallel on its model, and give models that share a config a copy each"
        )
    _refuse(module, shared, attention_mask, {**kwargs, "sliding_window": sliding_window})
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    math = _Math(scale, dropout, sliding_window, softcap)
    keys, values = _gathered(shared, key, value)
    ranges = shared.layout.ranges_of(shared.rank, query.shape[2])
    pieces = query.chunk(len(ranges), 2)
    out = [_attend(piece, keys, values, start, math) for piece, (start, _) in zip(pieces, ranges, strict=True)]
    return torch.cat(out, 2).transpose(1, 2).contiguous(), None


def _refuse(module: nn.Module, shared: ContextParallel, attention_mask: Tensor | None, given: dict[str, Any]) -> None:
    name = type(module).__name__
    found = [key for key in _CHANGES_THE_MATH if given.get(key) is not None and given[key] is not False]
    if attention_mask is not None:
        found.append("attention_mask")
    if found:
        raise ConfigurationError(
            f"{name} hands {', '.join(found)} to its attention, which context parallelism does not compute; use "
            "cp_size=1 for this model or call it without"
        )
    if given.get("is_causal") is False or not getattr(module, "is_causal", True):
        raise ConfigurationError(f"{name} is not causal, and context parallelism is for decoders only; use cp_size=1")
    if shared.has_windows and given["sliding_window"] is None and not _tells_windows(module):
        raise ConfigurationError(
            f"the config of {name} has sliding windows but its attention is not told which; use cp_size=1"
        )


def _tells_windows(module: nn.Module) -> bool:
    """Whether a call without a window means that this layer has none."""
    types, index = getattr(getattr(module, "config", None), "layer_types", None), getattr(module, "layer_idx", None)
    return types is not None and index is not None and types[index] == "full_attention"


def _gathered(shared: ContextParallel, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values of the whole sequence, in order."""
    sizes = [key.shape[-1], value.shape[-1]]
    together = torch.cat([key, value], -1)
    gathered = _gather(together, 0, shared.group)
    keys, values = shared.layout.join(gathered.chunk(shared.layout.ranks, 0), 2).split(sizes, -1)
    return keys, values


def _attend(query: Tensor, key: Tensor, value: Tensor, start: int, math: _Math) -> Tensor:
    """Attention of neighbouring tokens, of which the first has the position `start`, to those up to themselves."""
    end = start + query.shape[2]
    windowed = math.window is not None and math.window < end
    first = max(start - math.window + 1, 0) if windowed and math.window is not None else 0
    key, value = key[:, :, first:end], value[:, :, first:end]
    groups = query.shape[1] // key.shape[1]
    if not windowed and math.softcap is None:
        bias: Any = _lower_right(query.shape[2], end)
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask=bias, dropout_p=math.dropout, scale=math.scale, enable_gqa=groups > 1
        )
    if groups > 1:  # fused kernels take a mask or groups of heads, not both
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    mask = _band(start, end, first, math.window if windowed else None, query.device)
    if math.softcap is None:
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, dropout_p=math.dropout, scale=math.scale
        )
    scores = torch.tanh(query @ key.transpose(2, 3) * (math.scale / math.softcap)) * math.softcap
    weights = scores.masked_fill(~mask, float("-inf")).softmax(-1, dtype=torch.float32).to(query.dtype)
    return F.dropout(weights, math.dropout) @ value


def _lower_right(queries: int, keys: int) -> Tensor:
    """Torch's sign for fused kernels that the last query sees the last key; a tensor subclass without data."""
    if torch.compiler.is_compiling():
        return causal_lower_right(queries, keys)
    with _disable_current_modes():  # it cannot be made under a dispatch mode, such as selective recomputation's
        return causal_lower_right(queries, keys)


def _band(start: int, end: int, first: int, window: int | None, device: torch.device) -> Tensor:
    """Who sees whom: bool, (tokens start to end, tokens first to end)."""
    distance = torch.arange(start, end, device=device)[:, None] - torch.arange(first, end, device=device)
    return (distance >= 0) if window is None else (distance >= 0) & (distance < window)
