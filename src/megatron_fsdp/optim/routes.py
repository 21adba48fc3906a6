"""Say which parameters go to which optimizer, and what its step works on: read off live objects, nothing is sent."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from megatron_fsdp.optim.adamw8bit import AdamW8bit
from megatron_fsdp.optim.local_step import steps_locally
from megatron_fsdp.optim.owned_step import steps_owned

WHOLE_TENSOR_OPTIMIZERS = (
    torch.optim.LBFGS,
    torch.optim.Adafactor,
    torch.optim.Muon,
    torch.optim.Rprop,
    torch.optim.SparseAdam,
)
"""Torch's optimizers whose step, or an operation in it, needs more than the elements of a shard."""


def step_of(optimizer: Optimizer) -> str:
    """Say what the step of a connected optimizer works on."""
    if type(optimizer) is torch.optim.Muon:
        return "on shards and whole matrices (Muon)"
    if isinstance(optimizer, AdamW8bit):
        return "on shards, in blocks of 256 elements of whole tensors"
    if steps_owned(optimizer):
        return "on whole tensors, one owner each"
    if isinstance(optimizer, WHOLE_TENSOR_OPTIMIZERS):
        return "on whole tensors, the same on every rank"
    return "on local tensors" if steps_locally(optimizer) else "on DTensors"


def count_kinds(params: Iterable[Tensor], modules: Iterable[nn.Module]) -> tuple[str, ...]:
    """Count parameters by what they are, the most first: ("norms 65", "embeddings 1", "head 1"); see `kinds_of`."""
    return tuple(f"{kind} {count}" for kind, count in Counter(kinds_of(params, modules)).most_common())


def kinds_of(params: Iterable[Tensor], modules: Iterable[nn.Module]) -> list[str]:
    """Name what each parameter is.

    Args:
        params: Some parameters.
        modules: Of the whole model; what they do not hold just now is told by its shape.

    Returns:
        "matrices", "stacks of matrices", "embeddings", "head", "norms", "biases" or "vectors", for each.
    """
    modules = list(modules)
    holders: dict[int, tuple[nn.Module | None, str]] = {
        id(param): (module, name)
        for module in reversed(modules)  # of tied ones the first
        for name, param in module._parameters.items()
        if param is not None
    }
    vocabularies = {module.num_embeddings for module in modules if isinstance(module, nn.Embedding)}
    return [_kind(param, holders.get(id(param), (None, "")), vocabularies) for param in params]


def _kind(param: Tensor, holder: tuple[nn.Module | None, str], vocabularies: set[int]) -> str:
    module, name = holder
    if isinstance(module, nn.Embedding):
        return "embeddings"
    if "norm" in type(module).__name__.lower():
        return "norms"
    if name.endswith("bias"):
        return "biases"
    if param.dim() == 2:
        return "head" if isinstance(module, nn.Linear) and param.shape[0] in vocabularies else "matrices"
    return "stacks of matrices" if param.dim() > 2 else "vectors"


def route_line(optimizer: Optimizer, modules: Iterable[nn.Module]) -> str:
    """Say in a line what an optimizer updates: "AdamW: 67 parameters on local tensors (norms 65, ...)"."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    parts = ", ".join(count_kinds(params, modules))
    return f"{type(optimizer).__name__}: {len(params)} parameters {step_of(optimizer)} ({parts})"
