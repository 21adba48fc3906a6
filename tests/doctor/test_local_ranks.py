"""Ranks that the doctor starts itself: they are fed, watched and ended, and the command shows what they found."""

import json
import multiprocessing
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_fsdp.cli.main import main
from megatron_fsdp.doctor.local_ranks import run_on_local_ranks
from megatron_fsdp.errors import RankError
from tests.support.settling import LIMIT_S

MODEL = ["tests.doctor.models:build", "--batch", "tests.doctor.models:tokens", "--steps", "1", "--no-checkpoint"]


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Any:
    before = {process.pid for process in multiprocessing.active_children()}  # the suite's own workers
    yield
    assert {process.pid for process in multiprocessing.active_children()} == before
    assert not dist.is_initialized()


def misbehave(how: str, _device: str | None) -> str:
    """Something goes wrong on rank 1, and rank 0 waits for it."""
    if dist.get_rank() == 1:
        if how == "die":
            os._exit(7)
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "raise":
            raise KeyError("no such layer")
        dist.recv(torch.zeros(1), src=0)
    dist.barrier()
    return how


@pytest.mark.full
@pytest.mark.parametrize(
    ("how", "timeout_s", "message"),
    [
        ("die", LIMIT_S, r"rank 1 died with exit code 7, and all ranks were ended"),
        ("killed", LIMIT_S, r"rank 1 died \(killed by signal 9, as when memory runs out\), and all ranks were ended"),
        ("raise", LIMIT_S, r"rank 1 failed, and all ranks were ended:\n(?s:.*)KeyError: 'no such layer'"),
        ("hang", 8.0, r"took more than 8 s and were ended"),
    ],
    ids=["die", "killed", "raise", "hang"],
)
def test_ranks_that_fail_are_named_and_all_are_ended(how: str, timeout_s: float, message: str) -> None:
    with pytest.raises(RankError, match=message):
        run_on_local_ranks(misbehave, how, 2, "cpu", timeout_s)


@pytest.mark.full
def test_the_command_names_a_fault_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", *MODEL, "--shard", "tests.doctor.faults:summed", "--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    first = told["runs"][0]["differences"][0]
    assert (told["passed"], first["where"], first["name"]) == (False, "gradient", "head.weight")
    assert first["ratio"] == pytest.approx(3.0, rel=1e-5)
    assert told["runs"][0]["results"]["gradients"] == "DIFFERS, step 1"


@pytest.mark.full
def test_the_command_checks_a_transformers_configuration(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    config = {"model_type": "gpt2", "n_embd": 8, "n_head": 2, "n_layer": 3, "vocab_size": 40, "n_positions": 16}
    config |= {"bos_token_id": 0, "eos_token_id": 0}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    options = ["--layers", "1", "--ranks", "1", "--strategy", "1", "--steps", "2", "--no-checkpoint"]
    assert main(["doctor", "--hf-config", str(path), *options]) == 0, capsys.readouterr().out
    shown = capsys.readouterr().out.splitlines()
    assert shown[0].split() == ["initial", "weights", "loss", "gradients", "norm", "updates", "checkpoint"]
    assert shown[1].split() == ["strategy", "1", "(optim)", *["ok"] * 5, "-"]
    assert shown[-1] == "passed: 1 rank against one process, 2 steps, tolerance 1e-05"


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["doctor"], "give one of MODEL (package.module:name) and --hf-config"),
        (["doctor", *MODEL, "--ranks", "1", "--timeout", "0.01"], "(it had not begun: it was still importing)"),
        (["doctor", "a:b"], "--batch is missing"),
        (["doctor", "--hf-config", "nowhere.json"], "there is no such file or folder; give a local one"),
    ],
)
def test_the_command_says_what_it_cannot_run(argv: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv) == 2
    assert message in capsys.readouterr().err
