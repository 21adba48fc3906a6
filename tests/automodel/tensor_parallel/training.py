"""Train a small model for two steps, on one process or on tensor-parallel ranks, and list where two runs differ."""

import warnings
from collections.abc import Callable
from typing import Any

import peft
import torch
from torch import nn

from tests.automodel.training import Trained
from tests.automodel.training import train as train_rows
from tests.support.parity import fixed_seed

RTOL, ATOL = 1e-4, 1e-6


def with_lora(model: nn.Module, targets: list[str], **options: Any) -> nn.Module:
    """The model with random adapters of peft."""
    config = peft.LoraConfig(r=3, lora_alpha=6, target_modules=targets, init_lora_weights=False, **options)
    with fixed_seed(3), warnings.catch_warnings():
        # peft 0.21 asks transformers 5.23 by an old name.
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)
        return peft.get_peft_model(model, config)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """AdamW with an eps above rounding noise (the exact gradient of the bias of keys is 0); foreach, as on CUDA."""
    params = [param for param in model.parameters() if param.requires_grad]
    return torch.optim.AdamW(params, lr=1e-2, eps=1e-3, foreach=True)


def train(
    model: nn.Module,
    *,
    rank: int = 0,
    ranks: int = 1,
    optimizer_of: Callable[[nn.Module], torch.optim.Optimizer] = adamw,
    steps: int = 2,
) -> Trained:
    """Train on this data-parallel rank's rows; tensor-parallel ranks read the same ones."""
    return train_rows(model, steps=steps, data_rank=rank, data_ranks=ranks, optimizer=optimizer_of(model))


def differences(found: Trained, expected: Trained, *, with_logits: bool = True) -> list[str]:
    """Where a run differs from one process; empty where nowhere.

    Args:
        found: The run.
        expected: What one process computed.
        with_logits: False: leave out logits, which are of a part of the rows under data parallelism.
    """
    pairs = [("losses", torch.tensor(found.losses), torch.tensor(expected.losses))]
    if with_logits:
        pairs.append(("logits", found.logits[0], expected.logits[0]))
    wrong = []
    for what in ("gradients", "parameters"):
        for step, (mine, right) in enumerate(zip(getattr(found, what), getattr(expected, what), strict=True)):
            if mine.keys() != right.keys():
                wrong.append(f"{what} of step {step}: other names {sorted(mine.keys() ^ right.keys())}")
                continue
            pairs += [(f"{what} of step {step}, {name}", mine[name], right[name]) for name in right]
    for name, mine, right in pairs:
        # The tolerance is relative to a tensor's largest element: each element sums products of that size.
        bound = ATOL + RTOL * right.abs().max().item()
        if mine.shape != right.shape or not (mine - right).abs().max().item() <= bound:
            wrong.append(f"{name}: {(mine - right).abs().max().item():.2e} > {bound:.2e}")
    return wrong
