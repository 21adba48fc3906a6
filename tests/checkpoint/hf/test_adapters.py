"""LoRA adapters of sharded models, in peft's format."""

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor

from megatron_fsdp import MegatronFSDP, fully_shard
from megatron_fsdp.checkpoint.hf import load_adapter, load_hf, save_adapter, save_hf
from megatron_fsdp.errors import CheckpointError, ConfigurationError
from tests.checkpoint.hf.hf_models import build, logits, same_tensors, shard, stored, tokens
from tests.conftest import RunRanks
from tests.support.parity import fixed_seed

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


def train_and_save(folder: str, strategy: int) -> tuple[Tensor, Tensor]:
    plain = with_adapter()
    optimizer = torch.optim.AdamW([p for p in plain.parameters() if p.requires_grad], lr=0.1)
    model, optimizer = fully_shard(plain, optimizer, zero_dp_strategy=strategy)
    before = logits(model)
    model(input_ids=tokens(), labels=tokens()).loss.backward()
    optimizer.step()
    model.eval()
    save_adapter(model, folder)
    return before, logits(model)


@pytest.mark.full(short=["3-3"])
@pytest.mark.parametrize(("num_ranks", "strategy"), [(2, 3), (3, 3), (2, 0)])
def test_peft_loads_what_is_saved(run_ranks: RunRanks, tmp_path: Path, num_ranks: int, strategy: int) -> None:
    found = run_ranks(num_ranks, train_and_save, str(tmp_path / "out"), strategy)
    loaded = loaded_by_peft(tmp_path / "out")
    for before, after in found:
        assert not torch.equal(before, after)
        assert torch.equal(logits(loaded), after)
    loaded.save_pretrained(tmp_path / "reference")
    assert same_tensors(stored(tmp_path / "out"), stored(tmp_path / "reference"))
    config, wanted = (config_of(tmp_path / name) for name in ("out", "reference"))
    assert config == wanted
    assert config["inference_mode"] is True
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def load_both(base: str, adapter: str) -> tuple[Tensor, Any, Any]:
    model: MegatronFSDP = shard(with_adapter(seed=1, base_seed=1))
    base_report = load_hf(model, base)
    return logits(model), base_report, (load_adapter(model, adapter), logits(model))


def test_base_and_adapter_load_into_a_sharded_model(run_ranks: RunRanks, tmp_path: Path) -> None:
    plain = with_adapter().eval()
    plain.save_pretrained(tmp_path / "adapter")
    build("llama", seed=7).save_pretrained(tmp_path / "base")
    for with_other_adapter, base_report, (report, found) in run_ranks(
        2, load_both, str(tmp_path / "base"), str(tmp_path / "adapter")
    ):
        assert base_report.is_complete
        assert len(base_report.loaded) == 21
        assert not torch.equal(with_other_adapter, logits(plain))
        assert report.is_complete
        assert len(report.loaded) == 8
        assert torch.equal(found, logits(plain))


def refuse_adapter(folder: str) -> tuple[str, bool]:
    model = shard(with_adapter(seed=1))
    before = model.full_parameters()
    with pytest.raises(CheckpointError) as raised:
        load_adapter(model, folder)
    return str(raised.value), same_tensors(model.full_parameters(), before)


def test_other_adapters_are_refused(run_ranks: RunRanks, tmp_path: Path) -> None:
    cases = {
        "alpha": ({"lora_alpha": 8}, "lora_alpha=8, and the model's adapter lora_alpha=4"),
        "rank": ({"r": 2}, "r=2, and the model's adapter r=3"),
        "modules": ({"target_modules": ["q_proj"]}, "4 missing, 0 unexpected"),
        "more": ({"target_modules": ["q_proj", "down_proj", "up_proj"]}, "0 missing, 4 unexpected"),
    }
    for name, (changes, said) in cases.items():
        with_adapter(**changes).save_pretrained(tmp_path / name)
        results = run_ranks(2, refuse_adapter, str(tmp_path / name))
        assert results[0] == results[1]
        assert said in results[0][0]
        assert results[0][1]


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
