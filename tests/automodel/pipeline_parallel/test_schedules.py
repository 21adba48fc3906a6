"""Options of a pipeline, and how layers are cut into stages."""

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from megatron_fsdp.automodel.pipeline_parallel.schedules import (
    PipelineConfig,
    count_microbatches,
    count_stages,
    schedule_named,
    split_layers,
)
from megatron_fsdp.errors import ConfigurationError, ParallelSizeError
from tests.support.on_ranks import refusal


def loss(logits: Tensor, labels: Tensor) -> Tensor:
    return logits.sum() + labels.sum()


def test_defaults_and_fields_are_listed_in_order() -> None:
    assert PipelineConfig().to_dict() == {
        "pp_schedule": "1f1b",
        "pp_microbatch_size": 1,
        "pp_batch_size": 1,
        "layers_per_stage": None,
        "scale_grads_in_schedule": False,
        "loss_fn": None,
        **dict.fromkeys(["dtype", "pp_seq_len", "pp_schedule_csv"]),
        **dict.fromkeys(["round_virtual_stages_to_pp_multiple", "module_fqns_per_model_part"]),
        "patch_inner_model": True,
        "patch_causal_lm_model": True,
        "patch_stage_backward_maybe_with_nosync": False,
    }
    assert PipelineConfig(loss_fn=loss).to_dict()["loss_fn"] is loss


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"pp_schedule": "interleavedzerobubble"}, "one of 1f1b, gpipe, interleaved1f1b, loopedbfs"),
        ({"pp_schedule": None}, "pp_schedule is None"),
        ({"pp_microbatch_size": 0}, "pp_microbatch_size is 0"),
        ({"pp_batch_size": True}, "pp_batch_size is True"),
        ({"layers_per_stage": -1}, "layers_per_stage is -1"),
        ({"pp_batch_size": 6, "pp_microbatch_size": 4}, "pp_batch_size=6 is no multiple of pp_microbatch_size=4"),
        ({"loss_fn": "mean"}, "loss_fn is 'mean'"),
        ({"scale_grads_in_schedule": True}, "needs a loss_fn"),
    ],
)
def test_values_that_cannot_work_are_refused(options: dict[str, Any], words: str) -> None:
    assert re.search(words, refusal(PipelineConfig, error=ConfigurationError, **options))


@given(st.integers(1, 200), st.integers(1, 64))
def test_stages_cover_all_layers_in_order_and_earlier_ones_take_the_remainder(layers: int, stages: int) -> None:
    if stages > layers:
        with pytest.raises(ParallelSizeError, match=f"{layers} layers cannot be cut into {stages} stages"):
            split_layers(layers, stages)
        return
    pieces = split_layers(layers, stages)
    assert [layer for start, stop in pieces for layer in range(start, stop)] == list(range(layers))
    lengths = [stop - start for start, stop in pieces]
    assert len(pieces) == stages
    assert lengths == sorted(lengths, reverse=True)
    assert max(lengths) - min(lengths) <= 1


@given(st.integers(1, 100), st.integers(1, 16), st.integers(1, 20), st.sampled_from(["1f1b", "interleaved1f1b"]))
def test_stages_counted_from_their_length_are_no_longer(layers: int, ranks: int, longest: int, schedule: str) -> None:
    kind = schedule_named(schedule)
    try:
        stages = count_stages(kind, layers, ranks, longest)
    except ParallelSizeError:
        expected = -(-layers // longest)
        assert expected % ranks or (expected > ranks) != kind.several_stages
        return
    assert (stages == ranks) != kind.several_stages
    assert max(stop - start for start, stop in split_layers(layers, stages, longest)) <= longest


def test_stages_that_do_not_divide_are_refused_with_the_arithmetic() -> None:
    with pytest.raises(ParallelSizeError, match="30 layers with layers_per_stage=10 make 3 stages, no multiple of 2"):
        count_stages(schedule_named("interleaved1f1b"), 30, 2, 10)
    assert "make stages of 8, more than layers_per_stage=7" in refusal(split_layers, 30, 4, 7, error=ParallelSizeError)


def test_schedules_say_what_numbers_of_microbatches_they_take() -> None:
    assert count_microbatches(schedule_named("gpipe"), 6, 3, num_ranks=4, num_stages=4) == 2
    assert count_microbatches(schedule_named("interleaved1f1b"), 3, 1, num_ranks=4, num_stages=8) == 3
    assert count_microbatches(schedule_named("interleaved1f1b"), 10, 1, num_ranks=4, num_stages=8) == 10
    for name, rows in (("1f1b", 3), ("interleaved1f1b", 9), ("gpipe", 0)):
        refusal(count_microbatches, schedule_named(name), rows, 1, error=ConfigurationError, num_ranks=4, num_stages=4)
