"""Step Muon on sharded matrices.

Each matrix has one owner among the ranks. The step is split where it needs the matrix whole:

    every rank, on its shards      momentum                        the operand, in the dtype that is computed with
        one packed all-to-all      --> the owners
    owner, on whole matrices       Newton-Schulz iteration         the result
        one packed all-to-all      --> all ranks
    every rank, on its shards      weight decay, update            once all ranks have all results

The elementwise parts run on shards, so state stays sharded as the parameters and is saved and resharded as that of any
other optimizer; each matrix is computed once, by the same kernels as in one process, so that results are the same bits.
With P parameters over N ranks a rank sends and receives 2 P / N bytes in bf16 each way, and holds as many until the
update. Replicas (the outer axis of HSDP, all ranks where nothing is sharded) share the work, too. The memory of all
messages is taken, and ranks agree that all have it, before the first is sent; what fails later on a rank fails on all.

Matrices go in waves, so that an owner holds few of them at a time. While one is computed the operands of the next and
the results of the one before travel:

    wave 0    send   compute  return
    wave 1           send     compute  return
    wave 2                    send     compute  return
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer
from torch.optim._muon import _adjust_lr, _zeropower_via_newtonschulz

from megatron_fsdp.dtensor.shard_spec import ShardSpec
from megatron_fsdp.dtensor.tensor import UnevenDTensor, as_sharded
from megatron_fsdp.engine.gradients import shown_grads
from megatron_fsdp.errors import ConfigurationError
from megatron_fsdp.optim.full_tensor.exchange import (
    Exchange,
    Messages,
    Ranks,
    agreed,
    balanced_owners,
    holders_of,
    replicas_of,
    waves_of,
)
from megatron_fsdp.optim.local_step import ExchangingStep, params_of
from megatron_fsdp.sharding.shards import narrow_description

Group = Mapping[str, Any]
"""A parameter group of an optimizer: its options."""
State = MutableMapping[str, Any]

SPLIT_KEY = "split_sizes"
"""Option of a parameter group: the rows of the matrices that its matrices are made of, each iterated by itself.

Numbers, one number for all, or numbers by name, such as {"q": 4096, "k": 1024, "v": 1024}."""
_MOMENTUM = "momentum_buffer"
WAVE_BYTES = 256 << 20
"""Bytes that an owner receives, or sends to all replicas, at a time, unless those of a single matrix are more."""


# ---- one matrix, by the functions of torch.optim.Muon (K. Jordan et al., "Muon", 2024) -------------------------------


def check_muon(optimizer: Optimizer) -> None:
    """Raise for options under which a step could not be right.

    torch checks some of them only when it iterates, which is on the owner of a matrix alone.
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
        for param in group["params"]:
            if param.dim() not in (2, 3):
                raise ConfigurationError(
                    f"Muon was given a parameter of shape {tuple(param.shape)}; give it matrices, or stacks of "
                    "matrices with three dimensions, and the others to another optimizer; ChainedOptimizer joins both"
                )
            split_rows(group, param.shape)


