"""Save a live, sharded model as Hugging Face files: several ranks write, nothing is gathered whole."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from megatron_fsdp.checkpoint.agree import decided_by_first, together
from megatron_fsdp.checkpoint.hf.carried import carry_files, change_dtype, index_text, write_config
from megatron_fsdp.checkpoint.hf.catalog import gather_catalog
from megatron_fsdp.checkpoint.hf.index import INDEX_FILE, MODEL_FILE
from megatron_fsdp.checkpoint.hf.live import LiveTensor, live_tensors, unwrap
from megatron_fsdp.checkpoint.hf.names import file_tensors
from megatron_fsdp.checkpoint.hf.parts import FileTensor
from megatron_fsdp.checkpoint.hf.publish import new_folder
from megatron_fsdp.checkpoint.hf.safetensors_format import FileLayout
from megatron_fsdp.checkpoint.hf.save_plan import lay_out_files
from megatron_fsdp.checkpoint.hf.writing import Job, write_files
from megatron_fsdp.errors import CheckpointError, ConfigurationError

DEFAULT_SHARD_BYTES = 5 * 2**30

Naming = Callable[[Mapping[str, tuple[int, ...]]], dict[str, FileTensor]]


def save_hf(
    model: nn.Module,
    folder: str | Path,
    *,
    max_shard_bytes: int = DEFAULT_SHARD_BYTES,
    dtype: torch.dtype | None = None,
    carry_from: str | Path | None = None,
    config: Any = None,
    tokenizer: Any = None,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Save a model as `transformers` does, so that `from_pretrained(folder)` loads it; collective.

    What is saved are the main weights, under the names that transformers stores, tied ones once. Each file is written
    by one rank, several at the same time; elements come to it in stretches of 32 MiB. The folder appears at once and
    complete, or not at all.

    Args:
        model: Sharded by `fully_shard_model` or `fully_shard`, or a plain module.
        folder: Not there yet, or empty; seen by all ranks.
        max_shard_bytes: Of the tensors of one file; several files have an index.
        dtype: Of all floating-point tensors in the files; None: that of the main weights.
        carry_from: A local folder of a model whose other files (config, tokenizer, templates) are copied.
        config: Its `save_pretrained` writes the config; None: the one of `carry_from`, or else the model's own.
        tokenizer: Its `save_pretrained` writes the tokenizer; None: only what `carry_from` has.
        group: The ranks that hold the model; None: all.

    Raises:
        CheckpointError: It cannot be saved, or a rank could not write; on every rank, and nothing is left of it.
        ConfigurationError: An argument is out of range, or the model cannot be saved so.
    """
    _check_arguments(max_shard_bytes, dtype, {"config": config, "tokenizer": tokenizer})
    module = unwrap(model)
    if getattr(module, "peft_config", None):
        raise ConfigurationError(
            "the model has adapters, which a Hugging Face checkpoint of the model cannot hold; save them by "
            "save_adapter (those of peft.get_peft_model), or merge them into the model first"
        )
    folder = Path(folder)
    ignored = set(getattr(module, "_keys_to_ignore_on_save", None) or ())
    live = [tensor for tensor in live_tensors(module) if tensor.name not in ignored]
    job = plan_job(
        live, lambda shapes: file_tensors(module, shapes), folder, dtype, (max_shard_bytes, MODEL_FILE), group
    )

    def write_the_rest(temporary: Path) -> None:
        if carry_from is not None:
            carry_files(Path(carry_from), temporary)
            if dtype is not None:
                change_dtype(temporary, dtype)
        write_config(module, config, temporary, _only_dtype(job.files))
        if tokenizer is not None:
            tokenizer.save_pretrained(temporary)
        if len(job.files) > 1:
            (temporary / INDEX_FILE).write_text(index_text(job.files), encoding="utf-8")

    publish_files(job, folder, write_the_rest, group)


def _check_arguments(max_shard_bytes: int, dtype: torch.dtype | None, carried: Mapping[str, Any]) -> None:
    if type(max_shard_bytes) is not int:
        raise ConfigurationError(
            f"max_shard_bytes={max_shard_bytes!r} is a {type(max_shard_bytes).__name__}; give a whole number of bytes"
        )
    if dtype is not None and not isinstance(dtype, torch.dtype):
        raise ConfigurationError(f"dtype={dtype!r} is a {type(dtype).__name__}; give a torch.dtype, or None")
    if max_shard_bytes <= 0:
        raise ConfigurationError(f"max_shard_bytes={max_shard_bytes} holds nothing; give a positive number of bytes")
    if dtype is not None and not (dtype.is_floating_point and dtype.itemsize > 1):
        raise ConfigurationError(
            f"dtype={dtype} cannot hold weights as they are; give a floating-point dtype of 16 bits or more, or None"
        )
    for name, value in carried.items():
        if value is not None and not hasattr(value, "save_pretrained"):
            raise ConfigurationError(
                f"{name} is a {type(value).__name__} without save_pretrained; give an object of transformers, or the "
                "folder that has its files as carry_from"
            )


def plan_job(
    live: Sequence[LiveTensor],
    naming: Naming,
    folder: Path,
    dtype: torch.dtype | None,
    shards: tuple[int, str],
    group: dist.ProcessGroup | None,
) -> Job:
    """Find out who holds what, and lay the files out; collective.

    Args:
        live: What to save of this rank's model.
        naming: From shapes by name to file tensors by key.
        folder: For messages.
        dtype: As of `save_hf`.
        shards: The most bytes of a file, and its name if it is the only one.
        group: The ranks.

    Raises:
        CheckpointError: Something cannot be saved; on every rank.
    """
    doing = f"preparing to save {folder}"
    pieces = together(doing, lambda: {tensor.name: tensor.pieces() for tensor in live}, group)
    catalog = gather_catalog(live, pieces, group)

    def lay_out() -> tuple[dict[str, FileTensor], list[FileLayout]]:
        if not catalog:
            raise CheckpointError("there is nothing to save: the model has no such tensors")
        tensors = naming({name: held.shape for name, held in catalog.items()})
        return tensors, lay_out_files(tensors, catalog, dtype, *shards)

    tensors, files = together(doing, lay_out, group)
    device = next((tensor.tensor.device for tensor in live), torch.device("cpu"))
    return Job(files, tensors, catalog, pieces, device)


def publish_files(
    job: Job, folder: Path, write_the_rest: Callable[[Path], None], group: dist.ProcessGroup | None
) -> None:
    """Write the files of a job, and what else belongs to them, into a new folder; collective.

    Args:
        job: What to write.
        folder: As of `save_hf`.
        write_the_rest: Called on the first rank with the temporary folder.
        group: The ranks.

    Raises:
        CheckpointError: As of `save_hf`.
    """
    with new_folder(folder, {file.name: file.nbytes for file in job.files}, group) as temporary:
        decided_by_first(lambda: write_the_rest(temporary), f"saving to {folder}", group)
        write_files(job, temporary, group)


def _only_dtype(files: Sequence[FileLayout]) -> torch.dtype | None:
    dtypes = {tensor.dtype for file in files for tensor in file.tensors if tensor.dtype.is_floating_point}
    return dtypes.pop() if len(dtypes) == 1 else None
