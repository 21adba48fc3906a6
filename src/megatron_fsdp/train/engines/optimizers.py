"""The optimizer of a run, with weight decay for matrices only."""

from __future__ import annotations

from collections.abc import Collection, Hashable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from megatron_fsdp.train.models.decoder import split_for_decay
from megatron_fsdp.train.options.options import OptimizerOptions


def build_optimizer(
    model: nn.Module, options: OptimizerOptions, *, undecayed: Collection[str] = ()
) -> torch.optim.Optimizer:
    """Return AdamW or SGD, with groups with weight decay (matrices) and without (norms, biases, embeddings).

    Args:
        model: Whose parameters are updated.
        options: Which optimizer, and how.
        undecayed: Further names without weight decay, such as a head that is a copy of the embeddings.
    """
    parameters = dict(model.named_parameters())
    decay, keep = split_for_decay(model)
    keep += [name for name in decay if name in undecayed]
    decay = [name for name in decay if name not in undecayed]
    groups = _groups([parameters[name] for name in decay], options.weight_decay)
    groups += _groups([parameters[name] for name in keep], 0.0)
    rate = 0.0 if options.lr is None else options.lr
    if options.optimizer == "sgd":
        return torch.optim.SGD(groups, lr=rate, momentum=options.sgd_momentum)
    betas = (options.adam_beta1, options.adam_beta2)
    return torch.optim.AdamW(groups, lr=rate, betas=betas, eps=options.adam_eps, fused=True)


def _groups(parameters: list[nn.Parameter], weight_decay: float) -> list[dict[str, Any]]:
    """One group per mesh, since fused steps do not mix meshes; experts lie on one of their own."""
    by_mesh: dict[Hashable, list[nn.Parameter]] = {}
    for parameter in parameters:
        by_mesh.setdefault(_mesh_of(parameter), []).append(parameter)
    return [{"params": found, "weight_decay": weight_decay} for found in by_mesh.values()]


def _mesh_of(parameter: Tensor) -> Hashable:
    return parameter.device_mesh if isinstance(parameter, DTensor) else None
