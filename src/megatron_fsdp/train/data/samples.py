"""From token ids to samples."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import numpy as np
import torch

from megatron_fsdp.train.data.batches import Batch
from megatron_fsdp.train.data.token_file import TokenArray


def cut_samples(tokens: TokenArray, starts: Sequence[int | None], length: int, unlearned: int | None = None) -> Batch:
    """Return the samples of `length` tokens that begin at these places.

    Args:
        tokens: The text.
        starts: Where samples begin; None: one that only fills up, which is the first of the text with weights 0.
        length: Targets of a sample.
        unlearned: A target that does not count; None: all do.
    """
    rows = np.stack([tokens[start or 0 : (start or 0) + length + 1] for start in starts]).astype(np.int64)
    is_real = [start is not None for start in starts]
    checksum = sum(zlib.crc32(row.tobytes()) for row, real in zip(rows, is_real, strict=True) if real)
    samples = torch.from_numpy(rows)
    inputs, targets = samples[:, :-1].contiguous(), samples[:, 1:].contiguous()
    weights = torch.tensor(is_real, dtype=torch.float32)[:, None].expand(targets.shape).clone()
    if unlearned is not None:
        weights *= targets != unlearned
    return Batch(inputs, targets, weights, checksum)
