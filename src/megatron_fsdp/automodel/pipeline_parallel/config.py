"""What a pipeline runs by: its schedule, sizes and loss."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from megatron_fsdp.automodel.pipeline_parallel.schedules import schedule_named
from megatron_fsdp.errors import ConfigurationError


@dataclass
class PipelineConfig:
    """Options of pipeline parallelism; the number of ranks of a pipeline is `pp_size`, given elsewhere.

    Attributes:
        pp_schedule: "1f1b" or "gpipe" (one stage per rank), "interleaved1f1b" or "loopedbfs" (several); in upper or
            lower case.
        pp_microbatch_size: Rows that pass through the stages at a time.
        pp_batch_size: Rows that a training step of one data-parallel rank takes. 1 (the default; no pipeline can be
            filled by one row): any number, checked at each step; more: just this number, checked already when the
            pipeline is built.
        layers_per_stage: Decoder layers of a stage at most; None: as many as one stage per rank, or two stages per rank
            under schedules with several, give.
        scale_grads_in_schedule: `loss_fn` gives the mean over a microbatch, and gradients and loss are divided by the
            number of microbatches. Needs `loss_fn`.
        loss_fn: (logits (microbatch, sequence, vocabulary), labels (microbatch, sequence)) -> scalar; labels are
            those of the same position, with -100 where nothing counts. It gives the sum over the counted labels,
            unless `scale_grads_in_schedule`. None: the sum of cross entropies in float32.

    Raises:
        ConfigurationError: A value is not one of these.
    """

    pp_schedule: str = "1f1b"
    pp_microbatch_size: int = 1
    pp_batch_size: int = 1
    layers_per_stage: int | None = None
    scale_grads_in_schedule: bool = False
    loss_fn: Callable[[Tensor, Tensor], Tensor] | None = None

    def __post_init__(self) -> None:
        schedule_named(self.pp_schedule)
        for name in ("pp_microbatch_size", "pp_batch_size", "layers_per_stage"):
            value = getattr(self, name)
            if value is None and name == "layers_per_stage":
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ConfigurationError(f"{name} is {value!r} but has to be an integer of at least 1")
        if self.pp_batch_size > 1 and self.pp_batch_size % self.pp_microbatch_size:
            raise ConfigurationError(
                f"pp_batch_size={self.pp_batch_size} is no multiple of pp_microbatch_size={self.pp_microbatch_size}; "
                "change one of them, since all microbatches have the same number of rows"
            )
        if self.loss_fn is not None and not callable(self.loss_fn):
            raise ConfigurationError(
                f"loss_fn is {self.loss_fn!r} but has to be a function of logits and labels, or None for cross entropy"
            )
        if self.scale_grads_in_schedule and self.loss_fn is None:
            raise ConfigurationError(
                "scale_grads_in_schedule=True needs a loss_fn that gives the mean over a microbatch; the loss without "
                "loss_fn is already divided by the number of labels of the whole batch, so leave it False"
            )

    def to_dict(self) -> dict[str, Any]:
        """Field name -> value, in order; `loss_fn` is the function itself."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
