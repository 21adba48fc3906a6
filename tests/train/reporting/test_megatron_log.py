import math
import re
from datetime import UTC, datetime
from pathlib import Path

import pytest

from megatron_fsdp.train.progress import Progress
from megatron_fsdp.train.reporting.metrics import Evaluation
from megatron_fsdp.train.reporting.writers.megatron_log import MegatronLog, evaluation_line, step_line
from tests.train.reporting.records import record

NOW = datetime(2026, 11, 22, 7, 34, 16, tzinfo=UTC)

KEYS = (
    r"consumed samples: +(\d+)",
    r"elapsed time per iteration \(ms\): ([\d.]+)",
    r"throughput per GPU \(TFLOP/s/GPU\): ([\d.]+)",
    r"learning rate: ([\d.]+E[+-]\d+)",
    r"global batch size: +(\d+)",
    r"lm loss: ([\d.]+E[+-]\d+)",
    r"loss scale: ([\d.]+)",
    r"grad norm: ([\d.]+)",
    r"number of skipped iterations: +(\d+)",
    r"number of nan iterations: +(\d+)",
)


def log_in(folder: Path) -> MegatronLog:
    return MegatronLog(folder, train_iters=300, batch=8, clock=lambda: NOW)


def test_a_step_is_written_letter_by_letter_in_the_style_of_megatron() -> None:
    line = step_line(record(10, samples=80, loss=5.123456, grad_norm=1.234), train_iters=300, batch=8, now=NOW)
    assert line == (
        " [2026-11-22 07:34:16] iteration       10/     300 | consumed samples:           80 | "
        "elapsed time per iteration (ms): 500.0 | throughput per GPU (TFLOP/s/GPU): 1.25 | "
        "learning rate: 1.000000E-03 | global batch size:     8 | lm loss: 5.123456E+00 | loss scale: 1.0 | "
        "grad norm: 1.234 | number of skipped iterations:   0 | number of nan iterations:   0 |\n"
    )


def test_every_step_is_found_again_by_the_keys_of_megatron(tmp_path: Path) -> None:
    log = log_in(tmp_path)
    log.start(Progress())
    log.on_steps([record(1), record(2)])
    log.on_evaluation(Evaluation(2, 2.5))
    log.on_steps([record(3)])
    lines = (tmp_path / "train.log").read_text().splitlines()
    steps = [line for line in lines if re.search(r"iteration +\d+/ +\d+ \|", line)]
    assert len(steps) == 3
    for step, line in enumerate(steps, start=1):
        found = [re.search(f"{key} \\|", line) for key in KEYS]
        values = [float(match[1]) for match in found if match is not None]
        expected = [8 * step, 500, 1.25, 1e-3, 8, 5.0 / step, 1, 1.5, 0, 0]
        assert values == pytest.approx(expected, rel=1e-6)
    assert lines[2] == " validation loss at iteration 2 | lm loss value: 2.500000E+00 | lm loss PPL: 1.218249E+01 |"


def test_what_is_not_known_is_left_out_and_what_was_skipped_is_counted() -> None:
    line = step_line(record(1, tflops=math.nan, loss=math.nan), train_iters=1, batch=8, now=NOW)
    assert "TFLOP" not in line
    assert "| lm loss: NAN |" in line
    assert line.endswith("skipped iterations:   1 | number of nan iterations:   1 |\n")
    overflown = step_line(record(1, grad_norm=math.inf), train_iters=1, batch=8, now=NOW)
    assert overflown.endswith("grad norm: inf | number of skipped iterations:   1 | number of nan iterations:   0 |\n")


def test_a_restart_drops_what_happens_again_and_says_so(tmp_path: Path) -> None:
    first = log_in(tmp_path)
    first.start(Progress())
    first.on_steps([record(step) for step in (1, 2, 3, 4)])
    first.on_evaluation(Evaluation(4, 1.0))
    with (tmp_path / "train.log").open("a") as file:
        file.write(" [2026-11-22 07:34:16] iteration        5/     3")  # killed here
    second = log_in(tmp_path)
    second.start(Progress(steps=2))
    second.on_steps([record(3)])
    third = log_in(tmp_path)
    third.start(Progress(steps=3))
    shown = [re.sub(r" \| .*", "", line) for line in (tmp_path / "train.log").read_text().splitlines()]
    assert shown == [
        " [2026-11-22 07:34:16] iteration        1/     300",
        " [2026-11-22 07:34:16] iteration        2/     300",
        " > going on after iteration 2 at 2026-11-22 07:34:16",
        " [2026-11-22 07:34:16] iteration        3/     300",
        " > going on after iteration 3 at 2026-11-22 07:34:16",
    ]


def test_a_loss_beyond_any_perplexity_is_written() -> None:
    assert evaluation_line(Evaluation(1, 1e4)).endswith("| lm loss PPL: INF |\n")
