"""Adapters of peft: refused, merged as peft does, or alone."""

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_fsdp import fully_shard_model
from megatron_fsdp.checkpoint.hf import save_adapter
from megatron_fsdp.weights import WeightSource
from tests.checkpoint.hf.hf_models import build, same_tensors, stored
from tests.support.on_ranks import fixed_seed, on_ranks, refusal

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


@pytest.mark.parametrize(
    ("kind", "dtype"), [("llama", torch.float32), ("llama", torch.bfloat16), ("gpt2", torch.float32)]
)
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
    dora = adapted("llama", use_dora=True)
    assert "uses a variant of LoRA (such as DoRA); only LoRA on" in refusal(
        lambda: WeightSource(dora, adapters="merged").metadata()
    )
