"""Notice tensor-parallel ranks that are given different batches or random numbers, before they train on them.

Their activations would be put together from different rows, and replicated weights would drift apart, with a loss that
looks the same on all ranks. The usual cause is a sampler or a seed by the global rank.
"""

from __future__ import annotations

import zlib
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from megatron_fsdp.comm.fingerprint import fingerprint
from megatron_fsdp.engine.meta_init import random_state
from megatron_fsdp.errors import ConfigurationError

_POSITIVE = (1 << 62) - 1


def compare_first_forward(model: nn.Module, tp_mesh: DeviceMesh) -> None:
    """Let the first forward with gradients compare inputs, and where there is dropout random states; one all-reduce.

    Args:
        model: Called with the same batch on all ranks of `tp_mesh`.
        tp_mesh: One-dimensional.
    """
    model.register_forward_pre_hook(_FirstForward(tp_mesh), with_kwargs=True)


class _FirstForward:
    """The hook; later forwards pass it by."""

    def __init__(self, tp_mesh: DeviceMesh) -> None:
        self._mesh = tp_mesh
        self._is_done = False

    def __deepcopy__(self, _: dict[int, Any]) -> _FirstForward:
        """Copies of a model share the process group, which cannot be copied."""
        return self

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._is_done or not torch.is_grad_enabled() or torch.compiler.is_compiling():
            return
        self._is_done = True
        device = torch.empty(0, device=self._mesh.device_type).device  # with the index of the current device
        own = [_of_inputs(args, kwargs), _of_random_state(device) if _drops_out(module) else 0]
        both = torch.tensor([*own, *(-value for value in own)], dtype=torch.int64, device=device)
        dist.all_reduce(both, dist.ReduceOp.MAX, group=self._mesh.get_group())
        inputs, random, inputs_below, random_below = both.tolist()
        if inputs != -inputs_below:
            raise ConfigurationError(
                "tensor-parallel ranks were given different batches; let ranks that share a model read the same rows "
                "(mesh_context.data_rank, not the global rank)"
            )
        if random != -random_below:
            raise ConfigurationError(
                "tensor-parallel ranks have different random states, so dropout would let their weights drift apart; "
                "seed ranks that share a model alike (by mesh_context.data_rank, not by the global rank)"
            )


def _of_inputs(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    named = [*((str(index), value) for index, value in enumerate(args)), *sorted(kwargs.items())]
    tensors = [(name, value) for name, value in named if isinstance(value, Tensor) and not value.is_floating_point()]
    seen = [(name, tuple(value.shape), int(fingerprint(value))) for name, value in tensors]
    return zlib.crc32(repr(seen).encode())


def _of_random_state(device: torch.device) -> int:
    return int(fingerprint(random_state(device)[-1])) & _POSITIVE


def _drops_out(model: nn.Module) -> bool:
    return any(isinstance(part, nn.Dropout) and part.p > 0 and part.training for part in model.modules())
