"""The kernels that a device would choose, where the choice decides what is saved for backward.

On the meta device torch takes composite functions apart as no real device does: attention becomes a product, a softmax
and a product, which saves the square of the sequence length. Inside `kernels_of` such functions call the operators that
the named device would run; these know their results' shapes on the meta device as well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor
from torch.library import _scoped_library

Kernels = Literal["cuda", "cpu", "math"]
"""Kernels of a CUDA device, of a CPU, or of neither: attention by matrix products, whose operations are those of the
model, without what kernels compute again in backward."""

_ATEN = torch.ops.aten
_HALF = (torch.float16, torch.bfloat16)
_FLASH_HEAD_DIM = 256


@contextmanager
def kernels_of(kernels: Kernels) -> Iterator[None]:
    """Let attention, dropout and RMS norms on the meta device use the operators of a device inside the block.

    The functions are replaced in torch's dispatcher, for tensors of the meta device only, so every caller gets
    the replacement: transformers, `nn.MultiheadAttention`, a recomputed forward.

    Args:
        kernels: Whose. Attention on "cuda": flash attention for half precision without a mask and heads of one size up
            to 256, else memory-efficient attention; on "cpu": its flash attention where nothing is dropped, heads have
            one size and the mask takes no gradient. These keep queries, keys, values, results and one fp32 number per
            query and head. Else, and for "math", products, which keep all scores.
    """
    with _scoped_library("aten", "IMPL") as library:
        for name, function in _TABLES[kernels].items():
            library.impl(name, function, "AutogradMeta")
        yield


@dataclass(frozen=True)
class _Attention:
    """The arguments of `scaled_dot_product_attention`."""

    query: Tensor
    key: Tensor
    value: Tensor
    attn_mask: Tensor | None = None
    dropout_p: float = 0.0
    is_causal: bool = False
    scale: float | None = None
    enable_gqa: bool = False

    @cached_property
    def mask(self) -> Tensor | None:
        """A mask to add to scores for one of booleans, as torch makes it; other masks as they are."""
        if self.attn_mask is None or self.attn_mask.dtype != torch.bool:
            return self.attn_mask
        kept, masked = (torch.scalar_tensor(x, dtype=self.query.dtype, device="meta") for x in (0.0, float("-inf")))
        return torch.where(self.attn_mask, kept, masked)

    @property
    def is_plain(self) -> bool:
        """Whether queries, keys and values have four dimensions and are not empty."""
        return all(tensor.dim() == 4 and tensor.numel() > 0 for tensor in (self.query, self.key, self.value))

    @property
    def has_one_head_size(self) -> bool:
        """Whether queries, keys and values have as many features."""
        return len({tensor.shape[-1] for tensor in (self.query, self.key, self.value)}) == 1


def _attention_by_products(call: _Attention) -> Tensor:
    result: tuple[Tensor, ...] = _ATEN._scaled_dot_product_attention_math(
        call.query,
        call.key,
        call.value,
        call.mask,
        call.dropout_p,
        call.is_causal,
        None,
        scale=call.scale,
        enable_gqa=call.enable_gqa,
    )
    return result[0]


def _attention_on_cpu(call: _Attention) -> Tensor:
    mask = call.mask
    learned_mask = mask is not None and mask.requires_grad
    if call.dropout_p or learned_mask or not (call.is_plain and call.has_one_head_size):
        return _attention_by_products(call)
    result: tuple[Tensor, ...] = _ATEN._scaled_dot_product_flash_attention_for_cpu(
        call.query, call.key, call.value, call.dropout_p, call.is_causal, attn_mask=mask, scale=call.scale
    )
    return result[0]


def _attention_on_cuda(call: _Attention) -> Tensor:
    query, key, value, mask = call.query, call.key, call.value, call.mask
    is_small = call.has_one_head_size and query.shape[-1] <= _FLASH_HEAD_DIM
    result: tuple[Tensor, ...]
    if call.is_plain and is_small and mask is None and query.dtype in _HALF:
        result = _ATEN._scaled_dot_product_flash_attention(
            query, key, value, call.dropout_p, call.is_causal, False, scale=call.scale
        )
    elif call.is_plain and query.shape[1] == key.shape[1] and query.dtype != torch.float64:
        mask = None if mask is None else mask.expand(*query.shape[:3], key.shape[2])
        needs_grad = torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value))
        result = _ATEN._scaled_dot_product_efficient_attention(
            query, key, value, mask, needs_grad, call.dropout_p, call.is_causal, scale=call.scale
        )
    else:
        return _attention_by_products(call)
    return result[0]


def _fused_dropout(given: Tensor, p: float, train: bool) -> Tensor:
    """Run CUDA's fused dropout, which saves a mask of one byte per element; others save the input's dtype."""
    if not train or p == 0 or given.numel() == 0:
        return given
    result: Tensor = _ATEN.native_dropout(given, p, True)[0]
    return result


def _fused_rms_norm(given: Tensor, shape: list[int], weight: Tensor | None = None, _eps: float | None = None) -> Tensor:
    """Run RMS norm as one kernel in each direction, as CUDA does; the meta device would decompose it."""
    result: Tensor = _RmsNorm.apply(given, weight, len(shape))  # type: ignore[no-untyped-call]  # torch's own
    return result


class _RmsNorm(torch.autograd.Function):
    """RMS norm that saves the input, the weight and one number per row (fp32 for half precision)."""

    @staticmethod
    def forward(ctx: Any, given: Tensor, weight: Tensor | None, dims: int) -> Tensor:
        dtype = torch.float32 if given.dtype in _HALF else given.dtype
        scale = given.new_empty((*given.shape[: given.dim() - dims], *(1 for _ in range(dims))), dtype=dtype)
        ctx.save_for_backward(given, weight, scale)
        return given * 1 if weight is None else given * weight

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor | None, None]:
        given, weight, _ = ctx.saved_tensors
        wanted = weight is not None and ctx.needs_input_grad[1]
        return grads[0] * given, torch.empty_like(weight) if wanted else None, None


def _attention(kernel: Callable[[_Attention], Tensor]) -> dict[str, Callable[..., Tensor]]:
    return {"scaled_dot_product_attention": lambda *args, **kwargs: kernel(_Attention(*args, **kwargs))}


_TABLES: dict[Kernels, dict[str, Callable[..., Tensor]]] = {
    "cuda": {**_attention(_attention_on_cuda), "dropout": _fused_dropout, "rms_norm": _fused_rms_norm},
    "cpu": _attention(_attention_on_cpu),
    "math": _attention(_attention_by_products),
}
