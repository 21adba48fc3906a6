"""The program as a person starts it, by itself or under torchrun: a launcher and its ranks, each a process."""

import os
import signal
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from tests.support.forked_programs import Program, children_of, remains, torchrun
from tests.support.source_tree import ROOT
from tests.support.train_program import (
    LIMIT_S,
    OPTIONS,
    by_step,
    environment,
    metrics,
    run,
    start,
    steps_done,
    wait_for,
    write_text,
)

only_linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc to find ranks and sockets")
LOOPBACK = {"0100007F", "00000000000000000000000001000000"}  # 127.0.0.1 and ::1
FOREVER = ("--train-iters", "1000000", "--exit-duration-in-mins", "60")


SECRETS = {name: f"hush-{name}" for name in ("WANDB_API_KEY", "HF_TOKEN", "AWS_SECRET_ACCESS_KEY")}


def assert_hushed(folder: Path, shown: str) -> None:
    """No secret of the environment is written or shown."""
    written = [path for path in folder.rglob("*") if path.is_file()]
    assert len(written) > 3
    assert [path for path in written if b"hush-" in path.read_bytes()] == []
    assert "hush-" not in shown


def test_run_ends_well_and_shows_everything_but_secrets(text_file: Path, tmp_path: Path) -> None:
    options = ("--nproc", "1", "--save", str(tmp_path / "saved"))
    shown, errors = run("--data-path", str(text_file), "--out", str(tmp_path), *options, env=environment(**SECRETS))
    for part in ("8/8", "held-out loss", "peak memory of a rank"):
        assert shown.count(part) >= 1, part
    assert (errors, [record["step"] for record in metrics(tmp_path)]) == ("", list(range(1, 9)))
    assert_hushed(tmp_path, shown)


def sockets(pids: list[int]) -> set[str]:
    """Inodes of the files that these processes have open, sockets among them."""
    inodes = set()
    for pid in pids:
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(FileNotFoundError):  # closed meanwhile
                inodes.add(str(descriptor.readlink()).removeprefix("socket:[").removesuffix("]"))
    return inodes


def listening(pids: list[int], *, inherited_from: int | None = None) -> set[str]:
    """Addresses, in the kernel's hexadecimal, of the TCP sockets on which these processes listen.

    Forked ranks have the sockets of `inherited_from`, too; those do not count.
    """
    inodes = sockets(pids) - (set() if inherited_from is None else sockets([inherited_from]))
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:
                found.add(fields[1].partition(":")[0])
    return found


def started_forever(text_file: Path, out: Path, *options: str) -> Program:
    process = start("--data-path", str(text_file), "--out", str(out), *FOREVER, *options)
    wait_for(lambda: steps_done(out) >= 2, process)
    return process


@pytest.mark.full
@only_linux
def test_nothing_listens_to_the_outside_and_an_interrupt_ends_all_without_a_traceback(
    text_file: Path, tmp_path: Path
) -> None:
    process = started_forever(text_file, tmp_path)
    ranks = children_of(process.pid)
    assert len(ranks) == 2
    assert listening([process.pid]) == set()
    assert listening(ranks) <= LOOPBACK
    assert listening(ranks)  # gloo's own: the test sees sockets at all
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=LIMIT_S)
    assert (process.returncode, errors) == (130, "stopped; what was written so far is kept\n")
    assert [rank for rank in ranks if Path(f"/proc/{rank}").exists()] == []
    assert metrics(tmp_path)[0]["step"] == 1


# ---- under torchrun --------------------------------------------------------------------------------------------------

STEPS = 40


@pytest.mark.full
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc to find ranks and sockets")
def test_ranks_under_torchrun_talk_on_loopback_and_go_on_after_a_kill(tmp_path: Path) -> None:
    out, saved, temporary = (tmp_path / name for name in ("out", "saved", "temporary"))
    temporary.mkdir()
    own = ("--data-path", str(write_text(tmp_path / "text.txt")), "--train-iters", str(STEPS), "--save", str(saved))
    of_torchrun = ("--standalone", "--nproc-per-node", "2", "--max-restarts", "1")
    command = [*of_torchrun, str(ROOT / "pretrain_gpt.py"), *OPTIONS, *own, "--save-interval", "10", "--out", str(out)]
    program = Program(torchrun, command, environment(TMPDIR=str(temporary)))
    wait_for(lambda: (saved / "iter_0000010").exists(), program)
    ranks = children_of(program.pid)
    assert len(ranks) == 2
    found = listening(ranks, inherited_from=program.pid)
    assert found  # gloo's own: sockets are seen at all
    assert found <= LOOPBACK
    os.kill(ranks[1], signal.SIGKILL)
    shown, errors = program.communicate(timeout=LIMIT_S)
    assert program.returncode == 0, errors[-3000:]
    assert f"loaded {saved}" in shown
    assert list(by_step(out, "loss")) == list(range(1, STEPS + 1))
    assert (saved / f"iter_{STEPS:07}").exists()
    assert [name for name in remains(temporary, ranks) if not name.startswith("torchelastic_")] == []  # torchrun's logs
