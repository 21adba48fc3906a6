"""Step Muon on sharded matrices.

Each matrix has one owner among the ranks. The step is split where it needs the matrix whole:

    every rank, on its shards      momentum                        the operand, in the dtype that is computed with
        one packed all-to-all      --> the owners
    owner, on whole matrices       Newton-Schulz iteration         the result
        one packed all-to-all      --> all ranks
    every rank, on its shards      weight decay, update

The elementwise parts run on shards, so state stays sharded as the parameters and is saved and resharded as that of any
other optimizer; each matrix is computed once, by the same kernels as in one process, so that results are the same bits.
With P parameters over N ranks a rank sends and receives 2 P / N bytes in bf16 each way. Replicas (the outer axis of
HSDP, all ranks where nothing is sharded) share the work, too.

Matrices go in waves, so that an owner holds few of them at a time; the operands of one wave travel while the one before
is computed.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer
from torch.optim._muon import _adjust_lr, _zeropower_via_newtonschulz

from megatron_fsdp.dtensor.frame import ShardFrame
from megatron_fsdp.dtensor.tensor import UnevenDTensor, as_sharded
from megatron_fsdp.engine.gradients import GRAD, get_grads
from megatron_fsdp.errors import ConfigurationError
from megatron_fsdp.optim.whole_exchange import Exchange, Ranks, assign_owners, waves_of

Group = Mapping[str, Any]
"""A parameter group of an optimizer: its options."""
State = MutableMapping[str, Any]

_MOMENTUM = "momentum_buffer"
WAVE_BYTES = 256 << 20
"""Bytes of operands that an owner receives at a time, unless a single matrix is larger."""


# ---- one matrix, by the functions of torch.optim.Muon (K. Jordan et al., "Muon", 2024) -------------------------------


def check_muon(optimizer: Optimizer) -> None:
    """Refuse options under which a step could not be right.

    torch checks some of them only when it iterates, which is on the owner of a matrix alone.

    Raises:
        ConfigurationError: torch's own step would fail, or spoil its momentum.
    """
    for group in optimizer.param_groups:
        if group["ns_steps"] >= 100 or len(group["ns_coefficients"]) != 3:
            raise ConfigurationError(
                f"Muon was given ns_steps={group['ns_steps']} and ns_coefficients={group['ns_coefficients']}; give "
                "fewer than 100 steps and three coefficients"
            )
        if not group["nesterov"] and any(param.dtype is torch.bfloat16 for param in group["params"]):
            raise ConfigurationError(
                "Muon with nesterov=False divides bf16 momentum by its norm in every step (torch's iteration begins in "
                "place); use nesterov=True, or keep main weights and gradients in fp32"
            )


def _operand(group: Group, grad: Tensor, state: State) -> Tensor:
    """Update the momentum of a shard, and return the shard of what is orthogonalized."""
    momentum = group["momentum"]
    if _MOMENTUM not in state:
        state[_MOMENTUM] = torch.zeros_like(grad)
    buffer = state[_MOMENTUM]
    buffer.lerp_(grad, 1 - momentum)
    update = grad.lerp(buffer, momentum) if group["nesterov"] else buffer
    return update.bfloat16()  # as the iteration begins


def _orthogonalized(group: Group, operand: Tensor) -> Tensor:
    return _zeropower_via_newtonschulz(operand, group["ns_coefficients"], group["ns_steps"], group["eps"])


def _apply(group: Group, lr: float, shape: torch.Size, param: Tensor, result: Tensor) -> None:
    """Update the shard of a parameter of a global shape in place."""
    param.mul_(1 - lr * group["weight_decay"])
    param.add_(result, alpha=-_adjust_lr(lr, group["adjust_lr_fn"], shape))


def newton_schulz_flops(shape: Sequence[int], steps: int) -> int:
    """Return the floating-point operations of the iteration on a matrix: three products in each step."""
    short, long = sorted(shape)
    return steps * (4 * short * short * long + 2 * short**3)


# ---- all matrices ----------------------------------------------------------------------------------------------------


class MuonStep:
    """Steps one Muon; keeps process groups and plans from step to step."""

    def __init__(self) -> None:
        self._ranks: dict[DeviceMesh, Ranks] = {}
        self._loads: dict[DeviceMesh, list[int]] = {}  # FLOPs of each rank, over all groups
        self._plans: dict[tuple[ShardFrame, ...], tuple[tuple[tuple[int, ...], Exchange], ...]] = {}

    def stand_in(self, optimizer: Optimizer) -> Optimizer:
        """Return the object on which the code of the optimizer's class is to run its step."""
        made = _StandIn.__new__(_StandIn)
        made.__dict__ = optimizer.__dict__  # one dict: the step may read and write any attribute
        made._update = functools.partial(self.update, optimizer.state)
        return made

    def finish(self, _optimizer: Optimizer) -> None:
        """Do nothing: the step has made the update."""

    def release(self) -> None:
        """Do nothing: no step leaves anything behind."""

    @torch.no_grad()
    def update(self, state: MutableMapping[Tensor, State], group: Group) -> None:
        """Update the parameters of one group that have a gradient; collective over the ranks of their meshes.

        Args:
            state: Of the optimizer, by parameter.
            group: Parameters and options.
        """
        by_mesh: dict[DeviceMesh, list[UnevenDTensor]] = {}
        for param, grad in zip(group["params"], get_grads(group["params"], GRAD), strict=True):
            if type(param) is not UnevenDTensor or param.dim() != 2:
                raise ConfigurationError(
                    f"Muon holds a {type(param).__name__} of shape {tuple(param.shape)}; give it sharded parameters of "
                    "two dimensions"
                )
            if grad is not None:
                by_mesh.setdefault(param.shard_frame.mesh, []).append(param)
        for mesh, params in by_mesh.items():
            before: _Wave | None = None
            for members, exchange in self._planned(group, mesh, params):
                wave = _Wave([params[index] for index in members], exchange, group, state)
                if before is not None:
                    before.finish()  # while the operands of this one travel
                before = wave
            if before is not None:
                before.finish()

    def _planned(
        self, group: Group, mesh: DeviceMesh, params: Sequence[UnevenDTensor]
    ) -> tuple[tuple[tuple[int, ...], Exchange], ...]:
        """Return the waves of some parameters: indices and messages."""
        frames = tuple(param.shard_frame for param in params)
        found = self._plans.get(frames)
        if found is None:
            if mesh not in self._ranks:
                self._ranks[mesh], self._loads[mesh] = Ranks(mesh), [0] * mesh.size()
            ranks = self._ranks[mesh]
            flops = [newton_schulz_flops(frame.shape, group["ns_steps"]) for frame in frames]
            owners = assign_owners(flops, self._loads[mesh])
            nbytes = [2 * math.prod(frame.shape) for frame in frames]
            found = self._plans[frames] = tuple(
                (wave, Exchange([frames[i] for i in wave], [owners[i] for i in wave], ranks))
                for wave in waves_of(owners, nbytes, WAVE_BYTES)
            )
        return found


