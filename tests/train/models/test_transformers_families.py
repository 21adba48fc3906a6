"""Models of transformers by `--hf-config`, each kind beside a plain loop in one process."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import RunRanks
from tests.train.models.runs import LLAMA, SMALL_SHAPE, assert_equal_to_one_process, train_here

pytest.importorskip("transformers")

UNITS = {"use_megatron_fsdp": True}
BUCKETS = {"overlap_grad_reduce": True, "use_distributed_optimizer": True}
FSDP2 = {"use_torch_fsdp2": True}
FULL = {"recompute_granularity": "full"}
RUN = {
    name: LLAMA[name]
    for name in ("seq_length", "micro_batch_size", "global_batch_size", "train_iters", "lr", "adam_eps", "clip_grad")
}
RUN |= {"weight_decay": 0.1, "eval_iters": 1, "log_interval": 2}
SMALL = {**SMALL_SHAPE, "max_position_embeddings": 64}
LATENT = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8}
GROUPED = {"n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "moe_intermediate_size": 8}
WINDOW = {"sliding_window": 4, "query_pre_attn_scalar": 4, "head_dim": 4}
CONFIGS: dict[str, dict[str, Any]] = {
    "deepseek_v3": {**SMALL, **LATENT, **GROUPED, "num_key_value_heads": 4, "first_k_dense_replace": 1},
    "qwen3": {**SMALL, "head_dim": 6, "tie_word_embeddings": True},
    "mixtral": {**SMALL, "num_local_experts": 4, "num_experts_per_tok": 2},
    "gemma2": {**SMALL, **WINDOW},
    "gemma3_text": {**SMALL, **WINDOW, "layer_types": ["sliding_attention", "full_attention"]},
}


@pytest.mark.full(short=["gemma3_text-engine7"])
@pytest.mark.parametrize(
    ("family", "engine"),
    [
        ("deepseek_v3", UNITS),
        ("deepseek_v3", {**FSDP2, **FULL}),
        ("qwen3", {**UNITS, **FULL}),
        ("qwen3", FSDP2),
        ("mixtral", BUCKETS),
        ("gemma2", UNITS),
        ("gemma3_text", BUCKETS),
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
