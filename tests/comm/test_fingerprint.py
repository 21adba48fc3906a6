"""Fingerprints tell tensors apart that differ in any bit or in order."""

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from megatron_fsdp.comm.fingerprint import fingerprint, lowest_and_highest, mixed_words
from tests.support.on_ranks import on_ranks

Fingerprint = Callable[[torch.Tensor], torch.Tensor]
both_kinds = pytest.mark.parametrize("kind", [fingerprint, mixed_words], ids=["memory", "operations"])
"""That of the CPU, and that of other devices."""


@both_kinds
def test_every_random_state_of_many_seeds_differs(kind: Fingerprint) -> None:
    generator = torch.Generator()
    found = {kind(generator.manual_seed(seed).get_state()).item() for seed in range(300)}
    assert len(found) == 300


@both_kinds
def test_shape_strides_and_place_in_memory_do_not_matter(kind: Fingerprint) -> None:
    tensor = torch.randn(6, 4)
    for view in (tensor.t(), tensor[:, ::2], tensor.view(-1)[::2], torch.view_as_complex(tensor.view(6, 2, 2)).imag):
        assert kind(view).item() == kind(view.contiguous()).item()
    assert kind(torch.empty(0)).item() == 0
    for numel in (8, 9, (1 << 16) + 8):
        memory = torch.randn(numel + 1)
        assert kind(memory[1:]).item() == kind(memory[1:].clone()).item()


@both_kinds
def test_any_one_bit_matters(kind: Fingerprint) -> None:
    words = torch.arange(37, dtype=torch.int64)
    before = kind(words).item()
    for place in (0, 17, 36):
        for bit in range(64):
            changed = words.clone()
            changed[place] ^= 1 << bit if bit < 63 else -(2**63)
            assert kind(changed).item() != before


@on_ranks(2)
def test_the_lowest_and_the_highest_of_all_ranks_are_found_by_one_reduction() -> None:
    rank = dist.get_rank()
    hashes = torch.tensor([-(2**63), 2**63 - 1, 7, 5 - rank, (-1) ** rank * 2**62])
    lowest, highest = lowest_and_highest(hashes, dist.group.WORLD)
    lowest, highest = lowest.tolist(), highest.tolist()
    assert lowest == [-(2**63), 2**63 - 1, 7, 4, -(2**62)]
    assert highest == [-(2**63), 2**63 - 1, 7, 5, 2**62]
