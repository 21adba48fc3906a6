"""The engines of this package: fully sharded by modules, or replicated with buckets; one wrapper, one configuration."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional

from megatron_fsdp.ddp import DistributedDataParallel, DistributedOptimizer
from megatron_fsdp.placement import ShardingStrategy
from megatron_fsdp.train.data.batches import Batch
from megatron_fsdp.train.engines.optimizers import build_optimizer
from megatron_fsdp.train.launch.ranks import Rank
from megatron_fsdp.train.options.job import Job

MESH_DIM = "dp"


class ShardedModel:
    """A model of this package's engine, data-parallel over all ranks; see `Trained`."""

    def __init__(
        self, job: Job, rank: Rank, model: nn.Module, units: Sequence[type[nn.Module]], vocab_size: int
    ) -> None:
        """Shard a model.

        Args:
            job: How.
            rank: This process.
            model: The same on every rank, on the device of this rank; or on the meta device, where the job says so.
            units: Classes of the modules to gather together.
            vocab_size: Token ids that it knows.
        """
        self.device, self.data_index, self.data_size = rank.device, rank.index, rank.count
        self.vocab_size = vocab_size
        mesh = init_device_mesh(rank.device.type, (rank.count,), mesh_dim_names=(MESH_DIM,))
        self.sums = job.options.training.calculate_per_token_loss
        self.model = DistributedDataParallel(
            job.ddp,
            model,
            mesh,
            dp_dim=MESH_DIM,
            calculate_per_token_loss=self.sums,
            init_model_with_meta_device=job.options.parallel.init_model_with_meta_device,
            fsdp_unit_modules=list(units) if job.engine == "megatron_fsdp" else None,
        )
        optimizer = build_optimizer(self.model, job.options.optimizer)
        self.optimizer: torch.optim.Optimizer = DistributedOptimizer(optimizer, self.model)
        self._defers = self.model.resolved.strategy <= ShardingStrategy.optim

    @property
    def inside(self) -> DistributedDataParallel:
        """See `Trained`."""
        return self.model

    def accumulate(self, batches: Sequence[Batch], factors: Sequence[Tensor]) -> Tensor:
        """See `Trained`; gradients of strategies without sharded gradients are reduced once."""
        scale = 1.0 if self.sums else float(self.data_size)  # the engine averages over ranks, and the loss is a sum
        total = torch.zeros((), device=self.device)
        for i, (batch, factor) in enumerate(zip(batches, factors, strict=True)):
            is_last = i == len(batches) - 1
            with self.model.no_sync() if self._defers and not is_last else contextlib.nullcontext():
                loss = (self._losses(batch) * factor.to(self.device)).sum()
                (loss * scale).backward()
            total += loss.detach()
        return total

    def clip(self, max_norm: float) -> Tensor:
        """See `Trained`."""
        return self.model.clip_grad_norm_(max_norm if max_norm > 0 else float("inf"))

    def update(self) -> None:
        """See `Trained`."""
        self.optimizer.step()
        self.optimizer.zero_grad()

    def skip(self) -> None:
        """See `Trained`."""
        self.optimizer.zero_grad()

    @torch.no_grad()
    def token_losses(self, batch: Batch) -> Tensor:
        """See `Trained`."""
        return self._losses(batch)

    @torch.no_grad()
    def logits(self, tokens: Tensor) -> Tensor:
        """See `Trained`."""
        return self.model(tokens.to(self.device))

    def _losses(self, batch: Batch) -> Tensor:
        logits = self.model(batch.inputs.to(self.device))
        targets = batch.targets.to(self.device)
        return functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="none").view_as(
            targets
        )
