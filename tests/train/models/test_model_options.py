"""Options about models and ranks that contradict each other, or could do nothing, are refused in words."""

from typing import Any

import pytest

from megatron_fsdp.errors import ConfigurationError
from megatron_fsdp.train.options.command_line import PRESETS, Layer, assemble
from megatron_fsdp.train.options.job import World, resolve
from tests.train.models.runs import DECODER, LLAMA, MIXTRAL, job_of

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
        ({**LLAMA, "position_embedding_type": "learned_absolute"}, "give --position-embedding-type rope too"),
        ({**MIXTRAL, "add_bias_linear": True}, "give --disable-bias-linear"),
        ({**LLAMA, "qk_layernorm": True, "add_bias_linear": True}, "give --disable-bias-linear"),
        ({**MIXTRAL, "moe_router_topk": 5}, "--moe-router-topk 5 is more than --num-experts 4"),
        ({**LLAMA, "recompute_granularity": "selective"}, "selective is not offered for models of transformers"),
        (
            {**DECODER, "recompute_granularity": "selective", "recompute_num_layers": 1},
            "--recompute-num-layers does nothing without --recompute-granularity full",
        ),
        (
            {**DECODER, "recompute_granularity": "full", "recompute_num_layers": 3},
            "--recompute-num-layers 3 is more than --num-layers 2",
        ),
        ({**DECODER, "fp16": True, "check_for_nan_in_loss_and_grad": True}, "--fp16 .* contradicts --check-for-nan-in"),
        ({**DECODER, "pipeline_model_parallel_size": 2}, "the decoder of this package is not cut"),
        ({**DECODER, "tensor_model_parallel_size": 2}, "the decoder of this package is not cut"),
        ({**MIXTRAL, "expert_model_parallel_size": 2, "tensor_model_parallel_size": 2}, "give one of the two"),
        ({**MIXTRAL, **FSDP2, "expert_model_parallel_size": 2, "tensor_model_parallel_size": 2}, "one of the two"),
        ({**MIXTRAL, **FSDP2, "num_experts": 3, "expert_model_parallel_size": 2}, "does not divide --num-experts 3"),
        ({**LLAMA, **FSDP2, "expert_model_parallel_size": 2}, "does not divide --num-experts None"),
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
        ({**LLAMA, "sequence_parallel": True}, "--sequence-parallel does nothing"),
    ],
)
def test_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        job_of(values, 4)


def test_the_shape_of_a_preset_gives_way_to_a_configuration() -> None:
    layers = (Layer("preset tiny", PRESETS["tiny"]), Layer("command line", {"hf_config": "folder"}))
    assert resolve(assemble(layers), World(2, "cpu")).options.model.hf_config is not None


def test_a_preset_can_be_a_model_of_transformers() -> None:
    layers = (Layer("preset tiny", PRESETS["tiny"]), Layer("command line", {"transformer_impl": "transformers"}))
    assert resolve(assemble(layers), World(2, "cpu")).options.model.qk_layernorm
