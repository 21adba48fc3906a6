"""An exponential moving average of a sharded model's weights, sharded as they are."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch.distributed.tensor import DTensor

from megatron_fsdp.dtensor.chunks import describe_chunks
from megatron_fsdp.dtensor.tensor import UnevenDTensor
from megatron_fsdp.engine.param_group import ParameterGroup
from megatron_fsdp.errors import ConfigurationError, ScheduleError
from megatron_fsdp.megatron_fsdp import MegatronFSDP


class ShardedEMA:
    """An exponential moving average: average = decay * average + (1 - decay) * weight, of each rank's shards.

    Nothing is communicated. Frozen parameters do not change, so they have no average; module buffers are not part of
    it.

    Args:
        model: Model whose main weights are averaged; held weakly.
        decay: Decay of one update, 0 <= decay < 1.
        dtype: Dtype of the averages. Narrow ones lose small updates: with a decay of 0.999 bfloat16 hardly moves.

    Raises:
        ConfigurationError: An argument is out of range, or nothing is trainable.
    """

    def __init__(self, model: MegatronFSDP, decay: float = 0.999, dtype: torch.dtype = torch.float32) -> None:
        _check_decay(decay)
        if not dtype.is_floating_point:
            raise ConfigurationError(f"dtype={dtype} cannot hold an average; give a floating-point dtype")
        self.decay = decay
        self._model = weakref.ref(model)
        self._applied = False
        self._averages: dict[str, DTensor] = {}
        for group in model.parameter_groups():
            for index, name in enumerate(group.names if group.gradients is not None else ()):
                piece = group.weights.main.piece(index).detach().to(dtype, copy=True)
                self._averages[name] = group.describe_chunks(index, group.describe_piece(index, piece))
        if not self._averages:
            raise ConfigurationError("the model has no trainable parameter; there is nothing to average")

    @torch.no_grad()
    def update(self, decay: float | None = None) -> None:
        """Update the averages with the current weights; call it after `optimizer.step()`.

        Args:
            decay: Of this update only; None: the one given at construction.

        Raises:
            ConfigurationError: `decay` is out of range.
            ScheduleError: Inside `applied()`, where the weights are the averages.
        """
        if self._applied:
            raise ScheduleError(
                "update() was called inside applied(), where the weights are the averages; call it outside"
            )
        decay = self.decay if decay is None else decay
        _check_decay(decay)
        averages, weights = [], []
        for group, index in self._places():
            average = self._average(group, index)
            averages.append(average)
            weights.append(group.weights.main.piece(index).detach().to(average.dtype))
        torch._foreach_lerp_(averages, weights, 1.0 - decay)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Replace the model's weights by the averages inside a block, for evaluation; then restore them bit for bit.

        Memory: a copy of this rank's shards of the main weights.

        Raises:
            ScheduleError: It is applied already.
        """
        if self._applied:
            raise ScheduleError("the average is applied already; leave applied() before entering it again")
        model = self._alive()
        saved = [group.weights.main.piece(index).detach().clone() for group, index in self._places()]
        self._applied = True
        try:
            with torch.no_grad():
                for group, index in self._places():
                    group.weights.main.piece(index).copy_(self._average(group, index))
            model.install_optimized_model_weights()
            yield
        finally:
            with torch.no_grad():
                for (group, index), before in zip(self._places(), saved, strict=True):
                    group.weights.main.piece(index).copy_(before)
            model.install_optimized_model_weights()
            self._applied = False

    def state_dict(self) -> dict[str, DTensor]:
        """Return the averages by canonical name, as DTensors for in-place torch.distributed.checkpoint saves and loads.

        Experts have the names and shapes that they have in the state dict of the model.
        """
        model = self._alive()
        return {
            model.checkpoint_name(name): _described(model.checkpoint_view(name, average))
            for name, average in self._averages.items()
        }

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, torch.Tensor]) -> None:
        """Copy averages in.

        Args:
            state_dict: One tensor per trainable parameter: a DTensor sharded as the parameter is, or a full tensor.

        Raises:
            ConfigurationError: Names or shapes are not those of the trainable parameters; nothing is copied then.
        """
        model = self._alive()
        given = {model.held_name(name): value for name, value in state_dict.items()}
        given.pop(None, None)  # the experts of other ranks, if the dict holds all
        missing, unexpected = self._averages.keys() - given.keys(), given.keys() - self._averages.keys()
        if missing or unexpected:
            raise ConfigurationError(
                f"the averages do not fit: missing {sorted(missing)[:8]}, unexpected "
                f"{sorted(map(str, unexpected))[:8]}; load what state_dict() of the same model gave"
            )
        pieces = [self._piece_of(group, index, given[group.names[index]]) for group, index in self._places()]
        for (group, index), piece in zip(self._places(), pieces, strict=True):
            self._average(group, index).copy_(piece)

    def _piece_of(self, group: ParameterGroup, index: int, value: torch.Tensor) -> torch.Tensor:
        name = group.names[index]
        held = self._alive().held_tensor(name, value)
        if isinstance(held, UnevenDTensor) and held.shard_frame == group.frames[index]:
            return held.to_local()
        raise ConfigurationError(
            f"{name} of shape {tuple(value.shape)} does not fit the average of shape "
            f"{tuple(self._averages[name].shape)} or its shard; load what state_dict() of a model of the same shape "
            "and sharding gave, or full tensors"
        )

    def _average(self, group: ParameterGroup, index: int) -> torch.Tensor:
        return self._averages[group.names[index]]._local_tensor

    def _places(self) -> Iterator[tuple[ParameterGroup, int]]:
        for group in self._alive().parameter_groups():
            for index, name in enumerate(group.names):
                if name in self._averages:
                    yield group, index

    def _alive(self) -> MegatronFSDP:
        model = self._model()
        if model is None:
            raise ConfigurationError(
                "the model that this average follows has been deleted; make a new one for a new model"
            )
        return model


def _described(tensor: torch.Tensor) -> DTensor:
    assert isinstance(tensor, UnevenDTensor)
    return tensor if tensor.shard_frame.is_whole else describe_chunks(tensor, tensor.shard_frame)


def _check_decay(decay: float) -> None:
    if not 0.0 <= decay < 1.0:
        raise ConfigurationError(f"decay={decay} is out of range; give a number from 0 to below 1, such as 0.999")
