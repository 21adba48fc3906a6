from pathlib import Path

from megatron_fsdp.train.metrics import Evaluation, StepRecord, append_records, read_records
from megatron_fsdp.train.plot import plot_losses, smooth

RECORDS = [
    StepRecord(
        step=i, loss=5.0 / i, grad_norm=1.5, learning_rate=1e-3, tokens_per_s=10.25, peak_bytes=2**33, elapsed_s=0.1 * i
    )
    for i in (1, 2, 3)
]


def test_records_come_back_as_they_were_written(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    append_records(path, RECORDS[:2])
    append_records(path, RECORDS[2:])
    assert read_records(path) == RECORDS
    assert len(path.read_text().splitlines()) == 3


def test_moving_average_is_unbiased_from_the_start() -> None:
    assert smooth([4.0, 4.0, 4.0]) == [4.0, 4.0, 4.0]
    assert smooth([1.0, 3.0], factor=0.5) == [1.0, (0.25 * 1.0 + 0.5 * 3.0) / 0.75]


def test_curve_is_a_png_of_the_stated_size(tmp_path: Path) -> None:
    path = tmp_path / "loss.png"
    plot_losses(path, RECORDS, [Evaluation(3, 1.8)], "title")
    content = path.read_bytes()
    assert content[:8] == b"\x89PNG\r\n\x1a\n"
    assert (int.from_bytes(content[16:20]), int.from_bytes(content[20:24])) == (1200, 675)
