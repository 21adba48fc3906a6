"""Configurations of transformers from options, and data that do not fit them."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_fsdp.errors import ConfigurationError
from megatron_fsdp.train.models.build import check_fits, transformers_config
from tests.train.models.runs import LLAMA, job_of

transformers = pytest.importorskip("transformers")

QWEN = {**LLAMA, "qk_layernorm": True, "kv_channels": 6, "rotary_base": 500.0, "norm_epsilon": 1e-3}


def config_of(values: dict[str, Any], vocab_size: int = 59) -> Any:
    return transformers_config(job_of(values, 1).options.model, vocab_size)


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        (LLAMA, "LlamaConfig"),
        ({**LLAMA, "num_experts": 4}, "MixtralConfig"),
        (QWEN, "Qwen3Config"),
        ({**QWEN, "num_experts": 4}, "Qwen3MoeConfig"),
    ],
)
def test_family_of_a_shape(values: dict[str, Any], kind: str) -> None:
    assert type(config_of(values)).__name__ == kind


def test_every_number_of_the_shape_arrives() -> None:
    config = config_of({**QWEN, "num_experts": 6, "moe_router_topk": 3, "moe_ffn_hidden_size": 20, "seq_length": 24})
    told = {
        "num_hidden_layers": 2,
        "hidden_size": 16,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 6,
        "intermediate_size": 24,
        "moe_intermediate_size": 20,
        "num_experts": 6,
        "num_experts_per_tok": 3,
        "vocab_size": 64,
        "max_position_embeddings": 24,
        "rms_norm_eps": 1e-3,
        "initializer_range": 0.1,
        "tie_word_embeddings": False,
    }
    assert {name: getattr(config, name) for name in told} == told
    assert config.rope_parameters["rope_theta"] == 500.0


def test_biases_and_tied_embeddings_arrive() -> None:
    values = {**LLAMA, "add_bias_linear": True, "untie_embeddings_and_output_weights": False}
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config_of(values))
    assert model.model.layers[0].mlp.down_proj.bias is not None
    assert model.model.layers[0].self_attn.q_proj.bias is not None
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_file_or_folder_of_a_configuration(tmp_path: Path) -> None:
    config_of(LLAMA).save_pretrained(tmp_path)
    base = {name: LLAMA[name] for name in ("seq_length", "micro_batch_size", "train_iters", "lr")}
    for path in (tmp_path, tmp_path / "config.json"):
        found = config_of({**base, "hf_config": str(path)})
        assert json.loads(found.to_json_string())["hidden_size"] == 16
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigurationError, match=r"has no config that transformers .* reads"):
        config_of({**base, "hf_config": str(tmp_path)})
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "bart"}))
    with pytest.raises(ConfigurationError, match=r"encoder-decoder \(bart\), and the trainer trains decoders"):
        config_of({**base, "hf_config": str(tmp_path)})


def test_data_that_do_not_fit_are_refused_with_both_numbers() -> None:
    config = config_of(LLAMA)
    check_fits(config, 64, 8)
    with pytest.raises(ConfigurationError, match="the data has 65 token ids and the model knows 64"):
        check_fits(config, 65, 8)
    with pytest.raises(ConfigurationError, match="--seq-length 9 is more than the 8 positions of the model"):
        check_fits(config, 59, 9)
