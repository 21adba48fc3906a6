"""Who is compared: this engine under each strategy, PyTorch's FSDP2 and DDP, and a floor that does not communicate."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed import fsdp
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from benchmarks.workloads import Block, Decoder, Microbatch, Workload, build_model, loss_of
from megatron_fsdp import MegatronFSDP, MixedPrecisionPolicy, fully_shard
from megatron_fsdp.buffer.collectives import Traffic

FLOOR = "floor"
FSDP2 = "fsdp2"
DDP = "ddp"
PEERS = (FSDP2, DDP)
OURS = tuple(f"ours-{strategy}" for strategy in range(4))

_LEARNING_RATE = 1e-4
_FOLLOW_MODEL = MixedPrecisionPolicy(main_params_dtype=None, main_grads_dtype=None, grad_comm_dtype=None)


@dataclass(frozen=True)
class Setting:
    """What all contenders of a run share.

    Attributes:
        workload: Model and batch shape.
        dtype: Of weights, gradients, communication and optimizer state alike.
        device: Of this rank.
        mesh: One-dimensional, over all ranks.
    """

    workload: Workload
    dtype: torch.dtype
    device: torch.device
    mesh: DeviceMesh


@dataclass(frozen=True)
class Contender:
    """A model and its optimizer, ready to train.

    Attributes:
        name: One of `FLOOR`, `FSDP2`, `DDP`, `OURS`.
        model: Called with tokens.
        optimizer: Fused AdamW.
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
    if name == DDP:
        wrapped = DistributedDataParallel(model, process_group=setting.mesh.get_group())
        return Contender(name, wrapped, make_optimizer(wrapped), wrapped.no_sync)
    if name == FSDP2:
        return _fsdp2(model, setting)
    return _ours(int(name.removeprefix("ours-")), model, setting)


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """The optimizer that everybody uses."""
    return torch.optim.AdamW(model.parameters(), lr=_LEARNING_RATE, fused=True)


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
