"""The part of the wrapper that gives access to whole parameters, gradients and optimizer state, and to statistics."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Literal

import torch
from torch import nn

from megatron_fsdp.errors import ConfigurationError
from megatron_fsdp.runtime.engine import Engine
from megatron_fsdp.runtime.full_access import shown_in_full
from megatron_fsdp.runtime.full_tensors import (
    DEFAULT_BUCKET_BYTES,
    check_bucket_bytes,
    iter_gradients,
    iter_optimizer_state,
    iter_parameters,
)
from megatron_fsdp.runtime.observer import Phase
from megatron_fsdp.runtime.schedule import ROOT
from megatron_fsdp.runtime.statistics import ModelStatistics, gradient_statistics, parameter_statistics
from megatron_fsdp.unit.grad_slot import GRAD, get_grad, set_grad


class ParametersAccess:
    """Whole tensors out of shards, a part at a time or all. Every rank has to make the same calls."""

    _engine: Engine

    def full_parameters_context(
        self, module: nn.Module | None = None, *, writeback: bool = False, compute_dtype: bool = False
    ) -> AbstractContextManager[None]:
        """Let modules hold full, plain parameters inside a block, to read, export, run or (`writeback`) change them.

        The parameters are copies of the main weights in their main dtype, without gradients; state dicts taken inside
        hold them. Modules may be called, whole models or, under `torch.no_grad()`, with a part opened. Whatever happens
        inside, the sharded parameters are back afterwards. Memory: the copies and one group. Collective.

        Args:
            module: Open the units that own parameters of this module, and no others; None: all.
            writeback: At the end take what the copies hold into main and compute weights. Every rank has to write the
                same values; they are compared (one number per tensor) and nothing is taken in where they differ.
                After an exception nothing is taken in either.
            compute_dtype: Show the parameters in the dtype the model computes in; not with `writeback`.

        Raises:
            ScheduleError: Inside a forward or backward, or for a unit that is open already.
            ConfigurationError: `module` owns no parameter of the model; the two switches exclude each other; ranks
                wrote different values, or a parameter was replaced (both on every rank).
        """
        engine = self._engine
        units = list(engine.units) if module is None else engine.units_of(module.parameters())
        if not units:
            raise ConfigurationError(
                f"a {type(module).__name__} owns no parameter of this model; give one of its modules, or None for all"
            )
        return shown_in_full(engine, units, writeback, compute_dtype)

    def iter_full_tensors(
        self, bucket_bytes: int = DEFAULT_BUCKET_BYTES, what: Literal["parameters", "gradients"] = "parameters"
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Whole parameters or gradients one after another, with bounded memory.

        Args:
            bucket_bytes: The most that is held beyond the shards while no more than the latest tensor is kept; a
                tensor of more than half of it is held together with the bucket before it.
            what: Main weights in the main dtype, or the gradients that parameters show (those that show none are left
                out).

        Yields:
            Canonical name (a tied one once) and tensor, in the order of units and of their flat buffers. A tensor is a
            view of its bucket; clone it to keep it without the rest. The same on every rank, and every rank has to go
            through all of them.

        Raises:
            ConfigurationError: An argument means nothing, or ranks show gradients for different parameters.
        """
        check_bucket_bytes(bucket_bytes)
        if what not in ("parameters", "gradients"):
            raise ConfigurationError(f"what={what!r} is unknown; give 'parameters' or 'gradients'")
        tensors = iter_parameters if what == "parameters" else iter_gradients
        return tensors(self._engine, bucket_bytes)

    def iter_full_optimizer_state(
        self, optimizer: torch.optim.Optimizer, bucket_bytes: int = DEFAULT_BUCKET_BYTES
    ) -> Iterator[tuple[str, str, torch.Tensor]]:
        """As `iter_full_tensors`, for the optimizer's state tensors that are sharded as their parameter.

        Yields:
            Canonical name of the parameter, key of the state, and tensor; key after key. Other state, such as step
            counters, is whole on every rank and not part of this.

        Raises:
            ConfigurationError: `bucket_bytes` is not positive, or ranks hold state for different parameters.
        """
        check_bucket_bytes(bucket_bytes)
        return iter_optimizer_state(self._engine, optimizer, bucket_bytes)

    def parameter_statistics(self) -> ModelStatistics:
        """Mean, std, norm, extremes, zeros and non-finite elements of every main weight. One small collective."""
        with self._engine.observers.during(Phase.WHOLE, ROOT):
            return parameter_statistics(self._engine)

    def gradient_statistics(self) -> ModelStatistics:
        """The same of every gradient that is not None. One small collective."""
        with self._engine.observers.during(Phase.WHOLE, ROOT):
            return gradient_statistics(self._engine)

    def clear_decoupled_gradients(self, params: Iterable[nn.Parameter], set_to_none: bool = True) -> None:
        """Clear the `.decoupled_grad` of sharded parameters; nothing to do where gradients are in `.grad`."""
        if all(group.grad_attribute == GRAD for group in self._engine.groups()):
            return
        for param in params:
            group, _ = self._engine.places[id(param)]
            grad = get_grad(param, group.grad_attribute)
            if group.grad_attribute == GRAD or grad is None:
                continue
            if set_to_none:
                set_grad(param, group.grad_attribute, None)
            else:
                grad.zero_()
