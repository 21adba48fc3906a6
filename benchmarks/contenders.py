"""Who is compared: this engine by units and by buckets, a floor without ranks, and the peers of the next two files."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from importlib.util import find_spec
from shutil import which
from types import MappingProxyType
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from benchmarks.variants import COMPILED, Variant, variants
from benchmarks.workloads import Microbatch, Workload, blocks_of, build_model, loss_of
from megatron_fsdp import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    MegatronFSDP,
    MixedPrecisionPolicy,
    fully_shard,
    fully_shard_optimizer,
)
from megatron_fsdp.comm.axis import Traffic

FLOOR = "floor"
FSDP2 = "fsdp2"
FSDP2_DEFERRED = "fsdp2-deferred"
FSDP1 = "fsdp1"
DDP = "ddp"
DDP_VIEW = "ddp-view"
DDP_ZERO = "ddp-zero"
DEEPSPEED = tuple(f"deepspeed-{stage}" for stage in (1, 2, 3))
PEERS = (FSDP2, FSDP2_DEFERRED, FSDP1, DDP, DDP_VIEW, DDP_ZERO, *DEEPSPEED)
OURS = tuple(f"ours-{strategy}" for strategy in range(4))
FLOORS = (FLOOR, FLOOR + COMPILED)
"""Those that do not communicate, so that their losses are their own."""
ALL_COMPILED = (FLOOR + COMPILED, OURS[3] + COMPILED, FSDP2 + COMPILED)
OUR_DDP = "mddp"
OUR_DDP_OPTIM = "mddp-optim"
OURS_BY_BUCKETS = (OUR_DDP, OUR_DDP_OPTIM)

LEARNING_RATE = 1e-4
_MEBIBYTE = 2**20
_NEVER_REACHED = 1e9
"""A norm at which nothing is clipped, so that losses stay those of everybody."""
_COMPILERS = ("g++", "clang++", "c++")


@dataclass(frozen=True)
class Setting:
    """What all contenders of a run share.

    Attributes:
        workload: Model and batch shape.
        dtype: Of weights, gradients and optimizer state alike.
        device: Of this rank.
        mesh: One-dimensional, over all ranks.
        bucket_mib: Gradients that close a bucket, in MiB, of all that cut them by size.
        comm_dtype: Of gradients on the wire; None: as `dtype`.
        step_kernels: Which of torch's AdamW: one kernel for all, or one for each list of operations.
        microbatches: Per step, for those that have to know in advance.
    """

    workload: Workload
    dtype: torch.dtype
    device: torch.device
    mesh: DeviceMesh
    bucket_mib: float = 25.0
    comm_dtype: torch.dtype | None = None
    step_kernels: Literal["fused", "foreach"] = "fused"
    microbatches: int = 1

    @property
    def narrow_dtype(self) -> torch.dtype | None:
        """Of gradients on the wire where it is not theirs; else None."""
        return None if self.comm_dtype == self.dtype else self.comm_dtype

    @property
    def bucket_numel(self) -> int:
        """Elements of gradients that close a bucket, at least 1."""
        return max(1, int(self.bucket_mib * _MEBIBYTE) // self.dtype.itemsize)


@dataclass(frozen=True)
class Contender:
    """A model and its optimizer, ready to train.

    Attributes:
        name: `FLOOR`, or one of `PEERS`, `OURS`, `OURS_BY_BUCKETS`, `variants()` or `ALL_COMPILED`.
        model: Called with tokens.
        optimizer: AdamW, or that inside of ZeRO's.
        deferring: Surrounds every microbatch of a step but the last.
        around: Surrounds every step.
        clips: Whether the norm of gradients is taken, and clipped by, before the optimizer's step.
    """

    name: str
    model: nn.Module
    optimizer: torch.optim.Optimizer
    deferring: Callable[[], AbstractContextManager[None]] = nullcontext
    around: Callable[[], AbstractContextManager[object]] = nullcontext
    clips: bool = False

    def step(self, microbatches: Sequence[Microbatch]) -> Tensor:
        """Train on one step's microbatches of this rank; returns this rank's mean loss, a scalar, detached."""
        with self.around():
            loss = self.backward(microbatches)
            if self.clips and isinstance(self.model, MegatronFSDP):
                self.model.clip_grad_norm_(_NEVER_REACHED)
            self.optimizer.step()
            self.optimizer.zero_grad()
        return loss

    def backward(self, microbatches: Sequence[Microbatch]) -> Tensor:
        """The part of a step before the optimizer's."""
        losses = []
        for index, batch in enumerate(microbatches):
            is_last = index == len(microbatches) - 1
            with nullcontext() if is_last else self.deferring():
                loss = loss_of(self.model, batch) / len(microbatches)
                loss.backward()
            losses.append(loss.detach())
        return torch.stack(losses).sum()

    def traffic(self) -> Traffic | None:
        """What this rank has sent so far; None for those that do not count it."""
        return self.model.traffic() if isinstance(self.model, MegatronFSDP) else None


