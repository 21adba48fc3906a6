"""Formulas of tensor, sequence, context, pipeline and expert parallelism, by hand and against traced models."""

from math import prod
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from megatron_fsdp.errors import ConfigurationError, ParallelSizeError
from megatron_fsdp.plan import Plan, find_machine, plan
from megatron_fsdp.plan.activations import profile_compute
from megatron_fsdp.plan.compute_profile import ComputeProfile
from megatron_fsdp.plan.models import PRESETS, build_meta_model, model_config, preset_config
from megatron_fsdp.plan.parallel import (
    DecoderShape,
    DecoderShare,
    decoder_shape,
    layers_of_stage,
    microbatches_in_flight,
    share_exchanges,
    share_profile,
)
from megatron_fsdp.plan.setup import ParallelRanks, Recompute, Setup
from tests.plan.test_models import PUBLISHED, ROUTER_BIASES
from tests.support.small_language_models import build_small

TOKENS, HIDDEN, HEADS, LAYERS = 256, 64, 8, 4
GPT = DecoderShape(HIDDEN, LAYERS, HEADS, HEADS, 8, 8, 4 * HIDDEN, 512, is_gated=False, has_biases=True)
LLAMA = DecoderShape(HIDDEN, LAYERS, HEADS, 2, 8, 8, 160, 512)
MIXTURE = DecoderShape(HIDDEN, LAYERS, HEADS, 2, 8, 8, 160, 512, experts=8, chosen=2, expert_inner=96, dense_layers=1)
BF16 = 2


