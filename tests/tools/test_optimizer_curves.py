"""The tool behind curves and tables in docs/sharded_models.md: which runs there are, and what it makes of them."""

from megatron_fsdp.train.options.command_line import parse_options
from tools.optimizer_curves import (
    RUNS,
    STEPS,
    WINDOW,
    published,
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
