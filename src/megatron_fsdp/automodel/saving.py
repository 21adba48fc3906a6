"""`save_pretrained` of parallel models: files that plain transformers (or peft) loads."""

from __future__ import annotations

import types
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from megatron_fsdp.automodel.pipeline_parallel import Pipeline
from megatron_fsdp.checkpoint.agree import together
from megatron_fsdp.checkpoint.hf import save_adapter, save_hf
from megatron_fsdp.checkpoint.hf.live import unwrap
from megatron_fsdp.errors import ConfigurationError

_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def let_save(model: Any, whole: nn.Module, config: Any, folder: Path | None) -> None:
    """Give a model its `save_pretrained`.

    Args:
        model: What the user has.
        whole: What is saved of a `Pipeline`: the stages of this rank as one model.
        config: Written as config.json, as it was before the model was made parallel.
        folder: Where the weights came from; tokenizer and templates are carried along. None: from nowhere.
    """

    def save_pretrained(
        self: Any,
        save_directory: str | Path,
        *,
        max_shard_size: int | str = "5GB",
        dtype: torch.dtype | None = None,
        tokenizer: Any = None,
    ) -> None:
        """Save as transformers does; collective: all ranks call it. See docs/automodel.md.

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
        for unit in target.modules():
            if isinstance(unit, FSDPModule):
                unit.reshard()  # after a forward without its backward, weights are views of what FSDP2 frees
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
    if not isinstance(folder, str | Path):
        raise ConfigurationError(f"save_directory is {folder!r}; give the path of a folder")
    return _in_bytes(size)


def _in_bytes(size: int | str) -> int:
    """A size as transformers writes it.

    Raises:
        ConfigurationError: It is no size.
    """
    if isinstance(size, int):
        return size
    text = str(size).strip().upper()
    for unit, factor in sorted(_UNITS.items(), key=lambda entry: -len(entry[0])):
        number = text.removesuffix(unit).strip()
        if text.endswith(unit) and number.replace(".", "", 1).isdigit():
            return int(float(number) * factor)
    raise ConfigurationError(f"max_shard_size={size!r}; give a number of bytes, or a string such as '5GB'")
