"""A model that is built without memory begins as one that is not."""

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.conftest import RunRanks
from tests.train.engines.runs import DECODER, prepare, whole_weights

OTHER = {
    **DECODER,
    "position_embedding_type": "learned_absolute",
    "normalization": "LayerNorm",
    "swiglu": False,
    "add_bias_linear": True,
    "qk_layernorm": True,
    "kv_channels": 6,
}
UNTIED = {**DECODER, "untie_embeddings_and_output_weights": True}


def initial_weights(values: dict[str, Any]) -> dict[str, Tensor]:
    return whole_weights(prepare(values).trained.model)


@pytest.mark.full(cover=1)
@pytest.mark.parametrize("model", [OTHER, UNTIED])
@pytest.mark.parametrize(
    "engine",
    [
        {"use_megatron_fsdp": True},
        {"use_megatron_fsdp": True, "data_parallel_sharding_strategy": "optim", "bf16": True},
        {"use_torch_fsdp2": True, "bf16": True},
    ],
)
def test_initial_weights_are_the_same_bit_for_bit(
    run_ranks: RunRanks, model: dict[str, Any], engine: dict[str, Any]
) -> None:
    plain, meta = (
        run_ranks(2, initial_weights, {**model, **engine, "init_model_with_meta_device": is_meta})
        for is_meta in (False, True)
    )
    for built, drawn in zip(plain, meta, strict=True):
        assert built.keys() == drawn.keys()
        assert all(torch.equal(built[name], value) for name, value in drawn.items())
    drawn = meta[0]["blocks.1.feed_forward.output.weight"]
    assert drawn.std().item() == pytest.approx(0.1 / 2, rel=0.1)  # the root of 2 * 2 layers
