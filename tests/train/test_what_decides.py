"""What a checkpoint remembers of the options that decide losses, and which options no run can go on with."""

import json
from pathlib import Path

import numpy as np
import pytest

from megatron_fsdp.checkpoint.store import CheckpointStore
from megatron_fsdp.errors import ConfigurationError
from megatron_fsdp.train import checkpoints
from megatron_fsdp.train.checkpoints import Origin, TrainingState, _source_facts, facts_of, with_saved_batch
from megatron_fsdp.train.options.job import Job
from tests.support.array_tokens import token_data
from tests.support.train_program import job_of

WSD = ("--lr-decay-style", "WSD", "--lr-wsd-decay-iters")


def facts(*options: str) -> dict[str, str]:
    return facts_of(job_of(*options), token_data(np.zeros(9, np.uint16)))


@pytest.mark.parametrize(
    ("options", "more", "changes"),
    [
        ("", "--adam-beta1 0.5", ["--adam-beta1 was 0.9 and is 0.5"]),
        ("", "--adam-beta2 0.5", ["--adam-beta2 was {} and is 0.5"]),
        ("", "--adam-eps 0.5", ["--adam-eps was 1e-08 and is 0.5"]),
        ("", "--eod-mask-loss", ["--eod-mask-loss was False and is True"]),
        ("--optimizer sgd", "--sgd-momentum 0.5", ["--sgd-momentum was 0.9 and is 0.5"]),
        ("", "--optimizer sgd", ["--optimizer was adam and is sgd"]),
        (
            "--bf16 --no-grad-reduce-in-bf16",
            "--grad-reduce-in-bf16",
            ["the dtype that gradients travel in was float32 and is bfloat16"],
        ),
        (
            "--bf16 --use-torch-fsdp2 --no-grad-reduce-in-bf16",
            "--grad-reduce-in-bf16",
            ["the dtype that gradients travel in was float32 and is bfloat16"],
        ),
        (
            "--bf16",
            "--megatron-fsdp-main-grads-dtype bf16",
            ["the dtype of main gradients was float32 and is bfloat16"],
        ),
        (
            "--bf16",
            "--megatron-fsdp-main-params-dtype auto",
            ["the dtype of main weights was float32 and is bfloat16"],
        ),
        ("--bf16 --use-torch-fsdp2", "", []),
        ("", "--rotary-base 500", ["--rotary-base was 10000.0 and is 500.0"]),
        ("", "--norm-epsilon 0.1", ["--norm-epsilon was 1e-05 and is 0.1"]),
        ("--no-qk-layernorm", "--num-attention-heads 1", ["--num-attention-heads was 2 and is 1"]),
        ("", "--normalization LayerNorm", ["--normalization was RMSNorm and is LayerNorm"]),
        (
            "--transformer-impl transformers --num-experts 4 --no-qk-layernorm",
            "--moe-router-topk 1",
            ["--moe-router-topk was 2 and is 1"],
        ),
    ],
)
def test_every_option_that_decides_losses_is_told_when_it_changes(options: str, more: str, changes: list[str]) -> None:
    saved = TrainingState(facts(*options.split()))
    here = TrainingState(facts(*options.split(), *more.split()))
    here.load_state_dict(saved.state_dict())
    beta2 = saved.facts.get("--adam-beta2")
    assert here.changes() == [change.format(beta2) for change in changes]


def test_another_configuration_of_transformers_is_told(tmp_path: Path) -> None:
    found = []
    for more in ({}, {"transformers_version": "9"}, {"rope_theta": 5.0}):
        (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **more}))
        found.append(_source_facts(tmp_path))
    assert found[0] == found[1]
    assert found[2] == _source_facts(tmp_path / "config.json")
    assert found[0].keys() == found[2].keys()
    assert found[0] != found[2]


def test_the_fall_of_a_learning_rate_that_is_level_before_is_told() -> None:
    assert facts(*WSD, "2")["--lr-wsd-decay-iters"] == "2"
    assert "--lr-wsd-decay-iters" not in facts()


def test_an_adopted_batch_is_told_of_with_its_own_filling(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    options = ("--preset", "tiny", "--train-iters", "2", "--micro-batch-size", "2", "--load", str(tmp_path))
    job = without_batch(*options)
    assert not [notice for notice in job.notices if "only fill up" in notice]
    monkeypatch.setattr(checkpoints, "saved_batch", lambda _: 5)
    monkeypatch.setattr(checkpoints, "together", lambda _, work: work())
    monkeypatch.setattr(CheckpointStore, "resolve_or_itself", lambda _: tmp_path)
    found = with_saved_batch(job, Origin(tmp_path), lambda _: None)
    told = [notice for notice in found.notices if "only fill up" in notice]
    assert [notice.partition(",")[0] for notice in told] == ["3 of 8 samples of a step only fill up"]
    counted = without_batch(*options[:2], *options[4:], "--train-samples", "100")
    assert with_saved_batch(counted, Origin(tmp_path), lambda _: None).train_iters == 20
    other = without_batch(*options[:2], *options[4:], "--train-samples", "100", "--global-batch-size", "8")
    with pytest.raises(ConfigurationError, match="all steps of --train-samples have one size; give --global-batch"):
        with_saved_batch(other, Origin(tmp_path), lambda _: None)
    monkeypatch.setattr(checkpoints, "saved_batch", lambda _: 4)
    again = with_saved_batch(found, Origin(tmp_path), lambda _: None)
    assert not [notice for notice in again.notices if "only fill up" in notice]


def without_batch(*options: str) -> Job:
    from megatron_fsdp.train.options.command_line import parse_options
    from megatron_fsdp.train.options.job import World
    from megatron_fsdp.train.options.resolve import resolve

    return resolve(parse_options(options), World(2, "cpu"))


def test_tuning_from_the_folder_to_save_to_is_refused(tmp_path: Path) -> None:
    folder = str(tmp_path / "saved")
    with pytest.raises(ConfigurationError, match="would tune again from what it has saved itself"):
        job_of("--finetune", "--save", folder, "--load", f"{folder}/../saved")
    assert not job_of("--finetune", "--save", folder, "--load", str(tmp_path)).load_is_optional
