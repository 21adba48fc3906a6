"""Kills ranks of a running trainer at random moments, also while they save."""

import os
import random
import signal
import time
from contextlib import suppress
from pathlib import Path

from tests.support.forked_programs import Program, children_of
from tests.support.train_program import steps_done

_POLL_S = 0.005


def torment(program: Program, out: Path, saved: Path, *, seed: int, kills: int, during_saves: int) -> list[bool]:
    """Kill one rank after another until the program ends or enough were killed, some while a checkpoint is written.

    Each rank is killed when the run has got at least a step further than at the kill before. The seed fixes ranks and
    moments, as far as a machine repeats itself.

    Returns:
        For each rank that was killed, whether a save was under way.
    """
    choose = random.Random(seed)
    wants_save = [True] * during_saves + [False] * (kills - during_saves)
    choose.shuffle(wants_save)
    killed: list[bool] = []
    for want in wants_save:
        before = steps_done(out)
        while steps_done(out) <= before and program.poll() is None:
            time.sleep(_POLL_S)
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
            time.sleep(_POLL_S / 5)
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
