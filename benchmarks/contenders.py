"""The contenders: this engine by units and by buckets, FSDP2, DDP, DeepSpeed, and a floor without communication."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from inspect import signature
from typing import Any, cast
from unittest import mock

import torch
from torch import Tensor, nn
from torch.distributed import fsdp
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.optim._muon import _adjust_lr, _zeropower_via_newtonschulz

from benchmarks.workloads import Microbatch, Workload, blocks_of, build_model, loss_of, make_batch
from megatron_fsdp import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    MegatronFSDP,
    MixedPrecisionPolicy,
    fsdp2,
    fully_shard,
    fully_shard_model,
    fully_shard_optimizer,
)
from megatron_fsdp.comm.collectives import Axis, Traffic
from megatron_fsdp.errors import ConfigurationError
from megatron_fsdp.optim.optimizer import kinds_of
from megatron_fsdp.optional_packages import require

FLOOR = "floor"
"""The floor: does not communicate, so its losses differ."""
WIRES = ("wire-0", "wire-3")
"""The collectives of a step of `ours-0` and `ours-3` alone, one after another: the back end's time."""
UNTRAINED = (FLOOR, *WIRES)
"""The contenders whose losses are not compared."""
FSDP2, FSDP2_DEFERRED = "fsdp2", "fsdp2-deferred"
DDP, DDP_VIEWS, DDP_ZERO = "ddp", "ddp-views", "ddp-zero"
FSDP2_HOST = "fsdp2-host"
"""FSDP2 with all state in host memory."""
PEERS = (FSDP2, FSDP2_DEFERRED, FSDP2_HOST, DDP, DDP_VIEWS, DDP_ZERO)
OURS = tuple(f"ours-{strategy}" for strategy in range(4))
OURS_DEFERRED = "ours-3-deferred"
"""Strategy 3 with reductions in the last microbatch only, as `fsdp2-deferred`."""
OURS_HOST = "ours-3-host"
"""Strategy 3 with all state in host memory, as `fsdp2-host`."""
OURS_FSDP2 = "ours-fsdp2"
"""The program of `fsdp2`, with `fully_shard` imported from `megatron_fsdp.fsdp2`."""
OUR_DDP, OUR_DDP_OPTIM = "mddp", "mddp-optim"
OURS_BY_BUCKETS = (OUR_DDP, OUR_DDP_OPTIM)
DEEPSPEED_HOST, DEEPSPEED_RELEASES = "deepspeed-host", "deepspeed-host-releases"
"""DeepSpeed's ZeRO-3 with all state in host memory, if it is installed; see `_deepspeed`."""
NAMES = (
    *(FLOOR, *WIRES, *OURS, *OURS_BY_BUCKETS, *PEERS, DEEPSPEED_HOST, DEEPSPEED_RELEASES),
    *(OURS_DEFERRED, OURS_HOST, OURS_FSDP2),
)
"""The contenders that step AdamW, in table order."""
OUR_MUON, FSDP2_MUON = "ours-muon", "fsdp2-muon"
"""Muon for matrices and AdamW for the rest: this engine, and FSDP2 with all-gathered matrices."""

LEARNING_RATE = 1e-4
_MEBIBYTE = 2**20


