"""What recomputation keeps and repeats."""

import pytest
import torch
from torch import nn

pytest.importorskip("transformers")

from megatron_fsdp.errors import ConfigurationError
from megatron_fsdp.plan.activations import profile_compute
from megatron_fsdp.plan.compute_profile import ComputeProfile
from megatron_fsdp.plan.recompute import recomputing
from megatron_fsdp.plan.setup import Recompute
from tests.support.counting import on_meta, token_batch
from tests.support.language_models import LAYERS, build_small, unit_names
from tests.support.zoo import TOWER_FEATURES, Tower

HIDDEN = 32
TOKENS = token_batch()["input_ids"].numel()


def profile(recompute: Recompute, name: str = "llama") -> ComputeProfile:
    with torch.device("meta"):
        model = build_small(name)
    batch = on_meta(token_batch())
    return profile_compute(model, batch, unit_names=unit_names(name), kernels="cpu", recompute=recompute)


def test_recomputation_repeats_a_forward_up_to_what_backward_needs() -> None:
    """Torch stops a recomputation at the last tensor that is saved: the product of `down_proj` is not repeated."""
    plain, full = profile("none"), profile("full")
    assert plain.recomputed_flops == 0
    assert (full.forward_flops, full.backward_flops) == (plain.forward_flops, plain.backward_flops)
    layers = {f"F{unit}>" for unit in range(1, LAYERS + 1)}
    forward = sum(segment.flops for segment in plain.segments if str(segment) in layers)
    last_products = LAYERS * 2 * TOKENS * 48 * HIDDEN
    assert full.recomputed_flops == forward - last_products


@pytest.mark.parametrize("recompute", ["selective", "every_second_product", "mlp"])
def test_parts_keep_more_than_units_and_less_than_all(recompute: Recompute) -> None:
    assert profile("full").kept_bytes < profile(recompute).kept_bytes < profile("none").kept_bytes


def test_the_core_of_attention_repeats_no_product_with_weights() -> None:
    plain, found = profile("none"), profile("selective")
    products = [sum(segment.product_flops for segment in each.segments) for each in (plain, found)]
    assert products[0] == products[1]
    assert found.recomputed_flops > 0


def test_nothing_to_recompute_is_refused() -> None:
    model = nn.Linear(TOWER_FEATURES, TOWER_FEATURES)
    with pytest.raises(ConfigurationError, match="no units besides the root"), recomputing(model, [""], "full"):
        pass
    words = "no units with self_attn, self_attention, attention, attn"
    with pytest.raises(ConfigurationError, match=words), recomputing(Tower(), ["", "floors.0"], "selective"):
        pass
