"""State of an optimizer before it has a value: cut as its parameter, or whole."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megatron_fsdp.dtensor.tensor import UnevenDTensor


def blank_state(
    param: torch.Tensor, shape: Sequence[int], dtype: torch.dtype, device: torch.device | None = None
) -> torch.Tensor:
    """A state tensor of zeros, as an optimizer would make it; no communication.

    Args:
        param: Whose state it is.
        shape: Global shape of the state. That of the parameter: it is cut as the parameter; any other: every rank has
            all of it.
        dtype: Of the state.
        device: Of state that every rank has all of; None: the parameter's.
    """
    if isinstance(param, UnevenDTensor) and tuple(shape) == tuple(param.shape):
        return UnevenDTensor.wrap(torch.zeros_like(param._local_tensor.detach(), dtype=dtype), param.shard_frame)
    return torch.zeros(tuple(shape), dtype=dtype, device=param.device if device is None else device)
