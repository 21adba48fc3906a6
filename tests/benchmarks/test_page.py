"""The page says what the documents say, and names what is missing."""

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

from benchmarks.bench import main, shortened, write_page
from benchmarks.kept import commit_of, joined, made, sittings, stamped
from benchmarks.markup import spread, table
from benchmarks.page import page, targets_table
from benchmarks.plots import heights, over_floor, peak_mib
from benchmarks.suite import Run
from benchmarks.targets import Target, Verdict
from tests.benchmarks.documents import comparison, contender, phases
from tests.support.source_tree import ROOT

COUNTED = {"gathers": 2, "reductions": 1, "gather_bytes": 2**20, "reduce_bytes": 2**19}
OURS = contender("ours-3", over={"floor": 1.5, "fsdp2": 0.25}, peak=1600) | {"sent": COUNTED}
WRONG = contender("fsdp1", over={}, wall_s=None, cpu_s=None, disagrees="loss 3 at step 1", moved=None)


def row(text: str, *cells: str) -> list[str]:
    """The cells of the only row that begins like this."""
    (found,) = (line for line in text.splitlines() if line.startswith("| " + " | ".join(cells) + " |"))
    return [cell.strip() for cell in found.strip("|").split("|")]


def written(verdicts: list[Verdict] | None = None, **failures: str) -> str:
    documents: dict[str, Any] = {
        "large-2": comparison(OURS, WRONG, absent={"deepspeed-1": "not installed"}, planned_peak=2**20),
        "host": phases("host", ("forward", "floor", 1.0), ("forward", "ours-3", 4.0))
        | {"host_us_per_unit_and_pass": {"ours-3": 75.4}, "host_us_by_pass": {"forward": {"ours-3": 60.2}}},
    }
    return page("A page", documents, failures, verdicts or [], ["a.png"])


def test_a_row_has_times_ratios_memory_and_counts() -> None:
    cells = row(written(), "ours-3")
    assert cells[1:3] == ["250.0 [250.0, 250.0]", "500.0 [500.0, 500.0]"]
    assert [cell.split()[0] for cell in cells[3:7]] == ["1.50", "1.25", "0.25", "0.62"]
    assert cells[7] == "-"  # no ddp took part
    assert cells[10] == "2.00"  # 1600 bytes of 16 * 100 / 2
    assert cells[11] == "1.50"  # as the engine counts
    assert cells[14:] == ["7", "1.00"]


def test_memory_that_was_not_measured_is_a_dash() -> None:
    nothing = {"persistent": 0, "peak": 0, "allocations": 0, "allocated": 0}
    timed = contender("ours-3", over={"floor": 1.5}, live=nothing, moved=None)
    text = page("A page", {"large-1": comparison(timed)}, {}, [], [])
    assert row(text, "ours-3")[8:] == ["-"] * 8
    assert heights({"large-1": comparison(timed)}, peak_mib) == {}


def test_who_disagrees_has_a_row_without_speeds_and_a_reason() -> None:
    text = written()
    assert row(text, "fsdp1")[1:8] == ["-"] * 7
    assert "- fsdp1 has no speed: loss 3 at step 1" in text


def test_what_is_missing_is_said() -> None:
    text = written(gpu="there is no CUDA device here")
    assert "- deepspeed-1 took no part: not installed" in text
    assert "## Left out\n\n- gpu: there is no CUDA device here\n" in text


def test_phases_facts_pictures_and_the_plan_are_there() -> None:
    text = written()
    assert row(text, "forward", "ours-3")[4] == "4.000 [4.000, 4.000]"
    assert "Host time per unit and pass beyond the bare model: ours-3 75 us; forward alone: ours-3 60 us." in text
    assert "![a.png](a.png)" in text
    assert "- hardware: one abacus" in text
    assert "the planner says that ours-3 takes 1.0 MiB at its peak" in text


