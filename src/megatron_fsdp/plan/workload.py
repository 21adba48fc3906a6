"""What one rank computes in a microbatch: a model without memory, its inputs and its loss."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from megatron_fsdp.errors import ConfigurationError
from megatron_fsdp.plan.planned_model import UnitModules


@dataclass(frozen=True)
class Exchange:
    """A collective of model parallelism that the compute of one unit waits for, in every forward or every backward.

    Attributes:
        axis: "tp", "cp", "ep" or "pp".
        unit: Name of the unit's module.
        sent_bytes: By this rank.
        in_backward: Whether in backward, else in forward (and in its recomputation).
        count: How many of them.
    """

    axis: str
    unit: str
    sent_bytes: int
    in_backward: bool
    count: int = 1


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
        extra_flops: Operations of a forward that the module does not do on its own: attention to the tokens of other
            context-parallel ranks.
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
    extra_flops: int = 0
    notes: tuple[str, ...] = field(default=())

    @property
    def buffer_bytes(self) -> int:
        """Of the module's buffers."""
        return sum(buffer.nbytes for buffer in self.module.buffers())


def token_inputs(module: nn.Module, micro_batch: int, sequence_length: int) -> Mapping[str, Any]:
    """Tokens and labels for a causal language model of transformers, without memory.

    Where the model takes `use_cache`, it is told not to keep keys and values for generation, as training does.

    Raises:
        ConfigurationError: The model does not say its vocabulary, so it takes something else.
    """
    if not hasattr(getattr(module, "config", None), "vocab_size"):
        raise ConfigurationError(
            f"{type(module).__name__} has no config.vocab_size, so what it takes is not known; give inputs= (tensors "
            "on the meta device) and, where it does not return a loss, loss_fn="
        )
    tokens = torch.empty((micro_batch, sequence_length), dtype=torch.long, device="meta")
    told = {"use_cache": False} if "use_cache" in inspect.signature(module.forward).parameters else {}
    return {"input_ids": tokens, "labels": tokens, **told}


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
    return Workload(
        name,
        module,
        token_inputs(module, micro_batch, sequence_length),
        micro_batch * sequence_length,
        unit_modules=unit_modules,
        total_numel=sum(param.numel() for param in module.parameters()),
    )
