"""A model of transformers in stages over pipeline-parallel ranks; all microbatches of a step pass in one call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron_fsdp.automodel import Pipeline, PipelineConfig, clip_grad_norm_, connect_optimizer
from megatron_fsdp.automodel.gradients import gather_gradients
from megatron_fsdp.train.data.batches import Batch
from megatron_fsdp.train.engines.loss_scale import make_loss_scale
from megatron_fsdp.train.engines.microbatches import token_losses
from megatron_fsdp.train.engines.optimizers import build_optimizer
from megatron_fsdp.train.engines.stepping import Place, SteppedModel, seed_dropout, to_device
from megatron_fsdp.train.options.job import Job


class LossInOrder:
    """What the schedule calls for the loss of each microbatch, which it does in their order.

    Attributes:
        factors: [samples, length] of each microbatch to come; where there are none, losses count alike.
        seen: [samples, length] losses of each microbatch that was, without gradients.
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
    """How microbatches pass: alternating forward and backward, where there are enough of them to fill the stages."""
    fills = job.batch.microbatches >= job.sizes.pipeline
    return PipelineConfig("1f1b" if fills else "gpipe", pp_microbatch_size=job.batch.micro, loss_fn=loss)


class PipelineModel(SteppedModel):
    """A pipeline with one stage per rank, whichever engine shards it; see `Trained`."""

    inside = None

    def __init__(self, job: Job, place: Place, pipeline: Pipeline, loss: LossInOrder) -> None:
        """Take a pipeline with its weights.

        Args:
            job: How it is trained.
            place: Of this rank.
            pipeline: Made with `pipeline_config`.
            loss: That of its configuration.
        """
        training = job.options.training
        super().__init__(place, make_loss_scale(training.fp16, training.initial_loss_scale))
        self._pipeline, self._loss = pipeline, loss
        self._fewest = pipeline.pp_mesh.size() if pipeline.config.pp_schedule == "1f1b" else 1
        self.optimizer = self._connected(
            build_optimizer(pipeline.parts[0], job.options.optimizer, undecayed=pipeline.tied_copies)
        )

    def _connected(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """The optimizer of this stage, connected as its engine wants it."""
        return connect_optimizer(self._pipeline, optimizer)

    @property
    def model(self) -> nn.Module:
        """The stage of this rank, under the names of the whole model."""
        return self._pipeline.parts[0]

    def accumulate(self, batches: Sequence[Batch], factors: Sequence[Tensor]) -> Tensor:
        """See `Trained`."""
        weight = self._loss_weight
        self._loss.factors = [self._place.cut.take(to_device(factor, self.device)) * weight for factor in factors]
        stage = self._pipeline.pp_mesh.get_local_rank()
        seed_dropout(batches[0], stage * self._place.cut.size + self._place.cut.index)
        loss = self._run(self._pipeline.step, batches)
        self._loss.seen.clear()
        return self._place.cut.add_up(loss / weight)

    @torch.no_grad()
    def token_losses(self, batch: Batch) -> Tensor:
        """See `Trained`; copies of the microbatch fill the pipeline."""
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
        """See `Trained`: only the last stage would have them."""

    def _run(self, step: Callable[..., Tensor], batches: Sequence[Batch]) -> Tensor:
        cut, device = self._place.cut, self.device
        inputs = cut.take(torch.cat([to_device(batch.inputs, device) for batch in batches]))
        targets = cut.take(torch.cat([to_device(batch.targets, device) for batch in batches]))
        positions = cut.positions(inputs.shape[0], batches[0].inputs.shape[1], device)
        others: dict[str, Any] = {} if positions is None else {"position_ids": positions}
        return step(inputs, shift_labels=targets, num_label_tokens=1, **others)

    def _gradient_factor(self) -> float:
        return float(self.data_size * self._place.cut.size)

    def _scale_gradients(self, factor: float) -> None:
        gather_gradients(self._pipeline).scale(factor)

    def _clip(self, max_norm: float) -> Tensor:
        return clip_grad_norm_(self._pipeline, max_norm)
