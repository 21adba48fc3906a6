"""The tool behind curves and tables in docs/sharded_models.md: which runs there are, and what it makes of them."""

from pathlib import Path

from megatron_fsdp.train.options.command_line import parse_options
from tools.optimizer_curves import (
    CROSSINGS,
    FORMATS,
    RATES,
    RUNS,
    STEPS,
    WINDOW,
    CurveRun,
    crossing_bands,
    format_bands,
    optimizer_bands,
    plot,
    plot_formats,
    published,
    rate_table,
)


def test_the_trainer_takes_every_run() -> None:
    for run in RUNS:
        options = parse_options(run.words())
        assert (options.optimizer.optimizer, options.optimizer.lr) == (run.optimizer, run.rate)
        assert (options.training.train_iters, options.training.global_batch_size) == (STEPS, 4)


def test_published_losses_are_of_every_run() -> None:
    assert {name: len(values) for name, values in published().items()} == {
        run.name: STEPS // WINDOW + 1 for run in RUNS
    }


def test_tables_tell_the_held_out_loss_and_the_gap_to_adamw(tmp_path: Path) -> None:
    count = STEPS // WINDOW
    losses = {run.name: [3.0] * count + [1.0] for run in RUNS}
    losses[CurveRun("muon", RATES[0]).name][-1] = 0.5
    losses[CurveRun("adamw8bit").name] = [3.0] * (count - 1) + [2.0, 1.25]
    assert rate_table(losses).splitlines()[2:] == [
        "| AdamW | 1.000 | 1.000 | 1.000 |",
        "| Muon for matrices, AdamW for the rest | 0.500 | 1.000 | 1.000 |",
    ]
    losses[FORMATS["nvfp4"].name] = [3.5] * count + [1.5]
    assert optimizer_bands(losses).splitlines()[2:] == [
        "| AdamW | +0.0000 | +0.00000 | 1.0000 |",
        "| AdamW, 2 ranks | +0.0000 | +0.00000 | 1.0000 |",
        "| AdamW8bit | -1.0000 | -0.01000 | 1.2500 |",
    ]
    assert format_bands(losses).splitlines()[3:] == [
        *(f"| `{name}` | +0.0000 | +0.00000 | 1.0000 |" for name in FORMATS if name != "nvfp4"),
        "| `nvfp4` | +0.5000 | +0.50000 | 1.5000 |",
    ]
    losses[CROSSINGS["int4"].name] = [2.0] * count + [0.5]
    assert crossing_bands(losses).splitlines()[2:] == [
        "| float32 | +0.0000 | +0.00000 | 1.0000 |",
        *(f"| `{name}` | +0.0000 | +0.00000 | 1.0000 |" for name in ("int8", "fp8")),
        "| `int4` | -1.0000 | -1.00000 | 0.5000 |",
    ]
    for draw in (plot, plot_formats):
        draw(tmp_path / f"{draw.__name__}.png", losses)
        assert (tmp_path / f"{draw.__name__}.png").read_bytes().startswith(b"\x89PNG")
