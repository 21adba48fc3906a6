"""Seeded damage to the bytes of a file, and small checkpoints to damage."""

import io
import pickle
import random
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megatron_fsdp.checkpoint.save import save_alone, write_state


def small_state() -> dict[str, Any]:
    """Tensors of several dtypes, a scalar, an empty one, and objects of the kinds that checkpoints hold."""
    generator = torch.Generator().manual_seed(3)
    return {
        "model": {
            "weight": torch.randn(6, 5, generator=generator),
            "bias": torch.randn(7, generator=generator).to(torch.bfloat16),
            "flags": torch.tensor([True, False, True]),
        },
        "optimizer": {"step": torch.tensor(3.0), "none": torch.empty(0, 4), "lr": 0.1, "betas": (0.9, 0.95)},
        "rng": {"python": random.Random(0).getstate(), "numpy": np.random.RandomState(0).get_state()},
        "iteration": 7,
    }


def write_ours(folder: Path) -> None:
    """With a manifest."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is one process
        write_state(small_state(), folder)


def write_plain(folder: Path) -> None:
    """As torch alone writes it."""
    save_alone(small_state(), checkpoint_id=folder)


def saved_bytes(value: object) -> bytes:
    """What `torch.save` writes."""
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


def _flip(raw: bytearray, draw: random.Random) -> None:
    for _ in range(draw.choice([1, 1, 1, 4, 64])):
        raw[draw.randrange(len(raw))] ^= 1 << draw.randrange(8)


def _truncate(raw: bytearray, draw: random.Random) -> None:
    del raw[draw.randrange(len(raw)) :]


def _insert(raw: bytearray, draw: random.Random) -> None:
    place = draw.randrange(len(raw))
    raw[place:place] = draw.randbytes(draw.choice([1, 3, 100]))


def _zero(raw: bytearray, draw: random.Random) -> None:
    place = draw.randrange(len(raw))
    count = min(draw.choice([1, 16, 512]), len(raw) - place)
    raw[place : place + count] = bytes(count)


def _remove(raw: bytearray, draw: random.Random) -> None:
    place = draw.randrange(len(raw))
    del raw[place : place + draw.choice([1, 8, 200])]


def _operation(raw: bytearray, draw: random.Random) -> None:
    """Write an operation of pickles somewhere: damage that is more likely to mean something."""
    codes = [code for code in vars(pickle).values() if isinstance(code, bytes) and len(code) == 1]
    place = draw.randrange(len(raw))
    raw[place : place + 1] = draw.choice(codes)


def _swap(raw: bytearray, draw: random.Random) -> None:
    first, second, count = draw.randrange(len(raw)), draw.randrange(len(raw)), draw.choice([1, 4, 64])
    piece = raw[first : first + count]
    raw[first : first + count] = raw[second : second + count]
    raw[second : second + count] = piece


KINDS: tuple[Callable[[bytearray, random.Random], None], ...] = (
    _flip,
    _truncate,
    _insert,
    _zero,
    _remove,
    _operation,
    _swap,
)


def damaged(raw: bytes, seed: int) -> bytes:
    """The same bytes, damaged in a way that the seed decides; of an empty file nothing is left to damage."""
    draw, found = random.Random(seed), bytearray(raw)
    if found:
        draw.choice(KINDS)(found, draw)
    return bytes(found)
