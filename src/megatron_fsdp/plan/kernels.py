"""The kernels that a device would choose, where the choice decides what is saved for backward.

On the meta device torch takes composite functions apart as no real device does: attention becomes a product, a softmax
and a product, which saves the square of the sequence length. Inside `kernels_of` such functions call the operators that
the named device would run; these know their results' shapes on the meta device as well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.library import _scoped_library

Kernels = Literal["cuda", "cpu", "math"]
"""Kernels of a CUDA device, of a CPU, or of a CPU with attention by matrix products, which saves all scores."""

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
    """One call of scaled dot product attention."""

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    dropout: float
    causal: bool
    scale: float | None
    grouped: bool

    def by_products(self) -> Tensor:
        """Compute attention by matrix products, which saves the scores."""
        result: Tensor = _ATEN._scaled_dot_product_attention_math(
            self.query,
            self.key,
            self.value,
            self.additive_mask(),
            self.dropout,
            self.causal,
            None,
            scale=self.scale,
            enable_gqa=self.grouped,
        )[0]
        return result

    @property
    def plain(self) -> bool:
        """Whether all three tensors have four dimensions and are not empty."""
        tensors = (self.query, self.key, self.value)
        return all(tensor.dim() == 4 and tensor.numel() > 0 for tensor in tensors)

    @property
    def one_head_size(self) -> bool:
        """Whether queries, keys and values have the same number of features."""
        return self.query.shape[-1] == self.key.shape[-1] == self.value.shape[-1]

    def additive_mask(self) -> Tensor | None:
        if self.mask is None or self.mask.dtype != torch.bool:
            return self.mask
        kept, masked = (torch.scalar_tensor(x, dtype=self.query.dtype, device="meta") for x in (0.0, float("-inf")))
        return torch.where(self.mask, kept, masked)


def _call(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> _Attention:
    return _Attention(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)


def _attention_on_cpu(*args: Any, **kwargs: Any) -> Tensor:
    call = _call(*args, **kwargs)
    learned_mask = call.mask is not None and call.mask.requires_grad
    if call.dropout or learned_mask or not (call.plain and call.one_head_size):
        return call.by_products()
    result: Tensor = _ATEN._scaled_dot_product_flash_attention_for_cpu(
        call.query, call.key, call.value, call.dropout, call.causal, attn_mask=call.additive_mask(), scale=call.scale
    )[0]
    return result


def _attention_on_cuda(*args: Any, **kwargs: Any) -> Tensor:
    call = _call(*args, **kwargs)
    if not call.plain:
        return call.by_products()
    small = call.one_head_size and call.query.shape[-1] <= _FLASH_HEAD_DIM
    if small and call.mask is None and call.query.dtype in _HALF:
        result: Tensor = _ATEN._scaled_dot_product_flash_attention(
            call.query, call.key, call.value, call.dropout, call.causal, False, scale=call.scale
        )[0]
        return result
    if call.query.shape[1] != call.key.shape[1] or call.query.dtype == torch.float64:
        return call.by_products()
    return _efficient(call)


def _efficient(call: _Attention) -> Tensor:
    mask = call.additive_mask()
    if mask is not None:
        mask = mask.expand(*call.query.shape[:3], call.key.shape[2])
    needs_grad = torch.is_grad_enabled() and any(x.requires_grad for x in (call.query, call.key, call.value))
    result: Tensor = _ATEN._scaled_dot_product_efficient_attention(
        call.query, call.key, call.value, mask, needs_grad, call.dropout, call.causal, scale=call.scale
    )[0]
    return result


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


_TABLES: dict[Kernels, dict[str, Callable[..., Any]]] = {
    "cuda": {
        "scaled_dot_product_attention": _attention_on_cuda,
        "dropout": _fused_dropout,
        "rms_norm": _fused_rms_norm,
    },
    "cpu": {"scaled_dot_product_attention": _attention_on_cpu},
    "math": {},
}
