"""Words for standard streams that are closed, full, or without a reader."""

import os
import sys

import pytest

from megatron_fsdp.train.launch.streams import let_go, tell


def test_words_are_told_on_a_line_of_their_own(capsys: pytest.CaptureFixture[str]) -> None:
    tell("one\ntwo\n\n")
    assert capsys.readouterr().err == "one\ntwo\n"


def test_a_stream_that_was_closed_from_the_start_is_told_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", None)
    monkeypatch.setattr(sys, "stdout", None)
    tell("one")
    let_go()


def test_a_reader_that_has_gone_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as pipe:
        monkeypatch.setattr(sys, "stderr", pipe)
        tell("one")
        pipe.write("two")
        pipe.flush()  # goes nowhere now


def test_what_cannot_be_written_at_the_end_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    with open("/dev/full", "w") as full:  # noqa: PTH123  # a device
        monkeypatch.setattr(sys, "stdout", full)
        full.write("one")
        let_go()
        full.flush()
