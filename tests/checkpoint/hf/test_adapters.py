"""LoRA adapters of sharded models, in peft's format."""

import json
import tempfile
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from megatron_fsdp import MegatronFSDP
from megatron_fsdp.checkpoint.hf import load_adapter, load_hf, save_adapter, save_hf
from megatron_fsdp.checkpoint.hf.adapters import check_config
from megatron_fsdp.errors import CheckpointError, ConfigurationError
from tests.checkpoint.hf.hf_models import build, logits, same_tensors, shard, stored, trained
from tests.support.on_ranks import fixed_seed, on_ranks, once, refusal

pytest.importorskip("transformers")
peft = pytest.importorskip("peft")


def with_adapter(seed: int = 0, base_seed: int = 7, **changes: Any) -> Any:
    base = build("llama", seed=base_seed)
    options = {
        "r": 3,
        "lora_alpha": 4,
        "target_modules": ["q_proj", "down_proj"],
        "init_lora_weights": False,
        **changes,
    }
    with warnings.catch_warnings(), fixed_seed(seed):
        warnings.simplefilter("ignore", FutureWarning)  # newer releases have other names for checkpointing
        return peft.get_peft_model(base, peft.LoraConfig(**options))


def loaded_by_peft(folder: Path) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return peft.PeftModel.from_pretrained(build("llama", seed=7), folder).eval()


def config_of(folder: Path) -> dict[str, Any]:
    found = json.loads((folder / "adapter_config.json").read_text())
    return {**found, "target_modules": sorted(found["target_modules"])}  # a set, in any order


@pytest.mark.full(short=["3-3"])
@pytest.mark.parametrize(("num_ranks", "strategy"), [(2, 3), (3, 3), (2, 0)])
@on_ranks()
def test_peft_loads_what_is_saved(tmp_path: Path, strategy: int) -> None:
    plain = with_adapter()
    before = logits(plain.eval())
    model, _ = trained(plain, strategy)
    save_adapter(model, tmp_path / "out")
    loaded = loaded_by_peft(tmp_path / "out")
    assert not torch.equal(before, logits(model))
    assert torch.equal(logits(loaded), logits(model))
    once(lambda: loaded.save_pretrained(tmp_path / "reference"))
    assert same_tensors(stored(tmp_path / "out"), stored(tmp_path / "reference"))
    config, wanted = (config_of(tmp_path / name) for name in ("out", "reference"))
    assert config == wanted
    assert config["inference_mode"] is True
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


@on_ranks(2)
def test_base_and_adapter_load_into_a_sharded_model(tmp_path: Path) -> None:
    plain = with_adapter().eval()
    once(lambda: plain.save_pretrained(tmp_path / "adapter"))
    once(lambda: build("llama", seed=7).save_pretrained(tmp_path / "base"))
    model: MegatronFSDP = shard(with_adapter(seed=1, base_seed=1))
    report = load_hf(model, tmp_path / "base")
    assert (report.is_complete, len(report.loaded)) == (True, 21)
    assert not torch.equal(logits(model), logits(plain))
    report = load_adapter(model, tmp_path / "adapter")
    assert (report.is_complete, len(report.loaded)) == (True, 8)
    assert torch.equal(logits(model), logits(plain))


OTHER: dict[str, dict[str, Any]] = {
    "lora_alpha=8, and the model's adapter lora_alpha=4": {"lora_alpha": 8},
    "r=2, and the model's adapter r=3": {"r": 2},
    "4 missing, 0 unexpected": {"target_modules": ["q_proj"]},
    "0 missing, 4 unexpected": {"target_modules": ["q_proj", "down_proj", "up_proj"]},
}


@on_ranks(2)
def test_other_adapters_are_refused(tmp_path: Path) -> None:
    model = shard(with_adapter(seed=1))
    before = model.full_parameters()
    for number, (said, changes) in enumerate(OTHER.items()):
        folder = tmp_path / str(number)
        once(lambda: with_adapter(**changes).save_pretrained(folder))  # noqa: B023
        assert said in refusal(load_adapter, model, folder, error=CheckpointError)
        assert same_tensors(model.full_parameters(), before)


