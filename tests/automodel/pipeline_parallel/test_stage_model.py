"""A model that was cut: what it keeps, under which names, and what cannot be cut."""

import copy
from collections.abc import Callable
from operator import attrgetter
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from megatron_fsdp.automodel.architecture import find_layers
from megatron_fsdp.automodel.pipeline_parallel.stages import cut_stage, tied_embeddings
from megatron_fsdp.errors import ConfigurationError
from tests.support.language_models import FAMILIES, VOCABULARY, batch_of, build
from tests.support.on_ranks import refusal

PIECES = ((0, 2), (2, 3), (3, 4))


def stages_of(kind: str, device: str, **changes: Any) -> list[nn.Module]:
    stages = []
    for index, (start, stop) in enumerate(PIECES):
        with torch.device(device):
            model = build(kind, **changes)
        stages.append(cut_stage(model, start, stop, index == 0, index == len(PIECES) - 1))
    return stages


@pytest.mark.parametrize("kind", FAMILIES)
def test_stages_of_every_family_have_all_parameters_once_and_compute_the_same(kind: str) -> None:
    whole, stages = build(kind), stages_of(kind, "cpu")
    names = [name for stage in stages for name, _ in stage.named_parameters()]
    tied = tied_embeddings(whole)
    assert sorted(names) == sorted([name for name, _ in whole.named_parameters()] + ([tied[0]] if tied else []))
    assert [[name for name, _ in find_layers(stage).named()] for stage in stages] == [
        [name for name, _ in find_layers(whole).named()][start:stop] for start, stop in PIECES
    ]
    tokens = batch_of()["input_ids"]
    value = tokens
    with torch.no_grad():
        for stage in stages:
            value = stage(value)
        torch.testing.assert_close(value, whole(tokens, use_cache=False).logits, rtol=1e-5, atol=1e-6)


def test_models_that_take_tuples_from_their_layers_can_be_cut() -> None:
    config = transformers.FalconConfig(
        vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=7, num_attention_heads=4, tie_word_embeddings=False
    )
    whole = transformers.AutoModelForCausalLM.from_config(config).eval()
    tokens = batch_of()["input_ids"]
    value = tokens
    with torch.no_grad():
        for start, stop in ((0, 1), (1, 6), (6, 7)):
            value = cut_stage(copy.deepcopy(whole), start, stop, start == 0, stop == 7)(value)
        torch.testing.assert_close(value, whole(tokens, use_cache=False).logits, rtol=1e-5, atol=1e-6)


def llama_with(path: str, made_of: Callable[[Any], object]) -> Any:
    """A Llama one of whose parts or settings is another."""
    model = build("llama")
    owner, _, name = path.rpartition(".")
    setattr(attrgetter(owner)(model) if owner else model, name, made_of(model))
    return model


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: llama_with("vision", lambda _: nn.Linear(2, 2)), "no stage is known for (vision)"),
        (lambda: llama_with("model.adapter", lambda _: nn.Linear(2, 2)), "no stage is known for (adapter)"),
        (
            lambda: llama_with("model.layers.3.mlp", attrgetter("model.layers.0.mlp")),
            "shares parameters between layers",
        ),
        (lambda: build("mixtral", output_router_logits=True), "output_router_logits=True"),
        (lambda: llama_with("config.is_encoder_decoder", lambda _: True), "takes decoders only"),
        (lambda: nn.Sequential(nn.Linear(2, 2)), "no causal language model"),
    ],
)
def test_models_that_cannot_be_cut_are_refused_and_left_whole(make: Callable[[], Any], words: str) -> None:
    model = make()
    names = [name for name, _ in model.named_parameters()]
    assert words in refusal(cut_stage, model, 0, 2, error=ConfigurationError, is_first=True, is_last=False)
    assert [name for name, _ in model.named_parameters()] == names
