"""Model sizes by name, and the training settings that suit each (pure data)."""

from dataclasses import dataclass

from megatron_fsdp.errors import ConfigurationError
from megatron_fsdp.train.model import ModelShape


@dataclass(frozen=True)
class Preset:
    """A model size with defaults that fit it; an option given on the command line wins over each of them.

    Attributes:
        num_layers: Transformer blocks.
        dim: Width of the residual stream.
        num_heads: Attention heads; divides `dim`.
        hidden_dim: Width of the feed-forward layer.
        sequence_length: Tokens of one sample.
        batch_size: Samples per rank and microbatch.
        steps: Optimizer steps of a run.
        warmup: Steps in which the learning rate rises.
        learning_rate: Peak learning rate.
    """

    num_layers: int
    dim: int
    num_heads: int
    hidden_dim: int
    sequence_length: int
    batch_size: int
    steps: int
    warmup: int
    learning_rate: float


PRESETS: dict[str, Preset] = {
    "tiny": Preset(2, 64, 2, 176, sequence_length=64, batch_size=4, steps=30, warmup=3, learning_rate=3e-3),
    "cpu-small": Preset(4, 448, 7, 1216, sequence_length=256, batch_size=4, steps=300, warmup=30, learning_rate=2e-3),
    "gpu-125m": Preset(
        12, 896, 14, 2688, sequence_length=1024, batch_size=16, steps=600, warmup=60, learning_rate=1e-3
    ),
    "gpu-1b": Preset(20, 2048, 16, 5504, sequence_length=2048, batch_size=4, steps=600, warmup=60, learning_rate=4e-4),
}


def find_preset(name: str) -> Preset:
    """Return the preset of this name.

    Raises:
        ConfigurationError: There is none of this name.
    """
    if name not in PRESETS:
        raise ConfigurationError(f"preset {name!r} does not exist: choose one of {', '.join(PRESETS)}")
    return PRESETS[name]


def model_shape(preset: Preset, vocab_size: int) -> ModelShape:
    """Return the shape of the preset's model for a vocabulary of `vocab_size` tokens."""
    return ModelShape(
        vocab_size=vocab_size,
        num_layers=preset.num_layers,
        dim=preset.dim,
        num_heads=preset.num_heads,
        hidden_dim=preset.hidden_dim,
    )
