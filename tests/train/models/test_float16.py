"""Training in float16 with a scaled loss: the same updates, overflow that is no failure, and real failures."""

from typing import Any

import pytest

from megatron_fsdp.train.loop import train
from megatron_fsdp.train.models.trained import GROWTH_INTERVAL, LossScale
from tests.support.on_ranks import assert_equal_tensors, on_ranks
from tests.train.models.runs import DECODER, LLAMA, NoCheckpoints, Silent, expected, prepare, whole_weights

HALF = {"fp16": True, "initial_loss_scale": 2.0**10}
UNITS = {"use_megatron_fsdp": True}
FSDP2 = {"use_torch_fsdp2": True}


@pytest.mark.full(short=["values0", "values2"])
@pytest.mark.parametrize(
    "values",
    [
        {**DECODER, **UNITS},
        {**DECODER, **FSDP2},
        {**LLAMA, **FSDP2, "pipeline_model_parallel_size": 2},
        {**LLAMA, **UNITS, "pipeline_model_parallel_size": 2},
        {**DECODER, "overlap_grad_reduce": True},
    ],
)
@on_ranks(2)
def test_losses_are_those_of_float32_but_for_rounding(values: dict[str, Any]) -> None:
    plain, run, watcher = expected(values), prepare({**values, **HALF}), Silent()
    progress, *_ = train(run, watcher, NoCheckpoints())
    losses = [record.loss for record in watcher.records]
    assert losses == pytest.approx(plain.losses, rel=2e-3)
    assert losses != plain.losses
    assert run.trained.scale is not None
    assert (run.trained.scale.value, watcher.said, progress.skipped) == (2.0**10, [], 0)


@on_ranks(2)
def test_overflow_halves_the_scale_and_is_no_failure() -> None:
    """With a scale of 2**60 every step overflows; none may count towards --max-nan-steps 0, and no weight moves."""
    run, watcher = prepare({**DECODER, **UNITS, **HALF, "initial_loss_scale": 2.0**60, "max_nan_steps": 0}), Silent()
    before = whole_weights(run.trained.model)
    progress, *_ = train(run, watcher, NoCheckpoints())
    assert run.trained.scale is not None
    assert (run.trained.scale.value, progress.skipped, len(watcher.records)) == (2.0**57, 3, 3)
    assert len(watcher.said) == 3
    assert watcher.said[0] == f"step 1: gradients overflow float16 at loss scale {2**60:,}: skipped, halved"
    assert_equal_tensors(whole_weights(run.trained.model), before)


def test_scale_doubles_after_many_good_steps_is_restored_and_does_not_fall_below_one() -> None:
    scale, other = LossScale(8.0), LossScale(1.5)
    assert other.has_overflowed(2.0, float("inf"))
    assert not other.has_overflowed(2.0, 3.0)
    assert not other.has_overflowed(float("nan"), float("nan"))
    other.shrink()
    assert other.value == 1.0
    assert not other.has_overflowed(2.0, float("inf"))
    for _ in range(GROWTH_INTERVAL - 1):
        scale.grow()
    other.load_state_dict(scale.state_dict())
    assert (other.value, other.good_steps) == (8.0, GROWTH_INTERVAL - 1)
    other.grow()
    assert (other.value, other.good_steps) == (16.0, 0)
    scale.shrink()
    assert (scale.value, scale.good_steps) == (4.0, 0)
