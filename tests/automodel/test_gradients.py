"""Losses per token weigh every token alike, however many a rank has."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron_fsdp.automodel.gradients import count_label_tokens, scale_grads_and_clip_grad_norm, scale_per_token_loss
from megatron_fsdp.errors import ConfigurationError
from tests.automodel.layer_models import (
    SAMPLES,
    all_ranks,
    fsdp2,
    gradients_of,
    make_inputs,
    make_model,
    shard_by_engine,
    two_by_two,
)
from tests.conftest import RunRanks
from tests.support.arrangements import flattened
from tests.support.parity import assert_equal_tensors

MAX_NORM = 0.05


def labels_of(rows: int) -> Tensor:
    """(rows, 6), of which rows ignore 1, 2, 3, ... labels at their end."""
    labels = torch.arange(rows * 6).view(rows, 6)
    for row in range(rows):
        labels[row, 5 - row % 4 :] = -100
    return labels


def counted() -> list[int]:
    mesh = two_by_two("dp", "cp")
    mine = labels_of(4)[dist.get_rank()][None]
    over = flattened(mesh, ("dp", "cp"), "dp_cp")
    return [
        count_label_tokens(mine, over, shifted=True),
        count_label_tokens(mine, mesh, shifted=True),
        count_label_tokens(mine, over.get_group(), shifted=False),
        count_label_tokens([mine, mine], mesh["cp"], shifted=True),
        count_label_tokens(mine, shifted=True),
    ]


def test_labels_are_counted_over_ranks_and_microbatches(run_ranks: RunRanks) -> None:
    counts = [5, 4, 3, 2]
    total, pairs = sum(counts), [18, 18, 10, 10]
    assert run_ranks(4, counted) == [[total, total, total - 4, pairs[r], counts[r]] for r in range(4)]


def weighted_loss(model: nn.Module, rows: Tensor) -> Tensor:
    """A sum over tokens of different weights."""
    return (model(rows).square().sum(-1) * rows[:, 0].abs()).sum()


def check_uneven_tokens(per_token: bool) -> None:
    """Ranks have 2 and 6 tokens; gradients are those of the mean over 8, scaled before backward or after."""
    mesh, inputs = all_ranks(), make_inputs()
    mine = inputs[:2] if dist.get_rank() == 0 else inputs[2:]
    reference = make_model()
    (weighted_loss(reference, inputs) / SAMPLES).backward()
    gradients = gradients_of(reference)
    norm = nn.utils.clip_grad_norm_(reference.parameters(), MAX_NORM)
    clipped = gradients_of(reference)
    rescale: dict[str, Any] = {"gradients_are_summed": True} if per_token else {"dp_group_size": 2}
    for before in (True, False):
        model = shard_by_engine(make_model(), mesh, calculate_per_token_loss=True) if per_token else fsdp2()
        loss = weighted_loss(model, mine)
        if before:
            scale_per_token_loss(loss, SAMPLES, **rescale).backward()
            assert_equal_tensors(gradients_of(model), gradients, rtol=1e-4, atol=1e-6)
            found = scale_grads_and_clip_grad_norm([model], MAX_NORM)
        else:
            loss.backward()
            found = scale_grads_and_clip_grad_norm([model], MAX_NORM, num_label_tokens=SAMPLES, **rescale)
        torch.testing.assert_close(found, norm, rtol=1e-5, atol=0.0)
        assert_equal_tensors(gradients_of(model), clipped, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("per_token", [False, True])
def test_every_token_weighs_the_same_on_ranks_with_different_numbers(run_ranks: RunRanks, per_token: bool) -> None:
    run_ranks(2, check_uneven_tokens, per_token)


def test_factors_without_effect_or_meaning_are_refused() -> None:
    loss, param = torch.ones(()), nn.Parameter(torch.ones(2))
    refused: list[Callable[[], Any]] = [
        lambda: scale_per_token_loss(loss, 0, dp_group_size=2),
        lambda: scale_per_token_loss(loss, 3),
        lambda: scale_per_token_loss(loss, 3, dp_group_size=2, gradients_are_summed=True),
        lambda: scale_grads_and_clip_grad_norm([param], 1.0, dp_group_size=2),
        lambda: scale_grads_and_clip_grad_norm([param], 1.0, gradients_are_summed=True),
    ]
    for call in refused:
        with pytest.raises(ConfigurationError):
            call()
