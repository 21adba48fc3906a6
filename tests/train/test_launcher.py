"""How many ranks are started, with which variables, on which device, by which back end, and with which streams."""

import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from megatron_fsdp.errors import ConfigurationError
from megatron_fsdp.train import ranks
from megatron_fsdp.train.program import choose_ranks, find_device_type, is_rank, rank_environment, run_rank
from tests.support.forked_programs import Program, trainer
from tests.support.train_program import LIMIT_S, OPTIONS, environment, metrics, write_text


@pytest.mark.parametrize(
    ("requested", "num_accelerators", "num_cores", "expected"),
    [(None, 0, 2, 2), (None, 0, 1, 1), (None, 0, 64, 2), (3, 0, 2, 3), (None, 8, 64, 8), (2, 8, 64, 2)],
)
def test_ranks_fit_the_machine(requested: int | None, num_accelerators: int, num_cores: int, expected: int) -> None:
    assert choose_ranks(requested, num_accelerators=num_accelerators, num_cores=num_cores) == expected


def test_more_ranks_than_accelerators_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="--nproc 3 needs as many accelerators and 2 are here"):
        choose_ranks(3, num_accelerators=2, num_cores=64)


def test_ranks_share_the_cores_and_the_environment_of_the_user_is_left_alone() -> None:
    assert rank_environment({}, ranks=2, num_cores=8)["OMP_NUM_THREADS"] == "4"
    assert rank_environment({}, ranks=4, num_cores=2)["OMP_NUM_THREADS"] == "1"
    given = {"OMP_NUM_THREADS": "7", "GLOO_SOCKET_IFNAME": "eth0", "NCCL_SOCKET_IFNAME": "ib0"}
    assert rank_environment(given, ranks=2, num_cores=8) == {}
    assert is_rank({"RANK": "0", "WORLD_SIZE": "1"})
    assert not is_rank({"PATH": "x"})


@pytest.mark.skipif(sys.platform != "linux", reason="the loopback interface has another name elsewhere")
def test_traffic_stays_on_this_machine() -> None:
    added = rank_environment({}, ranks=2, num_cores=8)
    assert (added["GLOO_SOCKET_IFNAME"], added["NCCL_SOCKET_IFNAME"]) == ("lo", "lo")


def test_missing_accelerator_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.accelerator.current_accelerator", lambda **_: None)
    assert find_device_type("auto") == find_device_type("cpu") == "cpu"
    with pytest.raises(ConfigurationError, match="--device cuda is not available here: use --device cpu"):
        find_device_type("cuda")


# ---- the back end ----------------------------------------------------------------------------------------------------

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
    ("option", "met_by"), [((), "the one for this device"), (("--distributed-backend", "gloo"), "gloo")]
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


# ---- streams that are full or closed ---------------------------------------------------------------------------------


def on_a_full_disk(argv: Sequence[str]) -> int:
    full = os.open("/dev/full", os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(full, stream)
    return trainer(argv)


def with_closed_streams(argv: Sequence[str]) -> int:
    for stream in (0, 1, 2):
        os.close(stream)
    sys.stdin = sys.stdout = sys.stderr = None  # type: ignore[assignment]  # as Python does
    return trainer(argv)


@pytest.mark.parametrize("program", [on_a_full_disk, with_closed_streams])
def test_a_wrong_option_has_its_code_where_it_cannot_be_told(program: Callable[[Sequence[str]], int]) -> None:
    run = Program(program, [*OPTIONS, "--lr", "-1"], environment())
    run.communicate(timeout=LIMIT_S)
    assert run.returncode == 2
