"""The trainer's presets as models to plan."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from megatron_fsdp.train.options.options import Layer, ModelOptions, assemble
from megatron_fsdp.train.options.presets import PRESETS, find_preset

if TYPE_CHECKING:
    import torch

    from megatron_fsdp.plan.setup import ParallelRanks
    from megatron_fsdp.plan.workload import Workload
    from megatron_fsdp.train.models.decoder import Decoder

BYTES = 256
"""The vocabulary of the trainer's default tokens."""


def trainer_presets() -> tuple[str, ...]:
    """Their names."""
    return tuple(PRESETS)


def is_trainer_preset(name: str) -> bool:
    """Whether a name is one of them."""
    return name in PRESETS


def build_trainer_model(name: str, dtype: torch.dtype) -> Decoder:
    """The model of a preset with a vocabulary of bytes, on the default device."""
    return build_decoder_model(_options(name)[0], BYTES, dtype)


def build_decoder_model(options: ModelOptions, vocab_size: int, dtype: torch.dtype) -> Decoder:
    """The trainer's own decoder for these options, on the default device.

    Raises:
        ConfigurationError: A size is missing or cannot be.
    """
    from megatron_fsdp.train.models.build import model_shape
    from megatron_fsdp.train.models.decoder import Decoder

    return Decoder(model_shape(options, vocab_size)).to(dtype)


def trainer_workload(
    name: str, ranks: ParallelRanks, sequence_length: int | None, micro_batch: int | None, dtype: torch.dtype
) -> Workload:
    """What one rank of the trainer computes with a preset.

    Args:
        name: Of the preset.
        ranks: Data-parallel ones only.
        sequence_length: Tokens of a sequence; None: the preset's.
        micro_batch: Sequences per rank; None: the preset's.
        dtype: Of the weights that compute uses.

    Raises:
        ConfigurationError: The ranks are those of another parallelism.
    """
    options, own_micro_batch = _options(name)
    shape = (
        own_micro_batch if micro_batch is None else micro_batch,
        (options.seq_length or 1) if sequence_length is None else sequence_length,
    )
    return decoder_workload(lambda: build_trainer_model(name, dtype), ranks, shape, name)


def decoder_workload(build: Callable[[], Decoder], ranks: ParallelRanks, shape: tuple[int, int], name: str) -> Workload:
    """What one rank computes with the trainer's own decoder.

    Args:
        build: Makes the model on the default device.
        ranks: Data-parallel ones only.
        shape: Sequences of a microbatch, and tokens of each.
        name: What to call it.

    Raises:
        ConfigurationError: The ranks are those of another parallelism.
    """
    import torch

    from megatron_fsdp.plan.front import make_workload
    from megatron_fsdp.train.models.decoder import Block, next_token_loss

    with torch.device("meta"):
        model = build()
    tokens = torch.empty(shape, dtype=torch.long, device="meta")

    def loss(logits: torch.Tensor) -> torch.Tensor:
        targets = tokens if logits.is_meta else torch.empty_like(tokens, device=logits.device)  # in a simulated run
        return next_token_loss(logits, targets)

    return make_workload(
        model,
        ranks,
        inputs=tokens,
        loss_fn=loss,
        fsdp_unit_modules=[Block],
        name=name,
        tokens=tokens.numel(),
    )


def _options(name: str) -> tuple[ModelOptions, int]:
    """What a preset says of the model, and its microbatch."""
    options = assemble((Layer(f"preset {name}", find_preset(name)),))
    return options.model, options.training.micro_batch_size or 1
