"""Files that do not fit are refused with names on every rank; new heads, dtypes, attention, memory while loading."""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
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
from megatron_fsdp.automodel.auto_model import canonical_text
from megatron_fsdp.checkpoint.hf.files import FolderReader, StoredTensor
from megatron_fsdp.errors import ConfigurationError
from megatron_fsdp.sharding.shards import Box
from tests.automodel.training import STRATEGIES, load, parameters_of, plain_name, saved, strategy
from tests.conftest import RunRanks
from tests.support.counting import LiveBytes
from tests.support.language_models import batch_of, build, config_of, folder_with_code
from tests.support.on_ranks import (
    assert_equal_tensors,
    first_rank_warns,
    fixed_seed,
    on_ranks,
    once,
    refusal,
    same_on_ranks,
)

WEIGHTS = "model.safetensors"


def rewrite(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> Path:
    """Save a small Llama, with its tensors changed."""

    def save() -> None:
        build("llama").save_pretrained(folder)
        tensors = load_file(folder / WEIGHTS)
        change(tensors)
        save_file(tensors, folder / WEIGHTS, {"format": "pt"})

    once(save)
    return folder


MISFITS: dict[str, Callable[[dict[str, Tensor]], object]] = {
    "model.layers.2.mlp.up_proj.weight": lambda tensors: tensors.pop("model.layers.2.mlp.up_proj.weight"),
    "model.layers.2.mlp.extra": lambda tensors: tensors.update({"model.layers.2.mlp.extra": torch.zeros(2)}),
    "model.norm.weight (has (31,), wanted (32,))": lambda tensors: tensors.update(
        {"model.norm.weight": torch.zeros(31)}
    ),
    "lm_head.weight": lambda tensors: tensors.pop("lm_head.weight"),
}


@pytest.mark.full(cover=1)
@pytest.mark.parametrize("name", STRATEGIES)
@pytest.mark.parametrize("told", MISFITS)
@on_ranks(2)
def test_weights_that_do_not_fit_are_named_on_every_rank(tmp_path: Path, name: str, told: str) -> None:
    assert told in refusal(load, rewrite(tmp_path, MISFITS[told]), name)


@pytest.mark.full(short=["fsdp2"])
@pytest.mark.parametrize("name", STRATEGIES)
@on_ranks(2)
def test_what_is_missing_is_drawn_if_that_is_asked_for(tmp_path: Path, name: str) -> None:
    missing = "model.layers.2.mlp.up_proj.weight"
    folder = rewrite(tmp_path, MISFITS[missing])
    with first_rank_warns(f"lacks 1 weights, which were drawn at random: {missing}"):
        found = parameters_of(load(folder, name, strict=False))
    drawn = found.pop(missing)
    assert 0.015 < drawn.std() < 0.025  # initializer_range is 0.02
    same_on_ranks(drawn.tolist())
    assert_equal_tensors(found, load_file(folder / WEIGHTS))


@on_ranks(2)
def test_from_config_refuses_what_only_transformers_own_takes() -> None:
    make = partial(AutoModelForCausalLM.from_config, config_of("llama"), distributed_config=strategy("ddp"))
    assert "device_map='cpu'" in refusal(make, device_map="cpu", error=ConfigurationError)
    assert "trust_remote_code=True" in refusal(make, trust_remote_code=True, error=ConfigurationError)


@on_ranks(2)
def test_folders_names_and_fields_that_are_not_there_are_refused(tmp_path: Path) -> None:
    def prepare() -> None:
        for name in ("empty", "other"):
            (tmp_path / name).mkdir()
        (tmp_path / "other" / "config.json").write_text(json.dumps({"model_type": "of_tomorrow"}))
        folder_with_code(tmp_path / "own")

    once(prepare)
    saved("llama", tmp_path / "model")
    cases: list[tuple[str, dict[str, Any], str]] = [
        ("absent", {}, "neither a local folder nor in the local cache"),
        ("empty", {}, "has no config that transformers"),
        ("other", {}, "of_tomorrow"),
        ("model", {"num_layer": 3}, "'num_layer' is neither an argument nor a field of LlamaConfig"),
        ("model", {"dtype": "int8"}, "dtype='int8'"),
        ("model", {"attn_implementation": "of_tomorrow"}, "of_tomorrow"),
        ("model", {"peft_config": {}}, "peft_config is a dict"),
        ("model", {"device_map": "auto"}, "device_map='auto' puts whole layers on devices"),
        ("model", {"trust_remote_code": True}, "code from a model's folder is never run"),
        ("own", {}, "it needs code of its own (auto_map), which is never run here"),
    ]
    for folder, options, told in cases:
        assert told in refusal(load, tmp_path / folder, **options)


@pytest.mark.full(short=["ddp"])
@pytest.mark.parametrize("name", STRATEGIES)
@on_ranks(2)
def test_dtype_and_attention_are_what_was_asked_for_or_what_the_config_says(tmp_path: Path, name: str) -> None:
    once(lambda: build("llama").to(torch.bfloat16).save_pretrained(tmp_path))
    asked = {"dtype": "float32", "attn_implementation": "eager"}
    for options, dtype, attention in (({}, torch.bfloat16, "sdpa"), (asked, torch.float32, "eager")):
        model = load(tmp_path, name, **options)
        assert {param.dtype for param in model.parameters()} == {dtype}
        assert {buffer.dtype for buffer in model.buffers()} == {torch.float32}
        assert getattr(model, "module", model).config._attn_implementation == attention


@pytest.mark.full(short=["megatron_fsdp"])
@pytest.mark.parametrize("name", STRATEGIES)
@on_ranks(2)
def test_a_classifier_takes_the_body_and_draws_its_head(tmp_path: Path, name: str) -> None:
    folder, rows = saved("llama", tmp_path), batch_of(4)["input_ids"]
    with first_rank_warns("lacks 1 weights, which were drawn at random: score.weight"):
        model = load(folder, name, AutoModelForSequenceClassification, num_labels=3)
    with torch.no_grad():
        logits = model(input_ids=rows.chunk(2)[dist.get_rank()], use_cache=False).logits
    weights = parameters_of(model)
    config = transformers.AutoConfig.from_pretrained(folder, num_labels=3)
    plain = transformers.AutoModelForSequenceClassification.from_config(config, dtype=torch.float32)
    plain.load_state_dict(weights)
    stored = load_file(folder / WEIGHTS)
    assert all(torch.equal(weights[key], stored[key]) for key in stored if key != "lm_head.weight")
    with torch.no_grad():
        expected = plain.eval()(input_ids=rows, use_cache=False).logits.chunk(2)[dist.get_rank()]
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)


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


