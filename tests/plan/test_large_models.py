"""Models that no machine here could hold: by hand, and by their small twins."""

from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from megatron_fsdp.plan.activations import profile_compute
from megatron_fsdp.plan.compute_profile import ComputeProfile
from megatron_fsdp.plan.models import build_meta_model, preset_config
from megatron_fsdp.plan.setup import Recompute

TOKENS, HIDDEN, VOCABULARY = 8192, 16384, 128256
BF16 = 2


def profile(config: dict[str, Any], recompute: Recompute) -> ComputeProfile:
    model = build_meta_model(config, torch.bfloat16)
    ids = torch.empty(1, TOKENS, dtype=torch.int64, device="meta")
    names = ["", *(f"model.layers.{index}" for index in range(config["num_hidden_layers"]))]
    inputs = {"input_ids": ids, "labels": ids, "use_cache": False}
    return profile_compute(model, inputs, unit_names=names, recompute=recompute)


@pytest.mark.full
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_405b_is_its_small_twin_with_more_equal_layers(recompute: Recompute) -> None:
    config = preset_config("llama-3-405b")
    layers = config["num_hidden_layers"]
    two, three = (profile({**config, "num_hidden_layers": count}, recompute) for count in (2, 3))
    whole = profile(config, recompute)
    per_layer = three.kept_bytes - two.kept_bytes
    assert whole.kept_bytes == two.kept_bytes + (layers - 2) * per_layer
    assert whole.peak_bytes - whole.kept_bytes == three.peak_bytes - three.kept_bytes
    for name in ("forward_flops", "backward_flops", "recomputed_flops", "moved_bytes"):
        first, second = getattr(two, name), getattr(three, name)
        assert getattr(whole, name) == first + (layers - 2) * (second - first)
    if recompute == "full":
        assert per_layer == BF16 * TOKENS * HIDDEN


def test_products_of_405b_by_hand() -> None:
    """Each weight but the embedding is multiplied once per token; attention is two products per query and key."""
    config = preset_config("llama-3-405b")
    found = profile({**config, "num_hidden_layers": 1}, "none")
    heads, key_heads, inner = 128, 8, config["intermediate_size"]
    projections = HIDDEN * HIDDEN * (2 + 2 * key_heads / heads) + 3 * HIDDEN * inner
    attention = 2 * 2 * TOKENS * TOKENS * HIDDEN
    assert found.forward_flops == 2 * TOKENS * (projections + HIDDEN * VOCABULARY) + attention