@dataclass(frozen=True)
class Setting:
    """The common settings of all contenders of a run."""

    workload: Workload  # model and batch shape
    dtype: torch.dtype  # of weights, gradients and optimizer state alike
    device: torch.device
    mesh: DeviceMesh  # one-dimensional, over all ranks
    bucket_mib: float = 25.0  # gradients that close a bucket, in MiB, of all that cut them by size
    comm_dtype: torch.dtype | None = None  # of gradients on the wire; None: as `dtype`

    @property
    def narrow_dtype(self) -> torch.dtype | None:
        """The communication dtype of gradients, if it is not their own."""
        return None if self.comm_dtype == self.dtype else self.comm_dtype

    @property
    def bucket_numel(self) -> int:
        """The bucket size in elements, at least 1."""
        return max(1, int(self.bucket_mib * _MEBIBYTE) // self.dtype.itemsize)


class Several:
    """Optimizers that step one after another."""

    def __init__(self, *optimizers: torch.optim.Optimizer) -> None:
        self._optimizers = optimizers

    def step(self) -> None:
        """Step all of them."""
        for optimizer in self._optimizers:
            optimizer.step()

    def zero_grad(self) -> None:
        """Clear the gradients of all of them."""
        for optimizer in self._optimizers:
            optimizer.zero_grad()


@dataclass(frozen=True)
class Contender:
    """A model and its optimizer, ready to train."""

    name: str  # one of `NAMES`
    model: nn.Module  # called with tokens
    optimizer: torch.optim.Optimizer | Several  # AdamW, or that inside of ZeRO's
    # surrounds every microbatch of a step but the last
    deferring: Callable[[], AbstractContextManager[None]] = nullcontext

    def step(self, microbatches: Sequence[Microbatch]) -> Tensor:
        """Train on this rank's microbatches of a step; return its mean loss, a scalar, detached."""
        loss = self.backward(microbatches)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss

    def backward(self, microbatches: Sequence[Microbatch]) -> Tensor:
        """Run forward and backward of a step; return this rank's mean loss, detached."""
        losses = []
        for index, batch in enumerate(microbatches):
            is_last = index == len(microbatches) - 1
            with nullcontext() if is_last else self.deferring():
                loss = loss_of(self.model, batch) / len(microbatches)
                loss.backward()
            losses.append(loss.detach())
        return torch.stack(losses).sum()

    def hidden_bytes(self) -> int:
        """Count bytes that no Python object holds: the buckets of torch's DDP, unless gradients are views of them."""
        if not isinstance(self.model, TorchDDP) or self.model.gradient_as_bucket_view:
            return 0
        told = self.model._get_ddp_logging_data()
        return sum(map(int, str(told.get("rebuilt_bucket_sizes") or told["bucket_sizes"]).split(",")))

    def traffic(self) -> Traffic | None:
        """Return this rank's traffic so far; None for contenders that do not count it."""
        return self.model.traffic() if isinstance(self.model, MegatronFSDP) else None


@dataclass(frozen=True)
class Wire(Contender):
    """The contender that runs a step's collectives only."""

    calls: Sequence[Callable[[], object]] = ()  # each starts a collective and waits for it

    def step(self, microbatches: Sequence[Microbatch]) -> Tensor:
        """Run the collectives; the loss is 0."""
        for call in self.calls:
            call()
        return torch.zeros((), device=microbatches[0][0].device)


def build_contender(name: str, setting: Setting, model: nn.Module | None = None) -> Contender:
    """Build a contender by name, around a model or the workload's own. Collective."""
    model = build_model(setting.workload, setting.dtype, setting.device) if model is None else model
    if name == FLOOR:
        return Contender(name, model, make_optimizer(model))
    if name in WIRES:
        return Wire(name, nn.Identity(), Several(), calls=_collectives(f"ours-{name[-1]}", model, setting))
    if name in OURS_BY_BUCKETS:
        return _our_ddp(name, model, setting)
    if name in (OUR_MUON, FSDP2_MUON):
        return _muon(name, model, setting)
    if name in (*OURS, OURS_DEFERRED, OURS_HOST):
        return _ours(name, model, setting)
    if name in (DEEPSPEED_HOST, DEEPSPEED_RELEASES):
        return _deepspeed(name, model, setting)
    return _ddp(name, model, setting) if name in (DDP, DDP_VIEWS, DDP_ZERO) else _fsdp2(name, model, setting)


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """Make the optimizer that all contenders use."""
    return torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)


def _our_ddp(name: str, model: nn.Module, setting: Setting) -> Contender:
    """Build this engine by buckets, which close at the same parameters as torch's."""
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
    return Contender(name, wrapped, fully_shard_optimizer(make_optimizer(wrapped)), wrapped.no_sync)


