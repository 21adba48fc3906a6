"""Who is compared: this engine by units and by buckets, PyTorch's FSDP2, DDP and ZeRO, and a floor without ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed import fsdp
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from benchmarks.workloads import Block, Decoder, Microbatch, Workload, build_model, loss_of
from megatron_fsdp import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    MegatronFSDP,
    MixedPrecisionPolicy,
    fully_shard,
    fully_shard_optimizer,
)
from megatron_fsdp.buffer.collectives import Traffic

FLOOR = "floor"
FSDP2 = "fsdp2"
DDP = "ddp"
DDP_VIEW = "ddp-view"
DDP_ZERO = "ddp-zero"
PEERS = (FSDP2, DDP, DDP_VIEW, DDP_ZERO)
OURS = tuple(f"ours-{strategy}" for strategy in range(4))
OUR_DDP = "mddp"
OUR_DDP_OPTIM = "mddp-optim"
OURS_BY_BUCKETS = (OUR_DDP, OUR_DDP_OPTIM)

_LEARNING_RATE = 1e-4
_MEBIBYTE = 2**20
_FOLLOW_MODEL = MixedPrecisionPolicy(main_params_dtype=None, main_grads_dtype=None, grad_comm_dtype=None)


@dataclass(frozen=True)
class Setting:
    """What all contenders of a run share.

    Attributes:
        workload: Model and batch shape.
        dtype: Of weights, gradients, communication and optimizer state alike.
        device: Of this rank.
        mesh: One-dimensional, over all ranks.
        bucket_mib: Gradients that close a bucket, in MiB, of all that cut them by size.
    """

    workload: Workload
    dtype: torch.dtype
    device: torch.device
    mesh: DeviceMesh
    bucket_mib: float = 25.0


@dataclass(frozen=True)
class Contender:
    """A model and its optimizer, ready to train.

    Attributes:
        name: `FLOOR`, or one of `PEERS`, `OURS`, `OURS_BY_BUCKETS`.
        model: Called with tokens.
        optimizer: Fused AdamW, or that inside of ZeRO's.
        deferring: Surrounds every microbatch of a step but the last.
    """

    name: str
    model: nn.Module
    optimizer: torch.optim.Optimizer
    deferring: Callable[[], AbstractContextManager[None]] = nullcontext

    def step(self, microbatches: Sequence[Microbatch]) -> Tensor:
        """Train on one step's microbatches of this rank; returns this rank's mean loss, a scalar, detached."""
        losses = []
        for index, batch in enumerate(microbatches):
            is_last = index == len(microbatches) - 1
            with nullcontext() if is_last else self.deferring():
                loss = loss_of(self.model, batch) / len(microbatches)
                loss.backward()
            losses.append(loss.detach())
        self.optimizer.step()
        self.optimizer.zero_grad()
        return torch.stack(losses).sum()

    def traffic(self) -> Traffic | None:
        """What this rank has sent so far; None for those that do not count it."""
        return self.model.traffic() if isinstance(self.model, MegatronFSDP) else None


def build_contender(name: str, setting: Setting) -> Contender:
    """Build one contender by name; collective."""
    model = build_model(setting.workload, setting.dtype, setting.device)
    if name == FLOOR:
        return Contender(name, model, make_optimizer(model))
    if name in (DDP, DDP_VIEW, DDP_ZERO):
        return _torch_ddp(name, model, setting)
    if name in OURS_BY_BUCKETS:
        return _our_ddp(name, model, setting)
    if name == FSDP2:
        return _fsdp2(model, setting)
    return _ours(int(name.removeprefix("ours-")), model, setting)


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """The optimizer that everybody uses."""
    return torch.optim.AdamW(model.parameters(), lr=_LEARNING_RATE, fused=True)


def _torch_ddp(name: str, model: Decoder, setting: Setting) -> Contender:
    """PyTorch's DDP: as it is, with gradients that are views of its buckets, or with ZeRO's optimizer.

    ZeRO sends one tensor per rank after a step, where its default is one per parameter.
    """
    group = setting.mesh.get_group()
    wrapped = TorchDDP(
        model,
        process_group=group,
        bucket_cap_mb=setting.bucket_mib,  # type: ignore[arg-type]  # it multiplies and rounds, so fractions are fine
        gradient_as_bucket_view=name == DDP_VIEW,
    )
    if name != DDP_ZERO:
        return Contender(name, wrapped, make_optimizer(wrapped), wrapped.no_sync)
    from torch.distributed.optim import ZeroRedundancyOptimizer  # warns where it is imported: only where it is used

    sharded = ZeroRedundancyOptimizer(
        wrapped.parameters(),
        torch.optim.AdamW,
        process_group=group,
        parameters_as_bucket_view=True,
        lr=_LEARNING_RATE,
        fused=True,
    )
    return Contender(name, wrapped, sharded, wrapped.no_sync)


def _our_ddp(name: str, model: Decoder, setting: Setting) -> Contender:
    """This engine by buckets: a bucket is closed by the parameter with which it reaches its size, as in torch's."""
    shards = name == OUR_DDP_OPTIM
    config = DistributedDataParallelConfig(
        overlap_grad_reduce=True,
        use_distributed_optimizer=shards,
        overlap_param_gather=shards,
        bucket_size=max(1, int(setting.bucket_mib * _MEBIBYTE) // setting.dtype.itemsize),
        megatron_fsdp_main_params_dtype=None,
        megatron_fsdp_main_grads_dtype=None,
        megatron_fsdp_grad_comm_dtype=None,
    )
    wrapped = DistributedDataParallel(config, model, setting.mesh)
    return Contender(name, wrapped, fully_shard_optimizer(make_optimizer(wrapped)), wrapped.no_sync)


def _fsdp2(model: Decoder, setting: Setting) -> Contender:
    """Blocks are units; the root keeps its default, which is to stay gathered after forward."""
    for block in model.blocks:
        fsdp.fully_shard(block, mesh=setting.mesh)
    fsdp.fully_shard(model, mesh=setting.mesh)
    return Contender(FSDP2, model, make_optimizer(model))


def _ours(strategy: int, model: Decoder, setting: Setting) -> Contender:
    """Dtypes follow the model's. Where gradients are whole until the sync (0 and 1), they defer as DDP's does."""
    sharded, optimizer = fully_shard(
        model,
        make_optimizer(model),
        device_mesh=setting.mesh,
        fsdp_unit_modules=[Block],
        zero_dp_strategy=strategy,
        mixed_precision_policy=_FOLLOW_MODEL,
    )
    return Contender(OURS[strategy], sharded, optimizer, sharded.no_sync if strategy < 2 else nullcontext)
