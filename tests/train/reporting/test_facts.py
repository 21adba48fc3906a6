import math

import pytest

from megatron_fsdp.train.reporting.console import format_bytes, printable
from megatron_fsdp.train.reporting.facts import Facts, averaged, cells, duration, percent, plain_line, short_number
from megatron_fsdp.train.reporting.metrics import Evaluation
from tests.train.reporting.records import record


def test_bytes_are_shown_with_binary_units() -> None:
    assert [format_bytes(count) for count in (0, 1023, 1536, 5 * 2**20, 3 * 2**30)] == [
        "0 B",
        "1023 B",
        "1.5 KiB",
        "5.0 MiB",
        "3.00 GiB",
    ]


def test_speeds_are_those_of_all_steps_together() -> None:
    slow, fast = (
        record(1, tokens_per_s=10.0, tflops=1.0, step_s=3.0),
        record(2, tokens_per_s=30.0, tflops=3.0, step_s=1.0),
    )
    found = averaged([slow, fast])
    assert (found.step, found.loss) == (2, 2.5)
    assert (found.tokens_per_s, found.tflops, found.step_s) == (15.0, 1.5, 2.0)
    assert math.isnan(averaged([slow, record(2, mfu=math.nan)]).mfu)


def test_a_plain_line_has_every_figure() -> None:
    facts = Facts(record(3, loss=1.23456, skipped=2), None, 0.125, 3700.0)
    assert plain_line(facts, 300) == (
        "step     3/300  loss 1.235  grad norm 1.50  64 tokens/s  1.25 TFLOP/s  MFU 40.0%  exposed 12.5%  skipped 2  "
        "peak 1.0 MiB  1:01:40 left"
    )
    evaluated = Facts(record(3), Evaluation(2, 1.75), 0.125, 3700.0)
    assert "  loss 1.667  held-out 1.750  grad norm 1.50  " in plain_line(evaluated, 300)
    unknown = Facts(record(3, tflops=math.nan, mfu=math.nan), None, math.nan, math.nan)
    assert "64 tokens/s  - TFLOP/s  MFU -  exposed -  skipped 0  peak 1.0 MiB  - left" in plain_line(unknown, 300)


def test_a_terminal_shows_every_figure() -> None:
    facts = Facts(record(4, skipped=1), Evaluation(2, 1.75), 0.5, 1.0)
    assert dict(cells(facts)) == {
        "loss": "1.250",
        "held-out loss": "1.750",
        "grad norm": "1.50",
        "tokens/s": "64",
        "TFLOP/s/rank": "1.25",
        "MFU": "40.0%",
        "step": "500 ms",
        "exposed comm": "50.0%",
        "memory peak": "1.0 MiB",
        "learning rate": "1.00e-03",
        "skipped steps": "1",
    }


@pytest.mark.parametrize(("seconds", "shown"), [(0, "0:00"), (59.6, "1:00"), (3599, "59:59"), (7322, "2:02:02")])
def test_durations(seconds: float, shown: str) -> None:
    assert duration(seconds) == shown


def test_numbers_that_are_not_known_are_dashes() -> None:
    assert [short_number(math.nan), percent(math.nan), duration(math.inf)] == ["-", "-", "-"]
    assert [short_number(value) for value in (0.00123, 1.5, 99.96, 1234.5)] == ["0.00123", "1.5", "100", "1,234"]


def test_what_a_model_writes_cannot_steer_a_terminal() -> None:
    assert printable("a\n\x1b[31mé\x07\x9b") == "a\n\N{REPLACEMENT CHARACTER}[31mé" + 2 * "\N{REPLACEMENT CHARACTER}"
