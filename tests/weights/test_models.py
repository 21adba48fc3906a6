"""Formats, offload, odd shapes and families of models: a pass is the weights, whatever holds them."""

import copy
import re
import warnings
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from megatron_fsdp import MixedPrecisionPolicy, fully_shard_model
from megatron_fsdp.checkpoint.hf import save_adapter, save_hf
from megatron_fsdp.errors import CheckpointError
from megatron_fsdp.weights import WeightSource
from tests.checkpoint.hf.hf_models import build, same_tensors, stored
from tests.support import language_models
from tests.support.case import shard as shard_case
from tests.support.on_ranks import fixed_seed, on_ranks, once, refusal
from tests.support.zoo import MODEL_CASES, Holder

KINDS: list[dict[str, Any]] = [
    {"offload": ("main_weights",)},
    {"offload": ("main_weights", "compute_weights")},
    {"mixed_precision_policy": MixedPrecisionPolicy(weight_format="mxfp8")},
    {"mixed_precision_policy": MixedPrecisionPolicy(weight_format="fp8")},
]


def computed(model: Any) -> dict[str, Tensor]:
    with model.full_parameters_context(compute_dtype=True):
        return {name: param.detach().clone() for name, param in model.module.named_parameters()}


@pytest.mark.parametrize("options", KINDS)
@on_ranks(2)
def test_formats_and_host_memory_give_main_weights_or_those_that_are_computed_with(options: dict[str, Any]) -> None:
    model, _ = shard_case(MODEL_CASES["transformer"], **options)
    main = {name: tensor.bfloat16() for name, tensor in model.full_parameters().items()}
    assert same_tensors(dict(WeightSource(model, bucket_bytes=2000)), main)  # type: ignore[arg-type]
    rounded = dict(WeightSource(model, bucket_bytes=2000, values="computed", dtype=None))
    assert same_tensors(rounded, computed(model))  # type: ignore[arg-type]
    shards = list(WeightSource(model, values="computed", dtype=None).local_shards())
    for shard in shards:
        whole = rounded[shard.name]
        assert whole is not None
        assert torch.equal(shard.tensor, whole.flatten()[shard.offset : shard.offset + shard.numel])


def odd() -> nn.Module:
    """No dimension, one element, no element, more ranks than rows, a buffer, and one that is not stored."""
    buffers = {"mean": torch.ones(3), "count": torch.tensor(7)}
    few = torch.arange(10.0).view(2, 5)
    model = Holder(buffers, scale=torch.tensor(2.0), one=torch.ones(1), none=torch.zeros(0, 3), few=few)
    model.register_buffer("hidden", torch.ones(3), persistent=False)
    return model


@pytest.mark.parametrize(("strategy", "bucket_bytes"), [(0, 1), (3, 1), (3, 2**20)])
@on_ranks(4)
def test_odd_tensors_and_buffers_come_as_they_are(strategy: int, bucket_bytes: int) -> None:
    plain = odd()
    wanted = {name: t.detach().clone() for name, t in plain.state_dict().items()}
    model = fully_shard_model(plain, zero_dp_strategy=strategy)
    for destination in ("all", "spread"):
        source = WeightSource(
            model, dtype=torch.float32, buffers=True, bucket_bytes=bucket_bytes, destination=destination
        )
        found = {name: t for name, t in source if t is not None}
        assert same_tensors(found, {name: t for name, t in wanted.items() if name in found})
        assert destination != "all" or found.keys() == wanted.keys()
    assert "mean" not in dict(WeightSource(model))


