"""Options of a pipeline."""

from typing import Any

import pytest
from torch import Tensor

from megatron_fsdp.automodel.pipeline_parallel.schedules import PipelineConfig
from megatron_fsdp.errors import ConfigurationError


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
    with pytest.raises(ConfigurationError, match=words):
        PipelineConfig(**options)
