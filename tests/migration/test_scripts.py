"""Every script before and after a move trains alike: on 2 ranks, going on on 1, and from the other's checkpoint."""

import contextlib
import io
import py_compile
import runpy
import shutil
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.format_utils import torch_save_to_dcp

from megatron_fsdp.checkpoint import load_checkpoint
from tests.conftest import RunRanks
from tests.support.real_torchrun import real_torchrun
from tests.support.source_tree import ROOT

FIRST, LAST = 3, 5
BEFORE = ("ddp_before", "fsdp2_before", "megatron_fsdp_before")
AFTER = ("ddp_after", "fsdp2_after", "deepspeed_after", "megatron_fsdp_after")

Losses = dict[str, dict[str, float]]


def run_all(jobs: dict[str, tuple[Path, Path, int]]) -> Losses:
    """What each job printed: a script, the folder of its checkpoints, and the steps to train up to."""
    found = {}
    for name, (path, folder, steps) in jobs.items():
        found[name] = run_script(path, folder, steps)
        dist.barrier()
    return found


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the checkpoints of all scripts after the first steps, each under its name."""
    return tmp_path_factory.mktemp("saved")


@pytest.fixture(scope="module")
def trained(run_ranks: RunRanks, saved: Path) -> Losses:
    jobs = {name: (script(name), saved / name, FIRST) for name in (*BEFORE, *AFTER)}
    jobs["all steps"] = (script("ddp_before"), saved / "all steps", LAST)
    return run_ranks(2, run_all, jobs)[0]


@pytest.fixture(scope="module")
def expected(trained: Losses) -> dict[str, float]:
    """What DDP prints in one go."""
    found = trained["all steps"]
    assert list(found) == told(1, LAST)
    assert found[LOSS.format(1)] > 5.5 > 4.7 > found[LOSS.format(LAST)]  # ln 256 = 5.5: it has learnt something
    return found


@pytest.mark.parametrize("name", [*BEFORE, *AFTER])
def test_before_and_after_train_alike(trained: Losses, expected: dict[str, float], name: str) -> None:
    found = trained[name]
    assert list(found) == told(1, FIRST)
    assert found | {HELD_OUT: 0.0} == pytest.approx({key: expected[key] for key in found} | {HELD_OUT: 0.0}, rel=1e-6)
    assert found[HELD_OUT] == pytest.approx(trained["ddp_before"][HELD_OUT], rel=1e-6)


@pytest.fixture(scope="module")
def resumed(run_ranks: RunRanks, trained: Losses, saved: Path, tmp_path_factory: pytest.TempPathFactory) -> Losses:
    """All go on on one rank, from copies of what two ranks have saved."""
    assert trained
    copies = tmp_path_factory.mktemp("resumed") / "copies"
    shutil.copytree(saved, copies)
    jobs = {name: (script(name), copies / name, LAST) for name in AFTER}
    return run_ranks(1, run_all, jobs)[0]


@pytest.mark.parametrize("name", AFTER)
def test_another_number_of_ranks_goes_on_alike(resumed: Losses, expected: dict[str, float], name: str) -> None:
    _assert_last_steps(resumed[name], expected)


@pytest.fixture(scope="module")
def moved(run_ranks: RunRanks, trained: Losses, saved: Path, tmp_path_factory: pytest.TempPathFactory) -> Losses:
    """The scripts after go on from what the scripts before have saved, moved as the pages say."""
    assert trained
    folder = tmp_path_factory.mktemp("moved")
    iteration = f"iter_{FIRST:07}"
    (folder / "ddp_after").mkdir()
    torch_save_to_dcp(saved / "ddp_before", folder / "ddp_after" / iteration)
    for origin in ("fsdp2", "megatron_fsdp"):
        shutil.copytree(saved / f"{origin}_before", folder / f"{origin}_after" / iteration)
    jobs = {name: (script(name), folder / name, LAST) for name in AFTER if name != "deepspeed_after"}
    return run_ranks(2, run_all, jobs)[0]


@pytest.mark.parametrize("name", ["ddp_after", "fsdp2_after", "megatron_fsdp_after"])
def test_the_checkpoint_from_before_is_taken_along(moved: Losses, expected: dict[str, float], name: str) -> None:
    _assert_last_steps(moved[name], expected)


def _assert_last_steps(found: dict[str, float], expected: dict[str, float]) -> None:
    keys = told(FIRST + 1, LAST)
    assert list(found) == keys
    assert found == pytest.approx({key: expected[key] for key in keys}, rel=1e-6)


def test_consolidated_weights_of_deepspeed_become_a_checkpoint(tmp_path: Path) -> None:
    """One `torch.save` file of weights under the model's own names, as `zero_to_fp32.py` writes it."""
    source = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
    torch.save({"model": source.state_dict()}, tmp_path / "weights.pt")
    torch_save_to_dcp(tmp_path / "weights.pt", tmp_path / "weights")
    target = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
    report = load_checkpoint(target, None, tmp_path / "weights")
    assert not report.missing
    assert not report.unexpected
    assert not [note for note in report.notes if "not asked for" in note]
    for name, value in source.state_dict().items():
        torch.testing.assert_close(target.state_dict()[name], value, rtol=0, atol=0)


def test_the_script_for_deepspeed_compiles(tmp_path: Path) -> None:
    """DeepSpeed is not installed here."""
    assert py_compile.compile(str(script("deepspeed_before")), str(tmp_path / "compiled"), doraise=True)


@pytest.mark.full
def test_torchrun_runs_a_script(tmp_path: Path, expected: dict[str, float]) -> None:
    shown = real_torchrun([str(script("ddp_after")), str(tmp_path / "runs"), "1"])
    what, _, number = shown.splitlines()[0].rpartition(" ")
    assert (what, float(number)) == (LOSS.format(1), pytest.approx(expected[LOSS.format(1)], rel=1e-6))


def test_every_script_is_short_and_has_its_pair() -> None:
    names = {path.stem for path in FOLDER.glob("*.py")}
    assert names == {"workload", "deepspeed_before", *BEFORE, *AFTER}
    lengths = {path.name: len(path.read_text(encoding="utf-8").splitlines()) for path in FOLDER.glob("*.py")}
    assert {name: lines for name, lines in lengths.items() if lines > 80} == {}


# ---- scripts as ranks run them ---------------------------------------------------------------------------------------

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
