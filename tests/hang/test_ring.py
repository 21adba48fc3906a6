"""The file of a ring log: what goes in comes out, also after a wrap, a tear or a cut; and reading believes nothing."""

import os
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_fsdp.comm.processes import this_process
from megatron_fsdp.config.engine_options import HangSettings, resolve_hang_log
from megatron_fsdp.engine.observer import Phase
from megatron_fsdp.errors import ConfigurationError
from megatron_fsdp.hang.log_file import (
    NO_NUMBER,
    RECORD_BYTES,
    WORDS_BYTES,
    Mark,
    RankLog,
    Ring,
    UnitFacts,
    Writer,
    file_name,
    fold,
    parse_log,
    read_folder,
)

Event = tuple[Mark, Phase, int, int]
_EVENTS = st.tuples(
    st.sampled_from([Mark.BEGINS, Mark.ENDS, Mark.FAILED]),
    st.sampled_from(Phase),
    st.integers(0, 1),
    st.integers(0, 2**62),
)


def _writer(rank: int, run: str = "one", started_ns: int = 1, model: int = 0) -> Writer:
    units = (UnitFacts("(root)", ("a", "b"), 8), UnitFacts("layers.0", (), 0))
    return Writer(rank, (0, 1), model, run, started_ns, this_process(), units)


def _written(events: list[Event], capacity: int = 8) -> bytes:
    """A log with these events."""
    with tempfile.TemporaryDirectory() as folder:
        ring = Ring(Path(folder) / "log", _writer(0), capacity)
        for event in events:
            ring.add(*event)
        return ring.path.read_bytes()


def _events(log: RankLog) -> list[Event]:
    return [(record.mark, record.phase, record.unit, record.num_bytes) for record in log.records]


@settings(max_examples=40)
@given(st.lists(_EVENTS, max_size=40), st.integers(1, 12))
def test_the_last_records_come_out_as_they_went_in(events: list[Event], capacity: int) -> None:
    log = parse_log(_written(events, capacity))
    assert (log.writer, log.beat, log.words, log.termination) == (_writer(0), None, "", "")
    assert _events(log) == events[-capacity:]
    assert [record.number for record in log.records] == list(range(len(events)))[-capacity:]


@settings(max_examples=40)
@given(st.lists(_EVENTS, min_size=1, max_size=12), st.data())
def test_a_torn_record_is_left_out(events: list[Event], data: st.DataObject) -> None:
    content = bytearray(_written(events))
    kept = parse_log(bytes(content)).records
    torn = data.draw(st.sampled_from(kept))
    place = len(content) - RECORD_BYTES * (8 - torn.number % 8)
    content[place + data.draw(st.integers(0, RECORD_BYTES - 1))] ^= 1 << data.draw(st.integers(0, 7))
    assert parse_log(bytes(content)).records == tuple(record for record in kept if record != torn)


@given(st.integers(0, 10**6))
def test_a_file_that_was_cut_off_is_refused(length: int) -> None:
    content = _written([(Mark.BEGINS, Phase.FORWARD, 0, 0)])
    with pytest.raises(ValueError, match=r"^(it does not begin as|its header is damaged or|it was) "):
        parse_log(content[: length % len(content)])


def test_a_heartbeat_and_the_last_error_come_out_as_they_went_in(tmp_path: Path) -> None:
    ring = Ring(tmp_path / "log", _writer(0), 1)
    ring.beat(7, Phase.REDUCE, 1)
    ring.write_error(ValueError("x" * 2 * WORDS_BYTES + " tail"))
    content = ring.path.read_bytes()
    log = parse_log(content)
    assert log.beat is not None
    assert (log.beat.mark, log.beat.collective, log.beat.phase, log.beat.unit) == (Mark.BEAT, 7, Phase.REDUCE, 1)
    assert log.words.endswith("x tail")
    assert len(log.words) == WORDS_BYTES
    damaged = bytearray(content)
    damaged[-WORDS_BYTES - 2 * RECORD_BYTES] ^= 1
    assert parse_log(bytes(damaged)).beat is None
    ring.write_error(ValueError("short"))
    assert parse_log(ring.path.read_bytes()).words == "ValueError: short"


