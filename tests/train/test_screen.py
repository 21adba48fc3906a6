"""What a person sees: the program on a terminal that is emulated, and into a pipe."""

import contextlib
import fcntl
import io
import json
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from megatron_fsdp.train.measure import StepRecord
from megatron_fsdp.train.recorder import read_lines
from tests.conftest import RunRanks
from tests.support.train_program import LIMIT_S, environment, train

COLUMNS, LINES = 80, 50
HIDDEN = ("NO_COLOR", "COLUMNS", "LINES", "FORCE_COLOR")
QUICK = ("--preset", "tiny", "--device", "cpu", "--nproc", "2", "--seq-length", "16", "--eval-iters", "1")
FIGURES = (
    r"^loss +\d+\.\d{3}  held-out loss +\d+\.\d{3}  grad norm +\d+\.\d\d$",
    r"^tokens/s +[\d,]+  TFLOP/s/rank +[\d.e-]+  step +[\d,]+ ms$",
    r"^exposed comm +\d+\.\d%  memory peak +[\d.]+ [KM]iB  learning rate +\d\.\d\de-\d\d$",
    r"^skipped steps +\d+$",
)


def _listen_to_the_terminal() -> None:
    """Let Ctrl-C reach this process; it is ignored in jobs in the background, and in what they start."""
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    signal.signal(signal.SIGINT, signal.SIG_DFL)


class Terminal:
    """A program on a terminal, and what that shows."""

    def __init__(self, argv: list[str], pyte: Any) -> None:
        self.screen = pyte.Screen(COLUMNS, LINES)
        self._stream = pyte.ByteStream(self.screen)
        self.raw = b""
        self._ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", LINES, COLUMNS, 0, 0))
        known = environment(TERM="xterm-256color")
        self.process = subprocess.Popen(
            argv,
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env={name: value for name, value in known.items() if name not in HIDDEN},
            start_new_session=True,
            preexec_fn=_listen_to_the_terminal,
        )
        os.close(theirs)

    def type(self, keys: bytes) -> None:
        os.write(self._ours, keys)

    def read_until(self, is_there: Callable[[list[str]], bool]) -> list[str]:
        """Read until the screen shows something, or the program ends; return the lines."""
        deadline = time.monotonic() + LIMIT_S
        while not is_there(self.lines) and self._read(deadline):
            pass
        return self.lines

    @property
    def lines(self) -> list[str]:
        return [line.rstrip() for line in self.screen.display]

    def _read(self, deadline: float) -> bool:
        ready, _, _ = select.select([self._ours], [], [], max(0.0, deadline - time.monotonic()))
        if not ready:
            pytest.fail("the program hangs; the screen shows\n" + "\n".join(self.lines))
        try:
            chunk = os.read(self._ours, 65536)
        except OSError:  # Linux says so when the program has closed the terminal
            return False
        self.raw += chunk
        self._stream.feed(chunk)
        return bool(chunk)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._ours)


@contextlib.contextmanager
def on_a_terminal(*options: str) -> Iterator[Terminal]:
    command = [sys.executable, "-m", "megatron_fsdp.train", *QUICK, *options]
    terminal = Terminal(command, pytest.importorskip("pyte"))
    try:
        yield terminal
    finally:
        terminal.close()


def has_all_figures(lines: list[str]) -> bool:
    return all(any(re.search(figure, line) for line in lines) for figure in FIGURES)


@pytest.mark.full
def test_a_terminal_shows_bar_and_figures_and_ctrl_c_leaves_it_in_order(text_file: Path, tmp_path: Path) -> None:
    endless = ("--train-iters", "1000000", "--eval-interval", "5", "--data-path", str(text_file))
    with on_a_terminal(*endless, "--out", str(tmp_path / "out")) as terminal:
        lines = terminal.read_until(has_all_figures)
        assert has_all_figures(lines), "\n".join(lines)
        bars = [line for line in lines if re.match(r"^step [\d,]+/1,000,000 ━+ 0%  [\d:]+ left$", line)]
        assert len(bars) == 1, "\n".join(lines)
        assert len(bars[0]) == COLUMNS
        first = lines.index(bars[0])
        assert [bool(re.search(figure, line)) for figure, line in zip(FIGURES, lines[first + 1 :], strict=False)] == [
            True
        ] * 4
        header = "\n".join(lines[:first])
        for part in ("megatron_fsdp training", "global 8 = 2 ranks x 1 microbatch x 4", "main gradients float32"):
            assert part in header
        terminal.type(b"\x03")
        lines = terminal.read_until(lambda _: False)
        assert terminal.process.wait(LIMIT_S) == 130
        assert any("stopped" in line for line in lines), "\n".join(lines)
        assert "Traceback" not in "\n".join(lines)
        assert not terminal.screen.cursor.hidden
        assert terminal.screen.cursor.x == 0
        assert b"\x1b[?25l" not in terminal.raw  # it was never hidden, so even kill -9 leaves it
        assert sum(line.startswith("tokens/s") for line in lines) == 1  # the picture was drawn over itself


def shown_by(*options: str) -> str:
    """What a rank prints where there is no terminal."""
    with contextlib.redirect_stdout(io.StringIO()) as text:
        train(*options)
    return text.getvalue()


def test_a_pipe_gets_a_short_text_and_the_folder_everything(
    run_ranks: RunRanks, data: tuple[str, str], tmp_path: Path
) -> None:
    steps = ("--train-iters", "60", "--log-interval", "1", "--eval-interval", "3", "--global-batch-size", "5")
    text, nothing = run_ranks(2, shown_by, *steps, *data, "--out", str(tmp_path))
    assert nothing == ""
    assert "\x1b" not in text
    lines = text.splitlines()
    shown = [line for line in lines if line.startswith("step ")]
    assert 20 <= len([line for line in shown if "tokens/s" in line]) <= 21
    assert len([line for line in shown if " held-out loss " in line]) >= 20
    assert shown[-1].startswith("step    60/60  held-out loss ")
    assert "global 5 = 2 ranks x 2 microbatches x 2 - 3 that only fill up" in text
    assert len(lines) < 100

    records = read_lines(tmp_path / "metrics.jsonl", StepRecord)
    assert [record.step for record in records] == list(range(1, 61))
    assert all(0 < record.exposed_share < 1 and record.tflops > 0 for record in records)
    found = json.loads((tmp_path / "applied.json").read_text(), parse_constant=pytest.fail)
    assert (found["options"]["train_iters"], found["origins"]["train_iters"]) == (60, "command line")
    summary = json.loads((tmp_path / "summary.json").read_text(), parse_constant=pytest.fail)
    assert summary["progress"]["steps"] == 60
    assert summary["evaluations"][-1]["loss"] == summary["held_out_loss"]
