"""Fingerprints (hashes) of tensors' bits, to compare tensors over ranks without sending them.

Those of shards that add up to that of the whole tensor are digests. They tell, too, if ranks would draw the same random
numbers.

`torch.hash_tensor` does not do here: it is the exclusive or of all elements, which is 0 for any constant tensor of even
size and the same for any order of elements.
"""

from __future__ import annotations

import ctypes
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist

from megatron_fsdp.errors import warn_caller

_CHUNK_NUMEL = 1 << 16
_STEP, _MIX, _SPREAD = 0x1E3779B97F4A7C15, 0x3F58476D1CE4E5B9, 0x14D049BB133111EB
_SHIFT = 29
_LOW = 2**32 - 1
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_DIGESTED_NUMEL = 1 << 15  # elements of a digest that are mixed at a time, so that the integers stay in the cache
_LOW_33 = 2**33 - 1


def fingerprint(tensor: torch.Tensor) -> torch.Tensor:
    """Return the hash of a tensor's bits and their positions, an int64 scalar on its device.

    On the CPU it is zlib's CRC-32 of the bytes and a sum of their words. Elsewhere the bits are read as words; each
    word is added to a multiple of its position, multiplied, folded and multiplied again, modulo 2 ** 64, and the
    results are summed; the steps are those of splitmix64 (Steele, Lea and Flood, 2014). It works in chunks and takes at
    most 2 MiB. Fingerprints of CPU tensors and of others cannot be compared.
    """
    return fingerprints([tensor])[0]


def fingerprints(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the fingerprints of several tensors on one device, (len(tensors),) int64."""
    if all(tensor.device.type == "cpu" for tensor in tensors):
        return torch.tensor([_of_memory(tensor) for tensor in tensors], dtype=torch.int64, device="cpu")
    return torch.stack([mixed_words(tensor) for tensor in tensors])


def _of_memory(tensor: torch.Tensor) -> int:
    """Fingerprint a CPU tensor."""
    flat = _flat(tensor)
    if not flat.nbytes:
        return 0
    memory = (ctypes.c_char * flat.nbytes).from_address(flat.data_ptr())
    high, low = zlib.crc32(memory), int(_words(flat).sum())
    return (high - 2**31) * 2**32 + ((low ^ low >> 32) & _LOW)


def lowest_and_highest(hashes: torch.Tensor, group: dist.ProcessGroup) -> tuple[torch.Tensor, torch.Tensor]:
    """All-reduce the minimum and maximum of each number over the ranks, in one collective; int64 of any shape."""
    both = torch.stack([~hashes, hashes])  # the complement of the smallest is the largest of the complements
    dist.all_reduce(both, op=dist.ReduceOp.MAX, group=group)
    return ~both[0], both[1]


def mixed_words(tensor: torch.Tensor) -> torch.Tensor:
    """Fingerprint a tensor of any device, by the algorithm for accelerators."""
    real = _flat(tensor)
    total = torch.zeros((), dtype=torch.int64, device=real.device)
    for chunk in real.split(_CHUNK_NUMEL):
        words = _words(chunk)
        steps = torch.arange(1, words.numel() + 1, device=words.device).mul_(_STEP)
        mixed = steps.add_(words).mul_(_MIX)
        mixed = (mixed ^ (mixed >> _SHIFT)).mul_(_SPREAD)
        total = (total ^ (total >> _SHIFT)) * _MIX + (mixed ^ (mixed >> _SHIFT)).sum()
    return total


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """Flatten to contiguous real numbers; a copy only where the elements are not contiguous."""
    flat = tensor.detach().reshape(-1).contiguous()  # reshape leaves a strided 1-D tensor strided
    return torch.view_as_real(flat).reshape(-1) if flat.is_complex() else flat


def _words(chunk: torch.Tensor) -> torch.Tensor:
    """Return the bits of a flat tensor as int64: eight bytes each where these divide them, else one element each."""
    if chunk.nbytes % torch.int64.itemsize:
        return chunk.view(_BITS[chunk.itemsize]).to(torch.int64)
    aligned = chunk.storage_offset() * chunk.itemsize % torch.int64.itemsize == 0
    return (chunk if aligned else chunk.clone()).view(torch.int64)


def differing_tensors(
    tensors: Mapping[str, torch.Tensor], group: dist.ProcessGroup, device: torch.device
) -> tuple[str, ...]:
    """Return the names of tensors whose bits differ between ranks; sends two numbers per tensor.

    Every rank gives the same names in the same order, and no empty tensor; the hashes travel from `device`.
    """
    if not tensors:
        return ()
    hashes = fingerprints(list(tensors.values())).to(device)
    lowest, highest = lowest_and_highest(hashes, group)
    return tuple(name for name, same in zip(tensors, (lowest == highest).tolist(), strict=True) if not same)


@torch.no_grad()
def digest(shard: torch.Tensor, name: str, start: int = 0) -> torch.Tensor:
    """Return the digest of a local shard, an int64 scalar on its device.

    The shard, of any dtype, is contiguous in the flat whole tensor; its first element is element `start` of that.
    """
    flat, start = _flat(shard), 2 * start if shard.is_complex() else start
    bits = flat.view(_BITS[flat.itemsize])
    total = torch.zeros((), dtype=torch.int64, device=shard.device)
    first = zlib.crc32(name.encode()) << 29
    for begin in range(0, bits.numel(), _DIGESTED_NUMEL):
        block = bits[begin : begin + _DIGESTED_NUMEL].to(torch.int64)
        places = torch.arange(first + start + begin, first + start + begin + block.numel(), device=shard.device)
        places.mul_(_STEP)
        places.bitwise_xor_((places >> 31).bitwise_and_(_LOW_33)).mul_(_MIX).bitwise_or_(1)
        total += block.mul_(places).sum()
    return total


RandomState = tuple[torch.Tensor, ...]
"""States of the CPU's generator and, for another device, of the device's."""


def random_state(device: torch.device) -> RandomState:
    """Return the states of the generators that random numbers for `device` may come from."""
    cpu = torch.get_rng_state()
    return (cpu,) if device.type == "cpu" else (cpu, torch.get_device_module(device).get_rng_state(device))


def set_random_state(device: torch.device, state: RandomState) -> None:
    """Restore states that `random_state` returned."""
    torch.set_rng_state(state[0])
    if len(state) > 1:
        torch.get_device_module(device).set_rng_state(state[1], device)


@contextmanager
def same_random_numbers(groups: Sequence[dist.ProcessGroup], device: torch.device) -> Iterator[None]:
    """Draw the random numbers of the groups' first rank on every rank, inside a block.

    Where ranks were seeded alike nothing is changed and generators go on from where the block leaves them; else the
    ranks use the first one's state for the block, are warned, and get their own back afterwards. After an exception
    every rank gets its own back.
    """
    own = random_state(device)
    differ = [_follow_first(group, device) for group in groups]
    if any(differ):
        warn_caller(
            "ranks were seeded differently, so the weights were initialised with the random numbers of the first rank "
            "of the group; seed every rank alike before sharding"
        )
    try:
        yield
    except BaseException:
        set_random_state(device, own)
        raise
    if any(differ):
        set_random_state(device, own)


def _follow_first(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Take the random state of the group's first rank; return True if any rank had another."""
    mine = random_state(device)
    states = [state.to(device) for state in mine]
    hashes = torch.stack([fingerprint(state) for state in states])
    if torch.equal(*lowest_and_highest(hashes, group)):
        return False
    for state in states:
        dist.broadcast(state, group_src=0, group=group)
    set_random_state(device, tuple(state.to(before.device) for state, before in zip(states, mine, strict=True)))
    return True
