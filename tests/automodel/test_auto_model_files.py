"""Files that do not fit are refused with names on every rank; new heads, dtypes, attention, memory while loading."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from megatron_fsdp.automodel import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSequenceClassification,
)
from megatron_fsdp.checkpoint.hf.files import FolderReader, StoredTensor
from megatron_fsdp.errors import CheckpointError, ConfigurationError
from megatron_fsdp.sharding.shards import Box
from tests.automodel.training import STRATEGIES, parameters_of, plain_name, strategy
from tests.conftest import RunRanks
from tests.support.counting import LiveBytes
from tests.support.language_models import batch_of, build, config_of, folder_with_code
from tests.support.on_ranks import first_rank_warns, fixed_seed

WEIGHTS = "model.safetensors"


def rewrite(folder: Path, change: Callable[[dict[str, Tensor]], None]) -> str:
    """Save a small Llama, with its tensors changed."""
    build("llama").save_pretrained(folder)
    tensors = load_file(folder / WEIGHTS)
    change(tensors)
    save_file(tensors, folder / WEIGHTS, {"format": "pt"})
    return str(folder)


def refusal(folder: str, name: str, options: dict[str, Any]) -> str:
    """What `from_pretrained` raises."""
    try:
        AutoModelForCausalLM.from_pretrained(folder, distributed_config=strategy(name), **options)
    except (CheckpointError, ConfigurationError) as error:
        return str(error)
    return "nothing was refused"


def remove_a_weight(tensors: dict[str, Tensor]) -> None:
    del tensors["model.layers.2.mlp.up_proj.weight"]


def add_a_weight(tensors: dict[str, Tensor]) -> None:
    tensors["model.layers.2.mlp.extra"] = torch.zeros(2)


def reshape_a_weight(tensors: dict[str, Tensor]) -> None:
    tensors["model.norm.weight"] = torch.zeros(31)


def remove_the_head(tensors: dict[str, Tensor]) -> None:
    del tensors["lm_head.weight"]


@pytest.mark.full(cover=1)
@pytest.mark.parametrize("name", STRATEGIES)
@pytest.mark.parametrize(
    ("change", "told"),
    [
        (remove_a_weight, "model.layers.2.mlp.up_proj.weight"),
        (add_a_weight, "model.layers.2.mlp.extra"),
        (reshape_a_weight, "model.norm.weight (has (31,), wanted (32,))"),
        (remove_the_head, "lm_head.weight"),
    ],
)
def test_weights_that_do_not_fit_are_named_on_every_rank(
    run_ranks: RunRanks, tmp_path: Path, name: str, change: Callable[[dict[str, Tensor]], None], told: str
) -> None:
    first, second = run_ranks(2, refusal, rewrite(tmp_path, change), name, {})
    assert told in first
    assert first == second


def not_strict(folder: str, name: str) -> dict[str, Tensor]:
    with first_rank_warns("lacks 1 weights, which were drawn at random: model.layers.2.mlp.up_proj.weight"):
        model = AutoModelForCausalLM.from_pretrained(folder, distributed_config=strategy(name), strict=False)
    return parameters_of(model)


@pytest.mark.full(short=["fsdp2"])
@pytest.mark.parametrize("name", STRATEGIES)
def test_what_is_missing_is_drawn_if_that_is_asked_for(run_ranks: RunRanks, tmp_path: Path, name: str) -> None:
    folder = rewrite(tmp_path, remove_a_weight)
    stored = load_file(tmp_path / WEIGHTS)
    first, second = run_ranks(2, not_strict, folder, name)
    for key, value in first.items():
        assert torch.equal(value, second[key])
        if key in stored:
            assert torch.equal(value, stored[key])
    drawn = first["model.layers.2.mlp.up_proj.weight"]
    assert 0.015 < drawn.std() < 0.025  # initializer_range is 0.02


def from_config_with(options: dict[str, Any]) -> str:
    try:
        AutoModelForCausalLM.from_config(config_of("llama"), distributed_config=strategy("ddp"), **options)
    except ConfigurationError as error:
        return str(error)
    return ""


def test_from_config_refuses_what_only_transformers_own_takes(run_ranks: RunRanks) -> None:
    for options in ({"device_map": "cpu"}, {"trust_remote_code": True}):
        first, second = run_ranks(2, from_config_with, options)
        assert f"{next(iter(options))}={next(iter(options.values()))!r}" in first
        assert first == second


def test_folders_names_and_fields_that_are_not_there_are_refused(run_ranks: RunRanks, tmp_path: Path) -> None:
    build("llama").save_pretrained(tmp_path / "model")
    empty = tmp_path / "empty"
    empty.mkdir()
    other = tmp_path / "other"
    other.mkdir()
    (other / "config.json").write_text(json.dumps({"model_type": "of_tomorrow"}))
    cases: list[tuple[str, dict[str, Any], str]] = [
        (str(tmp_path / "absent"), {}, "neither a local folder nor in the local cache"),
        (str(empty), {}, "has no config that transformers"),
        (str(other), {}, "of_tomorrow"),
        (str(tmp_path / "model"), {"num_layer": 3}, "'num_layer' is neither an argument nor a field of LlamaConfig"),
        (str(tmp_path / "model"), {"dtype": "int8"}, "dtype='int8'"),
        (str(tmp_path / "model"), {"attn_implementation": "of_tomorrow"}, "of_tomorrow"),
        (str(tmp_path / "model"), {"peft_config": {}}, "peft_config is a dict"),
        (str(tmp_path / "model"), {"device_map": "auto"}, "device_map='auto' puts whole layers on devices"),
        (str(tmp_path / "model"), {"trust_remote_code": True}, "code from a model's folder is never run"),
        (str(folder_with_code(tmp_path / "own")), {}, "it needs code of its own (auto_map), which is never run here"),
    ]
    for folder, options, told in cases:
        first, second = run_ranks(2, refusal, folder, "fsdp2", options)
        assert told in first
        assert first == second


def facts(folder: str, name: str, options: dict[str, Any]) -> tuple[set[torch.dtype], str, set[torch.dtype]]:
    model: Any = AutoModelForCausalLM.from_pretrained(folder, distributed_config=strategy(name), **options)
    inner = getattr(model, "module", model)
    return (
        {param.dtype for param in model.parameters()},
        inner.config._attn_implementation,
        {buffer.dtype for buffer in model.buffers()},
    )


@pytest.mark.full(short=["ddp"])
@pytest.mark.parametrize("name", STRATEGIES)
def test_dtype_and_attention_are_what_was_asked_for_or_what_the_config_says(
    run_ranks: RunRanks, tmp_path: Path, name: str
) -> None:
    build("llama").to(torch.bfloat16).save_pretrained(tmp_path)
    assert run_ranks(2, facts, str(tmp_path), name, {}) == [({torch.bfloat16}, "sdpa", {torch.float32})] * 2
    asked = {"dtype": "float32", "attn_implementation": "eager"}
    assert run_ranks(2, facts, str(tmp_path), name, asked) == [({torch.float32}, "eager", {torch.float32})] * 2


def classify(folder: str, name: str) -> tuple[Tensor, dict[str, Tensor]]:
    with first_rank_warns("lacks 1 weights, which were drawn at random: score.weight"):
        model: Any = AutoModelForSequenceClassification.from_pretrained(
            folder, distributed_config=strategy(name), num_labels=3
        )
    rows = batch_of(4)["input_ids"].chunk(dist.get_world_size())[dist.get_rank()]
    with torch.no_grad():
        logits = model(input_ids=rows, use_cache=False).logits
    return logits, parameters_of(model)


@pytest.mark.full(short=["megatron_fsdp"])
@pytest.mark.parametrize("name", STRATEGIES)
def test_a_classifier_takes_the_body_and_draws_its_head(run_ranks: RunRanks, tmp_path: Path, name: str) -> None:
    build("llama").save_pretrained(tmp_path)
    found = run_ranks(2, classify, str(tmp_path), name)
    config = transformers.AutoConfig.from_pretrained(tmp_path, num_labels=3)
    with fixed_seed(0):
        plain = transformers.AutoModelForSequenceClassification.from_config(config, dtype=torch.float32)
    plain.load_state_dict(found[0][1])
    stored = load_file(tmp_path / WEIGHTS)
    assert all(torch.equal(found[0][1][key], stored[key]) for key in stored if key != "lm_head.weight")
    with torch.no_grad():
        expected = plain.eval()(input_ids=batch_of(4)["input_ids"], use_cache=False).logits
    torch.testing.assert_close(torch.cat([logits for logits, _ in found]), expected, rtol=1e-5, atol=1e-5)


def small_llava() -> Any:
    vision = transformers.CLIPVisionConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, image_size=16, patch_size=8
    )
    config = transformers.LlavaConfig(vision_config=vision, text_config=config_of("llama"), image_token_index=95)
    with fixed_seed(0):
        return transformers.AutoModelForImageTextToText.from_config(config, dtype=torch.float32)


def image_batch(model: Any) -> dict[str, Tensor]:
    with fixed_seed(2):
        pixels = torch.randn(2, 3, 16, 16)
        tokens = torch.randint(2, 90, (2, 12))
    tokens[:, 1:5] = model.config.image_token_index  # four patches
    return {"input_ids": tokens, "pixel_values": pixels, "attention_mask": torch.ones_like(tokens)}


def read_images(folder: str, name: str) -> tuple[Tensor, set[str]]:
    model: Any = AutoModelForImageTextToText.from_pretrained(folder, distributed_config=strategy(name))
    batch = image_batch(getattr(model, "module", model))
    own = {key: value.chunk(dist.get_world_size())[dist.get_rank()] for key, value in batch.items()}
    loss = model(**own, use_cache=False).logits
    loss.square().mean().backward()
    return loss.detach(), {plain_name(key) for key, param in model.named_parameters() if param.grad is not None}


@pytest.mark.full(short=["fsdp2"])
@pytest.mark.parametrize("name", STRATEGIES)
def test_a_model_of_images_and_text_has_the_logits_of_transformers(
    run_ranks: RunRanks, tmp_path: Path, name: str
) -> None:
    plain = small_llava()
    plain.save_pretrained(tmp_path)
    with torch.no_grad():
        expected = plain(**image_batch(plain), use_cache=False).logits
    found = run_ranks(2, read_images, str(tmp_path), name)
    torch.testing.assert_close(torch.cat([logits for logits, _ in found]), expected, rtol=1e-5, atol=1e-5)
    assert any("vision" in key for key in found[0][1])


def bytes_while_loading(folder: str, name: str) -> tuple[int, int, int]:
    """Bytes inside of `from_pretrained`: at the peak, at the end, and of this rank's weights.

    A mapped file would count whole, so a copy of each box that is read counts in its place.
    """
    read = FolderReader.read

    def read_a_copy(self: FolderReader, tensor: StoredTensor, box: Box) -> Tensor:
        with _disable_current_modes():
            mapped = read(self, tensor, box)
        return mapped.clone()

    with pytest.MonkeyPatch.context() as patch, LiveBytes() as live:
        patch.setattr(FolderReader, "read", read_a_copy)
        model = AutoModelForCausalLM.from_pretrained(folder, distributed_config=strategy(name))
        end = live.now_bytes
    return live.peak_bytes, end, sum(getattr(param, "_local_tensor", param).nbytes for param in model.parameters())


@pytest.mark.full(short=["megatron_fsdp"])
@pytest.mark.parametrize("name", ["fsdp2", "megatron_fsdp"])
def test_loading_needs_the_shards_and_one_tensor(run_ranks: RunRanks, tmp_path: Path, name: str) -> None:
    build("llama", vocab_size=4096, hidden_size=256, num_hidden_layers=2).save_pretrained(tmp_path)
    stored = load_file(tmp_path / WEIGHTS).values()
    whole_bytes, largest = sum(value.nbytes for value in stored), max(value.nbytes for value in stored)
    for peak, end, weights in run_ranks(4, bytes_while_loading, str(tmp_path), name):
        assert weights < 0.26 * whole_bytes
        assert peak - end <= 0.3 * largest  # a rank reads the part of a tensor that it holds
        assert end <= (1.02 if name == "fsdp2" else 2.02) * weights  # the engine has made its main gradients
