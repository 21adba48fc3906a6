"""Digests, by which processes tell whether they hold the same values."""

import hashlib
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten


def digest_of(value: Tensor | None) -> bytes:
    """Of a tensor on the CPU: its bits and shape; empty for None."""
    if value is None:
        return b""
    data = value.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes()
    return hashlib.blake2b(data + repr(value.shape).encode(), digest_size=16).digest()


def digest_of_batch(batch: Any) -> bytes:
    """Of the tensors, numbers and texts in dicts, tuples and lists; other values are left out."""
    total = hashlib.blake2b(digest_size=16)
    for leaf in tree_flatten(batch)[0]:
        if isinstance(leaf, Tensor):
            total.update(digest_of(leaf.cpu()))
        elif isinstance(leaf, str | int | float):
            total.update(repr(leaf).encode())
    return total.digest()
