"""Each flag of `MegatronFSDPConfig` reaches the engine and has its effect, and numbers stay those of one process."""

import re
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from transformers.models.llama.modeling_llama import LlamaMLP

from megatron_fsdp import MegatronFSDP
from megatron_fsdp.automodel import MegatronFSDPManager, create_device_mesh
from megatron_fsdp.config.ddp_config import ShardingStrategy
from megatron_fsdp.config.engine_options import WeightAllocator
from megatron_fsdp.errors import ConfigurationError
from tests.automodel.training import (
    assert_trained_alike,
    managed,
    optimizer_of,
    parameters_of,
    reference,
    strategy,
    train,
)
from tests.support.language_models import batch_of, build, config_of
from tests.support.on_ranks import assert_equal_tensors, engine_of, first_rank_warns, on_ranks, refusal

BF16, FP32 = torch.bfloat16, torch.float32


def manager_of(**fields: Any) -> MegatronFSDPManager:
    config: Any = strategy("megatron_fsdp", **fields)
    mesh, _ = create_device_mesh(config)
    assert mesh is not None
    return MegatronFSDPManager(config, mesh)


def parallel(model: nn.Module | None = None, **fields: Any) -> MegatronFSDP:
    made: MegatronFSDP = managed(strategy("megatron_fsdp", **fields), build("llama") if model is None else model)
    return made


def units_of(model: MegatronFSDP) -> set[str]:
    """Classes of the units besides the root."""
    parts = dict(model.module.named_modules())
    return {type(parts[unit.name]).__name__ for unit in engine_of(model).units if unit.name}


SWITCHES: list[tuple[dict[str, Any], str, Any]] = [
    *(({"zero_dp_strategy": number}, "strategy", ShardingStrategy(number)) for number in (0, 2, 3)),
    ({"overlap_grad_reduce": False, "zero_dp_strategy": 1}, "overlap_grad_reduce", False),
    ({"overlap_param_gather": False, "zero_dp_strategy": 1}, "overlap_param_gather", False),
    ({"average_in_collective": True}, "average_in_collective", True),
    ({"check_for_nan_in_grad": False}, "report_nan_in_param_grad", False),
    ({"calculate_per_token_loss": True}, "calculate_per_token_loss", True),
]
"""fields -> which switch of the engine has which value; all others are as without the fields."""


@on_ranks(2)
def test_switches_reach_the_engine_and_leave_gradients_right() -> None:
    expected = reference("llama", steps=1)
    plain = engine_of(parallel(zero_dp_strategy=1)).options
    for fields, name, value in SWITCHES:
        model = parallel(**fields)
        assert getattr(engine_of(model).options, name) is value
        assert getattr(plain, name) is not value
        assert_trained_alike(train(model, steps=1), expected)
    double, single = parallel(fsdp_double_buffer=True), parallel()
    assert engine_of(double).options.memory.allocator is WeightAllocator.DOUBLE_BUFFER
    assert engine_of(single).options.memory.allocator is WeightAllocator.SLOTS
    assert (parallel(disable_bucketing=True).bucket_size, single.bucket_size is None) == (None, False)


@on_ranks(2)
def test_units_are_those_asked_for_by_path_and_unknown_ones_are_refused() -> None:
    assert units_of(parallel()) == {"LlamaDecoderLayer", "Embedding", "Linear"}
    path = "transformers.models.llama.modeling_llama"
    for units, expected in (
        ([f"{path}.LlamaMLP"], {"LlamaMLP", "Embedding", "Linear"}),  # and large ends
        ([LlamaMLP], {"LlamaMLP", "Embedding", "Linear"}),
        ([f"{path}.LlamaDecoderLayer", "torch.nn.Embedding"], {"LlamaDecoderLayer", "Embedding"}),
    ):
        assert units_of(parallel(megatron_fsdp_unit_modules=units)) == expected
    for units, words in (
        (["no.such.module.Layer"], "no.such.module.Layer"),
        (["transformers.models.mistral.modeling_mistral.MistralDecoderLayer"], "MistralDecoderLayer"),
    ):
        assert re.search(words, refusal(parallel, error=ConfigurationError, megatron_fsdp_unit_modules=units))


