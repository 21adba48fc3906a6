"""Which differences between configs of adapters matter."""

import json
import tempfile
import warnings
from pathlib import Path
from typing import Any

import pytest

from megatron_fsdp.checkpoint.hf import load_adapter, save_adapter
from megatron_fsdp.checkpoint.hf.adapters import check_config
from megatron_fsdp.errors import CheckpointError
from tests.checkpoint.hf.hf_models import build, logits

pytest.importorskip("transformers")
peft = pytest.importorskip("peft")


def adapted(config: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return peft.get_peft_model(build("llama", seed=7), config).eval()


def test_another_alpha_of_loha_is_refused(tmp_path: Path) -> None:
    models = [adapted(peft.LoHaConfig(r=3, alpha=alpha, target_modules=["q_proj"])) for alpha in (9, 1, 9)]
    save_adapter(models[0], tmp_path / "out")
    with pytest.raises(CheckpointError, match="has alpha=9, and the model's adapter alpha=1"):
        load_adapter(models[1], tmp_path / "out")
    assert load_adapter(models[2], tmp_path / "out").is_complete
    assert logits(models[2]).equal(logits(models[0]))


DIFFERENT: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "another kind": ("LoHaConfig", {}, {"peft_type": "LOKR"}),
    "coft": ("OFTConfig", {"oft_block_size": 4}, {"coft": True}),
    "block_share": ("OFTConfig", {"oft_block_size": 4}, {"block_share": True}),
    "decompose": ("LoKrConfig", {}, {"decompose_both": True}),
    "feedforward": ("IA3Config", {"target_modules": ["a"], "feedforward_modules": ["a"]}, {"feedforward_modules": []}),
    "tokens": ("LoraConfig", {"trainable_token_indices": [1, 5]}, {"trainable_token_indices": [5, 1]}),
    "changed base": ("LoraConfig", {}, {"init_lora_weights": "pissa"}),
    "unknown": ("LoraConfig", {}, {"use_something_new": True}),
}
SAME: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "dropout": ("LoraConfig", {"lora_dropout": 0.1}, {"lora_dropout": 0.5}),
    "plain init": ("LoraConfig", {}, {"init_lora_weights": "gaussian"}),
    "order of a set": (
        "IA3Config",
        {"target_modules": ["a", "b"], "feedforward_modules": ["a", "b"]},
        {"target_modules": ["b", "a"], "feedforward_modules": ["b", "a"]},
    ),
    "schedule": ("AdaLoraConfig", {"total_step": 10}, {"total_step": 20, "tinit": 3}),
    "older peft": ("LoraConfig", {}, {"use_dora": ..., "lora_bias": ..., "rank_pattern": ...}),
    "file": ("LoraConfig", {}, {"peft_version": "0.1", "inference_mode": True, "base_model_name_or_path": "x"}),
    "unknown number": ("LoraConfig", {}, {"new_group_size": 16, "new_switch": False}),
}


def compare(kind: str, options: dict[str, Any], changes: dict[str, Any]) -> None:
    config = getattr(peft, kind)(**options)
    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        own = json.loads((Path(folder) / "adapter_config.json").read_text())
    stored = {name: value for name, value in {**own, **changes}.items() if value is not ...}
    check_config(stored, config, "x.json")


@pytest.mark.parametrize("name", DIFFERENT)
def test_what_changes_the_computation_is_refused(name: str) -> None:
    with pytest.raises(CheckpointError, match=f"x.json has {next(iter(DIFFERENT[name][2]))}="):
        compare(*DIFFERENT[name])


@pytest.mark.parametrize("name", SAME)
def test_what_does_not_change_it_passes(name: str) -> None:
    compare(*SAME[name])


def test_a_missing_field_has_its_default() -> None:
    with pytest.raises(CheckpointError, match="use_dora=False, and the model's adapter use_dora=True"):
        compare("LoraConfig", {"use_dora": True}, {"use_dora": ...})
