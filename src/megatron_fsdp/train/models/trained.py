"""A sharded model and its optimizer as the training loop sees them, for every engine, and the choice of the engine.

Models run one microbatch at a time; pipelines run all of a step at once (`automodel.py`). Models of FSDP2 and pipelines
are clipped and measured by automodel, which is imported then, and with it transformers.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from types import ModuleType
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.nn import functional

from megatron_fsdp.config.engine_options import configured_strategies
from megatron_fsdp.ddp import DistributedDataParallel, DistributedOptimizer
from megatron_fsdp.optim.adamw8bit import AdamW8bit
from megatron_fsdp.optim.chained import ChainedOptimizer
from megatron_fsdp.optim.optimizer import kinds_of
from megatron_fsdp.optional_packages import require
from megatron_fsdp.train.data.tokens import Batch
from megatron_fsdp.train.models.build import build_decoder
from megatron_fsdp.train.models.decoder import Block, split_for_decay
from megatron_fsdp.train.options import OptimizerOptions
from megatron_fsdp.train.options.checks import needs_transformers, uses_transformers
from megatron_fsdp.train.options.job import Job
from megatron_fsdp.train.ranks import Rank

_MESH_DIM = "dp"
GROWTH_INTERVAL = 1000
"""Steps without overflow after which the loss scale is doubled; Megatron-LM's `--loss-scale-window`."""


@dataclass
class LossScale:
    """The factor of the loss in float16, which keeps small gradients from vanishing (Micikevicius 2018).

    `torch.amp.GradScaler` looks for infinity in the gradients of each rank; here all ranks know the norm of all
    gradients anyway, and every engine, pipelines included, is scaled alike.
    """

    value: float
    good_steps: int = 0

    def has_overflowed(self, loss: float, grad_norm: float) -> bool:
        """Return True if only the scale made a step fail; loss (unscaled) and norm are those of all ranks."""
        return math.isfinite(loss) and not math.isfinite(grad_norm) and self.value > 1.0

    def grow(self) -> None:
        """Count a successful step."""
        self.good_steps += 1
        if self.good_steps == GROWTH_INTERVAL:
            self.value, self.good_steps = self.value * 2.0, 0

    def shrink(self) -> None:
        """Halve the scale after a skipped step."""
        self.value, self.good_steps = max(1.0, self.value / 2.0), 0

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint."""
        return asdict(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state from a checkpoint."""
        self.value, self.good_steps = float(state["value"]), int(state["good_steps"])


@dataclass(frozen=True)
class Place:
    """The position of a rank among the data-parallel ones, and among those that share its sequences."""

    device: torch.device
    data_index: int
    data_size: int
    is_transformers: bool = False  # whether its model is one of transformers
    context: DeviceMesh | None = None  # of the context-parallel ranks; None: sequences are not cut

    @property
    def context_size(self) -> int:
        """The number of ranks that share a sequence."""
        return 1 if self.context is None else self.context.size()

    @property
    def context_index(self) -> int:
        """The index of this rank among them."""
        return 0 if self.context is None else int(self.context.get_local_rank())

    def take(self, whole: Tensor) -> Tensor:
        """Copy a tensor of a batch, [samples, length] on the CPU, to the device, and return this rank's part.

        All ranks that share it get the same tensor; from pinned memory the copy is asynchronous.
        """
        moved = whole.to(self.device, non_blocking=True)
        if self.context is None:
            return moved
        from megatron_fsdp.automodel.context_parallel import SequenceLayout

        return SequenceLayout(self.context_size).cut(moved, self.context_index, 1)

    def position_ids(self, whole: Tensor) -> dict[str, Tensor]:
        """Return the argument with positions in `whole`, [samples, length / ranks]; none if nothing is cut."""
        if self.context is None:
            return {}
        positions = torch.arange(whole.shape[1]).expand(whole.shape)
        return {"position_ids": self.take(positions).contiguous()}

    def join(self, part: Tensor) -> Tensor:
        """Return the whole [samples, length] of parts [samples, length / ranks], on every rank."""
        if self.context is None:
            return part
        from megatron_fsdp.automodel import unshard_sequence  # imports transformers

        return unshard_sequence(part, self.context)

    def add_up(self, share: Tensor) -> Tensor:
        """Sum numbers over the context-parallel ranks, on every rank."""
        if self.context is not None:
            dist.all_reduce(share, group=self.context.get_group())
        return share


