"""Where a model has its layers and heads, and which lists FSDP2 takes apart."""

from types import SimpleNamespace

import pytest
import torch
import transformers
from torch import nn

from megatron_fsdp.automodel.architecture import find_layers, head_counts, model_type, text_config
from megatron_fsdp.automodel.managers import lists_of_layers
from megatron_fsdp.errors import ConfigurationError
from tests.support.language_models import FAMILIES, config_of


def on_meta(kind: str) -> nn.Module:
    with torch.device("meta"):
        model: nn.Module = transformers.AutoModelForCausalLM.from_config(config_of(kind))
    return model


@pytest.mark.parametrize("kind", FAMILIES)
def test_every_family_has_its_four_layers_where_it_computes_them(kind: str) -> None:
    model = on_meta(kind)
    found = find_layers(model)
    assert found.path == ("transformer.h" if kind == "gpt2" else "model.layers")
    assert found.modules() == list(model.get_submodule(found.path).children())
    assert [name for name, _ in found.named()] == [f"{found.path}.{index}" for index in range(4)]
    assert [model.get_submodule(name) for name, _ in found.named()] == found.modules()
    assert [list(layers.children()) for layers in lists_of_layers(model)] == [found.modules()]


@pytest.mark.parametrize(("kind", "heads"), [("llama", (4, 4)), ("llama_gqa", (4, 2)), ("gpt2", (4, 4))])
def test_heads_of_queries_and_of_keys_are_counted(kind: str, heads: tuple[int, int]) -> None:
    assert head_counts(text_config(on_meta(kind))) == heads


def test_family_has_the_name_of_transformers() -> None:
    assert model_type(on_meta("qwen3_moe")) == "qwen3_moe"
    assert model_type(nn.Linear(1, 1)) == ""
    assert head_counts(text_config(nn.Linear(1, 1))) is None


def test_config_of_the_language_model_is_found_inside_of_a_multimodal_one() -> None:
    inner = SimpleNamespace(num_attention_heads=8, num_key_value_heads=2, model_type="llama")
    model = nn.Linear(1, 1)
    model.config = SimpleNamespace(get_text_config=lambda: inner)  # type: ignore[assignment]
    assert text_config(model) is inner
    assert head_counts(text_config(model)) == (8, 2)


class Wrapped(nn.Module):
    """Layers under a name that nobody knows, and a shorter list beside them."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList(nn.Linear(1, 1) for _ in range(2))
        self.inside = nn.Module()
        self.inside.stack = nn.ModuleList(nn.Linear(1, 1) for _ in range(3))


def test_longest_list_is_taken_where_the_path_is_not_known() -> None:
    model = Wrapped()
    assert find_layers(model).path == "inside.stack"
    assert list(lists_of_layers(model)) == [model.heads, model.inside.stack]


def test_layers_of_a_stage_keep_their_names() -> None:
    model = nn.Module()
    model.layers = nn.ModuleDict({"2": nn.Linear(1, 1), "3": nn.Linear(1, 1)})
    assert [name for name, _ in find_layers(model).named()] == ["layers.2", "layers.3"]
    assert list(lists_of_layers(model)) == [model.layers]


def test_lists_of_lists_are_taken_apart_and_lists_inside_of_layers_are_not() -> None:
    model, layer = nn.Module(), nn.Module()
    layer.experts = nn.ModuleList(nn.Linear(1, 1) for _ in range(2))
    model.towers = nn.ModuleList([nn.ModuleList([layer]), nn.ModuleList([nn.Linear(1, 1)])])
    model.nothing = nn.ModuleList([nn.ReLU()])
    assert list(lists_of_layers(model)) == list(model.towers)


@pytest.mark.parametrize("model", [nn.Linear(1, 1), nn.Sequential(nn.ModuleList())])
def test_model_without_layers_is_refused(model: nn.Module) -> None:
    with pytest.raises(
        ConfigurationError, match=rf"^{type(model).__name__} has no list of layers .*fully_shard_model$"
    ):
        find_layers(model)
