"""torchrun without imports: its own program, with ranks that are forked and then are what its command line names."""

import os
import runpy
import sys
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

from torch.distributed import run
from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

from tests.support.forked_programs import ForkedRank


class ForkedCommand(ForkedRank):
    """`python -u -m MODULE ...` or `python -u FILE ...`, forked; as much of `subprocess.Popen` as torchrun uses."""

    def work(self, command: Sequence[str], env: Mapping[str, str]) -> int:
        """Be the program."""
        os.environ.clear()
        os.environ.update(env)
        _, unbuffered, *words = command
        assert unbuffered == "-u"
        if words[0] == "-m":
            sys.argv = words[1:]
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = words
            runpy.run_path(words[0], run_name="__main__")
        return 0


def torchrun(argv: Sequence[str]) -> int:
    """`torchrun` with these words."""
    tempfile.tempdir = None  # what it was when the server of the forks started
    module: Any = subprocess_handler
    module.Popen = ForkedCommand  # of this process alone
    run.main(list(argv))
    return 0
