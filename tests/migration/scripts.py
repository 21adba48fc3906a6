"""Runs a script of examples/coming_from as a rank of a worker pool would under torchrun, and reads what it printed."""

import contextlib
import io
import runpy
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import torch.distributed as dist

from tests.support.source_tree import ROOT

FOLDER = ROOT / "examples" / "coming_from"
LOSS, NORM = "step {}: loss", "step {}: gradient norm"
HELD_OUT = "held-out loss"


def told(first: int, last: int) -> list[str]:
    """What a script tells of the steps from one to another, both included, and at the end."""
    return [*(what.format(step) for step in range(first, last + 1) for what in (LOSS, NORM)), HELD_OUT]


def script(name: str) -> Path:
    """Where a script is."""
    return FOLDER / f"{name}.py"


def run_script(path: Path, folder: Path, steps: int) -> dict[str, float]:
    """The numbers that this rank printed, by the words before them; the others than the first print nothing."""
    arguments = (
        ["--folder", str(folder), "--steps", str(steps)] if "deepspeed" in path.name else [str(folder), str(steps)]
    )
    printed = io.StringIO()
    with _as_a_program(path, arguments), contextlib.redirect_stdout(printed), warnings.catch_warnings():
        if path.name.endswith("_before.py"):
            warnings.simplefilter("ignore")
        runpy.run_path(str(path), run_name="__main__")
    rows = (line.rpartition(" ") for line in printed.getvalue().splitlines())
    return {what: float(number) for what, _, number in rows}


@contextlib.contextmanager
def _as_a_program(path: Path, arguments: list[str]) -> Iterator[None]:
    """The ranks of the pool are joined already and are needed afterwards."""
    with (
        mock.patch.object(sys, "argv", [str(path), *arguments]),
        mock.patch.object(sys, "path", [str(FOLDER), *sys.path]),
        mock.patch.object(dist, "init_process_group"),
        mock.patch.object(dist, "destroy_process_group"),
    ):
        yield
