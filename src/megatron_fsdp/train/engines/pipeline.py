"""Models of transformers in pipeline stages; all microbatches of a step pass in one call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_fsdp.automodel import Pipeline, PipelineConfig, clip_grad_norm_, connect_optimizer
from megatron_fsdp.automodel.gradients import count_zero_gradients, gather_gradients, norm_of_parameters
from megatron_fsdp.ddp import DistributedDataParallel, DistributedOptimizer
from megatron_fsdp.train.data.batches import Batch
from megatron_fsdp.train.engines.trained import Place, Trained, build_optimizer, seed_dropout, to_device, token_losses
from megatron_fsdp.train.options.job import Job


class LossInOrder:
    """The loss function of the schedule, which calls it for the microbatches in their order.

    Attributes:
        factors: [samples, length] of each microbatch to come; if empty, all losses count alike.
        seen: [samples, length] losses of each microbatch so far, without gradients.
    """

    def __init__(self) -> None:
        self.factors: list[Tensor] = []
        self.seen: list[Tensor] = []

    def __call__(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the sum over tokens of factor times loss."""
        losses = token_losses(logits, labels)
        self.seen.append(losses.detach())
        return (losses * self.factors.pop(0)).sum() if self.factors else losses.sum()


def pipeline_config(job: Job, loss: LossInOrder) -> PipelineConfig:
    """Choose 1F1B if there are enough microbatches to fill the stages, else GPipe."""
    fills = job.batch.microbatches >= job.sizes.pipeline
    return PipelineConfig("1f1b" if fills else "gpipe", pp_microbatch_size=job.batch.micro, loss_fn=loss)


class PipelineModel(Trained):
    """A pipeline with one stage per rank, each sharded by FSDP2 or a wrapped model of this package."""

    def __init__(
        self,
        job: Job,
        place: Place,
        pipeline: Pipeline,
        loss: LossInOrder,
        stage: DistributedDataParallel | None = None,
    ) -> None:
        """Take a pipeline with its weights.

        Args:
            job: How it is trained.
            place: Of this rank.
            pipeline: Made with `pipeline_config`.
            loss: That of its configuration.
            stage: The wrapper of this package around the stage of this rank; None: FSDP2 shards it.
        """
        part = pipeline.parts[0]  # under the names of the whole model
        optimizer = build_optimizer(part, job.options.optimizer, undecayed=pipeline.tied_copies)
        connected = connect_optimizer(pipeline, optimizer) if stage is None else DistributedOptimizer(optimizer, stage)
        super().__init__(job, place, part if stage is None else stage, connected)
        self._pipeline, self._loss, self._stage = pipeline, loss, stage
        self._fewest = pipeline.pp_mesh.size() if pipeline.config.pp_schedule == "1f1b" else 1
        if stage is not None and self._defers:
            pipeline.finish_gradients = stage.finish_grad_sync

    def accumulate(self, batches: Sequence[Batch], factors: Sequence[Tensor]) -> Tensor:
        """Run all microbatches through the pipeline (see `Trained`); strategies 0 and 1 reduce gradients once."""
        weight = self._loss_weight
        self._loss.factors = [self._place.cut.take(to_device(factor, self.device)) * weight for factor in factors]
        stage = self._pipeline.pp_mesh.get_local_rank()
        seed_dropout(batches[0], stage * self._place.cut.size + self._place.cut.index)
        with self._stage.no_sync() if self._stage is not None and self._defers else nullcontext():
            loss = self._run(self._pipeline.step, batches)
        self._loss.seen.clear()
        return self._place.cut.add_up(loss / weight)

    @torch.no_grad()
    def token_losses(self, batch: Batch) -> Tensor:
        """Return token losses (see `Trained`); copies of the microbatch fill the pipeline."""
        self._run(self._pipeline.eval_step, [batch] * self._fewest)
        length = batch.inputs.shape[1] // self._place.cut.size
        found = torch.empty(batch.inputs.shape[0], length, device=self.device)
        if self._pipeline.has_last_stage:
            found = self._loss.seen[0].contiguous()
        self._loss.seen.clear()
        group = self._pipeline.pp_mesh.get_group()
        dist.broadcast(found, group=group, group_src=self._pipeline.num_stages - 1)
        return self._place.cut.join(found)

    def logits(self, tokens: Tensor) -> None:
        """Return None: only the last stage has logits."""

    def _run(self, step: Callable[..., Tensor], batches: Sequence[Batch]) -> Tensor:
        cut, device = self._place.cut, self.device
        inputs = cut.take(torch.cat([to_device(batch.inputs, device) for batch in batches]))
        targets = cut.take(torch.cat([to_device(batch.targets, device) for batch in batches]))
        positions = cut.positions(inputs.shape[0], batches[0].inputs.shape[1], device)
        others: dict[str, Any] = {} if positions is None else {"position_ids": positions}
        return step(inputs, shift_labels=targets, num_label_tokens=1, **others)

    def _scale_gradients(self, factor: float) -> None:
        gather_gradients(self._pipeline).scale(factor)

    def _clip(self, max_norm: float) -> Tensor:
        return clip_grad_norm_(self._pipeline, max_norm)

    def norm_of_parameters(self) -> float:
        """Return the norm of all weights (see `Trained`)."""
        return norm_of_parameters(self._pipeline)

    def count_zero_gradients(self) -> int:
        """Return the number of zeros (see `Trained`)."""
        return count_zero_gradients(self._pipeline)
