"""Tensors that wait for their initial value and show whether they got it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor


@dataclass(frozen=True)
class Blank:
    """A tensor filled with what no initialisation leaves behind.

    Attributes:
        tensor: NaN where the dtype has it, else the dtype's extreme value.
        version: Its version when it was made.
    """

    tensor: torch.Tensor
    version: int

    @property
    def is_untouched(self) -> bool:
        """Whether nothing was written to it."""
        return self.tensor._version == self.version and self.is_unset

    @property
    def is_unset(self) -> bool:
        """Whether some element never got a value; for integers, whether none did."""
        return is_unset(self.tensor, self.version)


def blank_tensor(like: torch.Tensor, device: torch.device) -> Blank:
    """A tensor of the (global) shape and dtype of `like`."""
    tensor = torch.full(like.shape, _marker(like.dtype), dtype=like.dtype, device=device)
    return Blank(tensor, tensor._version)


def blank_parameter(like: nn.Parameter, device: torch.device) -> Blank:
    """A parameter of the (global) shape, dtype, requires_grad and attributes of `like`."""
    param = nn.Parameter(blank_tensor(like, device).tensor, requires_grad=like.requires_grad)
    param.__dict__.update(like.__dict__)
    return Blank(param, param._version)


def hollow_parameter(like: nn.Parameter) -> Blank:
    """The same without memory: writing into it is noticed, and does nothing."""
    param = nn.Parameter(torch.empty(like.shape, dtype=like.dtype, device="meta"), requires_grad=like.requires_grad)
    return Blank(param, param._version)


def own_part(full: torch.Tensor, original: nn.Parameter) -> torch.Tensor:
    """What this rank keeps of a full tensor before data-parallel sharding: all of it, or its tensor-parallel part.

    Full tensors are drawn whole on every rank and cut here, so that weights do not depend on the tensor-parallel size.
    No communication.

    Args:
        full: In the global shape of the parameter.
        original: The parameter as the model had it; a DTensor where it is tensor-parallel.
    """
    if not isinstance(original, DTensor):
        return full.detach()
    cut = distribute_tensor(full.detach(), original.device_mesh, original.placements, src_data_rank=None)
    return cut.to_local()


def is_unset(tensor: torch.Tensor, version: int) -> bool:
    """Whether a tensor that was blank at `version` has elements without a value."""
    if tensor.is_meta:
        return True
    if not tensor.numel():
        return False
    if tensor.dtype.is_floating_point or tensor.dtype.is_complex:
        real = torch.view_as_real(tensor.detach()) if tensor.dtype.is_complex else tensor.detach()
        wide = real.to(torch.float32) if real.dtype.itemsize == 1 else real
        return bool(wide.amin().isnan())  # a minimum with NaN is NaN, and takes no memory
    return tensor._version == version and bool((tensor == _marker(tensor.dtype)).all())


def _marker(dtype: torch.dtype) -> float | int | bool:
    if dtype.is_floating_point or dtype.is_complex:
        return float("nan")
    if dtype is torch.bool:
        return True
    info = torch.iinfo(dtype)
    return info.min or info.max