@pytest.mark.parametrize("kind", ["gpt2", "qwen3_moe", "gemma3"])
@on_ranks(2)
def test_families_compiled_and_recomputed_have_the_names_and_bits_of_their_files(tmp_path: Path, kind: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # newer names in transformers and torch
        model = language_models.build(kind)
        model.gradient_checkpointing_enable()
        once(lambda: model.save_pretrained(tmp_path / "plain"))
        layers = model.transformer.h if kind == "gpt2" else model.model.layers
        layers[1], layers[2] = torch.compile(layers[1], backend="eager"), checkpoint_wrapper(layers[2])
        model = fully_shard_model(model)
        compiled: Any = torch.compile(model, backend="eager")
    save_hf(compiled, tmp_path / "out", dtype=torch.bfloat16)
    source = WeightSource(compiled, bucket_bytes=20_000)
    assert same_tensors(dict(source), stored(tmp_path / "out"))  # type: ignore[arg-type]
    wanted = stored(tmp_path / "plain")
    assert same_tensors(dict(source), {name: tensor.bfloat16() for name, tensor in wanted.items()})  # type: ignore[arg-type]


@on_ranks(2)
def test_a_conversion_that_is_no_slice_is_refused_by_the_name_of_the_tensor() -> None:
    model = fully_shard_model(build("mixtral"))

    def transposed(_: object, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: tensor.t() if tensor.ndim == 2 else tensor for name, tensor in tensors.items()}

    with patch("transformers.core_model_loading.revert_weight_conversion", transposed):
        message = refusal(lambda: WeightSource(model).metadata(), error=CheckpointError)
    assert re.search("transformers stores of .*weight what is no slice of it, such as its transpose", message)


# ---- adapters of peft: refused, merged as peft does, or alone --------------------------------------------------------


peft = pytest.importorskip("peft")


def adapted(kind: str, **options: Any) -> Any:
    """A peft model whose adapter changes something."""
    targets = {"llama": ["q_proj", "down_proj", "embed_tokens"], "gpt2": ["c_attn"]}[kind]
    config = peft.LoraConfig(r=3, target_modules=targets, fan_in_fan_out=kind == "gpt2", **options)
    with fixed_seed(1), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # peft's use of transformers
        model = peft.get_peft_model(build(kind), config)
        for name, param in model.named_parameters():
            if "lora_" in name:
                torch.nn.init.normal_(param)
    return model


@pytest.mark.parametrize(("kind", "dtype"), [("llama", torch.bfloat16), ("gpt2", torch.float32)])
@on_ranks(2)
def test_merged_weights_are_those_of_peft(kind: str, dtype: torch.dtype) -> None:
    model = adapted(kind, use_rslora=True).to(dtype)
    merged = copy.deepcopy(model).float().merge_and_unload()  # in the dtype of main weights
    wanted = dict(WeightSource(merged))
    layers = [type(model.base_model.model.model.layers[0])] if kind == "llama" else None
    sharded = fully_shard_model(model, fsdp_unit_modules=layers)
    before = sharded.parameter_digests()
    for destination in ("all", 1):
        found = dict(WeightSource(sharded, adapters="merged", destination=destination, bucket_bytes=4000))
        assert found.keys() == wanted.keys()
        if destination in ("all", dist.get_rank()):
            assert same_tensors(found, wanted)  # type: ignore[arg-type]
    assert sharded.parameter_digests() == before


@on_ranks(2)
def test_an_adapter_alone_is_what_its_file_has(tmp_path: Path) -> None:
    sharded = fully_shard_model(adapted("llama"))
    save_adapter(sharded, tmp_path / "out")
    assert same_tensors(dict(WeightSource(sharded, adapters="only", dtype=None)), stored(tmp_path / "out"))  # type: ignore[arg-type]


@on_ranks(2)
def test_adapters_that_are_not_asked_for_or_cannot_be_merged_are_refused() -> None:
    sharded = fully_shard_model(adapted("llama"))
    assert refusal(lambda: WeightSource(sharded).metadata()).startswith(
        'the model has adapters; give adapters="merged"'
    )
    if dist.get_rank() == 1:
        sharded.module.base_model.disable_adapter_layers()
    words = r"the plan is \d+ gathers with 10 factors of adapters .* on rank 0, \d+ gathers with 0 factors"
    assert re.search(words, refusal(lambda: WeightSource(sharded, adapters="merged").metadata()))
    dora = adapted("llama", use_dora=True)
    assert "uses a variant of LoRA (such as DoRA); only LoRA on" in refusal(
        lambda: WeightSource(dora, adapters="merged").metadata()
    )
