"""`--export-hf`: transformers loads what a run has trained, whatever engine and ranks trained it."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_fsdp.train.loop import train
from megatron_fsdp.train.options.command_line import parse_options
from megatron_fsdp.train.options.job import World
from megatron_fsdp.train.options.resolve import resolve
from megatron_fsdp.train.run_job import export, run_job
from tests.conftest import RunRanks
from tests.support.train_program import refusal, this_rank, write_text
from tests.support.train_program import train as train_whole
from tests.train.engines.runs import IDS, LLAMA, MIXTRAL, SMALL_SHAPE, NoCheckpoints, Silent, prepare, whole_weights

UNITS = {"use_megatron_fsdp": True, "data_parallel_sharding_strategy": "optim_grads_params"}
FSDP2 = {"use_torch_fsdp2": True}
FAMILY = ("--transformer-impl", "transformers", "--no-qk-layernorm", "--train-iters", "2")


def trained_and_exported(values: dict[str, Any], folder: str) -> dict[str, torch.Tensor]:
    run = prepare(values)
    run = replace(run, data=replace(run.data, vocab_size=IDS))
    train(run, Silent(), NoCheckpoints())
    export(run, Path(folder))
    return whole_weights(run.trained.model)


@pytest.mark.full(short=["units", "fsdp2-pipeline"])
@pytest.mark.parametrize(
    ("ranks", "values"),
    [
        pytest.param(2, {**LLAMA, **UNITS}, id="units"),
        pytest.param(2, {**LLAMA, **UNITS, "tensor_model_parallel_size": 2}, id="tensor"),
        pytest.param(2, {**LLAMA, **UNITS, "pipeline_model_parallel_size": 2}, id="pipeline"),
        pytest.param(2, {**LLAMA, **FSDP2}, id="fsdp2"),
        pytest.param(2, {**LLAMA, **FSDP2, "pipeline_model_parallel_size": 2}, id="fsdp2-pipeline"),
        pytest.param(2, {**MIXTRAL, **UNITS, "expert_model_parallel_size": 2}, id="experts"),
    ],
)
def test_transformers_loads_the_weights_that_were_trained(
    run_ranks: RunRanks, tmp_path: Path, ranks: int, values: dict[str, Any]
) -> None:
    import transformers

    folder = tmp_path / "exported"
    expected = run_ranks(ranks, trained_and_exported, values, str(folder))[0]
    loaded = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    found = {name: param.detach() for name, param in loaded.named_parameters()}
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


def test_a_run_exports_when_it_ends_and_never_over_anything(run_ranks: RunRanks, tmp_path: Path) -> None:
    import transformers

    text, folder = str(write_text(tmp_path / "text.txt")), tmp_path / "exported"
    options = (*FAMILY, "--data-path", text, "--export-hf", str(folder))
    run_ranks(2, train_whole, *options, "--out", str(tmp_path / "out"))
    config = transformers.AutoConfig.from_pretrained(folder)
    assert (config.architectures, config.hidden_size) == (["LlamaForCausalLM"], 32)
    told = run_ranks(2, refusal, *options, "--out", str(tmp_path / "again"))
    assert (
        told == [f"ConfigurationError: --export-hf {folder} is there already: give a new folder, or an empty one"] * 2
    )
    below = tmp_path / "text.txt" / "exported"
    told = run_ranks(2, refusal, *options, "--export-hf", str(below), "--out", str(tmp_path / "again"))
    assert told[0].startswith(f"ConfigurationError: --export-hf {below} cannot be made (")
    assert told[0] == told[1]
    assert not (tmp_path / "again").exists()


def test_a_tuned_model_takes_along_what_lies_beside_its_weights(run_ranks: RunRanks, tmp_path: Path) -> None:
    import transformers

    source, folder = tmp_path / "source", tmp_path / "exported"
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**SMALL_SHAPE, "vocab_size": 256}))
    model.save_pretrained(source)
    (source / "chat_template.jinja").write_text("{{ messages }}")
    text, steps = str(write_text(tmp_path / "text.txt")), ("--seq-length", "16", "--micro-batch-size", "1")
    data = ("--tokenizer-type", "byte", "--data-path", text, "--out", str(tmp_path / "out"))
    begin = ("--hf-model", str(source), "--train-iters", "2", "--lr", "0.1", "--device", "cpu", "--use-megatron-fsdp")
    run_ranks(1, train_words, *begin, *steps, *data, "--export-hf", str(folder))
    assert (folder / "chat_template.jinja").read_text() == "{{ messages }}"
    tuned = transformers.AutoModelForCausalLM.from_pretrained(folder)
    assert tuned.config.hidden_size == model.config.hidden_size
    assert not torch.equal(tuned.lm_head.weight, model.lm_head.weight)


def train_words(*words: str) -> None:
    run_job(resolve(parse_options(words), World(1, "cpu")), this_rank())
