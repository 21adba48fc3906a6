"""Adapters other than LoRA: what is saved as by peft, what the base is loaded under, and what is refused."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_fsdp.checkpoint.hf import load_adapter, load_hf, save_adapter, save_hf
from megatron_fsdp.errors import ConfigurationError
from tests.checkpoint.hf.hf_models import build, same_tensors, stored

pytest.importorskip("transformers")
peft = pytest.importorskip("peft")


@pytest.fixture(autouse=True)
def _newer_names_elsewhere() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of peft: newer names, a schedule that is not called
        yield


def adapted(config: Any, seed: int = 0) -> Any:
    return peft.get_peft_model(build("llama", seed=seed), config).eval()


def vera() -> Any:
    return peft.VeraConfig(r=3, target_modules=["q_proj"])


def test_projections_that_layers_share_are_saved_as_by_peft(tmp_path: Path) -> None:
    model = adapted(vera())
    save_adapter(model, tmp_path / "ours")
    model.save_pretrained(tmp_path / "theirs")
    assert "base_model.vera_A" in stored(tmp_path / "ours")
    assert same_tensors(stored(tmp_path / "ours"), stored(tmp_path / "theirs"))
    other = adapted(vera())
    other.base_model.vera_A["default"].zero_()
    assert load_adapter(other, tmp_path / "theirs").is_complete
    assert torch.equal(other.base_model.vera_A["default"], model.base_model.vera_A["default"])


def test_the_base_is_loaded_below_all_that_adapters_add(tmp_path: Path) -> None:
    base = build("llama", seed=7)
    base.save_pretrained(tmp_path / "base")
    ada = adapted(peft.AdaLoraConfig(init_r=3, target_modules=["q_proj"], total_step=10))
    own = build("llama")
    own.add_adapter(peft.LoraConfig(target_modules=["q_proj"]))
    for model, inner in ((ada, ada.base_model.model), (own, own)):
        assert len(load_hf(model, tmp_path / "base").loaded) == 21
        found = inner.model.layers[0].self_attn.q_proj.base_layer.weight
        assert torch.equal(found, base.model.layers[0].self_attn.q_proj.weight)
    tokens = adapted(peft.LoraConfig(target_modules=["q_proj"], trainable_token_indices=[1, 5]))
    with pytest.raises(ConfigurationError, match=r"trainable tokens hold copies.*before adding the adapters"):
        load_hf(tokens, tmp_path / "base")


def test_adapters_that_are_not_saved_are_refused_in_words(tmp_path: Path) -> None:
    own = build("llama")
    own.add_adapter(peft.LoraConfig(target_modules=["q_proj"]))
    with pytest.raises(ConfigurationError, match=r"added by its own add_adapter; only those of peft\.get_peft_model"):
        save_adapter(own, tmp_path / "out")
    with pytest.raises(ConfigurationError, match=r"save_adapter \(those of peft\.get_peft_model\), or merge"):
        save_hf(own, tmp_path / "out")
    prompt = adapted(peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3))
    for call in (save_adapter, load_adapter):
        with pytest.raises(ConfigurationError, match=r"is a learned prompt \(PromptTuningConfig\)"):
            call(prompt, tmp_path / "out")
