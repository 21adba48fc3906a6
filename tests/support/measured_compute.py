"""Forward, loss and backward of real tensors on the CPU, for comparison with a profile of the planner."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tests.support.live_bytes import LiveBytes


def measured_peak(model: nn.Module, inputs: Any, loss_fn: Callable[[Any], Tensor] | None) -> int:
    """The most bytes alive during one step besides parameters and inputs; gradients of parameters die at once."""
    for param in model.parameters():
        if param.requires_grad:
            param.register_post_accumulate_grad_hook(_drop)
    with LiveBytes() as live:
        output = model(**inputs) if isinstance(inputs, dict) else model(inputs)
        loss = loss_fn(output) if loss_fn is not None else output.loss
        del output
        loss.backward()
    return live.peak_bytes


def _drop(param: Tensor) -> None:
    param.grad = None


def on_meta(value: Any) -> Any:
    """The same tensors without memory."""
    if isinstance(value, dict):
        return {name: on_meta(item) for name, item in value.items()}
    return value.to("meta")


def token_batch() -> dict[str, Tensor]:
    """Inputs of a causal language model of transformers, with labels."""
    ids = torch.arange(32).view(2, 16) * 7 % 100
    return {"input_ids": ids, "labels": ids}
