"""Folders of traces: what was written back, refusals that say what is wrong, events by the rules of their format."""

import json
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings

from megatron_fsdp.errors import TraceError
from megatron_fsdp.trace.files import (
    COMPUTE_THREAD,
    KEY,
    STEPS_THREAD,
    chrome_events,
    merge_traces,
    read_traces,
    write_timeline,
)
from megatron_fsdp.trace.summary import summarise
from megatron_fsdp.trace.timeline import Timeline
from tests.support.on_ranks import refusal
from tests.trace.synthetic import KNOWN, collective
from tests.trace.test_summary import nested_timelines


def test_what_is_written_comes_back_and_viewers_can_read_it(tmp_path: Path) -> None:
    lost = collective((500, 510), None, None, number=1)
    second = replace(KNOWN, rank=1, collectives=(*KNOWN.collectives, lost))
    (tmp_path / "notes.txt").write_text("something else")
    for timeline in (second, KNOWN):
        path = write_timeline(tmp_path / "new", timeline)
        assert path == tmp_path / "new" / f"trace-rank{timeline.rank}.json"
        check(json.loads(path.read_text())["traceEvents"])
    for trace, timeline in zip(read_traces(tmp_path / "new"), (KNOWN, second), strict=True):
        assert (trace.rank, trace.steps) == (timeline.rank, summarise(timeline))
        assert list(trace.events) == chrome_events(timeline)
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == ["trace-rank0.json", "trace-rank1.json"]
    merge_traces(tmp_path / "all.json", read_traces(tmp_path / "new"))
    events = json.loads((tmp_path / "all.json").read_text())["traceEvents"]
    check(events)
    assert {event["pid"] for event in events} == {0, 1}


def test_aligned_ranks_share_a_clock_and_others_are_shifted_by_their_wall_clocks(tmp_path: Path) -> None:
    def starts(folder: Path, *timelines: Timeline) -> list[tuple[int, float]]:
        for timeline in timelines:
            write_timeline(folder, timeline)
        merge_traces(folder / "all.json", read_traces(folder))
        events = json.loads((folder / "all.json").read_text())["traceEvents"]
        return [(event["pid"], event["ts"]) for event in events if event["name"] == "step 0"]

    late = replace(KNOWN, rank=1, started_unix_ns=KNOWN.started_unix_ns + 250)
    assert starts(tmp_path / "aligned", KNOWN, late) == [(0, 0.0), (1, 0.0)]
    assert starts(tmp_path / "other", replace(KNOWN, is_aligned=False), late) == [(0, 0.0), (1, 0.25)]


def _set(*keys: Any, to: Any) -> Callable[[dict[str, Any]], None]:
    """Change a value in the file, given by its keys."""

    def change(told: dict[str, Any]) -> None:
        place: Any = told[KEY]
        for key in keys[:-1]:
            place = place[key]
        place[keys[-1]] = to

    return change


DAMAGE: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "other JSON": (lambda told: told.pop(KEY), "is JSON of something else"),
    "newer": (_set("format", to=1), "has format 1; this version reads 4"),
    "no rank": (lambda told: told[KEY].pop("rank"), "is damaged: KeyError: 'rank'"),
    "no events": (lambda told: told.pop("traceEvents"), "is damaged: KeyError: 'traceEvents'"),
    "half a step": (_set("steps", to=[{"rank": 0, "step": 0}]), "is damaged: TypeError"),
    "no list of ranks": (_set("peers", to=None), "is damaged: TypeError"),
    "another rank": (_set("rank", to=4), "is of rank 4; do not rename"),
}


@pytest.mark.parametrize("what", DAMAGE)
def test_damage_is_refused_with_the_name_of_the_file(tmp_path: Path, what: str) -> None:
    change, message = DAMAGE[what]
    path = write_timeline(tmp_path, KNOWN)
    told = json.loads(path.read_text())
    change(told)
    path.write_text(json.dumps(told))
    told = refusal(read_traces, tmp_path, error=TraceError)
    assert message in told
    assert "trace-rank0.json" in told


@pytest.mark.parametrize("text", ["", "[1, 2]", '{"traceEvents": []}', "\udcff", "[" * 100_000, "NaN"])
def test_what_is_no_timeline_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "trace-rank0.json").write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(TraceError, match=r"trace-rank0\.json is (not JSON|JSON of something else)"):
        read_traces(tmp_path)


def test_folders_without_timelines_and_files_that_were_cut_off_are_refused(tmp_path: Path) -> None:
    assert "holds no trace-rank*.json; write_timeline makes them" in refusal(read_traces, tmp_path, error=TraceError)
    assert "is not a folder" in refusal(read_traces, tmp_path / "nowhere", error=TraceError)
    path = write_timeline(tmp_path, KNOWN)
    path.write_text(path.read_text()[:-20])
    with pytest.raises(TraceError, match=r"trace-rank0\.json is not JSON, or was cut off: .*; record it again"):
        read_traces(tmp_path)


