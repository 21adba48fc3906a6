"""A stage for torch's schedules whose tensors are known before the first step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage

from megatron_fsdp.errors import ConfigurationError


@dataclass(frozen=True)
class Activations:
    """What stages send each other.

    Attributes:
        rows: Of a microbatch.
        sequence: Length on this rank.
        hidden: Size.
        vocabulary: Size, of the logits.
        dtype: Of hidden states.
    """

    rows: int
    sequence: int
    hidden: int
    vocabulary: int
    dtype: torch.dtype

    def hidden_states(self) -> Tensor:
        """A tensor without memory, (rows, sequence, hidden)."""
        return torch.empty(self.rows, self.sequence, self.hidden, dtype=self.dtype, device="meta", requires_grad=True)

    def token_ids(self) -> Tensor:
        """A tensor without memory, (rows, sequence), int64."""
        return torch.empty(self.rows, self.sequence, dtype=torch.int64, device="meta")

    def logits(self) -> Tensor:
        """A tensor without memory, (rows, sequence, vocabulary)."""
        shape = (self.rows, self.sequence, self.vocabulary)
        return torch.empty(shape, dtype=self.dtype, device="meta", requires_grad=True)


class DecoderStage(PipelineStage):
    """A stage of a decoder.

    Torch would otherwise find out shapes by running a microbatch forward and backward, for each new sequence length,
    and forget the gradients accumulated so far.

    Args:
        part: What `cut_stage` gave.
        index: Of the stage.
        num_stages: Of the pipeline.
        activations: What is sent.
        device: Of the stage.
        group: Of the pipeline.
    """

    def __init__(
        self,
        part: nn.Module,
        index: int,
        num_stages: int,
        activations: Activations,
        device: torch.device,
        group: dist.ProcessGroup,
    ) -> None:
        is_first, is_last = index == 0, index == num_stages - 1
        super().__init__(
            part,
            index,
            num_stages,
            device,
            input_args=activations.token_ids() if is_first else activations.hidden_states(),
            output_args=activations.logits() if is_last else activations.hidden_states(),
            group=group,
        )
        self._activations = activations

    def forward_maybe_with_nosync(self, *args: Any, **kwargs: Any) -> Any:
        """Run the part; the hidden states that it gives get the dtype that the next stage waits for."""
        output: Any = super().forward_maybe_with_nosync(*args, **kwargs)  # type: ignore[no-untyped-call]
        if self.is_last:
            return output
        sent = self._activations
        if tuple(output.shape) != (sent.rows, sent.sequence, sent.hidden):
            raise ConfigurationError(
                f"stage {self.stage_index} gave hidden states of shape {tuple(output.shape)} but the next stage waits "
                f"for ({sent.rows}, {sent.sequence}, {sent.hidden}); layers must not change the shape of what they get"
            )
        return output.to(sent.dtype)
