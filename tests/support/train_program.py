"""The trainer as a person starts it, and what it leaves behind: for tests of whole runs."""

import contextlib
import io
import json
import os
import random
import signal
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest import mock

import torch.distributed as dist
from torch import device

from megatron_fsdp.checkpoint.diff import diff
from megatron_fsdp.checkpoint.folder import CheckpointFolder
from megatron_fsdp.train.options.command_line import parse_options
from megatron_fsdp.train.options.job import Job, World, resolve
from megatron_fsdp.train.ranks import Rank
from megatron_fsdp.train.run_job import run_job
from tests.support.forked_programs import Program, children_of, trainer
from tests.support.settling import LIMIT_S
from tests.support.source_tree import SOURCE

OPTIONS: tuple[str, ...] = (
    *("--preset", "tiny", "--num-layers", "1", "--hidden-size", "32", "--ffn-hidden-size", "64"),
    *("--num-attention-heads", "2", "--seq-length", "16", "--micro-batch-size", "2", "--global-batch-size", "6"),
    *("--train-iters", "8", "--eval-iters", "1", "--eval-interval", "1000000", "--log-interval", "2"),
    *("--device", "cpu"),
)
"""A model so small that a step takes milliseconds, in float32."""
_TORCHRUN = ("RANK", "WORLD", "LOCAL_", "GROUP_", "ROLE_", "MASTER_", "TORCHELASTIC_", "MEGATRON_FSDP_")


def write_text(path: Path) -> Path:
    path.write_text("".join(f"line {i} of the text\n" for i in range(800)))
    return path


def environment(**more: str) -> dict[str, str]:
    """Of this process, without what a launcher left, with the sources on the path."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(_TORCHRUN)}
    return {**kept, "PYTHONPATH": str(SOURCE), "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1", **more}


def start(*options: str, env: Mapping[str, str] | None = None) -> Program:
    return Program(trainer, [*OPTIONS, *options], env or environment())


def run(*options: str, code: int = 0, **more: Any) -> tuple[str, str]:
    """Run the program to its end; what it showed, and its errors."""
    process = start(*options, **more)
    shown, errors = process.communicate(timeout=LIMIT_S)
    assert process.returncode == code, (process.returncode, shown, errors)
    return shown, errors


def this_rank() -> Rank:
    """This process in the group that is there already, as by `run_ranks`."""
    return Rank(dist.get_rank(), dist.get_world_size(), device("cpu"), os.getppid())


def job_of_words(words: str, ranks: int = 2, device_type: str = "cpu") -> Job:
    """What a whole command line asks for."""
    return resolve(parse_options(words.split()), World(ranks, device_type))


def job_of(*options: str, ranks: int = 2, restarts: int = 0) -> Job:
    """What the small model's options and these ask for."""
    return resolve(parse_options([*OPTIONS, *options]), World(ranks, "cpu", restarts=restarts))


def train(*options: str, restarts: int = 0) -> None:
    """A run in the process group that is there already."""
    rank = this_rank()
    run_job(job_of(*options, ranks=rank.count, restarts=restarts), rank)


def output_of(*options: str, restarts: int = 0) -> str:
    """What such a run shows, on lines so wide that no path in them is folded, as one line."""
    wide = mock.patch.dict(os.environ, COLUMNS="1000")
    with wide, contextlib.redirect_stdout(io.StringIO()) as shown:
        train(*options, restarts=restarts)
    return " ".join(shown.getvalue().split())


def refusal(*options: str, restarts: int = 0) -> str:
    """What such a run ends with."""
    try:
        train(*options, restarts=restarts)
    except Exception as error:  # noqa: BLE001  the test looks at it
        return f"{type(error).__name__}: {error}"
    return "it went well"


def metrics(out: Path) -> list[dict[str, Any]]:
    """The lines of a run's metrics, whole ones only."""
    lines = (out / "metrics.jsonl").read_text().splitlines()
    return [found for line in lines if "loss" in (found := json.loads(line)) and "data_checksum" in found]


def by_step(out: Path, *names: str) -> dict[int, tuple[Any, ...]]:
    """Figures of every step; of a step that came again, the last."""
    return {record["step"]: tuple(record[name] for name in names) for record in metrics(out)}


def differences(first: Path, second: Path) -> list[str]:
    """Keys that differ between two checkpoints, but for the clock."""
    report = diff(CheckpointFolder(first), CheckpointFolder(second))
    assert report.compared > 20
    return [found.key for found in report.differences if found.key != "trainer.elapsed_s"]


def wait_for(is_so: Callable[[], bool], process: Program) -> None:
    """Wait until something is so while a program runs."""
    until = time.monotonic() + LIMIT_S
    while not is_so():
        has_ended = process.poll() is not None  # asked first: what it did before its end still counts
        assert is_so() or not has_ended, process.communicate()
        assert time.monotonic() < until, (process.shown("out"), process.shown("err"))
        time.sleep(0.02)


def steps_done(out: Path) -> int:
    file = out / "metrics.jsonl"
    return file.read_text().count("\n") if file.exists() else 0


def torment(program: Program, out: Path, saved: Path, *, seed: int, kills: int, during_saves: int) -> list[bool]:
    """Kill one rank after another until the program ends or enough were killed; return who was in a save.

    Each rank is killed when the run has got at least a step further than at the kill before. The seed fixes ranks and
    moments, as far as a machine repeats itself.
    """
    choose = random.Random(seed)
    wants_save = [True] * during_saves + [False] * (kills - during_saves)
    choose.shuffle(wants_save)
    killed: list[bool] = []
    for want in wants_save:
        before = steps_done(out)
        while steps_done(out) <= before and program.poll() is None:
            time.sleep(0.005)
        if not want:
            time.sleep(choose.uniform(0.0, 0.3))
        was_saving = _kill_one(program, saved, choose, want)
        if was_saving is None:
            break
        killed.append(was_saving)
    return killed


def _kill_one(program: Program, saved: Path, choose: random.Random, in_save: bool) -> bool | None:
    """Kill a rank. In a save it is stopped before the last look, so that the save cannot end meanwhile."""
    while ranks := children_of(program.pid):
        chosen = choose.choice(ranks)
        while in_save and not _is_saving(saved) and program.poll() is None:
            time.sleep(0.001)
        with suppress(ProcessLookupError):
            os.kill(chosen, signal.SIGSTOP)
            is_saving = _is_saving(saved)
            os.kill(chosen, signal.SIGKILL if is_saving or not in_save else signal.SIGCONT)
            if is_saving or not in_save:
                return is_saving
    return None


def _is_saving(saved: Path) -> bool:
    with suppress(OSError):
        return any(path.name.startswith(".iter_") for path in saved.iterdir())
    return False
