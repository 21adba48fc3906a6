"""The file of a ring log: what goes in comes out, also after a wrap, a tear or a cut; and reading believes nothing."""

import os
import struct
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_fsdp.engine.collective_log import (
    PHASES,
    RECORD_BYTES,
    WORDS_BYTES,
    Beat,
    HangSettings,
    Mark,
    Record,
    Ring,
    fold,
    new_file,
    read_beat,
    read_head,
    read_records,
    read_words,
    resolve_hang_log,
    write_beat,
    write_record,
    write_words,
)
from megatron_fsdp.errors import ConfigurationError
from megatron_fsdp.hang.reading import read_folder, read_log
from megatron_fsdp.hang.writer import Process, UnitFacts, Writer, file_name, is_alive, is_log_name, this_process

_RECORDS = st.builds(
    Record,
    number=st.just(0),
    time_ns=st.integers(1, 2**62),
    step=st.integers(0, 2**31),
    unit=st.integers(0, 2**30),
    phase=st.integers(0, 255),
    mark=st.sampled_from(Mark),
    in_backward=st.booleans(),
    collective=st.integers(-1, 2**62),
    num_bytes=st.integers(0, 2**62),
    count=st.integers(0, 2**62),
    hash=st.integers(0, 2**61),
    epoch=st.integers(0, 255),
)


def _numbered(records: list[Record]) -> list[Record]:
    return [Record(**{**vars(record), "number": number}) for number, record in enumerate(records)]


def _written(records: list[Record], capacity: int) -> bytearray:
    content, places = new_file({"rank": 0}, capacity)
    memory = bytearray(content)
    for record in records:
        write_record(memory, places, tuple(vars(record).values()))
    return memory


@given(st.lists(_RECORDS, max_size=40), st.integers(1, 12))
def test_the_last_records_come_out_as_they_went_in(drawn: list[Record], capacity: int) -> None:
    records = _numbered(drawn)
    content = bytes(_written(records, capacity))
    who, places = read_head(content)
    assert who == {"rank": 0}
    assert read_records(content, places) == (records[-capacity:], 0)


@given(st.lists(_RECORDS, min_size=1, max_size=12), st.data())
def test_a_torn_record_is_left_out_and_counted(drawn: list[Record], data: st.DataObject) -> None:
    records = _numbered(drawn)
    content = _written(records, 8)
    _, places = read_head(bytes(content))
    kept = records[-8:]
    torn = data.draw(st.sampled_from(kept))
    at = places.record(torn.number) + data.draw(st.integers(0, RECORD_BYTES - 1))
    content[at] ^= 1 << data.draw(st.integers(0, 7))
    assert read_records(bytes(content), places) == ([record for record in kept if record != torn], 1)


@settings(max_examples=60)
@given(st.lists(_RECORDS, max_size=12), st.data())
def test_a_file_that_was_cut_off_is_refused_or_read_in_part(drawn: list[Record], data: st.DataObject) -> None:
    records = _numbered(drawn)
    content = bytes(_written(records, 8))
    short = content[: data.draw(st.integers(0, len(content) - 1))]
    try:
        _, places = read_head(short)
    except ValueError:
        return
    found, _ = read_records(short, places)
    assert all(record in records for record in found)
    assert read_beat(short, places) is None
    assert read_words(short, places) == ""


def test_signs_of_life_and_last_words_come_out_as_they_went_in() -> None:
    content, places = new_file({}, 1)
    memory = bytearray(content)
    assert read_beat(content, places) is None
    assert read_words(content, places) == ""
    write_beat(memory, places, Beat(5, 7, 3, 2))
    write_words(memory, places, "x" * 2 * WORDS_BYTES + "ValueError: tail")
    assert read_beat(bytes(memory), places) == Beat(5, 7, 3, 2)
    said = read_words(bytes(memory), places)
    assert said.endswith("xValueError: tail")
    assert len(said) == WORDS_BYTES - 8
    memory[places.beat] ^= 1
    memory[places.words + 9] ^= 1
    assert read_beat(bytes(memory), places) is None
    assert read_words(bytes(memory), places) == ""


@given(st.lists(st.tuples(*[st.integers(0, 2**40)] * 3), max_size=6), st.data())
def test_hashes_tell_sequences_apart(operations: list[tuple[int, int, int]], data: st.DataObject) -> None:
    def total(sequence: list[tuple[int, int, int]]) -> int:
        so_far = 0
        for operation in sequence:
            so_far = fold(so_far, *operation)
        return so_far

    other = data.draw(st.permutations(operations))
    assert (total(operations) == total(other)) == (operations == other)
    assert total([*operations, (0, 0, 0)]) != total(operations)


# ---- folders -------------------------------------------------------------------------------------------------------


def _writer(rank: int, run: str = "one", started_ns: int = 1, model: int = 0) -> Writer:
    return Writer(
        rank,
        2,
        (0, 1),
        model,
        run,
        started_ns,
        this_process(),
        (UnitFacts("(root)", ("a", "b"), 8),),
        tuple(phase.value for phase in PHASES),
    )


_GONE = replace(this_process(), started=-1)
"""One whose number has been given to somebody else since."""


def _log(folder: Path, writer: Writer) -> Path:
    path = folder / file_name(writer.rank, writer.model)
    Ring(path, asdict(writer), 4).add(Mark.BEGINS, 0, 0, False, 0, 0, 0, 0, 0, 0)
    return path