def test_counts_and_hashes_start_again_with_a_reset_and_a_goodbye_comes_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ring = Ring(tmp_path / "log", _writer(0), 8)
    ring.launch(Phase.UNSHARD, 1, 64)
    ring.launch(Phase.NORM, 0, 0)
    ring.reset()
    ring.collective = 3
    ring.launch(Phase.UNSHARD, 1, 64)
    monkeypatch.setattr(sys, "last_value", KeyError("uncaught"), raising=False)
    ring.close()
    ring.add(Mark.BEGINS, Phase.FORWARD)
    log = parse_log(ring.path.read_bytes())
    first = fold(0, Phase.UNSHARD, 1, 64)
    assert [(r.mark, r.counted, r.hash, r.epoch, r.collective) for r in log.records] == [
        (Mark.LAUNCHES, 1, first, 0, NO_NUMBER),
        (Mark.LAUNCHES, 2, fold(first, Phase.NORM, 0, 0), 0, NO_NUMBER),
        (Mark.RESET, 0, 0, 1, NO_NUMBER),
        (Mark.LAUNCHES, 1, first, 1, 3),
        (Mark.GOODBYE, 1, first, 1, 3),
    ]
    assert log.words == "KeyError: 'uncaught'"


# ---- folders -------------------------------------------------------------------------------------------------------


def _log(folder: Path, writer: Writer) -> Path:
    path = folder / file_name(writer.rank, writer.model)
    Ring(path, writer, 4).add(Mark.BEGINS, Phase.FORWARD)
    return path


def test_of_two_runs_the_one_asked_for_is_read(tmp_path: Path) -> None:
    _log(tmp_path, _writer(0, "mine", 10))
    _log(tmp_path, _writer(1, "other", 20))
    mine = read_folder(tmp_path, "mine")
    assert [log.writer.rank for log in mine.ranks] == [0]
    assert mine.remarks == ("logs of rank 1 are of other runs and were left out",)
    assert [log.writer.rank for log in read_folder(tmp_path).ranks] == [1]
    with pytest.raises(ConfigurationError, match="holds logs of other runs only; give each job its own folder"):
        read_folder(tmp_path, "gone")


def test_only_regular_files_are_opened(tmp_path: Path) -> None:
    """Reading a pipe waits for a writer, and a device may never end."""
    _log(tmp_path, _writer(0))
    os.mkfifo(tmp_path / file_name(1, 0))
    (tmp_path / file_name(2, 0)).symlink_to("/dev/zero")
    (tmp_path / file_name(3, 0)).mkdir()
    logs = read_folder(tmp_path)
    assert [log.writer.rank for log in logs.ranks] == [0]
    assert logs.remarks == tuple(f"rank-0000{rank}.mfsdplog was left out: it is no regular file" for rank in (1, 2, 3))


def test_foreign_and_damaged_files_are_told_and_left_out(tmp_path: Path) -> None:
    whole = _log(tmp_path, _writer(0)).read_bytes()
    (tmp_path / "notes.txt").write_text("not ours")
    (tmp_path / file_name(1, 0)).write_bytes(b"something else")
    (tmp_path / file_name(2, 0)).write_bytes(whole[:100])
    (tmp_path / file_name(4, 0)).write_bytes(whole.replace(b'log": 3', b'log": 4', 1))
    _log(tmp_path, replace(_writer(5), units=({},)))  # type: ignore[arg-type]
    logs = read_folder(tmp_path)
    assert [log.writer.rank for log in logs.ranks] == [0]
    *remarks, last = logs.remarks
    assert last.startswith("rank-00005.mfsdplog was left out: its header is incomplete (")
    assert tuple(remarks) == (
        "rank-00001.mfsdplog was left out: it does not begin as a log does",
        "rank-00002.mfsdplog was left out: its header is damaged or cut off",
        "rank-00004.mfsdplog was left out: another version of this package wrote it; read it with that one",
    )


def test_the_environment_switches_the_log_on() -> None:
    assert resolve_hang_log({}) is None
    assert resolve_hang_log({"MFSDP_HANG_LOG": ""}) is None
    assert resolve_hang_log({"MFSDP_HANG_LOG": "logs"}) == HangSettings(Path("logs"), None)
    both = {"MFSDP_HANG_LOG": "logs", "MFSDP_HANG_TIMEOUT": "2.5"}
    assert resolve_hang_log(both) == HangSettings(Path("logs"), 2.5)
