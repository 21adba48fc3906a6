import json
import math
from pathlib import Path

import pytest

from megatron_fsdp.train.reporting.metrics import Evaluation, StepRecord, from_line, read_lines, to_json, to_line
from tests.train.reporting.records import record


def test_a_record_comes_back_as_it_was_written() -> None:
    assert from_line(to_line(record(3, loss_scale=1024.0)), StepRecord) == record(3, loss_scale=1024.0)
    assert from_line(to_line(Evaluation(7, 1.25)), Evaluation) == Evaluation(7, 1.25)


def test_lines_are_strict_json_and_what_is_not_finite_is_null() -> None:
    line = to_line(record(1, loss=math.inf, mfu=math.nan, exposed_share=math.nan))
    found = json.loads(line, parse_constant=pytest.fail)
    assert (found["loss"], found["mfu"], found["exposed_share"], found["tflops"]) == (None, None, None, 1.25)
    again = from_line(line, StepRecord)
    assert again is not None
    assert math.isnan(again.loss)
    assert math.isnan(again.mfu)
    assert json.loads(to_json({"a": [1.0, math.nan], "p": Path("x")})) == {"a": [1.0, None], "p": "x"}


@pytest.mark.parametrize("line", ["", "{}", "[1]", '{"step": 3', '{"step": null}', '{"step": 3}', "7\n"])
def test_a_torn_line_is_no_record(line: str) -> None:
    assert from_line(line, StepRecord) is None


def test_reading_leaves_out_what_is_torn(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    whole = to_line(record(1)) + "not a record\n" + to_line(record(2))
    path.write_bytes(whole.encode() + b"\xff\x00\n" + to_line(record(3)).encode()[:-1])
    assert read_lines(path, StepRecord) == [record(1), record(2)]
    assert read_lines(tmp_path / "nothing", StepRecord) == []


def test_fields_of_other_versions_are_left_out_and_filled_in() -> None:
    found = json.loads(to_line(record(2)))
    del found["mfu"]
    again = from_line(json.dumps({**found, "another": 1}), StepRecord)
    assert again is not None
    assert math.isnan(again.mfu)
    assert again.loss == 2.5


@pytest.mark.parametrize(
    ("loss", "norm", "expected"), [(1.0, 2.0, False), (math.nan, 1.0, True), (1.0, math.inf, True)]
)
def test_a_step_is_skipped_where_something_is_not_finite(loss: float, norm: float, expected: bool) -> None:
    assert record(1, loss=loss, grad_norm=norm).is_skipped is expected


def test_perplexity_of_any_loss() -> None:
    assert Evaluation(1, 2.0).perplexity == math.exp(2.0)
    assert Evaluation(1, 1e4).perplexity == math.inf
    assert math.isnan(Evaluation(1, math.nan).perplexity)
