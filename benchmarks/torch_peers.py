"""PyTorch's own ways to train over ranks: FSDP2, FSDP1, DDP, and DDP with ZeroRedundancyOptimizer."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import cast

import torch
from torch import nn
from torch.distributed import fsdp
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from benchmarks.contenders import (
    DDP_VIEW,
    DDP_ZERO,
    FSDP1,
    FSDP2,
    FSDP2_DEFERRED,
    LEARNING_RATE,
    Contender,
    Setting,
    make_optimizer,
    step_kernels,
)
from benchmarks.workloads import blocks_of


def build_torch_peer(name: str, model: nn.Module, setting: Setting) -> Contender:
    """Build one of PyTorch's contenders by name; collective."""
    if name == FSDP2:
        return _fsdp2(model, setting)
    if name == FSDP2_DEFERRED:
        deferring = partial(_unsynchronised, cast(fsdp.FSDPModule, model))
        return replace(_fsdp2(model, setting), name=name, deferring=deferring)
    return _fsdp1(model, setting) if name == FSDP1 else _ddp(name, model, setting)


def _fsdp2(model: nn.Module, setting: Setting) -> Contender:
    """Blocks are units; the root keeps its default, which is to stay gathered after forward."""
    policy = fsdp.MixedPrecisionPolicy(reduce_dtype=setting.narrow_dtype)
    for block in blocks_of(model):
        fsdp.fully_shard(block, mesh=setting.mesh, mp_policy=policy)
    fsdp.fully_shard(model, mesh=setting.mesh, mp_policy=policy)
    return Contender(FSDP2, model, make_optimizer(model, setting))


@contextmanager
def _unsynchronised(model: fsdp.FSDPModule) -> Iterator[None]:
    """Keep whole gradients of a microbatch, as `no_sync` does."""
    model.set_requires_gradient_sync(False)
    try:
        yield
    finally:
        model.set_requires_gradient_sync(True)


def _fsdp1(model: nn.Module, setting: Setting) -> Contender:
    """Blocks are units, and parameters are its flat ones, as by default."""
    narrow = setting.narrow_dtype
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # it is on its way out, and says so
        wrapped = fsdp.FullyShardedDataParallel(
            model,
            process_group=setting.mesh.get_group(),
            auto_wrap_policy=ModuleWrapPolicy({type(blocks_of(model)[0])}),
            device_id=setting.device,
            mixed_precision=None if narrow is None else fsdp.MixedPrecision(reduce_dtype=narrow),
        )
    return Contender(FSDP1, wrapped, make_optimizer(wrapped, setting))


def _ddp(name: str, model: nn.Module, setting: Setting) -> Contender:
    """DDP as it is, with gradients that are views of its buckets, or with ZeRO's optimizer.

    ZeRO sends one tensor per rank after a step, where its default is one per parameter.
    """
    group = setting.mesh.get_group()
    wrapped = TorchDDP(
        model,
        process_group=group,
        bucket_cap_mb=setting.bucket_mib,  # type: ignore[arg-type]  # it multiplies and rounds, so fractions are fine
        gradient_as_bucket_view=name == DDP_VIEW,
    )
    if setting.narrow_dtype == torch.bfloat16:
        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook

        # Torch refuses this hook by its name on gloo, which can add up bfloat16 all the same.
        wrapped.register_comm_hook(group, lambda state, bucket: bf16_compress_hook(state, bucket))
    if name != DDP_ZERO:
        return Contender(name, wrapped, make_optimizer(wrapped, setting), wrapped.no_sync)
    from torch.distributed.optim import ZeroRedundancyOptimizer  # warns where it is imported: only where it is used

    sharded = ZeroRedundancyOptimizer(
        wrapped.parameters(),
        torch.optim.AdamW,
        process_group=group,
        parameters_as_bucket_view=True,
        lr=LEARNING_RATE,
        **step_kernels(setting),
    )
    return Contender(name, wrapped, sharded, wrapped.no_sync)
