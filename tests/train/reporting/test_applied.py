import json
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron_fsdp.train.launch.ranks import Rank
from megatron_fsdp.train.options.command_line import parse_options
from megatron_fsdp.train.options.job import Job, World
from megatron_fsdp.train.options.resolve import resolve
from megatron_fsdp.train.reporting.applied import (
    applied,
    applied_rows,
    batch_words,
    dtype_words,
    engine_words,
    preset_rows,
    sizes_words,
    tracker_config,
    without_password,
)
from megatron_fsdp.train.reporting.metrics import to_json
from megatron_fsdp.train.reporting.peak import Peak
from megatron_fsdp.train.reporting.speed import Speed
from tests.support.array_tokens import token_data


def job_of(*flags: str, ranks: int = 2, bf16: bool = False) -> Job:
    return resolve(parse_options(["--preset", "tiny", *flags]), World(ranks, "cpu", multiplies_bf16=bf16))


def rows_of(job: Job) -> list[tuple[str, str]]:
    tokens = np.zeros(1000, dtype=np.uint16)
    data = token_data(tokens, tokens[:100], 100)
    rank = Rank(0, 2, torch.device("cpu"), 0)
    speed = Speed(job.tokens_per_step, 4.09e8, 2, 0.2)
    return applied_rows(job, rank, data, Path("runs/x"), speed, Peak(0.2, "measured"))


def test_header_says_what_was_given_by_whom_and_what_became_of_it(tmp_path: Path) -> None:
    config = tmp_path / "run.yaml"
    config.write_text("lr: 0.25\nqk_layernorm: false\n")
    job = job_of("--config", str(config), "--train-iters", "20", "--no-overlap-grad-reduce", "--use-sharp")
    assert rows_of(job) == [
        ("engine", "megatron_fsdp, optim_grads_params"),
        ("ranks", "2 on cpu"),
        ("batch", "global 8 = 2 ranks x 1 microbatch x 4"),
        (
            "dtypes",
            "compute float32, main weights float32, main gradients float32, gradient communication float32",
        ),
        ("text", "source of the Python standard library"),
        ("tokens", "1,000 to train on, 100 held out"),
        ("steps", "20 of 512 tokens and 0.000409 TFLOP"),
        ("peak", "0.2 TFLOP/s per rank, measured"),
        ("results", "runs/x"),
        ("as applied", f"--no-qk-layernorm --lr 0.25 (config {config})"),
        ("as applied", "--train-iters 20 --no-overlap-grad-reduce (command line)"),
        *(("notice", notice) for notice in job.notices),
    ]
    assert any("--use-sharp has no effect" in notice for notice in job.notices)
    ((name, line),) = preset_rows(job.options)
    assert name == "preset tiny"
    assert "--num-layers 2 --hidden-size 64" in line
    assert "--min-lr 0.0003 " in line
    assert "--train-iters" not in line  # the command line won


def test_words_with_spaces_are_quoted() -> None:
    job = job_of("--prompt", "def main", "--data-path", "a b")
    assert ("as applied", "--prompt 'def main' --data-path 'a b' (command line)") in rows_of(job)
    assert ("as applied", "--prompt '' (command line)") in rows_of(job_of("--prompt", ""))


def test_batch_arithmetic_comes_out_even_or_says_what_fills_up() -> None:
    assert batch_words(job_of("--global-batch-size", "24")) == "global 24 = 2 ranks x 3 microbatches x 4"
    assert batch_words(job_of("--global-batch-size", "10")) == (
        "global 10 = 2 ranks x 2 microbatches x 4 - 6 that only fill up"
    )


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (("--bf16",), ("bfloat16", "float32", "float32", "bfloat16")),
        (
            ("--bf16", "--no-grad-reduce-in-bf16", "--megatron-fsdp-main-params-dtype", "bf16"),
            ("bfloat16", "bfloat16", "float32", "float32"),
        ),
        (("--fp16", "--no-grad-reduce-in-bf16"), ("float16", "float32", "float32", "float32")),
        (
            ("--bf16", "--no-grad-reduce-in-bf16", "--accumulate-allreduce-grads-in-fp32"),
            ("bfloat16", "float32", "float32", "float32"),
        ),
    ],
)
def test_dtypes_are_those_that_the_engine_will_use(flags: tuple[str, ...], expected: tuple[str, ...]) -> None:
    names = ("compute", "main weights", "main gradients", "gradient communication")
    assert dtype_words(job_of(*flags)) == ", ".join(map(" ".join, zip(names, expected, strict=True)))


def test_engines_and_sizes_in_words() -> None:
    replicated = ("--no-use-megatron-fsdp", "--data-parallel-sharding-strategy", "no_shard")
    assert engine_words(job_of(*replicated)) == "ddp, buckets"
    assert engine_words(job_of(*replicated, "--use-distributed-optimizer")) == "ddp, buckets, distributed optimizer"
    cut = job_of(
        "--use-torch-fsdp2",
        "--no-use-megatron-fsdp",
        "--transformer-impl",
        "transformers",
        "--tensor-model-parallel-size",
        "2",
        ranks=4,
    )
    assert engine_words(cut) == "torch FSDP2"
    assert sizes_words(cut) == ": data 2 x tensor 2"
    assert sizes_words(job_of()) == ""


def test_the_file_has_every_option_with_its_value_and_origin() -> None:
    job = job_of("--train-iters", "20", "--bf16", "--ddp-bucket-size", "1000")
    found = json.loads(to_json(applied(job)), parse_constant=pytest.fail)
    assert found["options"]["train_iters"] == 20
    assert found["options"]["ddp_bucket_size"] == 1000
    assert found["options"]["log_interval"] == 5
    assert found["origins"]["train_iters"] == "command line"
    assert found["origins"]["hidden_size"] == "preset tiny"
    assert "log_interval" not in found["origins"]
    assert found["batch"] == {"micro": 4, "total": 8, "ranks": 2, "microbatches": 1, "filled": 0}
    assert (found["engine"], found["dtype"], found["train_iters"]) == ("megatron_fsdp", "bfloat16", 20)
    assert found["ddp"]["megatron_fsdp_grad_comm_dtype"] == "bfloat16"
    flat = tracker_config(found)
    assert (flat["train_iters"], flat["batch.total"], flat["sizes.data"]) == (20, 8, 2)


def test_passwords_stay_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_SECRET_TOKEN", "zq7secret")
    job = job_of("--mlflow-tracking-uri", "https://user:zq7secret@host:5000/path")
    for text in (to_json(applied(job)), str(rows_of(job)), str(tracker_config(applied(job)))):
        assert "zq7secret" not in text
        assert "https://host:5000/path" in text
    assert without_password("runs/mlflow") == "runs/mlflow"
    assert without_password("sqlite:///runs.db") == "sqlite:///runs.db"
