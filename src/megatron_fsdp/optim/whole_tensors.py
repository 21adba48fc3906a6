"""Step optimizers that compute with whole matrices, such as Muon, on sharded parameters.

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
import heapq
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from megatron_fsdp.comm.groups import go_with
from megatron_fsdp.dtensor.frame import ShardFrame
from megatron_fsdp.dtensor.tensor import UnevenDTensor
from megatron_fsdp.engine.gradients import GRAD, get_grads
from megatron_fsdp.errors import ConfigurationError
from megatron_fsdp.sharding.shards import Box

Group = Mapping[str, Any]
"""A parameter group of an optimizer: its options."""
State = MutableMapping[str, Any]

WAVE_BYTES = 256 << 20
"""Bytes of operands that an owner receives at a time, unless a single matrix is larger."""


class WholeTensorRule(Protocol):
    """The parts of an optimizer's step, for one parameter: before, on and after the whole tensor."""

    def problem(self, group: Group, param: Tensor) -> str | None:
        """Return why a parameter cannot be stepped with these options; None where it can."""
        ...

    def operand(self, group: Group, grad: Tensor, state: State) -> Tensor:
        """Update state on a shard, and return the shard of what is needed whole, as a tensor that may be kept.

        Args:
            group: Options.
            grad: The shard of the gradient; its form says nothing about the matrix.
            state: Shards of state by name; filled in the first step.
        """
        ...

    def compute(self, group: Group, operand: Tensor) -> Tensor:
        """Return the result of a whole operand, which may be overwritten; the same shape and dtype."""
        ...

    def apply(self, group: Group, shape: torch.Size, param: Tensor, result: Tensor) -> None:
        """Update the shard of a parameter of a global shape in place, with the shard of the result."""
        ...

    def flops(self, group: Group, shape: Sequence[int]) -> int:
        """Return the floating-point operations of `compute` for a tensor of this shape."""
        ...


class _Muon:
    """The step of `torch.optim.Muon`, by its own functions (K. Jordan et al., "Muon", 2024)."""

    def problem(self, group: Group, param: Tensor) -> str | None:
        if param.dtype is torch.bfloat16 and not group["nesterov"]:
            return (
                "Muon with nesterov=False divides bf16 momentum by its norm in every step (torch's iteration begins in "
                "place); use nesterov=True, or keep main weights and gradients in fp32"
            )
        return None

    def operand(self, group: Group, grad: Tensor, state: State) -> Tensor:
        momentum = group["momentum"]
        buffer = state.setdefault("momentum_buffer", torch.zeros_like(grad))
        buffer.lerp_(grad, 1 - momentum)
        update = grad.lerp(buffer, momentum) if group["nesterov"] else buffer
        return update.bfloat16()

    def compute(self, group: Group, operand: Tensor) -> Tensor:
        from torch.optim._muon import _zeropower_via_newtonschulz

        return _zeropower_via_newtonschulz(operand, group["ns_coefficients"], group["ns_steps"], group["eps"])

    def apply(self, group: Group, shape: torch.Size, param: Tensor, result: Tensor) -> None:
        from torch.optim._muon import _adjust_lr

        lr = float(group["lr"])
        param.mul_(1 - lr * group["weight_decay"])
        param.add_(result, alpha=-_adjust_lr(lr, group["adjust_lr_fn"], shape))

    def flops(self, group: Group, shape: Sequence[int]) -> int:
        short, long = sorted(shape)
        return int(group["ns_steps"] * (4 * short * short * long + 2 * short**3))


RULES: Mapping[type[Optimizer], WholeTensorRule] = {torch.optim.Muon: _Muon()}
"""How the known classes step. These exact classes: a subclass may do anything."""


# ---- who computes what (pure) ----------------------------------------------------------------------------------------


