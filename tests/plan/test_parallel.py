"""Formulas of tensor, sequence, context, pipeline and expert parallelism, by hand and against traced models."""

from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("transformers")

from megatron_fsdp.errors import ConfigurationError, ParallelSizeError
from megatron_fsdp.plan import plan
from megatron_fsdp.plan.activations import profile_compute
from megatron_fsdp.plan.compute_profile import ComputeProfile
from megatron_fsdp.plan.models import PRESETS, build_meta_model
from megatron_fsdp.plan.parallel import (
    DecoderShare,
    layers_of_stage,
    microbatches_in_flight,
    share_exchanges,
    share_profile,
)
from megatron_fsdp.plan.setup import ParallelRanks, Recompute, Setup
from tests.support.language_models import build_small
from tests.support.on_ranks import refusal

TOKENS, HIDDEN, HEADS, LAYERS = 256, 64, 8, 4
BF16 = 2


def build(kind: str, **changes: Any) -> nn.Module:
    """A model of the widths above in bf16, without memory."""
    fields = {
        "model_type": kind,
        "hidden_size": HIDDEN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": 2,
        "intermediate_size": 160,
        "vocab_size": 512,
        "head_dim": 8,
        "tie_word_embeddings": False,
        **changes,
    }
    return build_meta_model(fields, torch.bfloat16)


GPT = build_meta_model({"model_type": "gpt2", "n_embd": HIDDEN, "n_layer": LAYERS, "n_head": HEADS}, torch.bfloat16)
LLAMA = build("llama")
MIXTURE = build("qwen3_moe", num_experts=8, num_experts_per_tok=2, moe_intermediate_size=96, mlp_only_layers=[0])


