"""Train a small model for two steps, on one process or on tensor-parallel ranks, and list where two runs differ."""

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import peft
import torch
from torch import Tensor, nn

from tests.automodel.small_models import batch_of, label_count, token_loss_sum
from tests.automodel.training import whole
from tests.support.parity import fixed_seed

RTOL, ATOL = 1e-4, 1e-6


@dataclass(frozen=True)
class Trace:
    """What two steps left behind; index = step, whole tensors by name of the parameter."""

    logits: Tensor
    losses: list[float]
    gradients: list[dict[str, Tensor]]
    parameters: list[dict[str, Tensor]]


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
) -> Trace:
    """Train on this data-parallel rank's rows; the loss is scaled so that the average over ranks is the mean."""
    optimizer = optimizer_of(model)
    losses, gradients, parameters, first = [], [], [], None
    for step in range(steps):
        batch = batch_of(seed=1 + step)
        rows = len(batch["labels"]) // ranks
        own = {key: value[rank * rows : (rank + 1) * rows] for key, value in batch.items()}
        logits = model(input_ids=own["input_ids"], use_cache=False).logits
        first = logits.detach().clone() if first is None else first
        loss = token_loss_sum(logits, own["labels"]) * ranks / label_count(batch["labels"])
        optimizer.zero_grad()
        loss.backward()
        losses.append(loss.item())
        gradients.append({name: whole(p.grad) for name, p in _named(model) if p.grad is not None})
        optimizer.step()
        parameters.append({name: whole(p) for name, p in _named(model)})
    assert first is not None
    return Trace(first, losses, gradients, parameters)


def _named(model: nn.Module) -> Iterator[tuple[str, Any]]:
    for name, param in model.named_parameters():
        yield name.removeprefix("module."), param


def differences(found: Trace, expected: Trace, *, only_sums: bool = False) -> list[str]:
    """Where a run differs from one process; empty where nowhere.

    Args:
        found: The run.
        expected: What one process computed.
        only_sums: Leave out logits and losses, which are of a part of the rows under data parallelism.
    """
    pairs: list[tuple[str, Tensor, Tensor]] = []
    if not only_sums:
        pairs.append(("logits", found.logits, expected.logits))
        pairs.append(("losses", torch.tensor(found.losses), torch.tensor(expected.losses)))
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
