"""The picture: colours where the timeline has phases, and refusals."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_fsdp.errors import MissingPackageError, TraceError
from megatron_fsdp.trace import picture
from megatron_fsdp.trace.picture import COLOURS, timeline_png
from megatron_fsdp.trace.summary import COLUMNS
from tests.trace.synthetic import KNOWN
from tests.trace.test_ranks import OTHER


def _runs(path: Path, colour: str) -> list[tuple[float, float]]:
    """Where a colour stands in the picture: its first and last column in each row of pixels, as parts of the width."""
    from matplotlib.colors import to_rgb
    from matplotlib.image import imread

    image = imread(path)[:, :, :3]
    near = abs(image - to_rgb(colour)).max(axis=2) < 0.02
    legend_until = 45
    found = []
    for row in near[legend_until:]:
        places = row.nonzero()[0]
        if len(places) > 1:
            found.append((places[0] / image.shape[1], places[-1] / image.shape[1]))
    return found


def test_phases_stand_where_they_were(tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    timeline_png(path, [KNOWN])
    assert path.read_bytes()[:4] == b"\x89PNG"
    left, right = max(_runs(path, COLOURS["forward"]), key=lambda run: run[1] - run[0])
    per_ns = (right - left) / 700  # the root's forward is 0 to 700
    wait = max(_runs(path, COLOURS["wait"]), key=lambda run: run[1] - run[0])
    assert wait[0] == pytest.approx(left + 410 * per_ns, abs=0.004)
    assert wait[1] == pytest.approx(left + 490 * per_ns, abs=0.004)
    update = max(_runs(path, COLOURS["update"]), key=lambda run: run[1] - run[0])
    assert update == pytest.approx((left + 700 * per_ns, left + 900 * per_ns), abs=0.004)
    lane = [run for run in _runs(path, COLOURS["gather"]) if run[1] - run[0] > 100 * per_ns]
    assert lane
    assert lane[0] == pytest.approx((left + 110 * per_ns, left + 470 * per_ns), abs=0.004)


def test_ranks_get_panels_below_each_other(tmp_path: Path) -> None:
    timeline_png(tmp_path / "one.png", [KNOWN])
    timeline_png(tmp_path / "two.png", [KNOWN, OTHER], steps=[0])
    one, two = (len(_runs(tmp_path / name, COLOURS["update"])) for name in ("one.png", "two.png"))
    assert two > 1.5 * one


def test_a_step_that_is_not_there_and_a_missing_library_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(TraceError, match="step 3 was not recorded"):
        timeline_png(tmp_path / "a.png", [KNOWN], steps=[3])
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(MissingPackageError, match="a picture needs the package matplotlib, which is not"):
        timeline_png(tmp_path / "a.png", [KNOWN])
    assert not (tmp_path / "a.png").exists()


def test_a_rank_without_collectives_can_be_drawn(tmp_path: Path) -> None:
    timeline_png(tmp_path / "a.png", [replace(KNOWN, collectives=())])
    assert max(right - left for left, right in _runs(tmp_path / "a.png", COLOURS["gather"])) < 0.1  # the launch only


def test_every_kind_of_work_has_a_colour() -> None:
    kinds = {phase if kind == "compute" else kind for phase, kind in COLUMNS.items()}
    assert kinds == set(COLOURS)
    assert len(set(COLOURS.values())) == len(COLOURS)


def test_names_lie_on_what_holds_no_other_name() -> None:
    spans = KNOWN.spans
    assert picture._that_hold_compute(spans) == {0}  # the root's forward, in which that of the layer lies
    assert picture._that_hold_compute(spans[2:]) == set()
