"""Whole programs without their imports: forked from a server that has imported everything, as are their ranks.

What differs from a program that is executed is how its processes come to be; a start takes tenths of a second.
"""

import multiprocessing
import os
import runpy
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch.distributed import run
from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

from tests.support.settling import settled

_PRELOADED = ["megatron_fsdp.train.run_job", "megatron_fsdp.train.program", "tests.support.forked_programs"]


class ForkedRank:
    """`python ...`, forked from its launcher; as much of `subprocess.Popen` as torch's launching of processes uses."""

    def __init__(self, args: Sequence[str], env: Mapping[str, str], **_: Any) -> None:
        self._code: int | None = None
        _flush()
        self.pid = os.fork()
        if self.pid == 0:
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                signal.signal(number, signal.SIG_DFL)
            os.setsid()
            end_with(lambda: python(args[1:], env))

    def poll(self) -> int | None:
        if self._code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self._code = os.waitstatus_to_exitcode(status) if pid else None
        return self._code

    def wait(self, timeout: float = 1e9) -> int:
        until = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > until:
                raise subprocess.TimeoutExpired("a rank", timeout)
            time.sleep(0.02)
        return code


def end_with(work: Callable[[], int]) -> None:
    """End this process with what the work returns, whatever it raises."""
    code = 1
    try:
        code = work()
    except SystemExit as asked:
        code = int(asked.code or 0)
    except BaseException:  # noqa: BLE001  nothing may go back into the code that forked
        traceback.print_exc()
    _flush()
    os._exit(code)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:  # None: closed
            stream.flush()


def python(words: Sequence[str], env: Mapping[str, str]) -> int:
    """Be `python -m MODULE ...` or `python FILE ...`, unbuffered or not."""
    os.environ.clear()
    os.environ.update(env)
    words = [word for word in words[:1] if word != "-u"] + list(words[1:])
    if words[0] == "-m":
        sys.argv = words[1:]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = words
        sys.path.insert(0, str(Path(words[0]).parent))
        runpy.run_path(words[0], run_name="__main__")
    return 0


def _with_forked_ranks() -> None:
    tempfile.tempdir = None  # what it was when the server of the forks started
    module: Any = subprocess_handler
    module.Popen = ForkedRank  # of this process alone


def trainer(argv: Sequence[str]) -> int:
    """The trainer's program, with ranks that are forked."""
    from megatron_fsdp.train.program import main

    _with_forked_ranks()
    return main(argv)


def torchrun(argv: Sequence[str]) -> int:
    _with_forked_ranks()
    run.main(list(argv))
    return 0


def in_folder(argv: Sequence[str]) -> int:
    """`python` with words that follow a folder, in this folder; a number before them: by torchrun on as many ranks."""
    folder, ranks, *words = argv
    os.chdir(folder)
    if int(ranks):
        return torchrun(["--standalone", "--nproc-per-node", ranks, *words])
    return python(words, dict(os.environ))


def _main(program: Callable[[Sequence[str]], int], argv: Sequence[str], env: Mapping[str, str], place: str) -> None:
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # it is ignored in jobs in the background
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # and this one below nohup
    for stream, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(Path(place) / name, os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream)
    os.environ.clear()
    os.environ.update(env)
    end_with(lambda: program(argv))


class Program:
    """A program that runs; as much of `subprocess.Popen` as tests use."""

    def __init__(self, program: Callable[[Sequence[str]], int], argv: Sequence[str], env: Mapping[str, str]) -> None:
        """Start `program(argv)`, a function of a module, in a process with this environment."""
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(_PRELOADED)
        self._place = tempfile.mkdtemp()
        weakref.finalize(self, shutil.rmtree, self._place, ignore_errors=True)
        self._process = context.Process(target=_main, args=(program, list(argv), dict(env), self._place))
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid
        weakref.finalize(self, _end_tree, self._process)

    def poll(self) -> int | None:
        return self._process.exitcode

    returncode = property(poll)

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        self._process.kill()

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        self._process.join(timeout)
        if self.poll() is None:
            raise subprocess.TimeoutExpired("the program", timeout or 0.0, self.shown("out"), self.shown("err"))
        return self.shown("out"), self.shown("err")

    def shown(self, name: str) -> str:
        """What it has written to `out` or `err` so far."""
        file = Path(self._place) / name
        return file.read_text(errors="replace") if file.exists() else ""


def _end_tree(process: Any) -> None:
    """End a program that a test has left behind, and its ranks."""
    if process.exitcode is None:
        for pid in children_of(process.pid):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.kill()


def children_of(pid: int) -> list[int]:
    """Processes whose parent this is, as Linux lists them; none of a process that has ended."""
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except (FileNotFoundError, ProcessLookupError):
        return []


def remains(place: Path, sessions: Iterable[int]) -> list[str]:
    """What is there still, once processes that were killed had the time to die.

    Processes of these sessions, each led by a rank; files in `place`, the program's TMPDIR; and shared memory that
    names one of these processes.
    """
    leaders = {str(session) for session in sessions}
    found = [path.name for path in place.iterdir() if not path.name.startswith("torchinductor_")]  # torch's cache
    found += settled(lambda: _processes(leaders), lambda living: not living)
    names = os.listdir("/dev/shm")  # noqa: PTH208  # names are all that is needed
    return found + [name for name in names if leaders.intersection(name.replace("-", "_").split("_"))]


def _processes(leaders: set[str]) -> list[str]:
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            state, _, _, session = (process / "stat").read_text().rpartition(")")[2].split()[:4]
            if session in leaders and state not in "ZX":
                found.append(f"process {process.name}")
    return found