class _Wave:
    """Some matrices whose operands travel to their owners from the moment that it is made."""

    def __init__(
        self,
        params: Sequence[UnevenDTensor],
        exchange: Exchange,
        group: Group,
        state: MutableMapping[Tensor, State],
    ) -> None:
        self._params, self._exchange, self._group = params, exchange, group
        operands = [self._operand(param, state) for param in params]
        self._like = operands[0]
        self._sent = exchange.to_owners(operands)

    def _operand(self, param: UnevenDTensor, state: MutableMapping[Tensor, State]) -> Tensor:
        """Update the state of a parameter, and return this rank's shard of what is needed whole."""
        own, frame = state[param], param.shard_frame
        shards = {key: value._local_tensor if type(value) is UnevenDTensor else value for key, value in own.items()}
        grad: Any = as_sharded(cast(Tensor, param.grad), frame)
        operand = _operand(self._group, grad._local_tensor, shards)
        for key in shards.keys() - own.keys():
            own[key] = UnevenDTensor.wrap(shards[key], frame)
        return operand

    def finish(self) -> None:
        """Compute this rank's matrices, and update all shards."""
        whole = self._exchange.whole(self._sent.wait())
        results = {index: _orthogonalized(self._group, operand) for index, operand in whole}
        received = self._exchange.to_shards(results, self._like).wait()
        lr = float(self._group["lr"])  # of a tensor, one synchronisation
        for index, result in self._exchange.shards(received):
            param = self._params[index]
            local = param._local_tensor.detach()  # shares the version counter, by which writes are noticed
            _apply(self._group, lr, param.shape, local, result)


class _StandIn(torch.optim.Muon):
    """A Muon whose step finds nothing left to do in a group: the update is made when it asks for the gradients."""

    __slots__ = ("_update",)
    _update: Callable[[Group], None]

    def _init_group(self, group: Group, *_lists: list[Any]) -> bool:
        self._update(group)
        return False  # nothing is complex
