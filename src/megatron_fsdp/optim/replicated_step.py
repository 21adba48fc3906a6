"""Step LBFGS on sharded parameters: every rank steps all weights, whole, and keeps its shards of the result.

LBFGS takes dot products over all parameters together and calls its closure several times, each time at other weights,
so that there is no part of a step that shards could do. The code of its class, unchanged, runs on every rank on whole
copies. Around each call of the closure weights go down to shards and gradients come up:

    copies -> this rank's shards -> compute weights      the closure      reduced gradients -> copies
                                                         its loss         mean (or sum) over ranks, as of gradients

Losses and whole gradients are the same bits on every rank, so all take the same decisions; they tell each other what
they are about to do before they do it, and raise together where one of them fails or decides otherwise.

With P parameters a rank holds whole weights and gradients, and state (up to 2 P for each step that the history
holds), and receives P elements in each call besides what the model itself communicates.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_map

from megatron_fsdp.comm.agreement import gather_over
from megatron_fsdp.dtensor.chunks import gather_full
from megatron_fsdp.dtensor.frame import ShardFrame
from megatron_fsdp.dtensor.tensor import UnevenDTensor, as_sharded
from megatron_fsdp.engine.gradients import GRAD, get_grads
from megatron_fsdp.errors import ConfigurationError, RankError


def steps_replicated(optimizer: Optimizer) -> bool:
    """Return whether an optimizer is stepped here: torch's LBFGS itself; a subclass may do anything."""
    return type(optimizer) is torch.optim.LBFGS


def check_replicated(optimizer: Optimizer) -> None:
    """Refuse parameters that ranks cannot all hold whole together.

    Raises:
        ConfigurationError: There are several parameter groups or meshes, or tensor or expert parallelism.
    """
    params = [param for group in optimizer.param_groups for param in group["params"]]
    if len(optimizer.param_groups) != 1:
        raise ConfigurationError(
            f"LBFGS was given {len(optimizer.param_groups)} parameter groups; give it all parameters in one, as it "
            "steps them together"
        )
    frames = [param.shard_frame for param in params if isinstance(param, UnevenDTensor)]
    is_divided = any(frame.foreign_groups or frame.description.use.tensor_dim is not None for frame in frames)
    if len({frame.mesh for frame in frames}) > 1 or is_divided:
        raise ConfigurationError(
            "LBFGS needs all parameters whole on every rank, and cannot step a model that tensor or expert parallelism "
            "divides, or models on several meshes; shard over data-parallel ranks alone, or use another optimizer"
        )


class ReplicatedStep:
    """Steps one LBFGS; between steps it holds nothing."""

    def __init__(self) -> None:
        self._params: Sequence[UnevenDTensor] = ()  # of the running step
        self._copies: Sequence[nn.Parameter] = ()
        self._made: Optimizer | None = None

    def stand_in(self, optimizer: Optimizer) -> Optimizer:
        """Gather whole weights on every rank; collective. Call `finish` after the step, or `fail`.

        Returns:
            The object on which the code of the optimizer's class is to run its step.
        """
        check_replicated(optimizer)
        (group,) = optimizer.param_groups
        self._params = group["params"]
        self._copies = [nn.Parameter(gather_full(each._local_tensor, each.shard_frame)) for each in self._params]
        made: Optimizer = object.__new__(type(optimizer))
        state = tree_map(_whole, dict(optimizer.state.get(group["params"][0], {})))
        made.__dict__ = {
            **optimizer.__dict__,
            "param_groups": [{**group, "params": self._copies}],
            "_params": self._copies,  # where LBFGS finds them
            "state": defaultdict(dict, {self._copies[0]: state} if state else {}),
        }
        self._made = made
        return made

    def around(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """Wrap a closure: weights from the copies to shards before it, gradients to the copies and the loss after."""

        def evaluated() -> Any:
            self._tell("calls the closure")
            self._to_shards()
            result = closure()
            loss = result.detach() if isinstance(result, Tensor) else result
            losses = self._tell("has a loss", float(loss))
            with torch.no_grad():
                grads = get_grads(self._params, GRAD)
                for param, copy, grad in zip(self._params, self._copies, grads, strict=True):
                    copy.grad = None if grad is None else _gathered(grad, param.shard_frame)
            united = sum(losses) / (1 if self._params[0].shard_frame.adds_up else len(losses))
            return loss.new_tensor(united) if isinstance(loss, Tensor) else united

        return evaluated

    def finish(self, optimizer: Optimizer) -> None:
        """Take new weights and state; collective, as ranks tell each other that they have come to an end."""
        made = self._made
        assert made is not None
        self._tell("ends the step")
        self._to_shards()
        (group,), (shown,) = optimizer.param_groups, made.param_groups
        group.update({key: value for key, value in shown.items() if key != "params"})
        optimizer.state[group["params"][0]] = made.state[self._copies[0]]
        self._drop()

    def fail(self, error: Exception) -> None:
        """Tell the other ranks that the step has failed here; collective.

        Raises:
            RankError: On every rank, with the same message.
        """
        if self._copies:
            self._tell(f"failed: {type(error).__name__}: {error}", error=error)

    def hand_over(self) -> None:
        """Do nothing: state rests with the optimizer, and is new once the step is finished."""

    def _to_shards(self) -> None:
        """Write this rank's elements of the copies into its shards."""
        with torch.no_grad():
            for param, copy in zip(self._params, self._copies, strict=True):
                local = param._local_tensor.detach()  # shares the version counter, by which writes are noticed
                local.copy_(param.shard_frame.take(copy).view_as(local))

    def _tell(self, doing: str, value: float = 0.0, error: Exception | None = None) -> list[float]:
        """Tell the other ranks what this one does; returns their values, in rank order, where all do the same."""
        frame = self._params[0].shard_frame
        everyone = gather_over((*frame.shard_groups, *frame.copy_groups), (doing, value))
        if error is not None or len({told for told, _ in everyone}) > 1:
            self._drop()
            told = "; ".join(f"rank {rank} {told}" for rank, (told, _) in enumerate(everyone))
            raise RankError(f"LBFGS cannot go on: {told}; weights are where the closure was called last") from error
        return [value for _, value in everyone]

    def _drop(self) -> None:
        self._params, self._copies, self._made = (), (), None


def _gathered(grad: Tensor, frame: ShardFrame) -> Tensor:
    sharded: Any = as_sharded(grad, frame)
    return gather_full(sharded._local_tensor, frame)


def _whole(value: Any) -> Any:
    """Return a value of the state whole: loading cuts a vector that has the shape of the first parameter."""
    return value.full_tensor() if isinstance(value, DTensor) else value
