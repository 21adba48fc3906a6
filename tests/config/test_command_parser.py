"""Ctrl-C before a program has got anywhere: while it is imported."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_fsdp.config.command_parser import end_quietly, raising
from tests.support.settling import LIMIT_S
from tests.support.source_tree import ROOT, SOURCE
from tests.support.train_program import environment

_CONSOLE = "import sys; from megatron_fsdp.cli.main import main; sys.exit(main())"  # as pip writes it for `mfsdp`
ENTRIES = {
    "mfsdp train": ("-c", _CONSOLE, "train"),
    "mfsdp plan": ("-c", _CONSOLE, "plan"),
    "python -m megatron_fsdp.cli": ("-m", "megatron_fsdp.cli", "plan"),
    "python -m megatron_fsdp.train": ("-m", "megatron_fsdp.train"),
    "pretrain_gpt.py": (str(ROOT / "pretrain_gpt.py"),),
}
_INTERRUPTING = """
import os, signal, sys

signal.signal(signal.SIGINT, getattr(signal, os.environ["BEFORE"]))  # a job in the background begins with it ignored

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == os.environ["WHERE"]:
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Finder())
"""


def interrupted(entry: str, place: Path, *, where: str, before: str = "default_int_handler") -> tuple[int, str]:
    """Exit code and errors of a program that gets Ctrl-C when it imports a module."""
    (place / "sitecustomize.py").write_text(_INTERRUPTING)
    env = environment(PYTHONPATH=f"{place}:{SOURCE}", WHERE=where, BEFORE=before)
    command = [sys.executable, *ENTRIES[entry], "--help"]
    ended = subprocess.run(command, env=env, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    return ended.returncode, ended.stderr


@pytest.mark.parametrize("entry", ENTRIES)
def test_ctrl_c_while_torch_is_imported_shows_nothing(entry: str, tmp_path: Path) -> None:
    assert interrupted(entry, tmp_path, where="torch") == (130, "")


@pytest.mark.full
def test_where_it_is_ignored_it_stays_ignored(tmp_path: Path) -> None:
    assert interrupted("mfsdp plan", tmp_path, where="torch", before="SIG_IGN") == (0, "")


@pytest.mark.parametrize("ignores", [False, True])
def test_a_handler_of_somebody_else_stays_and_what_ignores_ctrl_c_goes_on_ignoring_it(ignores: bool) -> None:
    heard: list[int] = []
    before = signal.signal(signal.SIGINT, signal.SIG_IGN if ignores else lambda number, _: heard.append(number))
    try:
        end_quietly()
        with raising():
            os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)
    assert heard == ([] if ignores else [signal.SIGINT, signal.SIGINT])
