"""Values that are right but for the digits that a coarser dtype drops (pure)."""

import torch
from torch import Tensor

_COARSER = (torch.float32, torch.float16, torch.bfloat16)
"""The finest first: the finest one that explains a difference is the likeliest."""
_LEAST = 1 / 16
"""Rounding of a whole tensor shows some error of this part of the dtype's eps at least."""


def rounded_to(
    expected: Tensor, found: Tensor, size: Tensor, *, must_be_exact: bool, times: float = 1.0
) -> torch.dtype | None:
    """The dtype that explains all differences by rounding.

    Args:
        expected: Right values, float64.
        found: Values that differ, float64.
        size: What was rounded, of each element: its own size, or that of the terms it is the sum of.
        must_be_exact: Whether the found values have to be ones that the dtype can hold, as where a copy is kept in it;
            a sum or mean of rounded terms need not be one.
        times: How many eps of `size` the error may be.

    Returns:
        float32, float16 or bfloat16; None where none does.
    """
    error = (found - expected).abs()
    if not bool(error.any()) or not bool(found.isfinite().all()):
        return None
    for dtype in _COARSER:
        info = torch.finfo(dtype)
        allowed = times * info.eps * (size + info.smallest_normal)
        is_held = torch.equal(found.to(dtype).to(found.dtype), found)
        shows = bool((error >= _LEAST * info.eps * size).any())
        if bool((error <= allowed).all()) and shows and (is_held or not must_be_exact):
            return dtype
    return None