def assign_owners(flops: Sequence[int], num_ranks: int) -> tuple[int, ...]:
    """Give every matrix an owner, the costliest first, each to the rank that has least to do.

    Args:
        flops: Cost of each matrix.
        num_ranks: Ranks that share the work.

    Returns:
        The owner of each matrix; the same on every rank. The busiest rank has at most 4/3 of the least possible
        (R. Graham, "Bounds on multiprocessing timing anomalies", 1969).
    """
    loads = [(0, rank) for rank in range(num_ranks)]
    owners = [0] * len(flops)
    for index in sorted(range(len(flops)), key=lambda index: (-flops[index], index)):
        load, rank = heapq.heappop(loads)
        owners[index] = rank
        heapq.heappush(loads, (load + flops[index], rank))
    return tuple(owners)


def waves_of(owners: Sequence[int], nbytes: Sequence[int], limit: int) -> tuple[tuple[int, ...], ...]:
    """Split matrices into waves in which no owner receives more than `limit` bytes, or a single matrix.

    Args:
        owners: Of each matrix.
        nbytes: Of each operand.
        limit: In bytes.

    Returns:
        Indices of the matrices of each wave, rising.
    """
    waves: list[list[int]] = []
    filled: dict[int, tuple[int, int]] = {}  # by owner: its last wave, and the bytes in there
    for index, (owner, size) in enumerate(zip(owners, nbytes, strict=True)):
        wave, held = filled.get(owner, (0, 0))
        if held and held + size > limit:
            wave, held = wave + 1, 0
        filled[owner] = wave, held + size
        while len(waves) <= wave:
            waves.append([])
        waves[wave].append(index)
    return tuple(map(tuple, waves))


# ---- packed messages -------------------------------------------------------------------------------------------------


class Ranks:
    """The ranks of a mesh in one process group.

    Attributes:
        coordinates: Of each rank on the mesh, in the order of the group.
        rank: This rank's place in the group.
        group: None for a single rank.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        """Use the mesh's group, or make one of all its ranks where it has several dimensions; then collective."""
        shape = tuple(mesh.mesh.shape)
        self.coordinates = tuple(itertools.product(*map(range, shape)))
        ranks = mesh.mesh.flatten().tolist()
        self.rank = ranks.index(dist.get_rank()) if len(ranks) > 1 else 0
        self.group: dist.ProcessGroup | None = None
        if len(ranks) == 1:
            return
        if mesh.ndim == 1:
            self.group = mesh.get_group()
            return
        self.group = dist.new_group(ranks, use_local_synchronization=True)
        go_with(self, [self.group])


class Exchange:
    """The messages of some matrices between the ranks that hold shards of them and their owners.

    Args:
        frames: How each matrix is cut.
        owners: Of each matrix, as places in the group.
        ranks: The ranks of their mesh.
    """

    def __init__(self, frames: Sequence[ShardFrame], owners: Sequence[int], ranks: Ranks) -> None:
        self._frames, self._owners, self._ranks = frames, owners, ranks
        self._places = range(len(ranks.coordinates))

    def to_owners(self, shards: Sequence[Tensor]) -> _Sent:
        """Start to send the operands' shards.

        Args:
            shards: This rank's shard of each matrix; one dtype.
        """
        here = self._ranks.rank
        sent = [
            [shards[index].reshape(-1) for index, _ in self._owned(place) if self._sends(index, here)]
            for place in self._places
        ]
        expected = [
            [self._numel(index, place) for index, _ in self._owned(here) if self._sends(index, place)]
            for place in self._places
        ]
        return _Sent(self._ranks.group, sent, expected, shards[0])

    def whole(self, received: Sequence[Sequence[Tensor]]) -> Iterator[tuple[int, Tensor]]:
        """Yield this rank's own matrices, put together from what `to_owners` has brought: index and whole tensor."""
        here = self._ranks.rank
        pieces = [iter(parts) for parts in received]
        for index, frame in self._owned(here):
            whole: Tensor | None = None
            for place in self._places:
                if not self._sends(index, place):
                    continue
                piece = next(pieces[place])
                whole = piece.new_empty(frame.shape) if whole is None else whole
                for part, box in _cut_up(piece, self._boxes(index, place)):
                    whole[box.indices].copy_(part)
            assert whole is not None, "somebody holds each matrix"
            yield index, whole

    def to_shards(self, results: Mapping[int, Tensor], like: Tensor) -> _Sent:
        """Start to send the results of this rank's own matrices to all ranks, each its shard.

        Args:
            results: By index.
            like: A tensor of their dtype and device.
        """
        here = self._ranks.rank
        sent = [
            [
                results[index][box.indices].reshape(-1)
                for index, _ in self._owned(here)
                for box in self._boxes(index, place)
            ]
            for place in self._places
        ]
        expected = [[self._numel(index, here) for index, _ in self._owned(place)] for place in self._places]
        return _Sent(self._ranks.group, sent, expected, like)

    def shards(self, received: Sequence[Sequence[Tensor]]) -> Iterator[tuple[int, Tensor]]:
        """Yield what `to_shards` has brought: index, and this rank's shard as `frame.description.local_shape`."""
        for place in self._places:
            for (index, frame), piece in zip(self._owned(place), received[place], strict=True):
                yield index, piece.view(frame.description.local_shape)

    def _owned(self, place: int) -> list[tuple[int, ShardFrame]]:
        return [(index, self._frames[index]) for index, owner in enumerate(self._owners) if owner == place]

    def _sends(self, index: int, place: int) -> bool:
        """Return whether a rank sends its shard to the owner: those that hold one copy of the matrix between them."""
        spread = self._frames[index].description.spread_dims
        own, other = self._ranks.coordinates[self._owners[index]], self._ranks.coordinates[place]
        return all(a == b for dim, (a, b) in enumerate(zip(own, other, strict=True)) if dim not in spread)

    def _boxes(self, index: int, place: int) -> tuple[Box, ...]:
        return self._frames[index].description.boxes_at(self._ranks.coordinates[place])

    def _numel(self, index: int, place: int) -> int:
        return sum(box.numel for box in self._boxes(index, place))