def _ours(name: str, model: nn.Module, setting: Setting) -> Contender:
    """Build this engine by units; under strategies 0 and 1 gradients stay unreduced until the sync, as in DDP."""
    strategy = OURS.index(name) if name in OURS else 3
    sharded, optimizer = fully_shard(
        model,
        make_optimizer(model),
        device_mesh=setting.mesh,
        zero_dp_strategy=strategy,
        mixed_precision_policy=MixedPrecisionPolicy(
            main_params_dtype=None, main_grads_dtype=None, grad_comm_dtype=setting.narrow_dtype
        ),
        offload="all" if name == OURS_HOST else None,
    )
    defers = strategy < 2 or name == OURS_DEFERRED
    return Contender(name, sharded, optimizer, sharded.no_sync if defers else nullcontext)


def _collectives(name: str, model: nn.Module, setting: Setting) -> list[Callable[[], object]]:
    """Record a contender's collectives in its third step, when all orders are known, with separate memory."""
    contender, calls = build_contender(name, setting, model), list[Callable[[], object]]()
    microbatches = [make_batch(setting.workload, setting.device, seed=0)]
    for _ in range(2):
        contender.step(microbatches)
    with ExitStack() as patches:
        for method in ("all_gather", "all_reduce", "gather_rows", "reduce_scatter", "exchange"):
            patches.enter_context(mock.patch.object(Axis, method, _noting(getattr(Axis, method), calls)))
        contender.step(microbatches)
    return calls


def _noting(method: Callable[..., Any], calls: list[Callable[[], object]]) -> Callable[..., Any]:
    def noted(axis: Axis, *given: Any) -> Any:
        taken = signature(method).bind(replace(axis, traffic=Traffic()), *given).arguments
        own = {key: torch.zeros_like(each) if isinstance(each, Tensor) else each for key, each in taken.items()}
        calls.append(partial(method, **{**own, "async_op": False}))
        return method(axis, *given)

    return noted


# ---- peers -----------------------------------------------------------------------------------------------------------


def _fsdp2(name: str, model: nn.Module, setting: Setting) -> Contender:
    """Shard each block and the model; the root stays unsharded after forward, by default."""
    shard = fsdp2.fully_shard if name == OURS_FSDP2 else fsdp.fully_shard
    policy = fsdp.MixedPrecisionPolicy(reduce_dtype=setting.narrow_dtype)
    pins = setting.device.type != "cpu"
    home = fsdp.CPUOffloadPolicy(pin_memory=pins) if name == FSDP2_HOST else fsdp.OffloadPolicy()
    for module in (*blocks_of(model), model):
        shard(module, mesh=setting.mesh, mp_policy=policy, offload_policy=home)
    is_deferred = name == FSDP2_DEFERRED
    deferring = partial(_unsynchronised, cast(fsdp.FSDPModule, model)) if is_deferred else nullcontext
    return Contender(name, model, make_optimizer(model), deferring)


@contextmanager
def _unsynchronised(model: fsdp.FSDPModule) -> Iterator[None]:
    """Keep unreduced gradients of a microbatch, as `no_sync` does."""
    model.set_requires_gradient_sync(False)
    try:
        yield
    finally:
        model.set_requires_gradient_sync(True)


def _ddp(name: str, model: nn.Module, setting: Setting) -> Contender:
    """Wrap by DDP, with or without `ZeroRedundancyOptimizer`.

    ZeRO sends one tensor per rank after a step, where its default is one per parameter.
    """
    group = setting.mesh.get_group()
    wrapped = TorchDDP(
        model,
        process_group=group,
        bucket_cap_mb=setting.bucket_mib,  # it multiplies and rounds, so fractions are fine
        gradient_as_bucket_view=name == DDP_VIEWS,
    )
    if setting.narrow_dtype == torch.bfloat16:
        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook

        # Torch refuses this hook by its name on gloo, which can add up bfloat16 all the same.
        wrapped.register_comm_hook(group, lambda state, bucket: bf16_compress_hook(state, bucket))
    if name != DDP_ZERO:
        return Contender(name, wrapped, make_optimizer(wrapped), wrapped.no_sync)
    from torch.distributed.optim import ZeroRedundancyOptimizer  # warns where it is imported: only where it is used

    sharded = ZeroRedundancyOptimizer(
        wrapped.parameters(),
        torch.optim.AdamW,
        process_group=group,
        parameters_as_bucket_view=True,
        lr=LEARNING_RATE,
        fused=True,
    )
    return Contender(name, wrapped, sharded, wrapped.no_sync)


