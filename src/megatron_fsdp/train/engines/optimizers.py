"""The optimizer of a run, with weight decay for matrices only."""

from __future__ import annotations

import torch
from torch import nn

from megatron_fsdp.train.models.decoder import split_for_decay
from megatron_fsdp.train.options.training import OptimizerOptions


def build_optimizer(model: nn.Module, options: OptimizerOptions) -> torch.optim.Optimizer:
    """Return AdamW or SGD with two groups: matrices with weight decay; norms, biases and embeddings without."""
    parameters = dict(model.named_parameters())
    decay, keep = split_for_decay(model)
    groups = [
        {"params": [parameters[name] for name in decay], "weight_decay": options.weight_decay},
        {"params": [parameters[name] for name in keep], "weight_decay": 0.0},
    ]
    rate = 0.0 if options.lr is None else options.lr
    if options.optimizer == "sgd":
        return torch.optim.SGD(groups, lr=rate, momentum=options.sgd_momentum)
    betas = (options.adam_beta1, options.adam_beta2)
    return torch.optim.AdamW(groups, lr=rate, betas=betas, eps=options.adam_eps, fused=True)