def test_phases_say_where_they_ran_and_how_they_are_repeated() -> None:
    document = phases("host", ("forward", "floor", 1.0))
    document["request"] |= {"simulated_ranks": 64, "device_type": "cuda", "dtype": "bfloat16", "rounds": 3}
    made = stamped(document | {"facts": {"versions": "torch 9", "hardware": "an H200"}}, "a1", "python it")
    text = page("A page", {"gpu-simulated-64": made}, {}, [], [])
    assert "many-small, rank 0 of 64 simulated ranks, cuda, bfloat16, 3 rounds." in text
    assert f"- date: {made['made']['date']}, commit a1\n- versions: torch 9\n- hardware: an H200\n" in text
    assert "\n`python it`\n" in text


def test_targets_stand_beside_what_was_reached_and_a_reason_only_where_missed() -> None:
    fast, slow = (Target(name, 0.5, lambda _: 0.0, "s", reason="gloo") for name in ("fast", "slow"))
    text = written([Verdict(fast, 0.25), Verdict(slow, 0.75), Verdict(fast, None)])
    assert "| fast | at most 0.5 s | 0.25 s | met |" in text
    assert "| slow | at most 0.5 s | 0.75 s | missed; gloo |" in text
    assert "| fast | at most 0.5 s | - | not measured |" in text
    close = [Verdict(slow, value) for value in (0.5002, 0.50000002, 0.4999)]
    assert [cells.split(" | ")[2] for cells in targets_table(close).splitlines()[2:]] == ["0.5002 s", "0.5 s", "0.5 s"]
    assert "3 targets: 1 met, 1 missed, 1 not measured." in text


def test_tables_and_spreads() -> None:
    assert table(("a", "b"), [("1", "2")]) == "| a | b |\n| --- | --- |\n| 1 | 2 |"
    assert spread({"median": 0.5, "lower": 0.25, "upper": 1.0}, 10, 1) == "5.0 [2.5, 10.0]"
    assert spread(None, 1, 1) == "-"


def test_bars_leave_out_what_has_no_value() -> None:
    results = {"large-2": comparison(OURS, WRONG), "host": phases("host", ("forward", "floor", 1.0))}
    assert heights(results, over_floor) == {"ours-3": {"large-2": 1.25}}
    assert heights(results, peak_mib)["fsdp1"] == {"large-2": 100 / 2**20}