@pytest.mark.full(short=["fsdp2"])
@pytest.mark.parametrize("name", STRATEGIES)
@on_ranks(2)
def test_a_model_of_images_and_text_has_the_logits_of_transformers(tmp_path: Path, name: str) -> None:
    plain, rank = small_llava(), dist.get_rank()
    once(lambda: plain.save_pretrained(tmp_path))
    skips: dict[str, Any] = {"find_unused_parameters": True} if name == "ddp" else {}  # the tower's last layer
    config = strategy(name, **skips)
    model = AutoModelForImageTextToText.from_pretrained(str(tmp_path), distributed_config=config)
    batch = image_batch(plain)
    with torch.no_grad():
        expected = plain(**batch, use_cache=False).logits.chunk(2)[rank]
    logits = model(**{key: value.chunk(2)[rank] for key, value in batch.items()}, use_cache=False).logits
    logits.square().mean().backward()
    torch.testing.assert_close(logits.detach(), expected, rtol=1e-5, atol=1e-5)
    assert any("vision" in key for key, param in model.named_parameters() if param.grad is not None)


@pytest.mark.full(short=["megatron_fsdp"])
@pytest.mark.parametrize("name", ["fsdp2", "megatron_fsdp"])
@on_ranks(4)
def test_loading_needs_the_shards_and_one_tensor(tmp_path: Path, name: str) -> None:
    """A mapped file would count whole, so a copy of each box that is read counts instead."""
    once(lambda: build("llama", vocab_size=4096, hidden_size=256, num_hidden_layers=2).save_pretrained(tmp_path))
    stored = load_file(tmp_path / WEIGHTS).values()
    whole_bytes, largest = sum(value.nbytes for value in stored), max(value.nbytes for value in stored)
    read = FolderReader.read

    def read_a_copy(self: FolderReader, tensor: StoredTensor, box: Box) -> Tensor:
        with _disable_current_modes():
            mapped = read(self, tensor, box)
        return mapped.clone()

    with pytest.MonkeyPatch.context() as patch, LiveBytes() as live:
        patch.setattr(FolderReader, "read", read_a_copy)
        model = load(tmp_path, name)
        end = live.now_bytes
    weights = sum(getattr(param, "_local_tensor", param).nbytes for param in model.parameters())
    assert weights < 0.26 * whole_bytes
    assert live.peak_bytes - end <= 0.3 * largest  # a rank reads the part of a tensor that it holds
    assert end <= (1.02 if name == "fsdp2" else 2.02) * weights  # the engine has made its main gradients


