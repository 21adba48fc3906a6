"""Results of several sittings on one page: which are kept, and when and from what each was made."""

from __future__ import annotations

import subprocess
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

Results = Mapping[str, Mapping[str, Any]]

_NOT_NOTED = "not noted"
_SHOWN_ALL_THE_SAME = "; what is shown was made before"


def commit_of(folder: Path) -> str:
    """The commit that is checked out around a folder, with a plus sign where files differ from it."""
    answers = []
    for command in (("rev-parse", "--short", "HEAD"), ("status", "--porcelain", "--untracked-files=no")):
        try:
            done = subprocess.run(["git", "-C", str(folder), *command], capture_output=True, text=True, check=True)
        except (OSError, subprocess.CalledProcessError):
            return _NOT_NOTED
        answers.append(done.stdout.strip())
    return answers[0] + ("+" if answers[1] else "")


def stamped(document: Mapping[str, Any], commit: str, command: str) -> dict[str, Any]:
    """A run's document with the moment it was made, the commit, and the command that repeats it."""
    date = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    return {**document, "made": {"date": date, "commit": commit, "command": command}}


def joined(
    before: Mapping[str, Any], results: Results, failures: Mapping[str, str], names: Iterable[str]
) -> tuple[dict[str, Any], dict[str, str]]:
    """What a page shows that keeps what is on it (pure).

    Args:
        before: "results" and "failures" of the page that is there.
        results: Made now, by run.
        failures: Of now, by run or by what else was left out.
        names: All runs of the suite, in order; what the suite no longer has is dropped.

    Returns:
        Results in the order of the suite, those of now before those of then, and failures; where a run failed now
        and has a result of then, that is shown, and the failure says so.
    """
    order = list(names)
    together = {**before["results"], **results}
    shown = {name: together[name] for name in order if name in together}
    old = {name: why for name, why in before["failures"].items() if name in order and name not in {*shown, *failures}}
    kept = shown.keys() - results.keys()
    return shown, {**old, **{name: why + _SHOWN_ALL_THE_SAME * (name in kept) for name, why in failures.items()}}


def made(document: Mapping[str, Any]) -> tuple[str, str]:
    """Commit and date of a run's document."""
    noted, facts = document.get("made", {}), document.get("facts", {})
    return noted.get("commit", _NOT_NOTED), noted.get("date") or facts.get("date", _NOT_NOTED)


def sittings(results: Results) -> list[str]:
    """When runs were made and from which commit, one line of Markdown each; runs are named where they differ (pure)."""
    by_commit: dict[str, dict[str, str]] = {}
    for name, document in results.items():
        commit, date = made(document)
        by_commit.setdefault(commit, {})[name] = date
    lines = []
    for commit, dates in by_commit.items():
        known = sorted(date for date in dates.values() if date != _NOT_NOTED) or [_NOT_NOTED]
        span = known[0] if known[0] == known[-1] else f"{known[0]} to {known[-1]}"
        which = "" if len(by_commit) == 1 else f": {', '.join(dates)}"
        lines.append(f"- date: {span}, commit {commit}{which}")
    return lines