class _Sent:
    """A packed all-to-all under way."""

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        sent: Sequence[Sequence[Tensor]],
        expected: Sequence[Sequence[int]],
        like: Tensor,
    ) -> None:
        self._expected, self._work = expected, None
        packed = torch.cat([like.new_empty(0), *(part for parts in sent for part in parts)])
        if group is None:
            self._received = packed
            return
        self._received = like.new_empty(sum(map(sum, expected)))
        self._kept = packed  # until it is sent
        self._work = dist.all_to_all_single(
            self._received.view(torch.uint8),
            packed.view(torch.uint8),
            [sum(lengths) * like.itemsize for lengths in expected],
            [sum(part.numel() for part in parts) * like.itemsize for parts in sent],
            group=group,
            async_op=True,
        )

    def wait(self) -> list[list[Tensor]]:
        """Return the pieces that came from each rank, in the order of the matrices."""
        if self._work is not None:
            self._work.wait()
            del self._kept
        found, start = [], 0
        for lengths in self._expected:
            total = sum(lengths)
            found.append(list(self._received[start : start + total].split(list(lengths))) if lengths else [])
            start += total
        return found


def _cut_up(piece: Tensor, boxes: Sequence[Box]) -> Iterator[tuple[Tensor, Box]]:
    start = 0
    for box in boxes:
        yield piece[start : start + box.numel].view(box.lengths), box
        start += box.numel


# ---- the step --------------------------------------------------------------------------------------------------------


def steps_whole(optimizer: Optimizer) -> bool:
    """Return whether an optimizer of this kind computes with whole tensors, and is stepped here."""
    return type(optimizer) in RULES


def check_whole(optimizer: Optimizer) -> None:
    """Refuse options under which a step could not be right.

    Raises:
        ConfigurationError: The rule of the optimizer's class has found a problem.
    """
    rule = RULES[type(optimizer)]
    for group in optimizer.param_groups:
        for param in group["params"]:
            if problem := rule.problem(group, param):
                raise ConfigurationError(problem)


