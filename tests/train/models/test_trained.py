"""What every engine does with a batch: how it is copied, what is rounded, and where weights begin."""

from typing import Any

import pytest
import torch
from torch import nn

from megatron_fsdp.train.models.trained import build_optimizer
from megatron_fsdp.train.options import OptimizerOptions
from tests.conftest import RunRanks
from tests.train.models.runs import DECODER, initial_weights

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


def test_options_of_the_optimizer_are_those_of_its_groups() -> None:
    model = nn.Linear(2, 2)
    for options, values in (
        (
            OptimizerOptions(lr=0.5, weight_decay=0.25, adam_beta1=0.1, adam_beta2=0.2, adam_eps=0.3),
            {"lr": 0.5, "betas": (0.1, 0.2), "eps": 0.3},
        ),
        (OptimizerOptions("sgd", lr=0.5, weight_decay=0.25, sgd_momentum=0.4), {"lr": 0.5, "momentum": 0.4}),
    ):
        groups = build_optimizer(model, options).param_groups
        assert [group["params"] for group in groups] == [[model.weight], [model.bias]]
        assert [group["weight_decay"] for group in groups] == [0.25, 0.0]
        assert all(group[name] == value for group in groups for name, value in values.items())