class Trained:
    """A sharded model and its optimizer, with every engine. Every method is called by all ranks together.

    `model` is the model for checkpoints, and `inside` the same if this package's engine shards it, which can report
    memory, traffic and phases. `scale` is that of the loss, and only set in float16. Ranks that share a `data_index`
    (tensor, pipeline, context), of `data_size`, get equal batches.
    """

    def __init__(self, job: Job, place: Place, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        training = job.options.training
        self.model, self.optimizer = model, optimizer
        self.inside = model if isinstance(model, DistributedDataParallel) else None
        strategy = None if self.inside is None else self.inside.resolved.strategy
        self.is_deterministic = training.deterministic is not None
        self._sums = strategy is not None and sums_over_ranks(job)
        # Strategies that do not shard gradients reduce them once a step, unless each microbatch is added by itself.
        strategies = () if self.inside is None else configured_strategies(self.inside.resolved.engine_config)
        shards_gradients = any(each.shards_gradients for each in strategies)
        self.defers = strategy is not None and not shards_gradients and not self.is_deterministic
        self.device, self.data_index, self.data_size = place.device, place.data_index, place.data_size
        self.scale = LossScale(max(1.0, training.initial_loss_scale)) if training.fp16 else None
        self._place = place
        self._own = self.inside  # clips and measures itself; where it is None, automodel does
        self._measured: Any = model  # by automodel: of a pipeline the parts together

    def accumulate(self, batches: Sequence[Batch], factors: Sequence[Tensor]) -> Tensor:
        """Run forward and backward of all microbatches of a step, which are on the CPU, and reduce gradients.

        The loss of the step is the sum over all data-parallel ranks and microbatches of factor, [samples, length]
        float32, times loss of the token, and gradients are those of this sum. Returns this rank's shares of the loss,
        float32, no gradient, one for each microbatch, or one for all; those of data-parallel ranks add up to the loss.
        """
        weight = self._loss_weight
        shares = []
        for i, (batch, factor) in enumerate(zip(batches, factors, strict=True)):
            seed_dropout(batch, self._place.context_index)
            with self._microbatch(is_last=i == len(batches) - 1):
                loss = (self._losses(batch) * self._place.take(factor)).sum()
                (loss * weight).backward()
            shares.append(loss.detach())
        return self._place.add_up(torch.stack(shares))

    @torch.no_grad()
    def token_losses(self, batch: Batch) -> Tensor:
        """Return [samples, length] float32 losses without gradients, the same on ranks that share the batch."""
        return self._place.join(self._losses(batch))

    def clip(self, max_norm: float) -> Tensor:
        """Scale gradients to at most this norm (0: only measure); return the norm before, the same on all ranks."""
        limit, factor = max_norm or math.inf, 1.0 if self.scale is None else 1.0 / self.scale.value
        if self._own is not None:
            if factor != 1.0:
                self._own.scale_gradients(factor)
            return self._own.clip_grad_norm_(limit)
        if factor != 1.0:
            self._gradients.gather_gradients(self._measured).scale(factor)
        return self._gradients.clip_grad_norm_(self._measured, limit)

    def update(self) -> None:
        """Step the optimizer and clear the gradients; the loss scale may grow."""
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.scale is not None:
            self.scale.grow()

    def skip(self) -> None:
        """Clear the gradients; the loss scale shrinks."""
        self.optimizer.zero_grad()
        if self.scale is not None:
            self.scale.shrink()

    def norm_of_parameters(self) -> float:
        """Return the 2-norm of all weights, the same on all ranks."""
        if self._own is not None:
            return self._own.parameter_statistics().total.norm
        return float(self._gradients.norm_of_parameters(self._measured))

    def digests_of(self, what: Literal["gradients", "weights"]) -> dict[str, str]:
        """Return digests by unit, the same on all ranks and for any number of them; only of this package's engine."""
        assert self.inside is not None
        return self.inside.gradient_digests() if what == "gradients" else self.inside.parameter_digests()

    def count_zero_gradients(self) -> int:
        """Count the zero elements of all gradients, the same on all ranks."""
        if self._own is not None and isinstance(self.optimizer, DistributedOptimizer):
            return self.optimizer.count_zeros()
        return int(self._gradients.count_zero_gradients(self._measured))

    @property
    def _gradients(self) -> ModuleType:
        """The module that clips and measures models of FSDP2 and pipelines; it imports transformers."""
        from megatron_fsdp.automodel import gradients

        return gradients

    @property
    def _loss_weight(self) -> float:
        """The factor of the loss before backward that makes gradients those of the sum over ranks, scaled."""
        averaged_over = 1.0 if self._sums else float(self.data_size * self._place.context_size)
        return averaged_over * (1.0 if self.scale is None else self.scale.value)

    def _microbatch(self, *, is_last: bool) -> AbstractContextManager[None]:
        if self.inside is not None:
            return self.inside.no_sync() if self.defers and not is_last else nullcontext()
        return self._gradients.accumulation_context(self.model, is_last, defer_grad_sync=True)

    def _losses(self, batch: Batch) -> Tensor:
        """Return the loss of each token of this rank, [samples, length / context-parallel ranks]."""
        place = self._place
        inputs = place.take(batch.inputs)
        if place.is_transformers:
            logits = self.model(input_ids=inputs, use_cache=False, **place.position_ids(batch.inputs)).logits
        else:
            logits = self.model(inputs)
        return token_losses(logits, place.take(batch.targets))


def sums_over_ranks(job: Job) -> bool:
    """Return True if the engine adds up gradients of ranks, instead of averaging them."""
    training = job.options.training
    return training.calculate_per_token_loss or training.deterministic is not None


def token_losses(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the cross-entropy [samples, length] in float32, of logits [samples, length, vocabulary] of any dtype."""
    losses = functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="none")
    return losses.view_as(targets)


def seed_dropout(batch: Batch, part: int = 0) -> None:
    """Seed dropout of the next forward by the batch, whatever was drawn before.

    Tensor-parallel ranks have the same batch, and so the same dropout; ranks that compute different parts drop
    independently.
    """
    torch.manual_seed(batch.dropout_seed + part)  # accelerators too


def trained_by_microbatches(job: Job, place: Place, model: nn.Module) -> Trained:
    """Build the optimizer of a sharded model with its weights, and connect both."""
    # Fused steps on the CPU round by an element's place in a shard.
    fused = place.device.type != "cpu" or job.options.training.deterministic is None
    optimizer = build_optimizer(model, job.options.optimizer, fused=fused)
    if isinstance(model, DistributedDataParallel):
        return Trained(job, place, model, DistributedOptimizer(optimizer, model))
    from megatron_fsdp.automodel import connect_optimizer

    return Trained(job, place, model, connect_optimizer(model, optimizer))


def build_optimizer(
    model: nn.Module, options: OptimizerOptions, *, undecayed: Collection[str] = (), fused: bool = True
) -> torch.optim.Optimizer:
    """Build an optimizer, with groups with weight decay (matrices) and without (norms, biases, embeddings).

    `undecayed` are further names without weight decay, such as a head that is a copy of the embeddings; `fused` runs
    AdamW in one kernel.
    """
    parameters = dict(model.named_parameters())
    decayed, others = ([parameters[name] for name in names] for names in split_for_decay(model, undecayed))
    matrices: list[nn.Parameter] = []
    if options.optimizer == "muon":
        kinds = list(zip(decayed, kinds_of(decayed, model), strict=True))
        matrices = [each for each, kind in kinds if kind == "matrices"]
        decayed = [each for each, kind in kinds if kind != "matrices"]
    groups = _groups(decayed, options.weight_decay) + _groups(others, 0.0)
    rate = 0.0 if options.lr is None else options.lr
    if options.optimizer == "sgd":
        return torch.optim.SGD(groups, lr=rate, momentum=options.sgd_momentum)
    betas = (options.adam_beta1, options.adam_beta2)
    if options.optimizer == "adamw8bit":
        return AdamW8bit(groups, lr=rate, betas=betas, eps=options.adam_eps)
    adamw = torch.optim.AdamW(groups, lr=rate, betas=betas, eps=options.adam_eps, fused=fused)
    if options.optimizer == "adam":
        return adamw
    muon = torch.optim.Muon(matrices, lr=rate, weight_decay=options.weight_decay, adjust_lr_fn="match_rms_adamw")
    return ChainedOptimizer(muon, adamw)


def _groups(parameters: list[nn.Parameter], weight_decay: float) -> list[dict[str, Any]]:
    """Make one group per mesh, since fused steps do not mix meshes; experts have a mesh of their own."""
    by_mesh: dict[Hashable, list[nn.Parameter]] = {}
    for parameter in parameters:
        mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
        by_mesh.setdefault(mesh, []).append(parameter)
    return [{"params": found, "weight_decay": weight_decay} for found in by_mesh.values()]


# ---- the engine of a job ---------------------------------------------------------------------------------------------


def build(job: Job, vocab_size: int, rank: Rank) -> Trained:
    """Build the model of a run, sharded, with its optimizer."""
    if job.options.training.deterministic is not None and rank.device.type == "cpu":
        torch.set_num_threads(1)  # matrix products and sums are cut by threads, and ranks share the cores out
    is_ours = not uses_transformers(job.options.model)
    if is_ours and job.engine != "torch_fsdp2":
        return shard_decoder(job, rank, vocab_size)
    require("transformers", needs_transformers(job.options) or "this model")
    from megatron_fsdp.train.models import automodel

    if job.engine != "torch_fsdp2":
        return automodel.shard_transformers(job, rank, vocab_size)
    if is_ours:
        return automodel.shard_decoder_by_fsdp2(job, rank, vocab_size)
    return automodel.shard_transformers_by_fsdp2(job, rank, vocab_size)


def wrap(job: Job, model: nn.Module, mesh: DeviceMesh, dim: str, **more: Any) -> DistributedDataParallel:
    """Shard a model, the same on every rank, by the configuration of a job; `more` is for the engine."""
    wrapped = DistributedDataParallel(
        job.ddp,
        model,
        mesh,
        dp_dim=dim,
        calculate_per_token_loss=sums_over_ranks(job),
        deterministic=job.options.training.deterministic,
        offload=job.options.offload,
        **more,
    )
    if job.ddp.fsdp_manual_registration:
        wrapped.manual_buffer_registration()
    return wrapped


def shard_decoder(job: Job, rank: Rank, vocab_size: int) -> Trained:
    """Shard the decoder of this package, data-parallel over all ranks."""
    decoder = build_decoder(job, vocab_size, rank.device)
    torch.manual_seed(job.options.training.seed)  # parameters on the meta device are drawn from here on
    mesh = init_device_mesh(rank.device.type, (rank.count,), mesh_dim_names=(_MESH_DIM,))
    units = {"fsdp_unit_modules": [Block]} if job.engine == "megatron_fsdp" else {}
    init_meta = job.options.parallel.init_model_with_meta_device
    model = wrap(job, decoder, mesh, _MESH_DIM, init_model_with_meta_device=init_meta, **units)
    return trained_by_microbatches(job, Place(rank.device, rank.index, rank.count), model)
