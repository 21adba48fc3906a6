"""Expert parallelism on paper: what travels, and layers that are computed again."""

import pytest

from megatron_fsdp.errors import ConfigurationError
from megatron_fsdp.plan.front import plan
from megatron_fsdp.plan.presets import preset_config
from megatron_fsdp.plan.setup import Backend
from tests.plan.shares import ROWS, SEQUENCE, profile, share, without_memory


def test_rows_travel_twice_each_way() -> None:
    """Of 2 rows for each token, 3 of 4 go to other ranks."""
    workload = share(without_memory("qwen3_moe"), dp_shard=4, ep=4)
    sent = 2 * ROWS * SEQUENCE * 32 * 4 * 3 // 4
    assert [(x.axis, x.unit, x.sent_bytes, x.in_backward, x.count) for x in workload.exchanges] == [
        ("ep", f"model.layers.{layer}", sent, in_backward, 2) for layer in range(4) for in_backward in (False, True)
    ]
    assert [x.runs("full") for x in workload.exchanges[:2]] == [(2, 2), (0, 2)]
    assert [x.runs("attention") for x in workload.exchanges[:2]] == [(2, 0), (0, 2)]


def test_dense_layers_send_nothing() -> None:
    """The first layer of this model is dense, and so is its first of four stages."""
    model = without_memory("deepseek_v3")
    units = {x.unit for x in share(model, dp_shard=2, ep=2).exchanges}
    assert units == {f"model.layers.{layer}" for layer in (1, 2, 3)}
    first = share(model, dp_shard=2, ep=2, pp=4)
    assert {x.axis for x in first.exchanges} == {"pp"}
    assert profile(first, Backend.NCCL, dp_shard=2, ep=2, pp=4).forward_flops > 0


@pytest.mark.full(short=["deepseek_v3-4"])
@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("kind", ["deepseek_v3", "mixtral"])
def test_recomputed_layers_keep_their_shapes(kind: str, ranks: int) -> None:
    """A cache of keys would grow when layers run again."""
    workload = share(without_memory(kind), dp_shard=4, ep=ranks)
    plain, repeated = (profile(workload, Backend.NCCL, mode, dp_shard=4, ep=ranks) for mode in ("none", "full"))
    assert (repeated.forward_flops, repeated.backward_flops) == (plain.forward_flops, plain.backward_flops)
    head = 2 * ROWS * SEQUENCE * 32 * 96
    assert 0 < repeated.recomputed_flops <= plain.forward_flops - head
    assert repeated.kept_bytes < plain.kept_bytes


def test_deepseek_v3_on_two_thousand_ranks() -> None:
    """256 experts on 64 ranks: four on each; two of five layers have experts."""
    config = {**preset_config("deepseek-v3"), "num_hidden_layers": 5}
    ranks = {"dp_shard": 256, "dp_outer": 8, "ep": 64}
    found = plan(config, ranks, recompute="full", sequence_length=256)
    layer = next(unit for unit in found.model.units if unit.name == "model.layers.4")
    experts = 4 * 3 * 7168 * 2048
    assert sum(group.layout.payload_numel for group in layer.groups if group.spec.key.is_expert) == experts
    sent = 8 * 256 * 7168 * 2 * 63 // 64
    exchanges = [traffic for traffic in found.traffic if traffic.axis == "ep"]
    assert [(traffic.reductions, traffic.sent_bytes) for traffic in exchanges] == [(2 * 6, 2 * 6 * sent)]


def test_impossible_arrangements_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="ep=2 and tp=2 cannot divide one model"):
        share(without_memory("mixtral"), dp_shard=2, ep=2, tp=2)
    with pytest.raises(ConfigurationError, match=r"LlamaForCausalLM has no fused experts.*use ep=1"):
        share(without_memory("llama"), dp_shard=2, ep=2)