def test_page_pictures_and_results_lie_in_one_folder(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = write_page({"large-2": comparison(OURS, WRONG)}, {"moe-2": "it stopped"}, tmp_path / "made", "bench-x")
    assert sorted(file.name for file in path.parent.iterdir()) == [
        "bench-x-memory.png",
        "bench-x-time.png",
        "bench-x.json",
        "bench-x.md",
    ]
    text = path.read_text()
    assert "- moe-2: it stopped" in text
    assert "![bench-x-time.png](bench-x-time.png)" in text
    assert (path.parent / "bench-x-time.png").read_bytes().startswith(b"\x89PNG")


def test_a_page_is_written_again_from_its_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With what `reasons.py` says by then; nothing is measured."""
    monkeypatch.setattr("benchmarks.bench.prepare", lambda _: pytest.fail("it was going to measure"))
    monkeypatch.setattr("benchmarks.reasons.REASONS", ())
    slow = contender("ours-3", over={"floor": 1.5000004, "fsdp2": 0.75})
    before = write_page({"large-2": comparison(slow)}, {"moe-2": "it stopped"}, tmp_path, f"bench-{os.cpu_count()}xcpu")
    first = before.read_text()
    title = "large, 2 ranks: wall time of a step over the floor's"
    monkeypatch.setattr("benchmarks.reasons.REASONS", ((title, "sockets"),))
    assert main(["--again", "--out", str(tmp_path)]) == 0
    missed = f"| {title} | at most 1.25 | 1.5 | missed"
    assert before.read_text() == first.replace(f"{missed} |", f"{missed}; sockets |") != first


def test_figures_are_stored_with_six_digits() -> None:
    assert shortened({"a": [1.23456789, 12345678, "x", None, (0.1,)]}) == {"a": [1.23457, 12345678, "x", None, [0.1]]}


def test_a_page_made_in_parts_keeps_the_other_parts() -> None:
    before = {
        "results": {"large-2": {"of": "then"}, "moe-2": {"of": "then"}, "gone": {"of": "then"}},
        "failures": {"host": "it stopped", "large-4": "the time was over", "gpu": "there is none"},
    }
    names = ["moe-2", "large-2", "host", "large-4"]
    now = {"moe-2": {"of": "now"}, "host": {"of": "now"}}
    results, failures = joined(before, now, {"large-2": "given up", "pictures": "no matplotlib"}, names)
    assert list(results.items()) == [("moe-2", {"of": "now"}), ("large-2", {"of": "then"}), ("host", {"of": "now"})]
    assert failures == {
        "large-4": "the time was over",
        "large-2": "given up; what is shown was made before",
        "pictures": "no matplotlib",
    }


def test_runs_are_named_with_their_commit_where_commits_differ() -> None:
    def of(commit: str, date: str) -> dict[str, Any]:
        return {"made": {"commit": commit, "date": date}}

    first, second, third = of("a1", "17:00"), of("a1", "16:00"), of("b2+", "18:00")
    assert sittings({"moe-2": first, "large-2": second}) == ["- date: 16:00 to 17:00, commit a1"]
    assert sittings({"moe-2": first, "host": third, "large-2": second, "old": {}}) == [
        "- date: 16:00 to 17:00, commit a1: moe-2, large-2",
        "- date: 18:00, commit b2+: host",
        "- date: not noted, commit not noted: old",
    ]


def test_a_result_carries_date_commit_and_command(tmp_path: Path) -> None:
    document = stamped({"rows": []}, "a1", "python benchmarks/phases.py host")
    assert document["rows"] == []
    assert made(document) == ("a1", document["made"]["date"])
    assert made(comparison(OURS)) == ("not noted", "today")
    assert commit_of(tmp_path) == "not noted"
    assert re.fullmatch(r"[0-9a-f]{7,}\+?", commit_of(ROOT))


def test_a_bench_in_parts_stores_what_it_has_after_every_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second sitting is interrupted in its second run; what the first one has and the second one made is there."""
    file = tmp_path / f"bench-{os.cpu_count()}xcpu.json"
    stopped_at = "facts"

    def performed(run: Run, *_: Any) -> tuple[dict[str, Any], str]:
        if run.name == stopped_at:
            raise KeyboardInterrupt
        return {"value": sitting}, ""

    monkeypatch.setattr("benchmarks.bench.perform", performed)
    monkeypatch.setattr("benchmarks.bench._has_gpu", lambda _: False)
    common = ["--no-environment", "--work", str(tmp_path / "work"), "--out", str(tmp_path), "--keep", "--only"]
    sitting = 1
    assert main([*common, "step-many", "start"]) == 0
    sitting = 2
    with pytest.raises(KeyboardInterrupt):
        main([*common, "start", "facts"])
    found = json.loads(file.read_text())["results"]
    assert {name: document["value"] for name, document in found.items()} == {
        "step-many-small-fused": 1,
        "step-many-small-foreach": 1,
        "start-many-small": 2,
    }
    assert found["start-many-small"]["made"]["command"].startswith(
        "python benchmarks/phases.py start --model many-small"
    )


def test_without_a_gpu_nothing_is_measured_on_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("benchmarks.bench._has_gpu", lambda _: False)
    assert main(["--gpu", "--no-environment", "--out", str(tmp_path)]) == 0
    assert capsys.readouterr().out == "bench.py: there is no CUDA device here, nothing measured\n"
    assert list(tmp_path.iterdir()) == []


def test_on_a_gpu_there_is_a_page_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.bench._has_gpu", lambda _: True)
    monkeypatch.setattr("benchmarks.bench.perform", lambda run, *_: (None, f"no room for {run.name}"))
    assert main(["--gpu", "--no-environment", "--work", str(tmp_path / "work"), "--out", str(tmp_path)]) == 1
    text = (tmp_path / "bench-gpu.md").read_text()
    assert "- gpu: no room for gpu\n- gpu-simulated-8: no room for gpu-simulated-8\n" in text