def share(shape: DecoderShape, stage: int = 0, **ranks: int) -> DecoderShare:
    return DecoderShare(shape, ParallelRanks(**{"dp_shard": 1, **ranks}), 2, TOKENS // 2, stage=stage)


def names_of(own: DecoderShare) -> list[str]:
    return ["", *(f"layers.{place}" for place in range(len(own.layers)))]


def profile(own: DecoderShare, **choices: Any) -> ComputeProfile:
    return share_profile(own, Setup(own.ranks, **choices), names_of(own))


def kept_by_a_layer(shape: DecoderShape, recompute: Recompute = "none", *, sequence: bool = True, **ranks: int) -> int:
    found = profile(share(shape, **ranks), recompute=recompute, sequence_parallel=sequence)
    layer = next(segment for segment in found.segments if str(segment) == f"F{LAYERS}>")
    return layer.end_bytes - layer.begin_bytes


@pytest.mark.parametrize("name", PRESETS)
def test_parameters_are_those_of_published_models(name: str) -> None:
    expected = PUBLISHED[name] - (ROUTER_BIASES if name == "deepseek-v3" else 0)
    assert decoder_shape(model_config(name), "tp=2").numel == expected


@pytest.mark.parametrize("name", ["llama", "mixtral", "qwen3-moe", "deepseek-v3"])
def test_operations_are_those_of_a_traced_forward(name: str) -> None:
    with torch.device("meta"):
        model: Any = build_small(name)
        tokens = torch.empty(2, 16, dtype=torch.long)
    inputs = {"input_ids": tokens, "labels": tokens, "use_cache": False}
    traced = profile_compute(model, inputs, unit_names=[""], kernels="cpu").forward_flops
    own = DecoderShare(decoder_shape(model.config, "tp=2"), ParallelRanks(1), 2, 16, torch.float32)
    assert profile(own).forward_flops == pytest.approx(traced, rel=1e-3)


def test_kept_bytes_of_a_layer_are_korthikantis() -> None:
    """34 s b h without the masks of dropout, and a number per query and head for fused attention (section 4.1, 4.2)."""
    residual, inside = 4 * BF16, (4 + 8) * BF16  # norms: what they get and give; q, k, v, result, up, activation
    statistics = 4 * HEADS * TOKENS
    assert kept_by_a_layer(GPT) == (residual + inside) * TOKENS * HIDDEN + statistics
    divided = inside * TOKENS * HIDDEN // 4 + statistics // 4
    assert kept_by_a_layer(GPT, tp=4) == residual * TOKENS * HIDDEN // 4 + divided
    assert kept_by_a_layer(GPT, tp=4, sequence=False) == residual * TOKENS * HIDDEN + divided


def test_kept_bytes_under_recomputation() -> None:
    hidden = BF16 * TOKENS * HIDDEN
    statistics = 4 * HEADS * TOKENS
    assert kept_by_a_layer(LLAMA, "full") == hidden
    assert kept_by_a_layer(LLAMA, "full", tp=2) == hidden // 2
    results = (HIDDEN + 2 * 8 + 160 + HIDDEN) * BF16 * TOKENS  # query, value, gate, down
    assert kept_by_a_layer(LLAMA, "selective") == hidden + hidden + statistics + results
    everything = kept_by_a_layer(LLAMA)
    assert kept_by_a_layer(LLAMA, "mlp") == everything - 3 * 160 * BF16 * TOKENS
    assert kept_by_a_layer(LLAMA, "attention") == everything - (2 * HIDDEN + 2 * 16) * BF16 * TOKENS - statistics


def test_key_heads_are_repeated_where_there_are_fewer_than_ranks() -> None:
    shapes = {name: tuple(param.shape) for name, param in share(LLAMA, tp=4).module().named_parameters()}
    assert shapes["layers.0.query"] == (HIDDEN // 4, HIDDEN)
    assert shapes["layers.0.key"] == shapes["layers.0.value"] == (8, HIDDEN)
    assert shapes["layers.0.out"] == (HIDDEN, HIDDEN // 4)
    assert shapes["layers.0.gate"] == (40, HIDDEN)
    assert shapes["embedding.weight"] == shapes["head.weight"] == (128, HIDDEN)


@pytest.mark.parametrize("shape", [LLAMA, GPT, MIXTURE])
def test_stages_together_are_the_model(shape: DecoderShape) -> None:
    stages = [share(shape, stage, pp=3).module() for stage in range(3)]
    assert sum(param.numel() for stage in stages for param in stage.parameters()) == shape.numel


def test_ends_of_a_pipeline_are_lighter_where_that_is_even() -> None:
    llama = [len(layers_of_stage(126, 16, stage)) for stage in range(16)]
    assert llama == [7, *[8] * 14, 7]
    assert [list(layers_of_stage(5, 2, stage)) for stage in range(2)] == [[0, 1, 2], [3, 4]]
    with pytest.raises(ParallelSizeError, match="5 layers cannot be cut into pp=6 stages"):
        layers_of_stage(5, 6, 0)
    with pytest.raises(ParallelSizeError, match="stage=2 does not exist"):
        layers_of_stage(5, 2, 2)


def test_microbatches_in_flight_are_narayanans() -> None:
    def kept(stage: int, microbatches: int = 64, virtual: int = 1) -> float:
        setup = Setup(ParallelRanks(1, pp=4), microbatches=microbatches, virtual_stages=virtual)
        return microbatches_in_flight(setup, stage)

    assert [kept(stage) for stage in range(4)] == [4, 3, 2, 1]
    assert kept(0, microbatches=2) == 2
    assert kept(0, virtual=2) == 4 * (1 + 3 / 8)  # Korthikanti et al. 2022: 1 + (p - 1) / (p v)
    assert kept(3, virtual=2) == 2.5


def test_the_bubble_is_smaller_with_virtual_stages_and_the_peak_larger() -> None:
    def found(virtual: int) -> Plan:
        config = {**preset_config("llama-3.2-1b"), "tie_word_embeddings": False}
        ranks = {"dp_shard": 2, "pp": 4}
        return plan(config, ranks, sequence_length=512, microbatches=8, virtual_stages=virtual)

    plain, interleaved = found(1), found(4)
    assert (plain.bubble, interleaved.bubble) == (3 / 8, 3 / 32)
    assert interleaved.step_s < plain.step_s
    assert interleaved.memory.peak_bytes > plain.memory.peak_bytes


def sent(shape: DecoderShape, **choices: Any) -> dict[str, int]:
    ranks = {name: choices.pop(name) for name in ("tp", "cp", "pp", "ep", "dp_shard") if name in choices}
    own = share(shape, **ranks)
    found: dict[str, int] = {}
    for exchange in share_exchanges(own, Setup(own.ranks, **choices)):
        found[exchange.axis] = found.get(exchange.axis, 0) + exchange.count * exchange.sent_bytes
    return found


def test_bytes_of_exchanges_by_hand() -> None:
    hidden = BF16 * TOKENS * HIDDEN
    ends, halves = 2 * 2, 8 * LAYERS  # embedding and head; two collectives for each half of a layer and direction
    assert sent(LLAMA, tp=2) == {"tp": (ends + halves) * hidden // 2}
    assert sent(LLAMA, tp=2, recompute="full") == {"tp": (ends + 12 * LAYERS) * hidden // 2}
    assert sent(LLAMA, cp=4) == {"cp": 2 * LAYERS * 3 * BF16 * (TOKENS // 4) * 2 * 2 * 8}
    assert sent(MIXTURE, ep=4, dp_shard=4) == {"ep": 4 * (LAYERS - 1) * 2 * hidden * 3 // 4}
    assert sent(LLAMA, pp=2, virtual_stages=2) == {"pp": 3 * hidden}  # the first stage gets no tokens from others
    assert sent(LLAMA, pp=2, tp=2)["pp"] == hidden // 2


def test_operations_are_shared_by_all_ranks() -> None:
    whole = profile(share(LLAMA)).forward_flops
    assert profile(share(LLAMA, tp=2)).forward_flops == whole // 2
    assert profile(share(LLAMA, cp=2)).forward_flops == whole // 2
    stages = [profile(share(LLAMA, stage, pp=2)).forward_flops for stage in range(2)]
    assert sum(stages) == whole
    own = share(LLAMA, pp=2)
    assert own.slowdown(Setup(own.ranks)) == pytest.approx(stages[1] / stages[0])
    assert own.model_flops == pytest.approx(3 * whole / 2)


def test_experts_are_divided_before_they_are_sharded() -> None:
    few = {**preset_config("qwen3-30b-a3b"), "num_hidden_layers": 4}
    divided = plan(few, {"dp_shard": 64, "ep": 8}, sequence_length=64)
    whole = sum(param.numel() for param in build_meta_model(few, torch.bfloat16).parameters())
    experts = 4 * 128 * 3 * 2048 * 768
    assert divided.model.numel == whole - experts + experts // 8
    assert divided.memory.held.compute_weights == pytest.approx(BF16 * whole / 64, rel=0.01)
    with pytest.raises(ParallelSizeError, match="128 experts cannot be divided by ep=3"):
        plan(few, {"dp_shard": 3, "ep": 3}, sequence_length=64)


def test_8_bit_products_are_faster_where_there_are_some() -> None:
    def step_s(machine: str, *, fp8: bool) -> float:
        return plan("llama-3.2-1b", 8, sequence_length=512, machine=machine, fp8=fp8).step_s

    assert step_s("h100", fp8=True) < step_s("h100", fp8=False)
    with pytest.raises(ConfigurationError, match="machine 'a100' has no fp8 products"):
        step_s("a100", fp8=True)


def test_exchanges_that_overlap_are_counted_and_not_waited_for() -> None:
    plain, hidden = (
        plan("llama-3-8b", {"dp_shard": 1, "tp": 8}, sequence_length=512, overlap_exchanges=each)
        for each in (False, True)
    )
    assert plain.traffic == hidden.traffic
    waited = plain.step_s - hidden.step_s
    assert waited == pytest.approx(sum(axis.seconds for axis in plain.traffic if axis.axis == "tp"))


@pytest.mark.parametrize(
    ("changes", "ranks", "words"),
    [
        ({"attention_bias": True}, {"tp": 2}, "tp=2 cannot be planned.*parameters where the formulas count"),
        ({"model_type": "gemma"}, {"pp": 2}, "its architecture is gemma.*whether it fits is not known"),
        ({}, {"tp": 5}, "32 attention heads cannot be divided by tp=5"),
        ({}, {"ep": 2, "dp_shard": 2}, "0 experts cannot be divided by ep=2"),
        ({}, {"cp": 3}, "128 tokens of a sequence cannot be divided by 2 x cp=3"),
    ],
)
def test_what_the_formulas_do_not_know_has_no_verdict(
    changes: dict[str, Any], ranks: dict[str, int], words: str
) -> None:
    config = {**preset_config("llama-3.2-1b"), "num_hidden_layers": 2, **changes}
    with pytest.raises(ConfigurationError, match=words):
        plan(config, {"dp_shard": 1, **ranks}, sequence_length=128)


def test_virtual_stages_need_stages_and_layers() -> None:
    with pytest.raises(ConfigurationError, match="invalid virtual_stages=2 with pp=1"):
        plan("llama-3.2-1b", 2, virtual_stages=2)
    with pytest.raises(ConfigurationError, match="virtual_stages=9 need as many layers"):
        plan("llama-3.2-1b", {"dp_shard": 1, "pp": 4}, virtual_stages=9)
    assert find_machine("h100").all_to_all_s(8e9, 1) == 0.0
    assert prod(GPT.head()[0].shape) == 512 * HIDDEN
