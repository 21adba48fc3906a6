"""Cut a batch along its sequences, and put sequences together again."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from megatron_fsdp.automodel.context_parallel.layout import SequenceLayout
from megatron_fsdp.comm.agreement import agree
from megatron_fsdp.errors import ConfigurationError

_IGNORED = -100
_EMBEDDINGS = "inputs_embeds"


def shard_batch(batch: Mapping[str, Tensor], cp_mesh: DeviceMesh, *, load_balance: bool = True) -> dict[str, Tensor]:
    """What this context-parallel rank computes of a batch that all of them hold whole.

    The ranks compare their batches first (one small collective), since a data loader that gives them different ones is
    an easy mistake that no later step would notice.

    Args:
        batch: `input_ids` (or `inputs_embeds`, of three dimensions) and other tensors of (batch, sequence). `labels` as
            transformers takes them, not shifted; or `shift_labels`. An `attention_mask` may pad on the right where
            labels are -100, which causal attention needs no mask for.
        cp_mesh: One dimension, the ranks that share sequences.
        load_balance: Give every rank the same work (see `SequenceLayout`); sequences must then divide by twice the
            number of ranks.

    Returns:
        The same keys, (batch, sequence / ranks, ...), contiguous, but: `labels` became `shift_labels`, shifted before
        cutting, since the next token may lie on another rank; `position_ids`, int64, count in the whole sequence;
        `attention_mask` is left out.

    Raises:
        ParallelSizeError: The sequence length does not divide.
        ConfigurationError: A tensor cannot be cut, sequences are packed, padding is not on the right or is counted, or
            the ranks hold different batches. All errors are raised on every rank.
    """
    layout = SequenceLayout(cp_mesh.size(), load_balance)
    error: Exception | None = None
    try:
        _check(batch, layout)
    except ConfigurationError as found:
        error = found
    agree(cp_mesh.get_group(), error, [_fact(name, batch[name]) for name in sorted(batch)])
    reference = _reference(batch)
    rows, length = reference.shape[:2]
    whole = {name: values for name, values in batch.items() if name not in ("labels", "attention_mask")}
    if "labels" in batch:
        whole["shift_labels"] = F.pad(batch["labels"][:, 1:], (0, 1), value=_IGNORED)
    whole["position_ids"] = torch.arange(length, device=reference.device).expand(rows, length)
    return {name: layout.cut(values, cp_mesh.get_local_rank(), 1).contiguous() for name, values in whole.items()}


def unshard_sequence(tensor: Tensor, cp_mesh: DeviceMesh, dim: int = 1, load_balance: bool = True) -> Tensor:
    """The whole of what every rank has a part of, such as logits, on every rank; detached. One gather.

    Args:
        tensor: This rank's part; the same shape on every rank.
        cp_mesh: As for `shard_batch`.
        dim: Of the sequence.
        load_balance: As for `shard_batch`.
    """
    layout = SequenceLayout(cp_mesh.size(), load_balance)
    mine = tensor.detach().contiguous()
    parts = [torch.empty_like(mine) for _ in range(cp_mesh.size())]
    dist.all_gather(parts, mine, group=cp_mesh.get_group())
    return layout.join(parts, dim)


def _reference(batch: Mapping[str, Tensor]) -> Tensor:
    return batch[_EMBEDDINGS] if "input_ids" not in batch else batch["input_ids"]


def _check(batch: Mapping[str, Tensor], layout: SequenceLayout) -> None:
    if "input_ids" not in batch and _EMBEDDINGS not in batch:
        raise ConfigurationError(f"the batch has {sorted(batch)}; it needs input_ids or {_EMBEDDINGS}")
    shape = tuple(_reference(batch).shape[:2])
    for name, values in batch.items():
        given = tuple(values.shape)
        if len(given) != (3 if name == _EMBEDDINGS else 2) or given[:2] != shape:
            raise ConfigurationError(
                f"{name} of shape {given} cannot be cut along the sequence; give tensors of (batch, sequence) = "
                f"{shape} only, without packed sequences and images"
            )
    layout.check_length(shape[1])
    if "labels" in batch and "shift_labels" in batch:
        raise ConfigurationError("the batch has labels and shift_labels; give one of them")
    if "position_ids" in batch and not bool(
        (batch["position_ids"] == torch.arange(shape[1], device=batch["position_ids"].device)).all()
    ):
        raise ConfigurationError(
            "position_ids are not 0, 1, 2, ... in every row, so sequences are packed or padded on the left; give "
            "one sequence per row, padded on the right, and leave position_ids out"
        )
    if "attention_mask" in batch:
        _check_padding(batch)


def _check_padding(batch: Mapping[str, Tensor]) -> None:
    """Tokens see none behind them, so padding behind all of them is as good as absent where it is not counted."""
    real = batch["attention_mask"].bool()
    if bool((real[:, 1:] & ~real[:, :-1]).any()):
        raise ConfigurationError(
            "attention_mask has holes or pads on the left, which context parallelism does not compute; pad on the right"
        )
    for name in ("labels", "shift_labels"):
        if name in batch and bool((batch[name][~real] != _IGNORED).any()):
            raise ConfigurationError(f"{name} count tokens that attention_mask pads; set them to {_IGNORED} there")


def _fact(name: str, values: Tensor) -> str:
    """One line that tells batches apart."""
    flat = values.detach().flatten().double()
    weights = torch.arange(1, flat.numel() + 1, device=flat.device, dtype=torch.float64)
    return f"{name} {tuple(values.shape)} {values.dtype} with the checksum {float((flat * weights).sum())!r}"
