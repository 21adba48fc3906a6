"""Models for `doctor` from configurations of transformers; what builds them can be sent to other processes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from megatron_fsdp.errors import ConfigurationError
from megatron_fsdp.optional_packages import require
from megatron_fsdp.plan.models import read_config


@dataclass(frozen=True)
class CausalModel:
    """Builds a causal language model with random weights, in eval mode.

    Attributes:
        path: A config.json, or the folder it is in.
        layers: How many layers; None: as many as the configuration says.
    """

    path: str
    layers: int | None = None

    def __call__(self) -> nn.Module:
        """The model."""
        config = self._config()
        auto: Any = require("transformers", "--hf-config").AutoModelForCausalLM
        model: nn.Module = auto.from_config(config, trust_remote_code=False)
        return model.eval()

    def vocabulary_size(self) -> int:
        """How many tokens there are."""
        return int(self._config().vocab_size)

    def _config(self) -> Any:
        """Read it.

        Raises:
            ConfigurationError: transformers is missing, or this is no configuration.
        """
        if not Path(self.path).exists():
            raise ConfigurationError(f"--hf-config {self.path}: there is no such file or folder; give a local one")
        config = read_config(self.path)
        if self.layers is not None:
            config.num_hidden_layers = self.layers
        return config


@dataclass(frozen=True)
class RandomTokens:
    """Makes batches of random tokens with the labels of a language model.

    Attributes:
        vocabulary_size: Of the model.
        samples: Per batch.
        length: Tokens of each.
    """

    vocabulary_size: int
    samples: int
    length: int

    def __call__(self, seed: int) -> dict[str, Tensor]:
        """A batch: `input_ids` and `labels`, (samples, length) int64."""
        generator = torch.Generator().manual_seed(seed)
        tokens = torch.randint(self.vocabulary_size, (self.samples, self.length), generator=generator)
        return {"input_ids": tokens, "labels": tokens.clone()}
