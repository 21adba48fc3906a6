"""Chooses the engine of a job; this package's own: fully sharded by modules, or replicated with buckets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from megatron_fsdp.ddp import DistributedDataParallel
from megatron_fsdp.optional_packages import require
from megatron_fsdp.train.engines.trained import Place, Trained, sums_over_ranks, trained_by_microbatches
from megatron_fsdp.train.models.build import build_decoder
from megatron_fsdp.train.models.decoder import Block
from megatron_fsdp.train.options.checks import needs_transformers, uses_transformers
from megatron_fsdp.train.options.job import Job
from megatron_fsdp.train.ranks import Rank

MESH_DIM = "dp"


def build(job: Job, vocab_size: int, rank: Rank) -> Trained:
    """Build the model of a run, sharded, with its optimizer."""
    if job.options.training.deterministic is not None and rank.device.type == "cpu":
        torch.set_num_threads(1)  # matrix products and sums are cut by threads, and ranks share the cores out
    is_ours = not uses_transformers(job.options.model)
    if is_ours and job.engine != "torch_fsdp2":
        return shard_decoder(job, rank, vocab_size)
    require("transformers", needs_transformers(job.options) or "this model")
    from megatron_fsdp.train.engines import automodel

    if job.engine != "torch_fsdp2":
        return automodel.shard_transformers(job, rank, vocab_size)
    if is_ours:
        return automodel.shard_decoder_by_fsdp2(job, rank, vocab_size)
    return automodel.shard_transformers_by_fsdp2(job, rank, vocab_size)


def wrap(
    job: Job,
    model: nn.Module,
    mesh: DeviceMesh,
    dim: str,
    *,
    units: Sequence[type[nn.Module]] | None = None,
    init_meta: bool | str = False,
    **cuts: Any,
) -> DistributedDataParallel:
    """Shard a model as the configuration of a job says.

    It is the same on every rank, on its device, or on the meta device, as `init_meta` says. `units` are the classes of
    the modules to gather together; None: what the model declares.
    """
    if job.engine == "megatron_fsdp" and units is not None:
        cuts["fsdp_unit_modules"] = list(units)
    wrapped = DistributedDataParallel(
        job.ddp,
        model,
        mesh,
        dp_dim=dim,
        calculate_per_token_loss=sums_over_ranks(job),
        deterministic=job.options.training.deterministic,
        init_model_with_meta_device=init_meta,
        **cuts,
    )
    if job.ddp.fsdp_manual_registration:
        wrapped.manual_buffer_registration()
    return wrapped


def shard_decoder(job: Job, rank: Rank, vocab_size: int) -> Trained:
    """Shard the decoder of this package, data-parallel over all ranks."""
    decoder = build_decoder(job, vocab_size, rank.device)
    torch.manual_seed(job.options.training.seed)  # from here, what is on the meta device is drawn
    mesh = init_device_mesh(rank.device.type, (rank.count,), mesh_dim_names=(MESH_DIM,))
    init_meta = job.options.parallel.init_model_with_meta_device
    model = wrap(job, decoder, mesh, MESH_DIM, units=[Block], init_meta=init_meta)
    return trained_by_microbatches(job, Place(rank.device, rank.index, rank.count), model)