# ---- weights that are drawn, and values that ranks compare -----------------------------------------------------------


def drawn(kind: str, name: str) -> Any:
    """What `from_config` draws under one seed."""
    torch.manual_seed(7)
    return AutoModelForCausalLM.from_config(config_of(kind), distributed_config=strategy(name), dtype=torch.float32)


@pytest.mark.full(short=["deepseek_v3"])
@pytest.mark.parametrize("kind", ["llama_tied", "deepseek_v3"])
@on_ranks(2)
def test_drawn_weights_are_those_of_transformers_bit_for_bit(kind: str) -> None:
    with fixed_seed(7):
        plain = transformers.AutoModelForCausalLM.from_config(config_of(kind), dtype=torch.float32)
    for name in STRATEGIES:
        model = drawn(kind, name)
        assert_equal_tensors(parameters_of(model), dict(plain.named_parameters()))
        buffers = {plain_name(key): buffer for key, buffer in model.named_buffers()}
        assert_equal_tensors(buffers, dict(plain.named_buffers()))


def drawn_by_all(kind: str) -> list[dict[str, Tensor]]:
    return [parameters_of(drawn(kind, name)) for name in STRATEGIES]


@pytest.mark.full
def test_drawn_weights_depend_on_neither_strategy_nor_ranks(run_ranks: RunRanks) -> None:
    # The constructors of GPT-2 draw by themselves, so its weights are not those that transformers gives under the seed.
    (alone,) = run_ranks(1, drawn_by_all, "gpt2")
    for found in [*alone, *(entry for rank in run_ranks(2, drawn_by_all, "gpt2") for entry in rank)]:
        assert_equal_tensors(found, alone[0])


FORTH, BACK = {0, 8}, {8, 0}  # equal, and with their elements in another order, as sets of texts in another process


class Kind(StrEnum):
    LORA = "LORA"


@dataclass
class Inner:
    kind: Kind = Kind.LORA
    names: Any = field(default=None, repr=False)


@dataclass
class Config:
    rank: int = 8
    inner: Any = None


@dataclass(init=False)
class Loose:
    """As BitsAndBytesConfig is, whose values are no fields."""

    def __init__(self, value: int) -> None:
        self.value = value


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (FORTH, BACK),
        (Config(inner=[Inner(names=frozenset(FORTH))]), Config(inner=[Inner(names=frozenset(BACK))])),
        ({"a": FORTH, "b": (1, FORTH)}, {"b": (1, BACK), "a": BACK}),
        (partial(print, 1), partial(print, 1)),
        (object(), object()),
    ],
)
def test_equal_values_have_the_same_text(one: object, other: object) -> None:
    assert list(FORTH) != list(BACK)
    assert canonical_text(one) == canonical_text(other)


def test_other_values_have_another_text() -> None:
    names = {"a"}
    values = [
        names, ["a"], ("a",), "a", {"a": 1}, {"a": "1"}, {"a", "b"}, {"a, b"}, 1, 1.0, True, None, Kind.LORA, Config,
        Config(), Config(9), Config(inner=Inner()), Config(inner=Inner(names=names)), torch.float32, torch.bfloat16,
        partial(print, 1), partial(print, 2), Loose(1), Loose(2),
    ]  # fmt: skip
    texts = [canonical_text(value) for value in values]
    assert len(set(texts)) == len(values), texts
