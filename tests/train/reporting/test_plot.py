import math
import sys
from pathlib import Path

import pytest

from megatron_fsdp.errors import MissingPackageError
from megatron_fsdp.train.reporting.metrics import Evaluation
from megatron_fsdp.train.reporting.plot import plot_run, smooth
from tests.train.reporting.records import record


def test_moving_average_is_unbiased_from_the_start() -> None:
    assert smooth([4.0, 4.0, 4.0]) == [4.0, 4.0, 4.0]
    assert smooth([1.0, 3.0], factor=0.5) == [1.0, (0.25 * 1.0 + 0.5 * 3.0) / 0.75]


def test_moving_average_passes_over_skipped_steps() -> None:
    found = smooth([math.nan, 1.0, math.inf, 3.0], factor=0.5)
    assert math.isnan(found[0])
    assert found[1:] == [1.0, 1.0, (0.25 * 1.0 + 0.5 * 3.0) / 0.75]


@pytest.mark.full(short=["1.25"])
@pytest.mark.parametrize("tflops", [1.25, math.nan])
def test_pictures_are_png_of_the_stated_size(tmp_path: Path, tflops: float) -> None:
    records = [record(i, tflops=tflops, loss=math.nan if i == 2 else 5.0) for i in (1, 2, 3)]
    paths = plot_run(tmp_path, records, [Evaluation(3, 1.8)], "title")
    assert [path.name for path in paths] == ["loss.png", "throughput.png", "memory.png"]
    for path in paths:
        content = path.read_bytes()
        assert content[:8] == b"\x89PNG\r\n\x1a\n"
        assert (int.from_bytes(content[16:20]), int.from_bytes(content[20:24])) == (1200, 675)


def test_curves_hold_what_was_measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from matplotlib.figure import Figure

    drawn: dict[str, Figure] = {}
    monkeypatch.setattr(Figure, "savefig", lambda figure, path: drawn.update({path.name: figure}))
    plot_run(tmp_path, [record(1), record(2, peak_bytes=3 * 2**20)], [Evaluation(2, 2.25)], "title")
    loss, throughput, memory = (drawn[f"{name}.png"].axes for name in ("loss", "throughput", "memory"))
    lines = {str(line.get_label()): line.get_xydata().tolist() for line in loss[0].lines}
    assert lines["training, each step"] == [[1.0, 5.0], [2.0, 2.5]]
    assert lines["held-out text"] == [[2.0, 2.25]]
    assert throughput[0].lines[0].get_xydata().tolist() == [[1.0, 64.0], [2.0, 64.0]]
    left, right = throughput[0].get_ylim()[1], throughput[1].get_ylim()[1]
    assert right / left == pytest.approx(1.25 / 64.0)
    assert memory[0].lines[0].get_xydata().tolist() == [[1.0, 1.0], [2.0, 3.0]]
    assert memory[0].get_ylabel().endswith("(MiB)")
    plot_run(tmp_path, [record(1), record(2, peak_bytes=3 * 2**30)], [], "title")
    (memory,) = drawn["memory.png"].axes
    assert memory.lines[0].get_xydata().tolist() == [[1.0, 2**-10], [2.0, 3.0]]
    assert memory.get_ylabel().endswith("(GiB)")


def test_missing_matplotlib_is_said_in_words(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(MissingPackageError, match="a picture needs the package matplotlib, which is not installed"):
        plot_run(tmp_path, [record(1)], [], "title")
