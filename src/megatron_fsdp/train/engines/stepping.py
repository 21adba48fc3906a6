"""What every engine does between backward and the next forward: unscale, clip, step or skip."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from megatron_fsdp.train.data.batches import Batch
from megatron_fsdp.train.engines.context_cut import ContextCut
from megatron_fsdp.train.engines.loss_scale import LossScale

Call = Callable[[nn.Module, Tensor, Tensor | None], Tensor]
"""From a model, token ids [samples, length] and their positions (None: from 0) to logits."""


def call_decoder(model: nn.Module, tokens: Tensor, positions: Tensor | None) -> Tensor:
    """The logits of this package's decoder, [samples, length, vocabulary]; its positions are always from 0."""
    assert positions is None
    logits: Tensor = model(tokens)
    return logits


def call_transformers(model: nn.Module, tokens: Tensor, positions: Tensor | None) -> Tensor:
    """The logits of a causal language model of transformers, [samples, length, vocabulary]."""
    where = {} if positions is None else {"position_ids": positions}
    logits: Tensor = model(input_ids=tokens, use_cache=False, **where).logits
    return logits


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor of a batch where the model computes; out of pinned memory the copy runs beside what the host does."""
    return tensor.to(device, non_blocking=True)


def seed_dropout(batch: Batch, part: int = 0) -> None:
    """Let what is dropped in the next forward follow from the batch, whatever was drawn before, here or elsewhere.

    Tensor-parallel ranks have the same batch, and have to drop the same.

    Args:
        batch: What is computed next.
        part: Which part of it, where ranks compute different parts; these drop independently.
    """
    torch.manual_seed(batch.dropout_seed + part)  # accelerators too


@dataclass(frozen=True)
class Place:
    """Where a rank lies, and how its model is called.

    Attributes:
        device: Where it computes.
        data_index: Which data-parallel rank it is.
        data_size: Data-parallel ranks.
        vocab_size: Token ids that the model knows.
        call: From token ids to logits.
        cut: Over context-parallel ranks.
    """

    device: torch.device
    data_index: int
    data_size: int
    vocab_size: int
    call: Call = call_decoder
    cut: ContextCut = field(default_factory=ContextCut)


class SteppedModel(ABC):
    """A model over ranks and its optimizer; see `Trained`.

    Attributes:
        optimizer: See `Trained`, as those that follow.
        device: See there.
        data_index: See there.
        data_size: See there.
        vocab_size: See there.
        scale: See there.
    """

    optimizer: torch.optim.Optimizer

    def __init__(self, place: Place, scale: LossScale | None) -> None:
        """Keep where this rank lies, and the scale of the loss in float16."""
        self.device, self.data_index, self.data_size = place.device, place.data_index, place.data_size
        self.vocab_size = place.vocab_size
        self.scale = scale
        self._place = place

    @abstractmethod
    def _gradient_factor(self) -> float:
        """What the engine divides the sum of gradients over ranks by."""

    @abstractmethod
    def _scale_gradients(self, factor: float) -> None:
        """Multiply all gradients."""

    @abstractmethod
    def _clip(self, max_norm: float) -> Tensor:
        """Clip and measure all gradients."""

    @property
    def _loss_weight(self) -> float:
        """What the loss is multiplied by before backward, so that gradients are those of the sum over ranks, scaled."""
        return self._gradient_factor() * (1.0 if self.scale is None else self.scale.value)

    def clip(self, max_norm: float) -> Tensor:
        """See `Trained`."""
        if self.scale is not None and self.scale.value != 1.0:
            self._scale_gradients(1.0 / self.scale.value)
        return self._clip(max_norm if max_norm > 0 else float("inf"))

    def update(self) -> None:
        """See `Trained`."""
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.scale is not None:
            self.scale.grow()

    def skip(self) -> None:
        """See `Trained`."""
        self.optimizer.zero_grad()
        if self.scale is not None:
            self.scale.shrink()
