"""Ends at bad moments: while a checkpoint is written, while tokens are made, once too often. Nothing is left behind."""

import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import pytest
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent

from megatron_fsdp.checkpoint import checkpointer
from megatron_fsdp.cli.main import main
from megatron_fsdp.train.data import preparation
from megatron_fsdp.train.models.trained import Trained
from tests.support.forked_programs import Program, children_of, remains, trainer
from tests.support.train_program import LIMIT_S, OPTIONS, environment, metrics, wait_for, write_text

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc to find ranks")
AGAIN = "] failed (exitcode: "  # of torch's agent, of the rank that it sees fail first, which starts all ranks again


class Started:
    """A run that would not end, with a folder to save to and one for temporary files."""

    def __init__(self, program: Callable[[Sequence[str]], int], place: Path, *options: str) -> None:
        self.temporary, self.saved, self.out = (place / name for name in ("temporary", "saved", "out"))
        self.temporary.mkdir()
        text = str(write_text(place / "text.txt"))
        given = ("--data-path", text, "--save", str(self.saved), "--out", str(self.out), "--train-iters", "1000000")
        self.program = Program(program, [*OPTIONS, *given, *options], environment(TMPDIR=str(self.temporary)))
        self.ranks: set[int] = set()

    def wait_for_ranks(self, is_so: Callable[[], bool]) -> list[int]:
        """Wait until something is so; the ranks of now."""
        wait_for(is_so, self.program)
        ranks = children_of(self.program.pid)
        self.ranks |= set(ranks)
        return ranks

    def end(self) -> tuple[int | None, str, str]:
        """Wait for the end; the code, and what was shown."""
        shown, errors = self.program.communicate(timeout=LIMIT_S)
        assert remains(self.temporary, self.ranks) == []
        return self.program.returncode, shown, errors

    @property
    def is_saving(self) -> bool:
        """Whether a checkpoint is being written, and not the first."""
        names = [path.name for path in self.saved.iterdir()] if self.saved.exists() else []
        return any(name.startswith("iter_") for name in names) and any(name.startswith(".iter_") for name in names)


def saving_slowly(argv: Sequence[str]) -> int:
    """The trainer, to which every save but the first takes long."""

    module: Any = checkpointer
    write_state, before = module.write_state, [0.0]

    def write(*given: Any, **options: Any) -> None:
        time.sleep(before[0])
        before[0] = 0.4
        write_state(*given, **options)

    module.write_state = write
    return trainer(argv)


@pytest.mark.full
@pytest.mark.parametrize(
    ("numbers", "saving"), [((signal.SIGTERM, signal.SIGTERM), ()), ((signal.SIGHUP,), ("--async-save",))]
)
def test_asked_to_end_while_it_saves(numbers: tuple[int, ...], saving: tuple[str, ...], tmp_path: Path) -> None:
    run = Started(saving_slowly, tmp_path, "--save-interval", "3", *saving)
    run.wait_for_ranks(lambda: run.is_saving)
    for number in numbers:
        run.program.send_signal(number)
        time.sleep(0.2)
    code, shown, errors = run.end()
    done = len(metrics(run.out))
    assert (code, errors) == (143, "stopped; what was written so far is kept\n")
    assert f"stopped and saved after {done} steps" in " ".join(shown.split())
    assert (run.saved / "latest_checkpointed_iteration.txt").read_text().strip() == str(done)
    assert [path.name for path in run.saved.iterdir() if path.name.startswith((".iter_", ".latest_"))] == []


def hanging(argv: Sequence[str]) -> int:
    """The trainer, whose second rank does not come back from its third step; torch would wait 30 s for it to end."""
    LocalElasticAgent._shutdown.__defaults__ = (signal.SIGTERM, 2)
    update, steps = Trained.update, iter(range(1, 1000))

    def hang(trained: Trained) -> None:
        update(trained)
        while next(steps) >= 3 and os.environ["RANK"] == "1":
            time.sleep(1.0)

    cast(Any, Trained).update = hang
    return trainer(argv)


@pytest.mark.full
def test_a_hang_is_explained_first_also_where_ranks_outlive_sigterm(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Started(hanging, tmp_path, "--distributed-timeout-minutes", "0.25")  # to start, too
    code, _, errors = run.end()
    assert code == 1
    assert errors.startswith("rank 0, all ranks were ended: Traceback")
    assert "rank 1 runs code outside of the model" in errors
    assert main(["hang", str(run.out / "hang")]) == 1
    told = capsys.readouterr().out
    assert told.startswith("rank 1 runs code outside of the model")
    assert "after that rank 1 was ended by SIGTERM" in told


def making_tokens_for_ever(argv: Sequence[str]) -> int:
    """The trainer, whose first start does not get beyond making tokens."""

    module: Any = preparation
    encode = module.encode_texts

    def stop(*args: Any) -> None:
        encode(*args)
        while os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            time.sleep(0.05)

    module.encode_texts = stop
    return trainer(argv)


def test_killed_while_tokens_are_made(tmp_path: Path) -> None:
    run = Started(making_tokens_for_ever, tmp_path, "--max-restarts", "1", "--exit-interval", "1")
    ranks = run.wait_for_ranks(lambda: any(run.out.glob(".tokens-*/*/*")))
    os.kill(ranks[0], signal.SIGKILL)
    code, _, errors = run.end()
    assert (code, errors.count(AGAIN)) == (0, 1)
    assert len(list(run.out.glob("tokens-*"))) == 1
    assert len(metrics(run.out)) == 1
