"""Models on the meta device: published sizes, every way to say which, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from megatron_fsdp.config.hf_config import build_from_config, read_config
from megatron_fsdp.errors import ConfigurationError
from megatron_fsdp.plan.models import PRESETS, build_meta_model
from tests.support.language_models import folder_with_code
from tests.support.zoo import Tower

transformers = pytest.importorskip("transformers")


PUBLISHED = {
    "gpt2": 124_439_808,
    "gpt2-xl": 1_557_611_200,
    "llama-2-7b": 6_738_415_616,
    "llama-3-8b": 8_030_261_248,
    "llama-3-70b": 70_553_706_496,
    "llama-3-405b": 405_853_388_800,
    "llama-3.2-1b": 1_235_814_400,
    "mistral-7b": 7_241_732_096,
    "mixtral-8x7b": 46_702_792_704,
    "mixtral-8x22b": 140_620_634_112,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-72b": 72_706_203_648,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-235b-a22b": 235_093_634_560,
    "deepseek-v3": 671_026_419_200,
    "kimi-k2": 1_026_408_232_448,
}
ROUTER_BIASES = {"deepseek-v3": 58 * 256, "kimi-k2": 60 * 384}
"""Among the published parameters; transformers has them as buffers, since no gradient moves them."""


def numel(model: nn.Module) -> int:
    return sum(param.numel() for param in model.parameters())


@pytest.mark.full(short=["gpt2", "deepseek-v3"])
@pytest.mark.parametrize("name", PRESETS)
def test_presets_have_the_published_size_and_no_memory(name: str) -> None:
    model = build_meta_model(name, torch.bfloat16)
    expected = PUBLISHED[name] - ROUTER_BIASES.get(name, 0)
    assert numel(model) == expected
    assert {(param.dtype, param.device.type) for param in model.parameters()} == {(torch.bfloat16, "meta")}
    assert model.training
    biases = [buffer.numel() for each, buffer in model.named_buffers() if "correction_bias" in each]
    assert sum(biases) == ROUTER_BIASES.get(name, 0)


def build_real() -> nn.Module:
    return nn.Linear(2, 2, device="cpu")


def build_nothing() -> Any:
    return 3


SMALL = {**PRESETS["gpt2"], "n_embd": 8, "n_layer": 1, "n_head": 2}


def test_every_way_to_give_a_model(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**SMALL, "dtype": "bfloat16"}))
    from_file = [build_meta_model(given) for given in (tmp_path, str(tmp_path), tmp_path / "config.json")]
    assert {(numel(model), next(model.parameters()).dtype) for model in from_file} == {
        (numel(build_meta_model(SMALL)), torch.bfloat16)
    }
    assert next(build_meta_model(SMALL).parameters()).dtype == torch.float32
    assert next(build_meta_model(SMALL, torch.float16).parameters()).dtype == torch.float16
    built = build_meta_model("tests.support.zoo:Tower")
    assert isinstance(built, Tower)
    assert isinstance(build_meta_model(Tower), Tower)
    assert build_meta_model(built) is built


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("lama-3-8b", r"'lama-3-8b' is no preset, .*; did you mean 'llama-3-8b'\? choose one of gpt2, "),
        ({"hidden_size": 8}, r"the config has no model_type \(hidden_size\)"),
        ({"model_type": "nonesuch"}, r"knows no model_type 'nonesuch'"),
        ({**SMALL, "n_head": "two"}, r"gpt2.* is not valid|builds no model from GPT2Config"),
        (
            {**SMALL, "architectures": ["OwnModel"]},
            r"names the class 'OwnModel', and transformers .* has no such model",
        ),
        (
            {**SMALL, "architectures": ["PreTrainedModel"]},
            r"names the class 'PreTrainedModel', and transformers .* has no such model",
        ),
        (
            {**SMALL, "architectures": ["BertModel"]},
            r"is a GPT2Config and names the class BertModel, which takes a Bert",
        ),
        ({"model_type": "clip_text_model_x"}, r"knows no model_type 'clip_text_model_x'"),
        ({"model_type": "siglip_text_model"}, r"has no model of SiglipTextConfig alone"),
        (build_real, r"weight has memory on cpu; build the model under torch.device\('meta'\)"),
        (build_nothing, r"build_nothing returned a int; it must return a model"),
        (f"{__name__}:SMALL", r"is a dict; give a function or class to call"),
        (3, r"given as a int; give a preset"),
        (nn.Linear(2, 2), r"weight has memory on cpu"),
    ],
)
def test_what_is_no_model_is_refused(spec: Any, words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        build_meta_model(spec)


WHOLE = {
    "bart": ("BartForConditionalGeneration", "AutoModelForSeq2SeqLM", 406_291_456),
    "whisper": ("WhisperForConditionalGeneration", "AutoModelForSpeechSeq2Seq", None),
    "gemma3": ("Gemma3ForConditionalGeneration", "AutoModelForImageTextToText", None),
}


@pytest.mark.full(short=["gemma3"])
@pytest.mark.parametrize("model_type", WHOLE)
def test_a_config_gives_its_whole_model(model_type: str) -> None:
    class_name, auto, count = WHOLE[model_type]
    model = build_meta_model({"model_type": model_type})
    with torch.device("meta"):
        expected = getattr(transformers, auto).from_config(transformers.AutoConfig.for_model(model_type))
    assert (type(model).__name__, type(expected).__name__) == (class_name, class_name)
    assert numel(model) == numel(expected)
    assert count in (None, numel(model))


def test_a_config_gives_the_class_that_it_names() -> None:
    small = {"model_type": "bart", "encoder_layers": 1, "decoder_layers": 1, "d_model": 16, "vocab_size": 50}
    for name in ("BartForCausalLM", "BartForConditionalGeneration", "BartModel", "BartForSequenceClassification"):
        assert type(build_meta_model({**small, "architectures": [name]})).__name__ == name


def test_code_of_a_folder_is_neither_run_nor_asked_about(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("builtins.input", lambda _: pytest.fail("transformers asks on standard input"))
    folder = folder_with_code(tmp_path / "own")
    refused = r"it needs code of its own \(auto_map\), which is never run here; run it yourself, and register"
    with pytest.raises(ConfigurationError, match=f"own has no config that transformers .* reads: {refused}"):
        read_config(folder)
    config = transformers.PretrainedConfig(auto_map={"AutoModelForCausalLM": "own.OwnModel"}, name_or_path=str(folder))
    with pytest.raises(ConfigurationError, match=f"builds no AutoModelForCausalLM from .*: {refused}"):
        build_from_config(config, torch.float32)
    assert not (folder / "has_run").exists()


def test_a_config_of_absurd_size_is_refused_at_once() -> None:
    for fields in (
        {"num_hidden_layers": 3_000_000},
        {"model_type": "mixtral", "num_local_experts": 10**9},
        {"model_type": "resnet", "depths": [1, 10**7, 1, 1]},
    ):
        with pytest.raises(ConfigurationError, match=r"the config has \w+=[\d\[\], ]+; give at most 100000"):
            build_meta_model({"model_type": "llama", **fields})