@on_ranks(2)
def test_float32_flags_change_main_weights_and_reduction_of_a_bfloat16_model() -> None:
    found = []
    for fields in (
        {},
        {"preserve_fp32_weights": True},
        {"grad_reduce_in_fp32": True},
        {"preserve_fp32_weights": True, "grad_reduce_in_fp32": True},
    ):
        model = parallel(build("llama").to(BF16), **fields)
        train(model, steps=1)
        param = next(model.parameters())
        assert param.grad is not None
        precision = next(iter(model.parameter_groups())).plan.precision
        logits = model(input_ids=batch_of(2)["input_ids"], use_cache=False).logits
        logits.float().sum().backward()
        found.append((param.dtype, precision.main_grads, precision.grad_comm, logits.dtype))
    assert found == [
        (BF16, BF16, BF16, BF16),
        (FP32, BF16, BF16, BF16),
        (BF16, FP32, FP32, BF16),
        (FP32, FP32, FP32, BF16),
    ]


@on_ranks(2)
def test_model_on_the_meta_device_gets_the_values_of_a_real_one_under_the_same_seed() -> None:
    config, make = config_of("llama_tied"), transformers.AutoModelForCausalLM.from_config
    torch.manual_seed(5)
    expected = dict(make(config, dtype=FP32).named_parameters())
    with torch.device("meta"):
        reference, refused = make(config, dtype=FP32), make(config, dtype=FP32)
    torch.manual_seed(5)
    model = parallel(reference, init_fsdp_with_meta_device=True)
    assert_equal_tensors(parameters_of(model), expected)
    logits = model(input_ids=batch_of(2)["input_ids"], use_cache=False).logits
    assert bool(logits.isfinite().all())
    assert "meta" in refusal(parallel, refused)


@on_ranks(2)
def test_flags_without_effect_are_warned_of_by_name() -> None:
    with first_rank_warns("keep_fp8_transpose_cache=True has no effect"):
        parallel(keep_fp8_transpose_cache=True)
    model = parallel(keep_fp8_transpose_cache=True, weight_format={"lm_head.*": None, "*": "fp8_compute"})
    assert "gather fp8_compute" in str(model.describe())
    with first_rank_warns("nccl_ub: .* only NCCL registers memory"):
        parallel(nccl_ub=True)
    with first_rank_warns(r"fsdp_double_buffer=True has no effect under optim, where every rank"):
        parallel(fsdp_double_buffer=True, zero_dp_strategy=1)


@on_ranks(2)
def test_activation_checkpointing_recomputes_mlps_or_whole_layers() -> None:
    for kind, flag in (("llama", False), ("qwen2_moe", True), ("llama", "full"), ("llama", "selective")):
        model: Any = parallel(build(kind), activation_checkpointing=flag)
        calls: list[str] = []
        layer = model.module.model.layers[1]
        layer.mlp.register_forward_pre_hook(lambda *_: calls.append("around"))  # noqa: B023
        part = layer.mlp.gate_proj if kind == "llama" else layer.mlp.gate
        part.register_forward_pre_hook(lambda *_: calls.append("mlp"))  # noqa: B023
        layer.self_attn.register_forward_pre_hook(lambda *_: calls.append("attention"))  # noqa: B023
        assert_trained_alike(train(model, steps=1), reference(kind, steps=1))
        again = {False: [], True: ["mlp"]}.get(flag, ["attention", "around", "mlp"])
        assert calls == ["attention", "around", "mlp", *again]


@pytest.mark.full
@on_ranks(2)
def test_optimizer_that_is_passed_along_is_sharded_with_the_model() -> None:
    model = build("llama")
    given = optimizer_of(model)
    sharded, optimizer = manager_of().parallelize(model, given)
    assert optimizer is given
    assert_trained_alike(train(sharded, steps=3, optimizer=optimizer), reference("llama"))
    other = torch.optim.AdamW(build("llama").parameters())
    assert "optimizer" in refusal(manager_of().parallelize, build("llama"), other, error=ConfigurationError)
