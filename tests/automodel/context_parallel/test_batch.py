"""What each rank gets of a batch, and which batches cannot be cut."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_fsdp.automodel.context_parallel import shard_batch, unshard_sequence
from megatron_fsdp.errors import ConfigurationError
from tests.conftest import RunRanks
from tests.support.arrangements import mesh_of

LENGTH = 8


def tokens() -> Tensor:
    return torch.arange(2 * LENGTH).view(2, LENGTH)


def cut(load_balance: bool) -> dict[str, list[Any]]:
    mesh = mesh_of((2,), ("cp",))
    mask = torch.ones(2, LENGTH, dtype=torch.int64)
    mask[1, 6:] = 0
    labels = tokens().masked_fill(mask == 0, -100)
    batch = {"input_ids": tokens(), "labels": labels, "attention_mask": mask, "weights": tokens() * 0.5}
    mine = shard_batch(batch, mesh, load_balance=load_balance)
    assert all(values.is_contiguous() for values in mine.values())
    for name, whole in batch.items():
        if name in mine:
            assert torch.equal(unshard_sequence(mine[name], mesh, load_balance=load_balance), whole)
    hidden = mine["input_ids"][..., None] + torch.zeros(3)
    whole_hidden = unshard_sequence(hidden.transpose(0, 1), mesh, 0, load_balance)
    assert torch.equal(whole_hidden, tokens().T[..., None] + torch.zeros(3))
    return {name: values.tolist() for name, values in mine.items()}


def test_labels_are_shifted_before_they_are_cut(run_ranks: RunRanks) -> None:
    first, second = run_ranks(2, cut, True)
    assert first["position_ids"] == [[0, 1, 6, 7]] * 2
    assert second["position_ids"] == [[2, 3, 4, 5]] * 2
    assert first["input_ids"] == [[0, 1, 6, 7], [8, 9, 14, 15]]
    assert first["shift_labels"] == [[1, 2, 7, -100], [9, 10, -100, -100]]
    assert second["shift_labels"] == [[3, 4, 5, 6], [11, 12, 13, -100]]
    assert sorted(first) == ["input_ids", "position_ids", "shift_labels", "weights"]


def test_without_balancing_ranks_have_neighbouring_tokens(run_ranks: RunRanks) -> None:
    first, second = run_ranks(2, cut, False)
    assert first["position_ids"] == [[0, 1, 2, 3]] * 2
    assert second["shift_labels"] == [[5, 6, 7, -100], [13, -100, -100, -100]]


def refused() -> dict[str, str]:
    """What each bad batch is told; rank 1 alone has the last two."""
    mesh, here = mesh_of((2,), ("cp",)), dist.get_rank()
    ids, ones = {"input_ids": tokens()}, torch.ones(2, LENGTH)
    hole, left, padded = ones.clone(), ones.clone(), ones.clone()
    hole[0, 3], left[0, 0], padded[0, 7] = 0, 0, 0
    batches: dict[str, dict[str, Tensor]] = {
        "length": {"input_ids": tokens()[:, :6]},
        "nothing": {"labels": tokens()},
        "square": {**ids, "attention_mask": ones[:, None, None]},
        "one dimension": {**ids, "cu_seq_lens_q": torch.tensor([0, 4, 8])},
        "image": {**ids, "pixel_values": torch.ones(2, 3, 4, 4)},
        "hole": {**ids, "attention_mask": hole},
        "left": {**ids, "attention_mask": left},
        "counted": {**ids, "attention_mask": padded, "labels": tokens()},
        "packed": {**ids, "position_ids": torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3]] * 2)},
        "twice": {**ids, "labels": tokens(), "shift_labels": tokens()},
        "other rows": {"input_ids": tokens() + here},
        "hole on one rank": {**ids, "attention_mask": hole if here == 1 else ones},
    }
    told = {}
    for name, batch in batches.items():
        with pytest.raises(ConfigurationError) as raised:
            shard_batch(batch, mesh)
        told[name] = str(raised.value)
    return told


def test_batches_that_cannot_be_cut_are_refused_on_all_ranks(run_ranks: RunRanks) -> None:
    first, second = run_ranks(2, refused)
    assert first == second
    parts = {
        "length": "sequences of 6 tokens cannot be cut into 2 * 2 = 4 equal pieces",
        "nothing": "needs input_ids or inputs_embeds",
        "square": "attention_mask of shape (2, 1, 1, 8)",
        "one dimension": "cu_seq_lens_q of shape (3,)",
        "image": "pixel_values of shape (2, 3, 4, 4)",
        "hole": "has holes or pads on the left",
        "left": "has holes or pads on the left",
        "counted": "labels count tokens that attention_mask pads",
        "packed": "sequences are packed",
        "twice": "labels and shift_labels",
        "other rows": "ranks of the group disagree",
        "hole on one rank": "rank 1: attention_mask has holes",
    }
    assert {name: part for name, part in parts.items() if part not in first[name]} == {}
