"""Every engine, on any number of ranks, trains as a plain loop in one process does on the whole batch."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_fsdp.train.loop import train
from tests.conftest import RunRanks
from tests.train.models.runs import (
    DECODER,
    LLAMA,
    MIXTRAL,
    SMALL_SHAPE,
    TIED,
    NoCheckpoints,
    Results,
    Silent,
    assert_equal_to_one_process,
    prepare,
    refusal_of_building,
    results_of,
    train_here,
    train_plainly,
    whole_weights,
)

UNITS = {"use_megatron_fsdp": True}
EVERYTHING = {**UNITS, "data_parallel_sharding_strategy": "optim_grads_params"}
BUCKETS = {"overlap_grad_reduce": True}
SHARDED_BUCKETS = {**BUCKETS, "use_distributed_optimizer": True, "overlap_param_gather": True}
FSDP2 = {"use_torch_fsdp2": True}
MASKED = {"eod_mask_loss": True, "calculate_per_token_loss": True}


def numbered(name: str, ranks: int, model: dict[str, Any], *values: dict[str, Any]) -> dict[str, Any]:
    return {f"{name} {number}": (ranks, {**model, **each}) for number, each in enumerate(values)}


TENSOR, CONTEXT, PIPELINE, EXPERT = (
    {f"{axis}_parallel_size": 2} for axis in ("tensor_model", "context", "pipeline_model", "expert_model")
)
FULL = {"recompute_granularity": "full"}
TWO = {**EVERYTHING, "num_distributed_optimizer_instances": 2}
ZERO_1 = {**UNITS, "data_parallel_sharding_strategy": "optim"}
WITHOUT_ADAM = {name: value for name, value in DECODER.items() if name != "adam_eps"}
TABLE: dict[str, tuple[int, dict[str, Any]]] = {
    "five samples on 3 ranks": (3, {**DECODER, **EVERYTHING, "micro_batch_size": 1}),
    **{
        strategy: (2, {**DECODER, **UNITS, "data_parallel_sharding_strategy": strategy})
        for strategy in ("no_shard", "optim_grads")
    },
    **numbered(
        "decoder",
        2,
        DECODER,
        SHARDED_BUCKETS,
        {**BUCKETS, **MASKED},
        {**EVERYTHING, "calculate_per_token_loss": True, "init_model_with_meta_device": True},
        {**EVERYTHING, **FULL, "recompute_num_layers": 1, "global_batch_size": 11},
        {**FSDP2, "init_model_with_meta_device": True},
        {**FSDP2, **FULL, "torch_fsdp2_no_reshard_after_forward": True, "global_batch_size": 11},
    ),
    "sgd": (2, {**WITHOUT_ADAM, **EVERYTHING, "optimizer": "sgd", "clip_grad": 0.0}),
    "two instances": (4, {**DECODER, **TWO, "outer_dp_sharding_strategy": "optim"}),
    **numbered(
        "llama",
        2,
        LLAMA,
        {**EVERYTHING, **TENSOR, "sequence_parallel": True},
        {**BUCKETS, **TENSOR},
        {**EVERYTHING, **MASKED, **CONTEXT, "cp_comm_type": ("a2a",)},
        {**FSDP2, **MASKED, **PIPELINE},
        {**EVERYTHING, **MASKED, **PIPELINE, **FULL},
        {**BUCKETS, **PIPELINE},
    ),
    **numbered(
        "llama on four",
        4,
        LLAMA,
        {**EVERYTHING, **PIPELINE, **TENSOR},
        {**SHARDED_BUCKETS, **PIPELINE, "global_batch_size": 11},
        {**TWO, **PIPELINE},
    ),
    **numbered("experts", 2, MIXTRAL, {**FSDP2, **EXPERT}, {**BUCKETS, **MASKED, **EXPERT}),
    **numbered(
        "experts on four",
        4,
        MIXTRAL,
        {**EVERYTHING, **EXPERT, "global_batch_size": 11},
        {**SHARDED_BUCKETS, **EXPERT},
        {**EVERYTHING, **EXPERT, **TENSOR},
        {**ZERO_1, **EXPERT, "data_parallel_sharding_strategy_experts": "optim_grads_params"},
    ),
}
SHORT = ["five samples on 3 ranks", "two instances", "llama 4", "experts 0"]


@pytest.mark.full(short=SHORT)
@pytest.mark.parametrize(("ranks", "values"), TABLE.values(), ids=TABLE)
def test_ranks_train_as_one_process_does(run_ranks: RunRanks, ranks: int, values: dict[str, Any]) -> None:
    for found in run_ranks(ranks, train_here, values):
        assert_equal_to_one_process(found, values)


@pytest.mark.full(short=["adamw8bit-2e-05"])
@pytest.mark.parametrize(("optimizer", "tolerance"), [("muon", 1e-3), ("adamw8bit", 2e-5)])
def test_decoder_under_other_optimizers(run_ranks: RunRanks, optimizer: str, tolerance: float) -> None:
    """Muon iterates in bf16, where gradients that are added in another order may round to other numbers."""
    values = {**DECODER, **EVERYTHING, "optimizer": optimizer}
    for found in run_ranks(2, train_here, values):
        assert_equal_to_one_process(found, values, tolerance)


@pytest.mark.full(short=["engine1"])
@pytest.mark.parametrize("engine", [FSDP2, EVERYTHING])
def test_tied_ends_in_two_stages_stay_one(run_ranks: RunRanks, engine: dict[str, Any]) -> None:
    values = {**TIED, **engine, **PIPELINE}
    for found in run_ranks(2, train_here, values):
        head = found.weights.pop("lm_head.weight")
        assert torch.equal(head, found.weights["model.embed_tokens.weight"])
        assert_equal_to_one_process(found, values)


def test_tied_ends_that_would_be_cut_differently_are_refused(run_ranks: RunRanks) -> None:
    told = run_ranks(4, refusal_of_building, {**TIED, **EVERYTHING, **PIPELINE})
    assert told == told[:1] * 4
    assert told[0].startswith("the embeddings and the head of LlamaForCausalLM are tied, and lie in two stages")
    assert "give --untie-embeddings-and-output-weights" in told[0]


# ---- families of transformers, by --hf-config ------------------------------------------------------------------------

pytest.importorskip("transformers")

RUN = {
    name: LLAMA[name]
    for name in ("seq_length", "micro_batch_size", "global_batch_size", "train_iters", "lr", "adam_eps", "clip_grad")
}
RUN |= {"weight_decay": 0.1, "eval_iters": 1, "log_interval": 2}
SMALL = {**SMALL_SHAPE, "max_position_embeddings": 64}
LATENT = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8}
GROUPED = {"n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "moe_intermediate_size": 8}
PARTS = {"recompute_granularity": "selective", "recompute_modules": ("moe", "mlp", "layernorm", "mla_up_proj")}
WINDOW = {"sliding_window": 4, "query_pre_attn_scalar": 4, "head_dim": 4}
CONFIGS: dict[str, dict[str, Any]] = {
    "deepseek_v3": {**SMALL, **LATENT, **GROUPED, "num_key_value_heads": 4, "first_k_dense_replace": 1},
    "qwen3": {**SMALL, "head_dim": 6, "tie_word_embeddings": True},
    "mixtral": {**SMALL, "num_local_experts": 4, "num_experts_per_tok": 2},
    "gemma2": {**SMALL, **WINDOW},
    "gemma3_text": {**SMALL, **WINDOW, "layer_types": ["sliding_attention", "full_attention"]},
}


@pytest.mark.full(short=["gemma3_text-engine4"])
@pytest.mark.parametrize(
    ("family", "engine"),
    [
        ("deepseek_v3", {**UNITS, **PARTS}),
        ("qwen3", {**UNITS, **FULL}),
        ("mixtral", {**BUCKETS, "use_distributed_optimizer": True}),
        ("gemma2", UNITS),
        ("gemma3_text", FSDP2),
    ],
)
def test_a_family_trains_as_in_one_process(
    run_ranks: RunRanks, family: str, engine: dict[str, Any], tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": family, **CONFIGS[family]}), encoding="utf-8")
    values = {**RUN, **engine, "hf_config": str(tmp_path)}
    for found in run_ranks(2, train_here, values):
        assert_equal_to_one_process(found, values)


# ---- what a model drops follows from the samples, and not from ranks, engines or recomputation -----------------------

GPT2 = {"model_type": "gpt2", "vocab_size": 64, "n_positions": 16, "n_embd": 16, "n_layer": 2, "n_head": 4}
IDS = {"bos_token_id": None, "eos_token_id": None}
DROPS = {"resid_pdrop": 0.2, "embd_pdrop": 0.2, "attn_pdrop": 0.2}


@pytest.fixture(scope="module")
def values(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A run of GPT-2 that drops a fifth everywhere."""
    folder = tmp_path_factory.mktemp("gpt2")
    (folder / "config.json").write_text(json.dumps({**GPT2, **IDS, **DROPS, "initializer_range": 0.1}))
    return {**RUN, "global_batch_size": 7, "hf_config": str(folder)}


def train_and_keep_the_beginning(values: dict[str, Any]) -> tuple[Results, dict[str, Tensor]]:
    run, watcher = prepare(values), Silent()
    first = whole_weights(run.trained.model)
    torch.manual_seed(torch.distributed.get_rank())  # what was drawn before must not matter
    train(run, watcher, NoCheckpoints())
    return results_of(run, watcher), first


@pytest.mark.full(short=["2-engine0"])
@pytest.mark.parametrize(("ranks", "engine"), [(2, {**UNITS, **FULL}), (3, {"overlap_grad_reduce": True}), (3, FSDP2)])
def test_the_same_is_dropped_on_any_ranks(
    run_ranks: RunRanks, values: dict[str, Any], ranks: int, engine: dict[str, Any]
) -> None:
    for found, first in run_ranks(ranks, train_and_keep_the_beginning, {**values, **engine}):
        assert_equal_to_one_process(found, values, plain=train_plainly(values, first=first))
