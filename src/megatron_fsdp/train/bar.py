"""The progress bar of a run at a terminal, drawn by rich below the printed lines."""

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn


class _Console(Console):
    """A console without cursor control, since a rank may be killed before it could restore the cursor."""

    def show_cursor(self, show: bool = True) -> bool:  # noqa: ARG002
        return False


class Bar:
    """A progress bar; lines that are printed meanwhile move up above it."""

    def __init__(self, total_steps: int, done: int, console: Console | None = None) -> None:
        columns = BarColumn(bar_width=None), MofNCompleteColumn(), TextColumn("steps  {task.fields[left]}")
        self._progress = Progress(
            *columns, console=console or _Console(), auto_refresh=False, transient=True, redirect_stderr=False
        )
        self._task = self._progress.add_task("", total=total_steps, completed=done, left="")
        self._progress.start()

    def move(self, step: int, left: str) -> None:
        """Show one more finished step, and the remaining time."""
        self._progress.update(self._task, completed=step, left=left)
        self._progress.refresh()

    def close(self) -> None:
        """Remove the bar."""
        self._progress.stop()
