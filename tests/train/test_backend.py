"""`--distributed-backend`: what it says is what the ranks meet by, and what cannot be is refused before they meet."""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from megatron_fsdp.train import ranks
from megatron_fsdp.train.program import run_rank
from tests.support.forked_programs import Program, trainer
from tests.support.train_program import LIMIT_S, OPTIONS, environment, metrics, write_text

ASKED = "asked"


def trainer_that_notes_back_ends(argv: Sequence[str]) -> int:
    """The trainer; ranks append the back end that they meet by to a file in TMPDIR. Torch's own choice is no gloo."""
    module: Any = ranks
    meet = module.dist.init_process_group

    def note(backend: str, **more: Any) -> None:
        with Path(os.environ["TMPDIR"], ASKED).open("a") as file:
            file.write(f"{backend}\n")
        meet("gloo", **{**more, "device_id": None})

    module.dist.init_process_group = note
    module.dist.get_default_backend_for_device = lambda _: "the one for this device"
    return trainer(argv)


@pytest.mark.full(short=["option1-gloo"])
@pytest.mark.parametrize(
    ("option", "met_by"),
    [((), "the one for this device"), (("--distributed-backend", "gloo"), "gloo")],
)
def test_ranks_meet_by_the_back_end_that_was_asked_for(option: tuple[str, ...], met_by: str, tmp_path: Path) -> None:
    text, out = str(write_text(tmp_path / "text.txt")), tmp_path / "out"
    options = ("--data-path", text, "--out", str(out), "--exit-interval", "1", *option)
    program = Program(trainer_that_notes_back_ends, [*OPTIONS, *options], environment(TMPDIR=str(tmp_path)))
    shown = program.communicate(timeout=LIMIT_S)
    assert program.returncode == 0, shown
    assert (tmp_path / ASKED).read_text().splitlines() == [met_by] * 2
    assert len(metrics(out)) == 1


@pytest.mark.parametrize("starter", [trainer, run_rank])
def test_a_back_end_that_does_not_reach_the_device_is_refused_on_all_ranks(starter: Any, tmp_path: Path) -> None:
    options = [*OPTIONS, "--data-path", str(tmp_path), "--distributed-backend", "nccl"]
    said = "--distributed-backend nccl does not go with --device cpu, which it cannot reach: give gloo, or leave it out"
    if starter is trainer:
        program = Program(starter, options, environment())
        assert program.communicate(timeout=LIMIT_S) == ("", f"error: {said}\n")
        assert program.returncode == 2
        return
    files = [tmp_path / f"error{rank}.json" for rank in range(2)]
    for rank, file in enumerate(files):  # one after the other: none waits for the other
        of_torchrun = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
        program = Program(starter, options, environment(**of_torchrun, TORCHELASTIC_ERROR_FILE=str(file)))
        program.communicate(timeout=LIMIT_S)
        assert program.returncode == 2
    assert [json.loads(file.read_text())["message"]["message"] for file in files] == [said] * 2
