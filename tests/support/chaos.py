"""Kills ranks of a running trainer at random moments, also while they save."""

import os
import random
import signal
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from tests.support.forked_programs import Program, children_of
from tests.support.train_program import steps_done

_POLL_S = 0.005


@dataclass
class Chaos:
    """What was killed when.

    Attributes:
        seed: Fixes ranks and moments, as far as a machine repeats itself.
        kills: How many ranks to kill.
        during_saves: How many of those while a checkpoint is being written.
        killed: Signals that reached a rank: whether a save was under way.
    """

    seed: int
    kills: int
    during_saves: int
    killed: list[bool] = field(default_factory=list)

    def torment(self, program: Program, out: Path, saved: Path) -> None:
        """Kill one rank after another until the program ends or enough were killed.

        Each rank is killed when the run has got at least a step further than at the kill before.
        """
        choose = random.Random(self.seed)
        wants_save = [True] * self.during_saves + [False] * (self.kills - self.during_saves)
        choose.shuffle(wants_save)
        for want in wants_save:
            before = steps_done(out)
            while steps_done(out) <= before and program.poll() is None:
                time.sleep(_POLL_S)
            if not want:
                time.sleep(choose.uniform(0.0, 0.3))
            if not self._kill_one(program, saved, choose, want):
                return

    def _kill_one(self, program: Program, saved: Path, choose: random.Random, in_save: bool) -> bool:
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
                    self.killed.append(is_saving)
                    return True
        return False


def _is_saving(saved: Path) -> bool:
    with suppress(OSError):
        return any(path.name.startswith(".iter_") for path in saved.iterdir())
    return False
