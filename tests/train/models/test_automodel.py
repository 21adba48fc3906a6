"""Weights of a folder or drawn from the seed, with every engine, and layers that are computed again."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from megatron_fsdp.errors import ConfigurationError
from megatron_fsdp.train.options import TrainingOptions
from tests.conftest import RunRanks
from tests.train.models.runs import (
    IDS,
    LLAMA,
    MIXTRAL,
    initial_weights,
    job_of,
    kept_by_autograd,
    plain_model,
    refusal_of_building,
)

UNITS = {"use_megatron_fsdp": True}
FSDP2 = {"use_torch_fsdp2": True}
RUN = {name: LLAMA[name] for name in ("seq_length", "micro_batch_size", "train_iters", "lr")}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    model: Any = plain_model(job_of({**LLAMA, "seed": 5}, 1))
    model.save_pretrained(path)
    return path


@pytest.mark.full(short=["engine0"])
@pytest.mark.parametrize(
    "engine", [UNITS, {**UNITS, "tensor_model_parallel_size": 2}, FSDP2, {**UNITS, "pipeline_model_parallel_size": 2}]
)
def test_weights_are_those_of_the_folder(run_ranks: RunRanks, folder: Path, engine: dict[str, Any]) -> None:
    stored = load_file(folder / "model.safetensors")
    for found in run_ranks(2, initial_weights, {**RUN, **engine, "hf_model": str(folder)}):
        assert found.keys() == stored.keys()
        assert all(torch.equal(found[name], value) for name, value in stored.items())


@pytest.mark.parametrize("engine", [UNITS, FSDP2])
def test_weights_of_a_configuration_are_drawn_from_the_seed(
    run_ranks: RunRanks, folder: Path, engine: dict[str, Any]
) -> None:
    drawn = dict(plain_model(job_of({**LLAMA, "seed": 3}, 1)).named_parameters())
    for found in run_ranks(2, initial_weights, {**RUN, **engine, "hf_config": str(folder), "seed": 3}):
        assert all(torch.equal(found[name], value) for name, value in drawn.items())


def test_what_does_not_fit_is_refused_on_every_rank(run_ranks: RunRanks, folder: Path) -> None:
    assert IDS < 64
    told = run_ranks(2, refusal_of_building, {**RUN, **UNITS, "hf_model": str(folder), "seq_length": 9})
    assert [text.split(":")[0] for text in told] == ["--seq-length 9 is more than the 8 positions of the model"] * 2
    told = run_ranks(2, refusal_of_building, {**LLAMA, **UNITS, "tensor_model_parallel_size": 2, "num_query_groups": 1})
    assert told[0] == told[1]
    heads = "the model has num_key_value_heads=1, which 2 tensor-parallel ranks cannot share evenly"
    assert all(text.startswith(heads) for text in told)
    exchanged = {"context_parallel_size": 2, "cp_comm_type": ("a2a",), "num_attention_heads": 1, "num_query_groups": 1}
    for engine in (UNITS, FSDP2):
        told = run_ranks(2, refusal_of_building, {**LLAMA, **engine, **exchanged})
        assert all(text.startswith("1 heads with 1 of keys and values cannot be divided over 2") for text in told)


pytest.importorskip("transformers")


def kept_and_gradients(options: TrainingOptions, start: dict[str, Any] = LLAMA) -> tuple[int, list[Tensor]]:
    """Elements that autograd keeps, and all gradients."""
    from megatron_fsdp.train.models.automodel import recompute_layers

    model = plain_model(job_of({**start, "num_layers": 3}, 1)).train()
    recompute_layers(model, options)
    tokens = torch.arange(8)[None]
    with kept_by_autograd(model) as kept:
        loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
    loss.backward()
    return sum(kept), [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


@pytest.mark.parametrize(
    ("words", "start"), [(("mlp",), LLAMA), (("layernorm", "mlp"), LLAMA), (("moe", "shared_experts"), MIXTRAL)]
)
def test_parts_of_layers_are_recomputed(words: Any, start: dict[str, Any]) -> None:
    chosen = TrainingOptions(recompute_granularity="selective", recompute_modules=words)
    kept, gradients = kept_and_gradients(chosen, start)
    all_kept, expected = kept_and_gradients(TrainingOptions(), start)
    assert kept < 0.9 * all_kept
    assert all(torch.equal(mine, plain) for mine, plain in zip(gradients, expected, strict=True))
    other = TrainingOptions(recompute_granularity="selective", recompute_modules=("shared_experts",))
    with pytest.raises(ConfigurationError, match=r"--recompute-modules shared_experts: the layers of .* have no such"):
        kept_and_gradients(other, start)