def split_rows(group: Group, shape: Sequence[int]) -> tuple[int, ...]:
    """Return the rows of the matrices into which a matrix, or each one of a stack, is split: `split_sizes`, or all."""
    sizes, rows = group.get(SPLIT_KEY), shape[-2]
    if sizes is None:
        return (rows,)
    pieces = list(sizes.values()) if isinstance(sizes, Mapping) else sizes
    if type(pieces) is int:
        pieces = [pieces] * (rows // max(pieces, 1))
    is_list = isinstance(pieces, list | tuple) and all(type(size) is int and size > 0 for size in pieces)
    has_names = not isinstance(sizes, Mapping) or all(isinstance(name, str) for name in sizes)
    if not is_list or not has_names or sum(pieces) != rows:
        raise ConfigurationError(
            f"Muon was given {SPLIT_KEY}={sizes!r} for a parameter of shape {tuple(shape)}; give the rows of each "
            f"piece, which add up to {rows}, or one number that divides it; names are text"
        )
    return tuple(pieces)


def newton_schulz_flops(shape: Sequence[int], steps: int) -> int:
    """Return the floating-point operations of the iteration on a matrix: three products in each step."""
    short, long = sorted(shape)
    return steps * (4 * short * short * long + 2 * short**3)


def matrices_in(spec: ShardSpec, rows: Sequence[int]) -> tuple[tuple[ShardSpec, slice], ...]:
    """Return the matrices of a parameter: the shard spec of each, and its elements in this rank's flattened shard.

    `spec` is that of the parameter, (rows, columns) or (matrices, rows, columns); `rows` are those of the matrices that
    each matrix is made of, one below the other. Specs that are returned are of (rows, columns) or (1, rows, columns),
    in the order of the flattened parameter.
    """
    if len(spec.shape) == 2 and len(rows) == 1:
        return ((spec, slice(None)),)
    whole = spec.description
    if whole.tensor_cut is not None and not whole.other_cuts:  # tensor-parallel parts of a piece may differ in shape
        whole = replace(whole, other_cuts=(whole.cut,) * whole.use.num_parts)
    edges = list(itertools.pairwise(itertools.accumulate(rows, initial=0)))
    count = spec.shape[0] if len(spec.shape) == 3 else 0
    stack = [narrow_description(whole, 0, index, index + 1) for index in range(count)] or [whole]
    found, start = [], 0
    for each in stack:
        for edge in edges:
            one = narrow_description(each, len(each.shape) - 2, *edge)
            first, last = one.local_range
            found.append((ShardSpec(spec.mesh, one), slice(start, start + last - first)))
            start += last - first
    return tuple(found)


@dataclass(frozen=True)
class _Matrix:
    """A matrix that is iterated."""

    param: UnevenDTensor  # that it is, or is a part of
    spec: ShardSpec  # how it is cut; (rows, columns), or (1, rows, columns) out of a stack
    part: slice  # its elements in this rank's flattened shard of the parameter
    group: Group  # the options
    lr: float  # as a number; of a tensor, one synchronisation for a group

    @property
    def flops(self) -> int:
        return newton_schulz_flops(self.spec.shape[-2:], self.group["ns_steps"])

    @property
    def weight(self) -> Tensor:
        """This rank's shard; shares the version counter of the parameter, by which writes are noticed."""
        return self.param._local_tensor.detach().view(-1)[self.part]

    def operand(self, state: State) -> Tensor:
        """Update the momentum of this rank's shard, and return the shard of the matrix to orthogonalize."""
        spec, momentum = self.param.shard_spec, self.group["momentum"]
        (shown,) = shown_grads([self.param])
        sharded: Any = as_sharded(cast(Tensor, shown), spec)
        grad = sharded._local_tensor
        if _MOMENTUM not in state:
            blank = torch.zeros_like(grad, memory_format=torch.contiguous_format)
            state[_MOMENTUM] = UnevenDTensor.wrap(blank, spec)
        grad, buffer = grad.reshape(-1)[self.part], state[_MOMENTUM]._local_tensor.view(-1)[self.part]
        buffer.lerp_(grad, 1 - momentum)
        update = grad.lerp(buffer, momentum) if self.group["nesterov"] else buffer
        return cast(Tensor, update.bfloat16())  # as the iteration begins

    def orthogonalized(self, operand: Tensor) -> Tensor:
        """Iterate on the whole operand."""
        options = self.group["ns_coefficients"], self.group["ns_steps"], self.group["eps"]
        result = _zeropower_via_newtonschulz(operand.view(self.spec.shape[-2:]), *options)
        return result.expand(self.spec.shape)

    def apply(self, result: Tensor) -> None:
        """Update this rank's shard of the parameter in place, by the shard of the result."""
        weight = self.weight
        weight.mul_(1 - self.lr * self.group["weight_decay"])
        lr = _adjust_lr(self.lr, self.group["adjust_lr_fn"], self.spec.shape[-2:])
        weight.add_(result.reshape(-1), alpha=-lr)


# ---- all matrices ----------------------------------------------------------------------------------------------------


class MuonStep(ExchangingStep):
    """Steps one Muon; keeps process groups, and the plan of the latest step."""

    def __init__(self) -> None:
        super().__init__()
        self._ranks: dict[DeviceMesh, Ranks] = {}
        self._owned: tuple[Any, list[int]] = None, []
        self._planned: tuple[Any, list[tuple[list[int], Exchange]]] = None, []
        self._parts: dict[tuple[ShardSpec, tuple[int, ...]], tuple[tuple[ShardSpec, slice], ...]] = {}

    def proxy(self, optimizer: Optimizer) -> Optimizer:
        """Return the proxy on which the code of the optimizer's class runs its step."""
        made = MuonProxy.__new__(MuonProxy)
        made.__dict__ = optimizer.__dict__  # one dict: the step may read and write any attribute
        made._update = functools.partial(self.update, optimizer)
        return made

    @torch.no_grad()
    def update(self, optimizer: Optimizer) -> None:
        """Update all parameters that have a gradient; collective over the ranks of their meshes.

        Raises:
            RankError: Some rank lacks memory, or momentum or iteration have failed there; on all ranks. No weight was
                updated.
        """
        for mesh in dict.fromkeys(param.shard_spec.mesh for param in params_of(optimizer)):
            self._ranks_of(mesh)  # making groups may be collective: in one order on all ranks
        error: BaseException | None = None
        try:
            matrices = list(self._matrices(optimizer))
            owners = self._owners(matrices)
            params = [matrix.param for matrix in matrices]
            live = [place for place, grad in enumerate(shown_grads(params)) if grad is not None]
            stepped = [matrices[place] for place in live]
            planned = self._waves(stepped, [owners[place] for place in live])
            messages = _reserve([exchange for _, exchange in planned], matrices[0].param.device)
        except BaseException as met:  # noqa: BLE001 - the other ranks must raise, too
            error = met
        self.agree(optimizer, error)
        waves = [
            _Wave([stepped[index] for index in members], each, optimizer.state)
            for (members, _), each in zip(planned, messages, strict=True)
        ]
        for index in range(len(waves) + 2):
            if index < len(waves):
                waves[index].send()
            if 0 < index <= len(waves):
                waves[index - 1].compute()
            if index > 1:
                waves[index - 2].receive()
        self.agree(optimizer, next((wave.error for wave in waves if wave.error is not None), None))
        for wave in waves:
            wave.apply()

    def agree(self, optimizer: Optimizer, error: BaseException | None) -> None:
        """Raise the error of any rank on all ranks of the meshes that step; collective."""
        self._begun = None
        params = params_of(optimizer)
        ranks = [self._ranks_of(param.shard_spec.mesh) for param in params]
        stepped = zip(ranks, shown_grads(params), strict=True)
        agreed({each: {} for each, grad in stepped if grad is not None}, error)
        if error is not None:  # where there are no gradients
            raise error

    def _ranks_of(self, mesh: DeviceMesh) -> Ranks:
        if mesh not in self._ranks:
            self._ranks[mesh] = Ranks(mesh)
        return self._ranks[mesh]

    def _matrices(self, optimizer: Optimizer) -> Iterator[_Matrix]:
        for group in optimizer.param_groups:
            lr = float(group["lr"])
            for param in group["params"]:
                key = param.shard_spec, split_rows(group, param.shape)
                if key not in self._parts:
                    self._parts[key] = matrices_in(*key)
                yield from (_Matrix(param, *part, group, lr) for part in self._parts[key])

    def _owners(self, matrices: Sequence[_Matrix]) -> list[int]:
        """Return the owner of each matrix; it is the same whichever of them have a gradient."""
        key = [(matrix.spec, matrix.group["ns_steps"]) for matrix in matrices]
        if key != self._owned[0]:
            meshes = [matrix.spec.mesh for matrix in matrices]
            costs, holders = [matrix.flops for matrix in matrices], [holders_of(matrix.spec) for matrix in matrices]
            self._owned = key, balanced_owners(meshes, costs, holders)
        return self._owned[1]

    def _waves(self, matrices: Sequence[_Matrix], owners: Sequence[int]) -> list[tuple[list[int], Exchange]]:
        """Return the waves of all meshes: places of the matrices, and their messages."""
        specs = [matrix.spec for matrix in matrices]
        key = specs, owners
        if key != self._planned[0]:
            found = []
            for mesh in dict.fromkeys(spec.mesh for spec in specs):
                members = [place for place, spec in enumerate(specs) if spec.mesh == mesh]
                nbytes = [2 * math.prod(specs[place].shape) * replicas_of(specs[place]) for place in members]
                for wave in waves_of([owners[place] for place in members], nbytes, WAVE_BYTES):
                    places = [members[index] for index in wave]
                    cut, whose = [specs[place] for place in places], [owners[place] for place in places]
                    found.append((places, Exchange(cut, whose, self._ranks_of(mesh))))
            self._planned = key, found
        return self._planned[1]


def _reserve(exchanges: Sequence[Exchange], device: torch.device) -> list[Messages]:
    """Allocate the messages of a step: shards of each wave, and full matrices of three waves by rotation."""
    numels = [exchange.here_numel for exchange in exchanges]
    largest = max((exchange.own_numel for exchange in exchanges), default=0)
    here = torch.empty(sum(numels), dtype=torch.bfloat16, device=device)
    own = torch.empty(min(3, len(exchanges)), largest, dtype=torch.bfloat16, device=device)
    return list(map(Messages, exchanges, here.split(numels), itertools.cycle(own)))


class _Wave:
    """Some matrices that travel, are computed and return together."""

    def __init__(self, matrices: Sequence[_Matrix], messages: Messages, state: MutableMapping[Tensor, State]) -> None:
        self._matrices, self._messages, self._state = matrices, messages, state
        self.error: BaseException | None = (
            None  # met on this rank by momentum or iteration; what is sent then is not used
        )

    def send(self) -> None:
        """Update momentum, and start to send operands to their owners."""
        with self._others_wait():
            self._messages.pack_shards([matrix.operand(self._state[matrix.param]) for matrix in self._matrices])
        self._messages.to_owners()

    def compute(self) -> None:
        """Compute this rank's matrices, and start to send the results."""
        self._messages.wait()
        with self._others_wait():
            whole = self._messages.whole()
            self._messages.pack_results({index: self._matrices[index].orthogonalized(each) for index, each in whole})
        self._messages.to_shards()

    def receive(self) -> None:
        """Wait for this rank's shards of all results."""
        self._messages.wait(is_last=True)

    def apply(self) -> None:
        """Update this rank's shards."""
        for index, result in self._messages.shards():
            self._matrices[index].apply(result)

    @contextmanager
    def _others_wait(self) -> Iterator[None]:
        """Keep an error for later: the other ranks wait for this one's messages, and must raise, too."""
        try:
            yield
        except BaseException as error:  # noqa: BLE001 - see above
            self.error = error.with_traceback(None)  # which would keep the tensors


class MuonProxy(torch.optim.Muon):
    """Proxy on which torch's Muon runs its step; reading the gradients of the first group performs all updates."""

    __slots__ = ("_update",)
    _update: Callable[[], None]

    def _init_group(self, group: Group, *_lists: list[Any]) -> bool:
        if group is self.param_groups[0]:
            self._update()
        return False  # nothing is complex
