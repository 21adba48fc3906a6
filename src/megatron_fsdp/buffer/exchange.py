"""Show every rank a small object of each: one collective where torch's `all_gather_object` takes two."""

from __future__ import annotations

import pickle
from typing import TypeVar

import torch
import torch.distributed as dist

Value = TypeVar("Value")

SMALL_BYTES = 1024
"""What is sent at first; objects that do not fit, with the 8 bytes of their length, are sent in a second collective."""
_LENGTH_BYTES = 8


def gather_objects(group: dist.ProcessGroup, value: Value) -> list[Value]:
    """The values of all ranks, by rank. Collective.

    Other back ends than gloo, which want tensors of their own devices, are left to torch.

    Args:
        group: The ranks.
        value: Of this rank; can be pickled.
    """
    if dist.get_backend(group) != dist.Backend.GLOO:
        found: list[Value] = [value] * dist.get_world_size(group)
        dist.all_gather_object(found, value, group=group)
        return found
    data = pickle.dumps(value)
    message = len(data).to_bytes(_LENGTH_BYTES, "little") + data
    messages = _gather_bytes(group, message, SMALL_BYTES)
    lengths = [_LENGTH_BYTES + int.from_bytes(each[:_LENGTH_BYTES], "little") for each in messages]
    if max(lengths) > SMALL_BYTES:  # which every rank sees
        messages = _gather_bytes(group, message, max(lengths))
    return [pickle.loads(each[_LENGTH_BYTES:length]) for each, length in zip(messages, lengths, strict=True)]


def _gather_bytes(group: dist.ProcessGroup, message: bytes, length: int) -> list[bytes]:
    """As many first bytes of every rank's message, filled up with zeros."""
    sent = torch.frombuffer(bytearray(message[:length].ljust(length, b"\0")), dtype=torch.uint8)
    received = torch.empty(dist.get_world_size(group), length, dtype=torch.uint8, device="cpu")
    dist.all_gather(list(received.unbind()), sent, group=group)
    return [bytes(each.tolist()) for each in received]
