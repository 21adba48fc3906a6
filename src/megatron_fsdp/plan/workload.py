"""What one rank computes in a microbatch: a model without memory, its inputs and its loss."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from megatron_fsdp.errors import ConfigurationError
from megatron_fsdp.plan.kernels import Kernels
from megatron_fsdp.plan.planned_model import UnitModules
from megatron_fsdp.plan.recompute import Recompute


@dataclass(frozen=True)
class Exchange:
    """A collective (or message) of model parallelism that the compute of one unit waits for, in every microbatch.

    Attributes:
        axis: "tp", "cp", "ep" or "pp".
        unit: Name of the unit's module.
        sent_bytes: By this rank.
        in_backward: Whether in backward, else in forward.
        count: How many of them.
        repeated_by: Under which recomputation those of a forward run again in backward.
    """

    axis: str
    unit: str
    sent_bytes: int
    in_backward: bool
    count: int = 1
    repeated_by: tuple[Recompute, ...] = ()

    def runs(self, recompute: Recompute) -> tuple[int, int]:
        """How many run in forward and how many in backward of a microbatch."""
        if self.in_backward:
            return 0, self.count
        return self.count, self.count * (recompute in self.repeated_by)

    def but(self, **changes: Any) -> Exchange:
        """The same with other values."""
        return replace(self, **changes)


@dataclass(frozen=True)
class Workload:
    """One rank's share of the model and of a microbatch.

    Attributes:
        name: For people.
        module: On the meta device: what one tensor-parallel rank of one pipeline stage computes, with the experts of
            all expert-parallel ranks.
        inputs: Of one microbatch, on the meta device, as `profile_compute` takes them.
        tokens: Tokens (or samples) of one microbatch on this rank.
        loss_fn: As `profile_compute` takes it.
        unit_modules: As `fully_shard` takes them.
        total_numel: Parameters of the whole model.
        exchanges: Collectives of model parallelism.
        stage: Of the pipeline; earlier stages keep more microbatches.
        received_bytes: Buffers for what other pipeline stages send, of one microbatch; each of a step has its own.
        surroundings: What the module has to run in, for the kernels of a device; None: nothing.
        notes: What was assumed, in words.
    """

    name: str
    module: nn.Module
    inputs: Any
    tokens: int
    loss_fn: Callable[[Any], torch.Tensor] | None = None
    unit_modules: UnitModules = None
    total_numel: int = 0
    exchanges: tuple[Exchange, ...] = ()
    stage: int = 0
    received_bytes: int = 0
    surroundings: Callable[[Kernels], AbstractContextManager[None]] | None = None
    notes: tuple[str, ...] = field(default=())

    @property
    def saved_buffer_bytes(self) -> int:
        """Of the module's buffers that state dicts hold."""
        saved = self.module.state_dict()
        return sum(saved[name].nbytes for name, _ in self.module.named_buffers() if name in saved)

    @property
    def buffer_bytes(self) -> int:
        """Of the module's buffers."""
        return sum(buffer.nbytes for buffer in self.module.buffers())


def unit_around(name: str, unit_names: Iterable[str]) -> str:
    """The unit that holds a module; the root, "", where no other does."""
    return next((unit for unit in unit_names if unit and f"{name}.".startswith(f"{unit}.")), "")


def token_inputs(module: nn.Module, micro_batch: int, sequence_length: int) -> Mapping[str, Any]:
    """Tokens and labels for a causal language model of transformers, without memory.

    A cache of keys and values is for generation; in training it would grow when layers are computed again.

    Raises:
        ConfigurationError: The model does not say its vocabulary, so it takes something else.
    """
    if not hasattr(getattr(module, "config", None), "vocab_size"):
        raise ConfigurationError(
            f"{type(module).__name__} has no config.vocab_size, so what it takes is not known; give inputs= (tensors "
            "on the meta device) and, where it does not return a loss, loss_fn="
        )
    tokens = torch.empty((micro_batch, sequence_length), dtype=torch.long, device="meta")
    return {"input_ids": tokens, "labels": tokens, **without_cache(module)}


def without_cache(module: nn.Module) -> dict[str, bool]:
    """The argument that turns the cache off, where the model has one."""
    return {"use_cache": False} if "use_cache" in inspect.signature(module.forward).parameters else {}


def language_workload(
    name: str, module: nn.Module, micro_batch: int, sequence_length: int, unit_modules: UnitModules = None
) -> Workload:
    """A causal language model on whole sequences.

    Args:
        name: For people.
        module: On the meta device.
        micro_batch: Sequences per rank and microbatch.
        sequence_length: Tokens of each.
        unit_modules: As `fully_shard` takes them.
    """
    notes: tuple[str, ...] = ()
    if not module.training:
        notes += ("The model is in evaluation mode, so nothing is dropped out; call train().",)
    longest = getattr(getattr(module, "config", None), "max_position_embeddings", None)
    if isinstance(longest, int) and sequence_length > longest:
        notes += (f"The model was made for {longest:,} tokens, and the sequences have {sequence_length:,}.",)
    return Workload(
        name,
        module,
        token_inputs(module, micro_batch, sequence_length),
        micro_batch * sequence_length,
        unit_modules=unit_modules,
        total_numel=sum(param.numel() for param in module.parameters()),
        notes=notes,
    )
