"""List the public surface: names with their arguments, commands with their options; or compare it.

python tools/public_surface.py > before.json
python tools/public_surface.py --against before.json       # says what is gone and what is new; fails if any is gone
"""

from __future__ import annotations

import argparse
import inspect
import json
import os
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("", ".automodel", ".checkpoint", ".checkpoint.hf", ".ddp", ".doctor", ".plan", ".trace", ".train")
_OPTION = re.compile(r"(?<![\w-])--[a-z][\w-]*")
_COMMAND = re.compile(r"^    ([a-z][\w-]+)(?:  | \(|$)", re.MULTILINE)  # aliases follow in parentheses


def published_modules() -> list[str]:
    """Return the public modules in the package's top folder."""
    return sorted(f".{path.stem}" for path in (ROOT / "src" / "megatron_fsdp").glob("[a-z]*.py"))


def names_of(module_name: str) -> list[str]:
    """Return the public names of a module, functions and classes with the names of their arguments."""
    module = import_module(f"megatron_fsdp{module_name}")
    own = [name for name, value in vars(module).items() if getattr(value, "__module__", None) == module.__name__]
    found = []
    for name in sorted(getattr(module, "__all__", own)):
        if name.startswith("_"):
            continue
        value = getattr(module, name, None)  # names in __all__ for type checkers may have no value
        found.append(f"{module.__name__}.{name}")
        if callable(value):
            try:
                arguments = inspect.signature(value).parameters
            except (TypeError, ValueError):
                continue
            found += [f"{module.__name__}.{name}({argument}=)" for argument in arguments]
        if inspect.isclass(value):
            found += [f"{module.__name__}.{name}.{each}" for each in dir(value) if not each.startswith("_")]
    return found


def help_of(*words: str) -> str:
    """Return a command's help."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "COLUMNS": "200", "NO_COLOR": "1"}
    command = [sys.executable, "-m", "megatron_fsdp.cli", *words, "--help"]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    return ended.stdout + ended.stderr


def commands(*words: str) -> list[str]:
    """Return the options of a command and its sub-commands."""
    text = help_of(*words)
    name = " ".join(("mfsdp", *words))
    found = [name, *sorted({f"{name} {option}" for option in _OPTION.findall(text)} - {f"{name} --help"})]
    listed = text.partition("  COMMAND\n")[2].partition("\n\n")[0]
    return [*found, *(line for each in _COMMAND.findall(listed) for line in commands(*words, each))]


def main() -> int:
    """List the surface, or compare it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", type=Path, help="a list that this wrote before")
    arguments = parser.parse_args()
    sys.path.insert(0, str(ROOT / "src"))
    surface = [*(line for module in (*PACKAGES, *published_modules()) for line in names_of(module)), *commands()]
    if arguments.against is None:
        print(json.dumps(surface, indent=0))
        return 0
    before = json.loads(arguments.against.read_text())
    gone = [line for line in before if line not in set(surface)]
    new = [line for line in surface if line not in set(before)]
    print("\n".join([*(f"gone  {line}" for line in gone), *(f"new   {line}" for line in new)]))
    print(f"{len(before)} before, {len(surface)} now: {len(gone)} gone, {len(new)} new")
    return int(bool(gone))


if __name__ == "__main__":
    sys.exit(main())
