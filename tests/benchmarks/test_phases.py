"""Phases: ratios within a turn, host time by subtraction; and the parts of the suite that decide without measuring."""

import os
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.bench import run_to_end
from benchmarks.operators import MovedModel, ring_bytes
from benchmarks.phases import PhaseNotes, host_microseconds_by_pass, phase_rows
from tests.support.settling import settled


def notes(*walls: float) -> PhaseNotes:
    return PhaseNotes({"act": list(walls)}, {"act": [wall / 2 for wall in walls]}, peak=int(walls[0]))


def test_rows_take_the_slowest_rank_and_ratios_within_a_turn() -> None:
    first, second = phase_rows(
        ("fsdp2", "ours-3"), {"fsdp2": [notes(2, 4), notes(1, 8)], "ours-3": [notes(1, 1), notes(1, 2)]}
    )
    assert (first["name"], first["wall_s"]) == ("fsdp2", {"median": 5.0, "lower": 3.5, "upper": 6.5})  # 2 and 8
    assert second["wall_over"] == {"median": 0.375, "lower": 0.3125, "upper": 0.4375}  # 1 / 2 and 2 / 8
    assert first["cpu_s"]["median"] == (0.75 + 3.0) / 2
    assert (first["peak"], second["peak"]) == (2, 1)


def test_host_time_is_what_is_added_to_the_bare_model_per_unit_and_pass() -> None:
    both = {
        name: [PhaseNotes({"forward": [1.0], "backward": [1.0]}, {"forward": [f], "backward": [b]})]
        for name, f, b in (("floor", 0.001, 0.002), ("ours-3", 0.002, 0.005))
    }
    rows = phase_rows(("floor", "ours-3"), both)
    assert host_microseconds_by_pass(rows, units=20) == {
        "forward": {"ours-3": pytest.approx(50.0)},
        "backward": {"ours-3": pytest.approx(150.0)},
    }


@pytest.mark.parametrize(
    ("name", "sent"),
    [
        ("_allgather_base_", 75),  # 100 bytes come together, a quarter is there already
        ("_reduce_scatter_base_", 300),
        ("alltoall_base_", 300),
        ("allreduce_", 150),
        ("broadcast_", 75),
        ("send", 400),
        ("barrier", None),
    ],
)
def test_a_ring_sends_all_but_its_own_part(name: str, sent: int | None) -> None:
    assert ring_bytes(name, inputs_bytes=400, outputs_bytes=100, num_ranks=4) == sent


def test_copies_are_counted_by_what_they_write() -> None:
    narrow, wide = torch.ones(6, dtype=torch.bfloat16), torch.zeros(2, 3)
    with MovedModel(2) as counted:
        wide.view(-1).copy_(narrow)
        torch.mul(wide, 2.0, out=torch.empty(2, 3))
        torch.cat([wide, wide])
        wide.add_(1.0)
        wide * 2.0
        torch._foreach_copy_([wide], [wide.clone()])
    assert (counted.moved.copied_numel, counted.moved.sent_bytes) == (6 + 6 + 12 + 6 + 6, 0)


def test_a_run_that_is_given_up_leaves_no_process_behind(tmp_path: Path) -> None:
    """Its ranks, too: one writes its number and sleeps."""
    noted = tmp_path / "pid"
    rank = f"import os, pathlib, time; pathlib.Path({str(noted)!r}).write_text(str(os.getpid())); time.sleep(600)"
    script = f"import subprocess, sys; subprocess.run([sys.executable, '-S', '-c', {rank!r}])"
    limit_s = 1.0
    while not noted.exists() or not noted.read_text():
        assert limit_s < 100
        assert run_to_end([sys.executable, "-S", "-c", script], os.environ, limit_s) is None
        limit_s *= 3
    state = Path(f"/proc/{noted.read_text()}/stat")
    assert settled(lambda: _has_ended(state), bool)


def _has_ended(state: Path) -> bool:
    try:
        return state.read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True
