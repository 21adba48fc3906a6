"""An exponential moving average of a sharded model's weights, sharded as they are."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch.distributed.tensor import DTensor

from megatron_fsdp.dtensor.frame import describe_chunks
from megatron_fsdp.dtensor.tensor import UnevenDTensor
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
        trained = [group for group in model.parameter_groups() if group.gradients is not None]
        self._averages = {
            name: param.detach().to(dtype, copy=True)
            for group in trained
            for name, param in zip(group.names, group.sharded, strict=True)
        }
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
        pairs = self._pairs()
        weights = [weight.to(average.dtype) for weight, average in pairs]
        torch._foreach_lerp_([average for _, average in pairs], weights, 1.0 - decay)

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
        saved = [weight.clone() for weight, _ in self._pairs()]
        self._applied = True
        try:
            for weight, average in self._pairs():
                weight.copy_(average)
            model.install_optimized_model_weights()
            yield
        finally:
            for (weight, _), before in zip(self._pairs(), saved, strict=True):
                weight.copy_(before)
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
        pieces = {name: self._piece_of(name, given[name]) for name in self._averages}
        for name, piece in pieces.items():
            self._averages[name].copy_(piece)

    def _piece_of(self, name: str, value: torch.Tensor) -> torch.Tensor:
        average = self._averages[name]
        held = self._alive().held_tensor(name, value)
        assert isinstance(average, UnevenDTensor)
        if isinstance(held, UnevenDTensor) and held.shard_frame == average.shard_frame:
            return held
        raise ConfigurationError(
            f"{name} of shape {tuple(value.shape)} does not fit the average of shape {tuple(average.shape)} or its "
            "shard; load what state_dict() of a model of the same shape and sharding gave, or full tensors"
        )

    def _pairs(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return the main weights, as shards without history, and their averages."""
        return [
            (param.detach(), self._averages[name])
            for group in self._alive().parameter_groups()
            for name, param in zip(group.names, group.sharded, strict=True)
            if name in self._averages
        ]

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
