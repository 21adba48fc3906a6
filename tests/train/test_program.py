"""The program as a person starts it: a launcher and its ranks, each a process."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_fsdp.train.metrics import read_records
from tests.support.source_tree import SOURCE

LIMIT_S = 120.0  # only for a program that hangs
QUICK = ["--preset", "tiny", "--device", "cpu", "--ranks", "2", "--dtype", "fp32", "--sequence-length", "16"]


@pytest.fixture(scope="module")
def text_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "text.txt"
    path.write_text("".join(f"line {i} of the text\n" for i in range(800)))
    return path


def start(*options: str) -> "subprocess.Popen[str]":
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("RANK", "WORLD", "LOCAL_"))}
    return subprocess.Popen(
        [sys.executable, "-m", "megatron_fsdp.train", *QUICK, *options],
        env={**kept, "PYTHONPATH": str(SOURCE), "PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def children_of(leader: int) -> list[int]:
    """Processes whose parent is `leader`, as Linux lists them."""
    path = Path(f"/proc/{leader}/task/{leader}/children")
    return [int(pid) for pid in path.read_text().split()]


def test_run_ends_well_and_shows_everything(text_file: Path, tmp_path: Path) -> None:
    process = start("--steps", "6", "--data", str(text_file), "--out", str(tmp_path))
    shown, errors = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0, errors
    for part in ("133,568 parameters", "2 x Block", "6/6", "held-out loss", "the model writes", "gathers per step"):
        assert shown.count(part) >= 1, part
    assert shown.count("held-out text") == 0
    assert len(read_records(tmp_path / "metrics.jsonl")) == 6


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc to find the ranks")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupt_ends_all_ranks_without_a_traceback(number: int, text_file: Path, tmp_path: Path) -> None:
    process = start("--steps", "1000000", "--log-every", "5", "--data", str(text_file), "--out", str(tmp_path))
    assert process.stdout is not None
    assert any(line.startswith("step ") for line in process.stdout)
    ranks = children_of(process.pid)
    assert len(ranks) == 2
    process.send_signal(number)
    _, errors = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 130
    assert "stopped" in errors
    assert "Traceback" not in errors
    assert [rank for rank in ranks if Path(f"/proc/{rank}").exists()] == []
    assert read_records(tmp_path / "metrics.jsonl")[0].step == 1


def test_wrong_data_is_said_once(tmp_path: Path) -> None:
    short = tmp_path / "short.txt"
    short.write_text("too short")
    process = start("--data", str(short), "--out", str(tmp_path / "out"))
    shown, errors = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 2
    assert errors.count("error: the ") == 1
    assert "one sample needs 17" in errors
    assert "Traceback" not in shown + errors
    assert not (tmp_path / "out").exists()


def test_wrong_option_is_refused_before_any_rank_starts(tmp_path: Path) -> None:
    process = start("--batch-size", "0", "--out", str(tmp_path / "out"))
    shown, errors = process.communicate(timeout=LIMIT_S)
    assert (process.returncode, shown) == (2, "")
    assert errors == "error: --batch-size 0 is not possible: give 1 or more\n"
