"""The console, the header and the tables of a run. Only the first rank has a console that writes."""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import IO, Any, cast

from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from megatron_fsdp.train.launch.failures import point_nowhere
from megatron_fsdp.train.reporting.comparison import Row

LIBRARY_LOGGER = "megatron_fsdp"
PLAIN_WIDTH = 120


def format_bytes(count: float) -> str:
    """Return a number of bytes with a binary unit, such as `1.5 MiB`."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.2f} GiB"


class _Console(Console):
    """Never ends the program, and never hides the cursor: a rank that is killed could not show it again."""

    def show_cursor(self, show: bool = True) -> bool:  # noqa: ARG002  # as the base class
        """Leave the cursor as it is."""
        return False

    def on_broken_pipe(self) -> None:
        """Show nothing from now on, where nobody reads any more (`| head`): the files of the run have everything."""
        self.quiet = True
        point_nowhere(self.file)

    @property
    def file(self) -> IO[str]:
        """Where it writes to, such that nothing that cannot be written there ends the program."""
        return cast("IO[str]", _Lenient(super().file))

    @file.setter
    def file(self, new_file: IO[str]) -> None:
        self._file = new_file

    @property
    def encoding(self) -> str:
        """Of where it writes to; without UTF-8 frames are of ASCII."""
        return str(getattr(self.file, "encoding", None) or "utf-8").lower()


class _Lenient:
    """A text file that drops what it cannot write, as on a full disk, and replaces letters that it cannot encode."""

    def __init__(self, file: IO[str]) -> None:
        self._inner = file

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def write(self, text: str) -> int:
        """Write what can be; a reader who has gone is told of."""
        try:
            return self._inner.write(text)
        except BrokenPipeError:
            raise
        except UnicodeEncodeError:
            encoding = getattr(self._inner, "encoding", None) or "ascii"
            return self.write(text.encode(encoding, "replace").decode(encoding))
        except OSError:
            return len(text)

    def flush(self) -> None:
        """Write what is buffered, if that can be."""
        try:
            self._inner.flush()
        except BrokenPipeError:
            raise
        except OSError:
            return


def printable(text: str) -> str:
    """Return a text without what would steer a terminal; a model, or the name of a file, may be anything."""
    return "".join(letter if letter.isprintable() or letter == "\n" else "\N{REPLACEMENT CHARACTER}" for letter in text)


def print_message(console: Console, text: str) -> None:
    """Print a text as it is: a terminal gets lines of whole words, a file the whole line, so that grep finds it."""
    console.print(Text(text), soft_wrap=not console.is_terminal)


def make_console(*, is_first: bool) -> Console:
    """Return a console for this rank; those of other ranks swallow everything."""
    console = _Console(quiet=not is_first, highlight=False)
    if not console.is_terminal:
        console.width = max(console.width, PLAIN_WIDTH)
    return console


class _ConsoleHandler(logging.Handler):
    """Prints log messages above the progress bar."""

    def __init__(self, console: Console) -> None:
        super().__init__(logging.INFO)
        self._console = console

    def emit(self, record: logging.LogRecord) -> None:
        """Print one message as it is."""
        print_message(self._console, self.format(record))


@contextmanager
def library_messages(console: Console) -> Iterator[None]:
    """Show what the library logs (its unit plan among others) while the context lasts."""
    logger, handler = logging.getLogger(LIBRARY_LOGGER), _ConsoleHandler(console)
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.setLevel(level)
        logger.removeHandler(handler)


def show_header(console: Console, facts: Sequence[tuple[str, str]], asides: Sequence[tuple[str, str]] = ()) -> None:
    """Print a panel of names and values; asides stand below, dimly."""
    grid = Table.grid(padding=(0, 2))
    for _ in range(2):
        grid.add_column(overflow="fold")  # on a narrow terminal nothing is left out
    for name, value in facts:
        grid.add_row(Text(name, style="bold"), Text(printable(value)))
    for name, value in asides:
        grid.add_row(Text(printable(name), style="dim"), Text(printable(value), style="dim"))
    console.print(Panel(grid, title="megatron_fsdp training", expand=False))


def show_comparison(console: Console, rows: Sequence[Row]) -> None:
    """Print measured values beside computed ones."""
    table = Table(title="One rank: measured and computed")
    table.add_column("what", overflow="fold")
    for name in ("measured", "formula", "ratio"):
        table.add_column(name, justify="right", overflow="fold")
    for row in rows:
        table.add_row(row.what, _format(row.measured, row.unit), _format(row.formula, row.unit), f"{row.ratio:.3f}")
    console.print(table)


def _format(value: int, unit: str) -> str:
    return format_bytes(value) if unit == "bytes" else f"{value:,}"
