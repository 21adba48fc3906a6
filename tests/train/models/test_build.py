"""Configurations of transformers from options, data that do not fit them, and options that contradict each other."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_fsdp.errors import ConfigurationError
from megatron_fsdp.train.models.build import check_fits, transformers_config
from megatron_fsdp.train.options.command_line import PRESETS, Layer, assemble
from megatron_fsdp.train.options.job import World, resolve
from tests.train.models.runs import DECODER, LLAMA, MIXTRAL, job_of

transformers = pytest.importorskip("transformers")

QWEN = {**LLAMA, "qk_layernorm": True, "kv_channels": 6, "rotary_base": 500.0, "norm_epsilon": 1e-3}


def config_of(values: dict[str, Any], vocab_size: int = 59) -> Any:
    return transformers_config(job_of(values, 1).options.model, vocab_size)


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


# ---- options that contradict each other ------------------------------------------------------------------------------

FSDP2 = {"use_torch_fsdp2": True}
SHARDED = {"use_megatron_fsdp": True, "data_parallel_sharding_strategy": "optim_grads_params"}
HF = {"hf_config": "folder", "seq_length": 8, "micro_batch_size": 1, "train_iters": 1, "lr": 1.0}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({**HF, "hidden_size": 8, "swiglu": True}, "--hidden-size, --swiglu: the shape is that of --hf-config"),
        ({**HF, "transformer_impl": "local"}, "--transformer-impl local contradicts --hf-config"),
        ({**DECODER, "num_experts": 4}, "--num-experts does nothing without --transformer-impl"),
        ({**DECODER, "position_embedding_type": "learned_absolute", "rotary_base": 5.0}, "--rotary-base does nothing"),
        ({**DECODER, "max_position_embeddings": 4}, "--seq-length 8 is more than --max-position-embeddings 4"),
        ({**LLAMA, "normalization": "LayerNorm", "swiglu": False}, "give --normalization RMSNorm --swiglu too"),
        ({**LLAMA, "qk_layernorm": True, "add_bias_linear": True}, "give --disable-bias-linear"),
        ({**MIXTRAL, "moe_router_topk": 5}, "--moe-router-topk 5 is more than --num-experts 4"),
        ({**LLAMA, "recompute_granularity": "selective"}, "selective is not offered for models of transformers"),
        (
            {**DECODER, "recompute_granularity": "full", "recompute_num_layers": 3},
            "--recompute-num-layers 3 is more than --num-layers 2",
        ),
        ({**DECODER, "fp16": True, "check_for_nan_in_loss_and_grad": True}, "--fp16 .* contradicts --check-for-nan-in"),
        ({**DECODER, "pipeline_model_parallel_size": 2}, "the decoder of this package is not cut"),
        (
            {**MIXTRAL, "expert_model_parallel_size": 3, "tensor_model_parallel_size": 2},
            "size 3 does not divide the 4 da",
        ),
        ({**MIXTRAL, **FSDP2, "num_experts": 3, "expert_model_parallel_size": 2}, "does not divide --num-experts 3"),
        ({**LLAMA, **FSDP2, "pipeline_model_parallel_size": 4}, "is more than --num-layers 2"),
        (
            {**MIXTRAL, **SHARDED, "expert_model_parallel_size": 2, "num_distributed_optimizer_instances": 2},
            "and expert-parallel ones .2. lie across",
        ),
        ({**LLAMA, "seq_length": 10, "context_parallel_size": 2}, "give a multiple of 4"),
        (
            {**LLAMA, "seq_length": 9, "tensor_model_parallel_size": 2, "sequence_parallel": True},
            "--seq-length 9 is no multiple of --tensor-model-parallel-size 2",
        ),
    ],
)
def test_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        job_of(values, 4)


def test_the_shape_of_a_preset_gives_way_to_a_configuration() -> None:
    layers = (Layer("preset tiny", PRESETS["tiny"]), Layer("command line", {"hf_config": "folder"}))
    assert resolve(assemble(layers), World(2, "cpu")).options.model.hf_config is not None