@pytest.mark.parametrize("others", ["earlier", ""])
def test_a_stale_file_of_an_earlier_recording_of_the_same_job_is_not_mixed_in(tmp_path: Path, others: str) -> None:
    write_timeline(tmp_path, replace(KNOWN, recording="now", peers=(0, 1)))
    write_timeline(tmp_path, replace(KNOWN, rank=1, recording=others, peers=(0, 1)))
    for partial in (False, True):
        with pytest.raises(TraceError, match="mixes recordings: recording differs between ranks 0 and 1; write each"):
            read_traces(tmp_path, partial=partial)


def test_ranks_that_recorded_too_are_missed_unless_told_otherwise(tmp_path: Path) -> None:
    one = replace(KNOWN, rank=2, world_size=8, recording="now", peers=(0, 2, 3, 5))
    other = replace(one, rank=3)
    for timeline in (one, other):
        write_timeline(tmp_path, timeline)
    with pytest.raises(TraceError, match=r"lacks the files of ranks 0, 5, which recorded too; bring .*\(--partial\)"):
        read_traces(tmp_path)
    assert [trace.rank for trace in read_traces(tmp_path, partial=True)] == [2, 3]
    for rank in (0, 5):
        write_timeline(tmp_path, replace(one, rank=rank))
    assert [trace.rank for trace in read_traces(tmp_path)] == [0, 2, 3, 5]


# ---- events for viewers ----------------------------------------------------------------------------------------------

NEEDED = {
    "X": {"name", "cat", "pid", "tid", "ts", "dur"},
    "C": {"name", "pid", "ts", "args"},
    "M": {"name", "pid", "tid", "args"},
    "s": {"name", "cat", "pid", "tid", "ts", "id"},
    "f": {"name", "cat", "pid", "tid", "ts", "id", "bp"},
}


def check(events: list[dict[str, Any]]) -> None:
    """Raise AssertionError where events break a rule of the format, or come in no order."""
    assert events == json.loads(json.dumps(events, allow_nan=False))
    named, starts, ends = set(), defaultdict(list), defaultdict(list)
    threads = defaultdict(list)
    for event in events:
        assert event.keys() - {"args"} == NEEDED[event["ph"]] - {"args"} | {"ph"}, event
        if event["ph"] == "M":
            named.add((event["name"], event["pid"], event["tid"]))
        elif event["ph"] == "X":
            assert event["dur"] >= 0
            threads[event["pid"], event["tid"]].append((event["ts"], -event["dur"]))
        elif event["ph"] in "sf":
            (starts if event["ph"] == "s" else ends)[event["id"]].append(event)
    stamps = [event["ts"] for event in events if event["ph"] != "M"]
    assert stamps == sorted(stamps)
    for process, thread in threads:
        assert ("process_name", process, 0) in named
        assert ("thread_name", process, thread) in named
    for found in threads.values():
        _check_nesting(found)
    assert starts.keys() == ends.keys()
    for key, (start,) in starts.items():
        (end,) = ends[key]
        assert start["ts"] <= end["ts"]
        assert start["name"] == end["name"]


def _check_nesting(events: list[tuple[float, float]]) -> None:
    """Complete events of one thread lie in each other or beside each other."""
    around: list[float] = []
    for start, minus_duration in sorted(events):
        end = start - minus_duration
        while around and around[-1] <= start + 1e-9:
            around.pop()
        assert not around or end <= around[-1] + 1e-6
        around.append(end)


def test_a_timeline_as_events() -> None:
    events = chrome_events(KNOWN)
    check(events)
    complete = {(e["tid"], e["name"]): e for e in events if e["ph"] == "X"}
    stream = complete[100, "gather layers.0"]
    assert (stream["ts"], stream["dur"]) == (0.11, 0.36)  # microseconds
    assert stream["args"] == {"unit": "layers.0", "step": 0, "bytes": 100, "axis": "dp", "number": 0}
    launch = complete[COMPUTE_THREAD, "unshard layers.0"]
    assert (launch["ts"], launch["dur"], launch["args"]["bytes"]) == (0.1, 0.05, 100)
    assert complete[STEPS_THREAD, "step 0"]["dur"] == 1.0
    assert (COMPUTE_THREAD, "optimizer") in complete
    assert [e["args"]["bytes"] for e in events if e["ph"] == "C"] == [64, 96, 80]
    arrow = [(e["ph"], e["tid"], e["ts"]) for e in events if e["ph"] in "sf"]
    assert arrow == [("s", 100, 0.11), ("f", COMPUTE_THREAD, 0.42)]
    names = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert names == {STEPS_THREAD: "steps", COMPUTE_THREAD: "compute", 100: "gather stream"}


@settings(max_examples=40)
@given(nested_timelines())
def test_any_timeline_makes_good_events(timeline: Timeline) -> None:
    check(chrome_events(timeline))
