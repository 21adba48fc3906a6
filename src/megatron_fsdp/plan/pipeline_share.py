"""One stage of a pipeline on paper: its layers, what it is given and what it passes on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from megatron_fsdp.errors import ParallelSizeError
from megatron_fsdp.plan.decoder_parts import DecoderParts, text_config


@dataclass(frozen=True)
class Stage:
    """A place in a pipeline.

    Attributes:
        index: From 0.
        count: Of all stages.
    """

    index: int
    count: int

    @property
    def is_first(self) -> bool:
        """It has the embeddings."""
        return self.index == 0

    @property
    def is_last(self) -> bool:
        """It has the final norm, the head and the loss."""
        return self.index == self.count - 1


def layers_of_stage(num_layers: int, stage: Stage) -> tuple[int, int]:
    """(first layer, one past the last) of a stage; earlier stages take the remainder, as in automodel's pipelines.

    Raises:
        ParallelSizeError: There are fewer layers than stages, or there is no such stage.
    """
    if num_layers < stage.count:
        raise ParallelSizeError(
            f"{num_layers} layers cannot be cut into pp={stage.count} stages, since each needs a layer; use pp of "
            f"{num_layers} or less"
        )
    if not 0 <= stage.index < stage.count:
        raise ParallelSizeError(f"stage={stage.index} does not exist; pp={stage.count} has 0 to {stage.count - 1}")
    length, remainder = divmod(num_layers, stage.count)
    start = stage.index * length + min(stage.index, remainder)
    return start, start + length + (stage.index < remainder)


def take_stage(model: nn.Module, parts: DecoderParts, stage: Stage, rows: int, tokens: int) -> None:
    """Take away, in place, what belongs to other stages; what stays keeps its name.

    A stage that is not the first computes on hidden states that have arrived in a buffer (`received_bytes`).

    Args:
        model: With modules and a config of its own.
        parts: Of the model.
        stage: Which.
        rows: Sequences of a microbatch.
        tokens: Of each, on this rank.

    Raises:
        ParallelSizeError: There are too few layers.
    """
    base: Any = model.get_submodule(parts.base)
    layers: nn.ModuleList = getattr(base, parts.layers)
    total = len(layers)
    start, stop = layers_of_stage(total, stage)
    kept = dict(list(layers._modules.items())[start:stop])
    layers._modules.clear()
    layers._modules.update(kept)
    config: Any = text_config(model)
    kinds = getattr(config, "layer_types", None)
    if kinds is not None:
        config.layer_types = list(kinds)[start:stop]
    config.num_hidden_layers = stop - start
    if not stage.is_first:
        for name in parts.embeddings:
            _replace(base, name, _NoEmbedding())
        arriving = _Arriving(hidden_states(model, rows, tokens))
        next(iter(kept.values())).register_forward_pre_hook(arriving)
    if not stage.is_last:
        for name in parts.norms:
            _replace(base, name, nn.Identity())
        if parts.head is not None:
            _replace(model, parts.head, nn.Identity())
        if getattr(config, "final_logit_softcapping", None) is not None:
            config.final_logit_softcapping = None


def stage_inputs(model: nn.Module, stage: Stage, rows: int, tokens: int) -> dict[str, Any]:
    """What the module of a stage is called with, without memory; tokens and labels where it takes them.

    Stages that are not the first are called with one tensor of the size of hidden states, of which they use the shape
    only: as large is the gradient of the microbatch before, which waits until it is sent.
    """
    ids = torch.empty((rows, tokens), dtype=torch.long, device="meta")
    inputs: dict[str, Any] = {"labels": ids} if stage.is_last else {}
    if stage.is_first:
        return {"input_ids": ids, **inputs}
    return {"inputs_embeds": hidden_states(model, rows, tokens), **inputs}


def hidden_states(model: nn.Module, rows: int, tokens: int) -> Tensor:
    """What stages send each other, without memory."""
    shape = (rows, tokens, text_config(model).hidden_size)
    return torch.empty(shape, dtype=_activation_dtype(model), device="meta")


def received_bytes(model: nn.Module, stage: Stage, rows: int, tokens: int) -> int:
    """Buffers for one microbatch: hidden states of the stage before, and gradients of the next one."""
    return hidden_states(model, rows, tokens).nbytes * ((not stage.is_first) + (not stage.is_last))


class EndOfStage:
    """The scalar whose backward is that of a stage.

    Torch's schedules hold what the stage gave until its backward is over; a gradient arrives in a buffer from before.

    Args:
        gradient: What the next stage sends; None in the last, where the loss is.
    """

    def __init__(self, gradient: Tensor | None) -> None:
        self._gradient = gradient

    def __call__(self, output: Any) -> Tensor:
        """A loss of the model's output; hidden states take the place of logits in stages that are not the last."""
        if self._gradient is None:
            end: Tensor = _End.apply(output.loss, output.logits.detach(), None)  # type: ignore[no-untyped-call]
        else:
            end = _End.apply(output.logits, output.logits.detach(), self._gradient)  # type: ignore[no-untyped-call]
        return end


def _activation_dtype(model: nn.Module) -> torch.dtype:
    sizes: dict[torch.dtype, int] = {}
    for param in model.parameters():
        if param.is_floating_point():
            sizes[param.dtype] = sizes.get(param.dtype, 0) + param.numel()
    return max(sizes, key=lambda dtype: sizes[dtype])


def _replace(owner: nn.Module, name: str, stand_in: nn.Module) -> None:
    """Put something in the place of a part that no list of modules shows: it belongs to another stage."""
    delattr(owner, name)
    vars(owner)[name] = stand_in


class _NoEmbedding(nn.Module):
    """An embedding of another stage; what is made of it is dropped."""

    def forward(self, indices: Tensor) -> Tensor:
        """A zero that can be added to anything."""
        return torch.zeros((), device=indices.device)


class _Arriving:
    """A hook that gives the first layer of a stage what has arrived, in a buffer from before."""

    def __init__(self, buffer: Tensor) -> None:
        self._buffer = buffer

    def __call__(self, _module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return (self._buffer.detach().requires_grad_(), *args[1:])


class _End(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, made: Tensor, held: Tensor, gradient: Tensor | None) -> Tensor:
        ctx.held, ctx.gradient = held, gradient
        return made.new_empty(())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return grads[0] if ctx.gradient is None else ctx.gradient, None, None
