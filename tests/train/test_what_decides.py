"""What a checkpoint remembers of the options that decide losses, and which options no run can go on with."""

import json
from pathlib import Path

import numpy as np
import pytest

from megatron_fsdp.errors import ConfigurationError
from megatron_fsdp.train.checkpoints import TrainingState, changes_of, facts_of
from tests.support.array_tokens import token_data
from tests.support.on_ranks import refusal
from tests.support.train_program import job_of, job_of_words

HEADS = [
    "num_heads of the model was 2 and is 1",
    "num_query_groups of the model was 2 and is 1",
    "kv_channels of the model was 16 and is 32",
]


def facts(*options: str) -> dict[str, str]:
    return facts_of(job_of(*options), token_data(np.zeros(9, np.uint16)))


@pytest.mark.parametrize(
    ("options", "more", "changes"),
    [
        ("", "--optimizer sgd", ["--optimizer was adam and is sgd"]),
        (
            "--bf16 --no-grad-reduce-in-bf16",
            "--grad-reduce-in-bf16",
            ["the dtype of gradient communication was float32 and is bfloat16"],
        ),
        (
            "--bf16 --use-torch-fsdp2 --no-grad-reduce-in-bf16",
            "--grad-reduce-in-bf16",
            ["the dtype of gradient communication was float32 and is bfloat16"],
        ),
        (
            "--bf16",
            "--megatron-fsdp-main-grads-dtype bf16",
            ["the dtype of main gradients was float32 and is bfloat16"],
        ),
        ("--bf16", "--megatron-fsdp-main-params-dtype auto", ["the dtype of main weights was float32 and is bfloat16"]),
        ("--bf16 --use-torch-fsdp2", "", []),
        ("--bf16", "--fp8-param-gather", ["--megatron-fsdp-weight-format was none and is *=fp8"]),
        ("--bf16 --fp8-param-gather", "--fp8-recipe mxfp8", ["--megatron-fsdp-weight-format was *=fp8 and is *=mxfp8"]),
        ("--no-qk-layernorm", "--num-attention-heads 1", HEADS),
        ("", "--normalization LayerNorm", ["normalization of the model was RMSNorm and is LayerNorm"]),
        (
            "--transformer-impl transformers --num-experts 4 --no-qk-layernorm",
            "--moe-router-topk 1",
            ["num_experts_per_tok of the model was 2 and is 1"],
        ),
    ],
)
def test_every_option_that_decides_losses_is_told_when_it_changes(options: str, more: str, changes: list[str]) -> None:
    saved = TrainingState(facts(*options.split()))
    here = TrainingState(facts(*options.split(), *more.split()))
    here.load_state_dict(saved.state_dict())
    assert changes_of(here.saved_facts, here.facts) == changes


def test_the_tokens_that_the_index_of_a_pair_leaves_to_training_are_a_fact() -> None:
    tokens = np.zeros(9, np.uint16)
    before, after = (facts_of(job_of(), token_data(tokens[:cut], tokens[cut:])) for cut in (6, 7))
    assert changes_of(before, after) == ["the number of tokens to train on was 6 and is 7"]


@pytest.mark.parametrize(
    ("field", "value", "named"),
    [
        ("rope_parameters", {"rope_type": "default", "rope_theta": 500.0}, ["rope_parameters"]),
        ("hidden_act", "gelu", ["hidden_act"]),
        ("_name_or_path", "elsewhere", []),
        ("initializer_range", 0.5, []),
    ],
)
def test_fields_of_a_configuration_are_facts(tmp_path: Path, field: str, value: object, named: list[str]) -> None:
    small = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 4}
    before, after = ({"model_type": "llama", "vocab_size": 64, **small, **more} for more in ({}, {field: value}))
    (tmp_path / "config.json").write_text(json.dumps(before))
    job = job_of_words(f"--seq-length 8 --micro-batch-size 2 --train-iters 2 --lr 1e-3 --hf-config {tmp_path}")
    data = token_data(np.zeros(9, np.uint16))
    saved = facts_of(job, data)
    (tmp_path / "config.json").write_text(json.dumps(after))
    changes = changes_of(saved, facts_of(job, data))
    assert sorted(change.partition(" of the model was ")[0] for change in changes) == sorted(named)


def test_tuning_from_the_folder_to_save_to_is_refused(tmp_path: Path) -> None:
    folder = str(tmp_path / "saved")
    told = refusal(job_of, "--finetune", "--save", folder, "--load", f"{folder}/../saved", error=ConfigurationError)
    assert "would tune again from what it has saved itself" in told
    assert not job_of("--finetune", "--save", folder, "--load", str(tmp_path)).load_is_optional