def test_a_damaged_adapter_is_refused(tmp_path: Path) -> None:
    model = with_adapter()
    model.save_pretrained(tmp_path)
    (tmp_path / "adapter_config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"adapter_config\.json cannot be read as JSON"):
        load_adapter(model, tmp_path)
    (tmp_path / "adapter_model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"holds no adapter_model\.safetensors"):
        load_adapter(model, tmp_path)


def test_adapters_are_chosen_by_name(tmp_path: Path) -> None:
    model = with_adapter()
    options = {"r": 2, "lora_alpha": 4, "target_modules": ["o_proj"], "init_lora_weights": False}
    model.add_adapter("second", peft.LoraConfig(**options))
    save_adapter(model, tmp_path / "out", adapter_name="second")
    weights = load_file(tmp_path / "out" / "adapter_model.safetensors")
    assert len(weights) == 4
    assert all("o_proj.lora_" in key and "second" not in key for key in weights)
    for value in weights.values():
        value.zero_()
    save_file(weights, tmp_path / "out" / "adapter_model.safetensors")
    first = {name: p.clone() for name, p in model.named_parameters() if ".second." not in name}
    load_adapter(model, tmp_path / "out", adapter_name="second")
    now = dict(model.named_parameters())
    assert all(torch.equal(now[name], value) for name, value in first.items())
    assert sum(not now[name].any() for name in now if ".second." in name) == 4


def test_models_without_that_adapter_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="LlamaForCausalLM has no adapters"):
        save_adapter(build("llama"), tmp_path / "out")
    with pytest.raises(ConfigurationError, match="no adapter 'other'; it has default"):
        load_adapter(with_adapter(), tmp_path, adapter_name="other")
    with pytest.raises(ConfigurationError, match="the model has adapters"):
        save_hf(with_adapter(), tmp_path / "out")
    copies = with_adapter(modules_to_save=["lm_head"])
    build("llama").save_pretrained(tmp_path / "base")
    with pytest.raises(ConfigurationError, match="modules_to_save"):
        load_hf(copies, tmp_path / "base")
    assert not dist.is_initialized()
    assert [path.name for path in tmp_path.iterdir()] == ["base"]


def test_modules_that_are_saved_whole_are_part_of_the_adapter(tmp_path: Path) -> None:
    model = with_adapter(modules_to_save=["lm_head"]).eval()
    with torch.no_grad():
        model.base_model.model.lm_head.modules_to_save["default"].weight.mul_(2)
    save_adapter(model, tmp_path / "out")
    assert "base_model.model.lm_head.weight" in stored(tmp_path / "out")
    assert torch.equal(logits(loaded_by_peft(tmp_path / "out")), logits(model))
    other = with_adapter(seed=1, modules_to_save=["lm_head"]).eval()
    assert load_adapter(other, tmp_path / "out").is_complete
    assert torch.equal(logits(other), logits(model))


# ---- configs that compute something else -----------------------------------------------------------------------------


quiet = pytest.mark.filterwarnings("ignore")
"""Of peft: newer names, a schedule that is not called."""


def adapted(config: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return peft.get_peft_model(build("llama"), config).eval()


DIFFERENT: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "another kind": ("LoHaConfig", {}, {"peft_type": "LOKR"}),
    "coft": ("OFTConfig", {"oft_block_size": 4}, {"coft": True}),
    "feedforward": ("IA3Config", {"target_modules": ["a"], "feedforward_modules": ["a"]}, {"feedforward_modules": []}),
    "tokens": ("LoraConfig", {"trainable_token_indices": [1, 5]}, {"trainable_token_indices": [5, 1]}),
    "unknown": ("LoraConfig", {}, {"use_something_new": True}),
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


# ---- other adapters than LoRA ----------------------------------------------------------------------------------------


@quiet
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


@quiet
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
