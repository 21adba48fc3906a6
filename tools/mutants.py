"""Plant the faults of tools/mutants.toml in a copy of the project, one at a time, and name the test that finds each.

    make mutants                                          the tests of the short suite that should find each fault
    make mutants ARGS="--only norm"                       faults with these words in their name or file
    make mutants ARGS="--thorough --full --out found.md"  what these miss: the short suite, then the full one; a table

Only tracked files are copied, as they are now, and the checkout is never written to. Without a fault the tests have to
pass. The exit status is 1 where a fault cannot be planted any more, where the short suite finds too few, and where the
full one, if it was asked for, does not find the rest.
"""

import argparse
import datetime
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TABLE = Path(__file__).with_suffix(".toml")
LEAST = 28 / 30
"""The share of faults that the short suite has to find."""
FIRST_LIMIT_S = 1200
SUITE_LIMIT_S = 4 * 3600
"""Time limit in seconds, many times the tests' duration; a deadlock counts as found."""

_FAILED = re.compile(r"^(?:FAILED|ERROR) (tests/.+?)(?: - .*)?$", re.MULTILINE)
_ASIDE = "--ignore=tests/tools/test_tools.py"  # where a fault is planted, it has no place any more
_SIDE_BY_SIDE = ("-n", "2", "--dist", "loadfile")


@dataclass(frozen=True)
class Mutant:
    """One fault."""

    name: str
    file: str
    old: str  # text that occurs there once
    new: str  # what takes its place
    tests: tuple[str, ...]  # files, folders or functions (`file::function`) that are run first

    def planted(self, root: Path) -> str:
        """Return the file's text with the fault."""
        path = root / self.file
        text = path.read_text(encoding="utf-8") if path.is_file() else ""
        if text.count(self.old) != 1:
            raise ValueError(
                f"the fault {self.name!r} is stale: {self.file} has {self.old!r} {text.count(self.old)} times, not "
                f"once; say in {TABLE.name} where it is now"
            )
        return text.replace(self.old, self.new)


@dataclass(frozen=True)
class Outcome:
    """The outcome of a fault: the test that found it, if any, and the suite of this test."""

    mutant: Mutant
    test: str | None = None
    is_short: bool = True

    def __str__(self) -> str:
        """Return the cell in the table's last column."""
        if self.test is None:
            return "missed"
        return f"`{self.test}`" if self.is_short else f"full suite only: `{self.test}`"


def load_mutants() -> list[Mutant]:
    """Read the table."""
    rows = tomllib.loads(TABLE.read_text(encoding="utf-8"))["mutant"]
    return [Mutant(**{**row, "tests": tuple(row["tests"])}) for row in rows]


def copy_tracked(target: Path) -> None:
    """Copy the tracked files of the checkout into an empty folder."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():  # else it is deleted and not committed yet
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)


def failing_test(root: Path, options: Sequence[str], limit_s: float) -> str | None:
    """Run pytest, in its own process group, until a test fails; return its id, or None."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", _ASIDE, *options]
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}  # may name the checkout
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as said:
        run = subprocess.Popen(command, cwd=root, env=env, stdout=said, stderr=said, start_new_session=True)
        try:
            code = run.wait(limit_s)
        except subprocess.TimeoutExpired:
            return f"a hang of {' '.join(options)}"
        finally:
            if run.poll() is None:  # or this was interrupted
                os.killpg(run.pid, signal.SIGKILL)
                run.wait()
        said.seek(0)
        text = said.read()
    found = _FAILED.search(text)
    if code == 0:
        return None
    if found is None:
        raise RuntimeError(f"{' '.join(command)} ended with status {code}:\n{text[-3000:]}")
    return found[1]


def judge(mutant: Mutant, root: Path, thorough: bool, full: bool) -> Outcome:
    """Plant a fault, run more and more tests, and restore the file."""
    path, whole, faulty = root / mutant.file, root / f"{mutant.file}.whole", mutant.planted(root)
    path.rename(whole)  # with the time of its last change, by which Python knows what it has compiled
    path.write_text(faulty, encoding="utf-8")
    try:
        found = failing_test(root, ("--short", "-n", "0", *mutant.tests), FIRST_LIMIT_S)
        if found is None and thorough:
            found = failing_test(root, ("--short", *_SIDE_BY_SIDE), SUITE_LIMIT_S)
        if found is not None or not full:
            return Outcome(mutant, found)
        return Outcome(mutant, failing_test(root, _SIDE_BY_SIDE, SUITE_LIMIT_S), is_short=False)
    finally:
        whole.replace(path)


def as_table(outcomes: Sequence[Outcome]) -> str:
    """Return a table in Markdown, with a sentence in front."""
    short = sum(outcome.test is not None and outcome.is_short for outcome in outcomes)
    today = datetime.datetime.now(tz=datetime.UTC).date()
    lines = [f"{today}: the short suite finds {short} of {len(outcomes)}.", ""]
    lines += ["| Fault | File | Found by |", "|---|---|---|"]
    lines += [f"| {found.mutant.name} | {Path(found.mutant.file).name} | {found} |" for found in outcomes]
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status."""
    parser = argparse.ArgumentParser(description="Plant faults and tell which tests find them.")
    parser.add_argument("--only", metavar="WORDS", default="", help="faults with these words in their name or file")
    parser.add_argument("--list", action="store_true", help="show the faults and plant none")
    parser.add_argument("--thorough", action="store_true", help="run the short suite where the first tests pass")
    parser.add_argument("--full", action="store_true", help="run the full suite where those before it pass")
    parser.add_argument("--out", metavar="FILE", type=Path, help="write the results as a table in Markdown")
    options = parser.parse_args(arguments)
    mutants = [each for each in load_mutants() if options.only.lower() in f"{each.name} {each.file}".lower()]
    if not mutants:
        parser.error(f"no fault has {options.only!r} in its name or file; --list shows all")
    try:
        for mutant in mutants:
            mutant.planted(ROOT)
    except ValueError as error:
        print(error)
        return 1
    if options.list:
        print("\n".join(f"{mutant.file}: {mutant.name}" for mutant in mutants))
        return 0
    outcomes = []
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        root = Path(folder)
        copy_tracked(root)
        first = dict.fromkeys(test for mutant in mutants for test in mutant.tests)
        sound = _SIDE_BY_SIDE if options.thorough else ("-n", "0", *first)
        broken = failing_test(root, ("--short", *sound), SUITE_LIMIT_S)
        if broken is not None:
            print(f"{broken} fails without a fault, so nothing can be told")
            return 1
        for number, mutant in enumerate(mutants, start=1):
            outcomes.append(judge(mutant, root, options.thorough, options.full))
            print(f"{number}/{len(mutants)} {mutant.name}: {outcomes[-1]}", flush=True)
            if options.out is not None:
                options.out.write_text(as_table(outcomes), encoding="utf-8")
    short = sum(outcome.test is not None and outcome.is_short for outcome in outcomes)
    wanted = math.ceil(len(mutants) * LEAST)
    print(f"the short suite finds {short} of {len(mutants)}; {wanted} are wanted")
    lost = options.full and any(outcome.test is None for outcome in outcomes)
    return 0 if short >= wanted and not lost else 1


if __name__ == "__main__":
    sys.exit(main())