class WholeStep:
    """Steps an optimizer that needs whole tensors; keeps process groups and plans from step to step."""

    def __init__(self) -> None:
        self._ranks: dict[DeviceMesh, Ranks] = {}
        self._plans: dict[tuple[ShardFrame, ...], tuple[tuple[tuple[int, ...], Exchange], ...]] = {}

    def stand_in(self, optimizer: Optimizer) -> Optimizer:
        """Return the object on which the code of the optimizer's class is to run its step."""
        kind = _stand_in_kind(type(optimizer))  # type: ignore[arg-type]  # mypy: classes with a __hash__
        made: Optimizer = kind.__new__(kind)
        made.__dict__ = optimizer.__dict__  # one dict: the step may read and write any attribute
        made._update = functools.partial(self.update, RULES[type(optimizer)], optimizer.state)  # type: ignore[attr-defined]
        return made

    @torch.no_grad()
    def update(self, rule: WholeTensorRule, state: MutableMapping[Tensor, State], group: Group) -> None:
        """Update the parameters of one group that have a gradient; collective over the ranks of their meshes.

        Args:
            rule: How the optimizer steps.
            state: Of the optimizer, by parameter.
            group: Parameters and options.
        """
        by_mesh: dict[DeviceMesh, list[UnevenDTensor]] = {}
        for param, grad in zip(group["params"], get_grads(group["params"], GRAD), strict=True):
            if grad is not None:
                by_mesh.setdefault(param.shard_frame.mesh, []).append(param)
        for mesh, params in by_mesh.items():
            before: _Wave | None = None
            for members, exchange in self._planned(rule, group, mesh, params):
                wave = _Wave([params[index] for index in members], exchange, rule, group, state)
                if before is not None:
                    before.finish()  # while the operands of this one travel
                before = wave
            if before is not None:
                before.finish()

    def _planned(
        self, rule: WholeTensorRule, group: Group, mesh: DeviceMesh, params: Sequence[UnevenDTensor]
    ) -> tuple[tuple[tuple[int, ...], Exchange], ...]:
        """Return the waves of some parameters: indices and messages."""
        frames = tuple(param.shard_frame for param in params)
        found = self._plans.get(frames)
        if found is None:
            if mesh not in self._ranks:
                self._ranks[mesh] = Ranks(mesh)
            ranks = self._ranks[mesh]
            owners = assign_owners([rule.flops(group, frame.shape) for frame in frames], len(ranks.coordinates))
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
        rule: WholeTensorRule,
        group: Group,
        state: MutableMapping[Tensor, State],
    ) -> None:
        self._params, self._exchange, self._rule, self._group = params, exchange, rule, group
        operands = [self._operand(param, state) for param in params]
        self._like = operands[0]
        self._sent = exchange.to_owners(operands)

    def _operand(self, param: UnevenDTensor, state: MutableMapping[Tensor, State]) -> Tensor:
        """Update the state of a parameter, and return this rank's shard of what is needed whole."""
        own, frame = state[param], param.shard_frame
        shards = {key: value._local_tensor if type(value) is UnevenDTensor else value for key, value in own.items()}
        operand = self._rule.operand(self._group, param.grad._local_tensor, shards)  # type: ignore[union-attr]
        for key in shards.keys() - own.keys():
            own[key] = UnevenDTensor.wrap(shards[key], frame)
        return operand

    def finish(self) -> None:
        """Compute this rank's matrices, and update all shards."""
        whole = self._exchange.whole(self._sent.wait())
        results = {index: self._rule.compute(self._group, operand) for index, operand in whole}
        received = self._exchange.to_shards(results, self._like).wait()
        for index, result in self._exchange.shards(received):
            param = self._params[index]
            local = param._local_tensor.detach()  # shares the version counter, by which writes are noticed
            self._rule.apply(self._group, param.shape, local, result)


@functools.cache
def _stand_in_kind(kind: type[Optimizer]) -> type[Optimizer]:
    """Return the class of stand-ins for a class of optimizers, under its name, which torch's messages mention."""
    return type(kind.__name__, (_StandIn, kind), {"__slots__": ()})


class _StandIn(Optimizer):
    """An optimizer whose step finds nothing left to do in a group: the update is made when it asks for gradients."""

    __slots__ = ("_update",)
    _update: Callable[[Group], None]

    def _init_group(self, group: Group, *_lists: list[Any]) -> bool:
        self._update(group)
        return False  # nothing is complex