def share(model: nn.Module, stage: int = 0, **ranks: int) -> DecoderShare:
    return DecoderShare(model, ParallelRanks(**{"dp_shard": 1, **ranks}), 2, TOKENS // 2, stage=stage)


def profile(own: DecoderShare, **choices: Any) -> ComputeProfile:
    names = ["", *(f"{own.layer_path}.{place}" for place in range(len(own.layers)))]
    return share_profile(own, Setup(own.ranks, **choices), own.module(), names)


def kept_by_a_layer(model: nn.Module, recompute: Recompute = "none", *, sequence: bool = True, **ranks: int) -> int:
    found = profile(share(model, **ranks), recompute=recompute, sequence_parallel=sequence)
    begins, ends = (next(s for s in found.segments if str(s) == f"F{LAYERS}{mark}") for mark in "><")
    return ends.begin_bytes - begins.begin_bytes


@pytest.mark.parametrize("name", ["llama", "mixtral", "qwen3-moe", "deepseek-v3", "gpt2-dropout"])
def test_operations_are_those_of_a_traced_forward(name: str) -> None:
    with torch.device("meta"):
        model: Any = build_small(name)
        tokens = torch.empty(2, 16, dtype=torch.long)
    inputs = {"input_ids": tokens, "labels": tokens, "use_cache": False}
    traced = profile_compute(model, inputs, unit_names=[""], kernels="cpu").forward_flops
    assert profile(DecoderShare(model, ParallelRanks(1), 2, 16)).forward_flops == pytest.approx(traced, rel=1e-3)


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
    assert kept_by_a_layer(LLAMA, "every_second_product") == hidden + hidden + statistics + results
    everything = kept_by_a_layer(LLAMA)
    assert kept_by_a_layer(LLAMA, "mlp") == everything - 3 * 160 * BF16 * TOKENS
    assert kept_by_a_layer(LLAMA, "selective") == everything - hidden - statistics  # the result of attention


def test_matrices_and_biases_are_cut_as_the_ranks_share_their_products() -> None:
    llama = {name: tuple(param.shape) for name, param in share(LLAMA, tp=4).module().named_parameters()}
    assert llama["model.layers.0.self_attn.k_proj.weight"] == (8, HIDDEN)  # two key heads, repeated on four ranks
    assert llama["model.layers.0.self_attn.o_proj.weight"] == (HIDDEN, HIDDEN // 4)
    assert llama["model.layers.0.input_layernorm.weight"] == (HIDDEN,)
    assert llama["model.embed_tokens.weight"] == llama["lm_head.weight"] == (128, HIDDEN)
    shapes = {name: tuple(param.shape) for name, param in share(GPT, tp=4).module().named_parameters()}
    layer = {name.removeprefix("transformer.h.0."): shape for name, shape in shapes.items()}
    assert (layer["attn.c_attn.weight"], layer["attn.c_attn.bias"]) == ((HIDDEN, 3 * HIDDEN // 4), (3 * HIDDEN // 4,))
    assert (layer["attn.c_proj.weight"], layer["attn.c_proj.bias"]) == ((HIDDEN // 4, HIDDEN), (HIDDEN,))
    mixture = dict(share(MIXTURE, tp=2).module().named_parameters())
    assert mixture["model.layers.1.mlp.experts.gate_up_proj"].shape == (8, 96, HIDDEN)
    assert mixture["model.layers.1.mlp.experts.down_proj"].shape == (8, HIDDEN, 48)
    assert mixture["model.layers.1.mlp.gate.weight"].shape == (8, HIDDEN)
    mixture = dict(share(MIXTURE, ep=4, dp_shard=4).module().named_parameters())
    assert mixture["model.layers.1.mlp.experts.down_proj"].shape == (2, HIDDEN, 96)


@pytest.mark.parametrize("model", [LLAMA, MIXTURE])
def test_stages_together_are_the_model(model: nn.Module) -> None:
    names = [name for name, _ in model.named_parameters()]
    stages = [share(model, stage, pp=3).module() for stage in range(3)]
    assert sum(param.numel() for stage in stages for param in stage.parameters()) == sum(
        param.numel() for param in model.parameters()
    )
    assert names == [name for name, _ in model.named_parameters()]  # which is left as it was


def test_ends_of_a_pipeline_are_lighter_where_that_is_even() -> None:
    llama = [len(layers_of_stage(126, 16, stage)) for stage in range(16)]
    assert llama == [7, *[8] * 14, 7]
    assert [list(layers_of_stage(5, 2, stage)) for stage in range(2)] == [[0, 1, 2], [3, 4]]
    assert "5 layers cannot be cut into pp=6 stages" in refusal(layers_of_stage, 5, 6, 0, error=ParallelSizeError)
    assert "stage=2 does not exist" in refusal(layers_of_stage, 5, 2, 2, error=ParallelSizeError)


def test_microbatches_in_flight_are_narayanans() -> None:
    def kept(stage: int, microbatches: int = 64, virtual: int = 1) -> float:
        setup = Setup(ParallelRanks(1, pp=4), microbatches=microbatches, virtual_stages=virtual)
        return microbatches_in_flight(setup, stage)

    assert [kept(stage) for stage in range(4)] == [4, 3, 2, 1]
    assert kept(0, microbatches=2) == 2
    assert kept(0, virtual=2) == 4 * (1 + 3 / 8)  # Korthikanti et al. 2022: 1 + (p - 1) / (p v)
    assert kept(3, virtual=2) == 2.5


def sent(model: nn.Module, **choices: Any) -> dict[str, int]:
    ranks = {name: choices.pop(name) for name in ("tp", "cp", "pp", "ep", "dp_shard") if name in choices}
    own = share(model, **ranks)
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


def test_experts_are_divided_before_they_are_sharded() -> None:
    few = {**PRESETS["qwen3-30b-a3b"], "num_hidden_layers": 4}
    divided = plan(few, {"dp_shard": 64, "ep": 8}, sequence_length=64)
    whole = sum(param.numel() for param in build_meta_model(few, torch.bfloat16).parameters())
    experts = 4 * 128 * 3 * 2048 * 768
    assert divided.model.numel == whole - experts + experts // 8
    assert divided.memory.compute_weights == pytest.approx(BF16 * whole / 64, rel=0.01)
    with pytest.raises(ParallelSizeError, match="128 experts cannot be divided by ep=3"):
        plan(few, {"dp_shard": 3, "ep": 3}, sequence_length=64)


@pytest.mark.parametrize(
    ("changes", "ranks", "words"),
    [
        ({"model_type": "gemma"}, {"pp": 2}, "its architecture is gemma.*whether it fits is not known"),
        ({}, {"tp": 5}, "32 attention heads cannot be divided by tp=5"),
        ({}, {"ep": 2, "dp_shard": 2}, "0 experts cannot be divided by ep=2"),
        ({}, {"cp": 3}, "128 tokens of a sequence cannot be divided by 2 x cp=3"),
    ],
)
def test_what_the_formulas_do_not_know_has_no_verdict(
    changes: dict[str, Any], ranks: dict[str, int], words: str
) -> None:
    config = {**PRESETS["llama-3.2-1b"], "num_hidden_layers": 2, **changes}
    with pytest.raises(ConfigurationError, match=words):
        plan(config, {"dp_shard": 1, **ranks}, sequence_length=128)