def _deepspeed(name: str, model: nn.Module, setting: Setting) -> Contender:
    """Shard by DeepSpeed with its defaults, except where these change results.

    Unless told otherwise it clips gradients to a norm of 1, steps by an Adam of its own, which rounds in its own way,
    and puts a linear of its own in the place of torch's, for everybody in this process. It keeps gathered weights up to
    a number of elements that models of this benchmark do not reach; with limits of 0 it releases them, as large ones.

    Raises:
        ConfigurationError: Something is not in float32.
        MissingPackageError: DeepSpeed is not installed.
    """
    if {setting.dtype, setting.comm_dtype or setting.dtype} != {torch.float32}:
        raise ConfigurationError(f"{name} is compared in float32 only; leave it out, or --dtype and --comm-dtype")
    os.environ.setdefault("DS_ACCELERATOR", setting.device.type)
    deepspeed = require("deepspeed", f"the contender {name}", "leave it out")
    limits = ("max_live_parameters", "max_reuse_distance", "param_persistence_threshold")
    home = {"device": "cpu", "pin_memory": setting.device.type != "cpu"}
    config = {
        "train_micro_batch_size_per_gpu": setting.workload.samples,
        "gradient_clipping": 0.0,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {
            "stage": 3,
            "offload_optimizer": home,
            "offload_param": home,
            "memory_efficient_linear": False,
            "reduce_bucket_size": setting.bucket_numel,
            **({f"stage3_{limit}": 0 for limit in limits} if name == DEEPSPEED_RELEASES else {}),
        },
    }
    engine, *_ = deepspeed.initialize(model=model, optimizer=make_optimizer(model), config=config)
    return Contender(name, engine, engine, partial(_before_the_boundary, engine))


@contextmanager
def _before_the_boundary(engine: Any) -> Iterator[None]:
    """Accumulate a microbatch's gradients in DeepSpeed, without its step."""
    engine.set_gradient_accumulation_boundary(False)
    try:
        yield
    finally:
        engine.set_gradient_accumulation_boundary(True)


# ---- Muon ------------------------------------------------------------------------------------------------------------


def _muon(name: str, model: nn.Module, setting: Setting) -> Contender:
    wrap: Callable[[Any], Any]
    kind: type[torch.optim.Optimizer]
    if name == FSDP2_MUON:
        model = _fsdp2(FSDP2, model, setting).model
        wrap, kind = (lambda optimizer: optimizer), GatheredMuon
    else:
        model = fully_shard_model(model, setting.mesh, dp_shard_dim="dp")
        wrap, kind = fully_shard_optimizer, torch.optim.Muon
    split: tuple[list[nn.Parameter], list[nn.Parameter]] = [], []
    for param, what in zip(model.parameters(), kinds_of(model.parameters(), model), strict=True):
        split[what != "matrices"].append(param)
    others = torch.optim.AdamW(split[1], lr=LEARNING_RATE, fused=True)
    return Contender(name, model, Several(wrap(kind(split[0], lr=LEARNING_RATE)), wrap(others)))


class GatheredMuon(torch.optim.Optimizer):
    """Muon over FSDP2's DTensors: momentum on shards; every rank all-gathers and iterates every matrix."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, torch.optim.Muon([nn.Parameter(torch.ones(1, 1))], lr=lr).defaults)

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        """Update every matrix; collective."""
        for group in self.param_groups:
            for param in group["params"]:
                if "momentum" not in self.state[param]:
                    self.state[param]["momentum"] = torch.zeros_like(param.grad)
                buffer = self.state[param]["momentum"]
                buffer.lerp_(param.grad, 1 - group["momentum"])
                operand = param.grad.lerp(buffer, group["momentum"]).bfloat16().full_tensor()
                whole = _zeropower_via_newtonschulz(operand, group["ns_coefficients"], group["ns_steps"], group["eps"])
                update = DTensor.from_local(whole, param.device_mesh).redistribute(placements=param.placements)
                param.mul_(1 - group["lr"] * group["weight_decay"])
                param.add_(update, alpha=-_adjust_lr(group["lr"], group["adjust_lr_fn"], param.shape))
