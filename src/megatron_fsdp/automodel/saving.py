"""`save_pretrained` of parallel models: files that plain transformers (or peft) loads."""

from __future__ import annotations

import re
import types
from pathlib import Path
from typing import Any

import torch
from torch import nn

from megatron_fsdp.automodel.gradients import reshard_units
from megatron_fsdp.automodel.pipeline_parallel import Pipeline
from megatron_fsdp.checkpoint.hf import save_adapter, save_hf
from megatron_fsdp.checkpoint.hf.live import unwrap
from megatron_fsdp.comm.agreement import together
from megatron_fsdp.errors import ConfigurationError

_SIZE = re.compile(r"(\d+\.?\d*|\.\d+)\s*([KMG])(I?)B")


def let_save(model: Any, whole: nn.Module, config: Any, folder: Path | None) -> None:
    """Give a model its `save_pretrained`.

    `whole` is what is saved of a `Pipeline`: the stages of this rank as one model. `config` becomes config.json, as it
    was before the model was made parallel. Tokenizer and templates are carried along from `folder`, if there is one.
    """

    def save_pretrained(
        self: Any,
        save_directory: str | Path,
        *,
        max_shard_size: int | str = "5GB",
        dtype: torch.dtype | None = None,
        tokenizer: Any = None,
    ) -> None:
        """Save as transformers does; collective: all ranks call it. See docs/integrations.md.

        Args:
            self: The model; a deep copy saves its own weights.
            save_directory: Not there yet, or empty; seen by all ranks.
            max_shard_size: Of one file, in bytes or as "5GB".
            dtype: Of the weights in the files; None: that of the main weights.
            tokenizer: Saved along; None: what the source folder had.

        Raises:
            CheckpointError: It cannot be saved; nothing is left of it.
            ConfigurationError: An argument is out of range.
        """
        target = whole if isinstance(self, Pipeline) else self  # a deep copy saves itself
        given = {"save_directory": repr(save_directory), "max_shard_size": repr(max_shard_size), "dtype": repr(dtype)}
        target_bytes = together("saving the model", lambda: _checked(save_directory, max_shard_size), facts=given)
        reshard_units(target)  # after a forward without its backward, weights are views of what FSDP2 frees
        if getattr(unwrap(target), "peft_config", None):
            save_adapter(target, save_directory)
            return
        save_hf(
            target,
            save_directory,
            max_shard_bytes=target_bytes,
            dtype=dtype,
            carry_from=folder,
            config=config,
            tokenizer=tokenizer,
        )

    model.save_pretrained = types.MethodType(save_pretrained, model)


def _checked(folder: object, size: int | str) -> int:
    """Return the size of a file in bytes."""
    if not isinstance(folder, str | Path):
        raise ConfigurationError(f"save_directory is {folder!r}; give the path of a folder")
    if isinstance(size, int):
        return size
    found = _SIZE.fullmatch(str(size).strip().upper())
    if found is None:
        raise ConfigurationError(f"max_shard_size={size!r}; give a number of bytes, or a string such as '5GB'")
    number, prefix, is_binary = found.groups()
    return int(float(number) * (1024 if is_binary else 1000) ** ("KMG".index(prefix) + 1))
