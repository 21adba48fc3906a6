"""The argument parser of this package's programs, and Ctrl-C without a traceback."""

from __future__ import annotations

import argparse
import difflib
import os
import re
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, NoReturn

EXIT_SAME = 0
EXIT_DIFFERENT = 1
EXIT_ERROR = 2
EXIT_INTERRUPTED = 128 + signal.SIGINT  # as shells have it


class Parser(argparse.ArgumentParser):
    """An `ArgumentParser` that suggests names and takes no abbreviations, since their meaning changes with versions."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        kwargs.setdefault("allow_abbrev", False)
        super().__init__(*args, **kwargs)  # type: ignore[arg-type]

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """Parse; a sub-command refuses its unknown arguments itself, since only it can suggest a name."""
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return found, unknown

    def error(self, message: str) -> NoReturn:
        """Print the error, with a suggestion, and exit with status 2."""
        self.exit(EXIT_ERROR, f"{self.prog}: error: {self.with_suggestion(message)}\n")

    def with_suggestion(self, message: str) -> str:
        """Return argparse's message in one line, with a suggestion and a pointer to the help."""
        value = re.search(r"ignored explicit argument (.*)", message)
        if value is not None:
            message = f"{message[: value.start()]}takes no value, and {value[1]} was given"
        return f"{message}{self._suggestion(message)}; see {self.prog} --help"

    def _suggestion(self, message: str) -> str:
        given = re.search(r"invalid choice: '([^']*)'|unrecognized arguments: (\S+)", message)
        if given is None:
            return ""
        command, option = given.groups()
        known = list(self._option_string_actions)
        if command is not None:
            known = [str(choice) for action in self._actions for choice in action.choices or ()]
        near = difflib.get_close_matches(command or option.partition("=")[0], known, 1, 0.5)
        return f"; did you mean {near[0]}?" if near else ""


def end_quietly() -> None:
    """Make Ctrl-C end this process at once with status 130; call it first, before slow imports.

    Where Ctrl-C is ignored, as in background jobs, or has another handler, that stays so.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _end)


@contextmanager
def raising() -> Iterator[None]:
    """Raise `KeyboardInterrupt` on Ctrl-C inside the block, so that the block can clean up."""
    is_quiet = signal.getsignal(signal.SIGINT) is _end
    if is_quiet:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        if is_quiet:
            signal.signal(signal.SIGINT, _end)


def _end(_number: int, _frame: FrameType | None) -> None:
    # Not the signal's own default: a shell would say 130, but the parent process would see the signal.
    os._exit(EXIT_INTERRUPTED)
