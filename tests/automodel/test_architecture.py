"""Where a model has its layers and heads, and which lists FSDP2 takes apart."""

import pytest
import torch
import transformers
from torch import nn

from megatron_fsdp.automodel.architecture import find_layers
from megatron_fsdp.automodel.managers import lists_of_layers
from megatron_fsdp.errors import ConfigurationError
from tests.support.language_models import FAMILIES, config_of
from tests.support.on_ranks import refusal


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


def test_longest_list_is_taken_where_the_path_is_not_known() -> None:
    shorter, longest = (nn.ModuleList(nn.Linear(1, 1) for _ in range(count)) for count in (2, 3))
    model = nn.ModuleDict({"heads": shorter, "inside": nn.ModuleDict({"stack": longest})})
    assert find_layers(model).path == "inside.stack"
    assert list(lists_of_layers(model)) == [shorter, longest]


def test_lists_of_lists_are_taken_apart_and_lists_inside_of_layers_are_not() -> None:
    model, layer = nn.Module(), nn.Module()
    layer.experts = nn.ModuleList(nn.Linear(1, 1) for _ in range(2))
    model.towers = nn.ModuleList([nn.ModuleList([layer]), nn.ModuleList([nn.Linear(1, 1)])])
    model.nothing = nn.ModuleList([nn.ReLU()])
    assert list(lists_of_layers(model)) == list(model.towers)


@pytest.mark.parametrize("model", [nn.Linear(1, 1), nn.Sequential(nn.ModuleList())])
def test_model_without_layers_is_refused(model: nn.Module) -> None:
    told = refusal(find_layers, model, error=ConfigurationError)
    assert told.startswith(f"{type(model).__name__} has no list of layers ")
    assert told.endswith("fully_shard_model")