def missing_peers(names: Sequence[str]) -> dict[str, str]:
    """Contenders that cannot take part here, each with the reason."""
    absent: dict[str, str] = {}
    if find_spec("deepspeed") is None:
        absent |= {name: "the package deepspeed is not installed" for name in names if name in DEEPSPEED}
    if not any(map(which, _COMPILERS)):
        absent |= {name: "there is no C++ compiler here" for name in names if name.endswith(COMPILED)}
    return absent


def build_contender(name: str, setting: Setting, model: nn.Module | None = None) -> Contender:
    """Build one contender by name, around a model or the workload's own; collective."""
    model = build_model(setting.workload, setting.dtype, setting.device) if model is None else model
    if name.endswith(COMPILED):
        for block in blocks_of(model):
            block.compile()
        return replace(build_contender(name.removesuffix(COMPILED), setting, model), name=name)
    if name in variants():
        return _varied(name, variants()[name], model, setting)
    if name == FLOOR:
        return Contender(name, model, make_optimizer(model, setting))
    if name in OURS_BY_BUCKETS:
        return _our_ddp(name, model, setting)
    if name in OURS:
        return _ours(OURS.index(name), model, setting)
    if name in DEEPSPEED:
        from benchmarks.deepspeed_peer import build_deepspeed

        return build_deepspeed(name, model, setting)
    from benchmarks.torch_peers import build_torch_peer

    return build_torch_peer(name, model, setting)


def make_optimizer(model: nn.Module, setting: Setting) -> torch.optim.Optimizer:
    """The optimizer that everybody uses."""
    return torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, **step_kernels(setting))


def step_kernels(setting: Setting) -> dict[str, bool]:
    """The argument of AdamW that chooses its kernels."""
    return {setting.step_kernels: True}


def _our_ddp(name: str, model: nn.Module, setting: Setting) -> Contender:
    """This engine by buckets: a bucket is closed by the parameter with which it reaches its size, as in torch's."""
    shards = name == OUR_DDP_OPTIM
    config = DistributedDataParallelConfig(
        overlap_grad_reduce=True,
        use_distributed_optimizer=shards,
        overlap_param_gather=shards,
        bucket_size=setting.bucket_numel,
        megatron_fsdp_main_params_dtype=None,
        megatron_fsdp_main_grads_dtype=None,
        megatron_fsdp_grad_comm_dtype=setting.narrow_dtype,
    )
    wrapped = DistributedDataParallel(config, model, setting.mesh)
    return Contender(name, wrapped, fully_shard_optimizer(make_optimizer(wrapped, setting)), wrapped.no_sync)


def _varied(name: str, variant: Variant, model: nn.Module, setting: Setting) -> Contender:
    with variant.around():
        whole = _ours(3, model, setting, variant.options)
    deferring = cast(MegatronFSDP, whole.model).no_sync if variant.defers else nullcontext
    return replace(whole, name=name, deferring=deferring, around=variant.around, clips=variant.clips)


def _ours(
    strategy: int, model: nn.Module, setting: Setting, options: Mapping[str, object] = MappingProxyType({})
) -> Contender:
    """Dtypes follow the model's. Where gradients are whole until the sync (0 and 1), they defer as DDP's does."""
    sharded, optimizer = fully_shard(
        model,
        make_optimizer(model, setting),
        device_mesh=setting.mesh,
        zero_dp_strategy=strategy,
        mixed_precision_policy=MixedPrecisionPolicy(
            main_params_dtype=None, main_grads_dtype=None, grad_comm_dtype=setting.narrow_dtype
        ),
        **cast(Any, options),
    )
    return Contender(OURS[strategy], sharded, optimizer, sharded.no_sync if strategy < 2 else nullcontext)