def test_a_log_is_read_back_with_its_writer(tmp_path: Path) -> None:
    path = _log(tmp_path, _writer(3))
    assert path.name == "rank-00003.mfsdplog"
    log = read_log(path)
    assert (log.writer, log.alive, log.torn, len(log.records)) == (_writer(3), True, 0, 1)


def test_logs_of_an_earlier_run_are_told_and_left_out(tmp_path: Path) -> None:
    _log(tmp_path, _writer(0, "new", 20))
    _log(tmp_path, replace(_writer(1, "old", 10), process=_GONE))
    logs = read_folder(tmp_path)
    assert [log.writer.rank for log in logs.ranks] == [0]
    assert logs.remarks == ("logs of rank 1 are of an earlier run and were left out",)


def test_of_two_runs_the_one_asked_for_is_read(tmp_path: Path) -> None:
    _log(tmp_path, _writer(0, "mine", 10))
    _log(tmp_path, _writer(1, "other", 20))
    mine = read_folder(tmp_path, "mine")
    assert [log.writer.rank for log in mine.ranks] == [0]
    assert mine.remarks == ("logs of rank 1 are of another run that still lives and were left out",)
    assert [log.writer.rank for log in read_folder(tmp_path).ranks] == [1]
    with pytest.raises(ConfigurationError, match="holds logs of other runs only; give each job its own folder"):
        read_folder(tmp_path, "gone")


def test_only_regular_files_are_opened(tmp_path: Path) -> None:
    """Reading a pipe waits for a writer, and a device may never end."""
    _log(tmp_path, _writer(0))
    os.mkfifo(tmp_path / file_name(1, 0))
    os.mkfifo(tmp_path / "rank-00000.flight.json")
    (tmp_path / file_name(2, 0)).symlink_to("/dev/zero")
    (tmp_path / file_name(3, 0)).mkdir()
    logs = read_folder(tmp_path)
    assert [(log.writer.rank, log.flight) for log in logs.ranks] == [(0, ())]
    assert logs.remarks == tuple(f"rank-0000{rank}.mfsdplog was left out: it is no regular file" for rank in (1, 2, 3))


def test_foreign_and_damaged_files_are_told_and_left_out(tmp_path: Path) -> None:
    whole = _log(tmp_path, _writer(0)).read_bytes()
    (tmp_path / "notes.txt").write_text("not ours")
    (tmp_path / file_name(1, 0)).write_bytes(b"something else")
    (tmp_path / file_name(2, 0)).write_bytes(whole[:100])
    (tmp_path / file_name(4, 0)).write_bytes(whole[:8] + struct.pack("<I", 99) + whole[12:])
    logs = read_folder(tmp_path)
    assert [log.writer.rank for log in logs.ranks] == [0]
    assert logs.remarks == (
        "rank-00001.mfsdplog was left out: it does not begin as a log does",
        "rank-00002.mfsdplog was left out: its header is damaged or cut off",
        "rank-00004.mfsdplog was left out: it has version 99, and this program reads version 1",
    )


def test_headers_that_lack_something_are_refused(tmp_path: Path) -> None:
    content, _ = new_file({"rank": 0}, 1)
    (tmp_path / file_name(0, 0)).write_bytes(content)
    with pytest.raises(ConfigurationError, match=r"holds no log of a rank \(rank-00000.mfsdplog was left out: its hea"):
        read_folder(tmp_path)


@pytest.mark.parametrize(("name", "is_one"), [("rank-00000.mfsdplog", True), ("rank-123456.mfsdplog", True)])
def test_names_of_logs(name: str, is_one: bool) -> None:
    assert is_log_name(name) is is_one
    assert is_log_name(file_name(7, 2))
    assert file_name(7, 2) == "rank-00007.model-2.mfsdplog"
    assert not is_log_name(f"{name}.{os.getpid()}")  # one that is being begun


def test_only_processes_of_this_machine_are_known_to_be_dead() -> None:
    me = this_process()
    assert is_alive(me) is True
    assert is_alive(Process(me.host, me.pid, (me.started or 0) + 1, me.namespace)) is False
    assert is_alive(Process("elsewhere", me.pid, me.started, me.namespace)) is None


# ---- the switch ----------------------------------------------------------------------------------------------------


def test_the_environment_switches_the_log_on() -> None:
    assert resolve_hang_log({}) is None
    assert resolve_hang_log({"MFSDP_HANG_LOG": ""}) is None
    assert resolve_hang_log({"MFSDP_HANG_LOG": "logs"}) == HangSettings(Path("logs"), None)
    both = {"MFSDP_HANG_LOG": "logs", "MFSDP_HANG_TIMEOUT": "2.5"}
    assert resolve_hang_log(both) == HangSettings(Path("logs"), 2.5)


@pytest.mark.parametrize("seconds", ["0", "-1", "inf", "nan", "soon"])
def test_times_that_are_none_are_refused(seconds: str) -> None:
    with pytest.raises(ConfigurationError, match=f"MFSDP_HANG_TIMEOUT='{seconds}' is no time to wait"):
        resolve_hang_log({"MFSDP_HANG_LOG": "logs", "MFSDP_HANG_TIMEOUT": seconds})


def test_a_time_without_a_folder_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="MFSDP_HANG_TIMEOUT=3 has no effect without MFSDP_HANG_LOG"):
        resolve_hang_log({"MFSDP_HANG_TIMEOUT": "3"})
