"""The environment of the benchmark: peers by their own packages, beside what the project's environment has already."""

from __future__ import annotations

import os
import site
import subprocess
import sys
import venv
from pathlib import Path

PACKAGES = ("deepspeed==0.19.8",)
"""Installed into the benchmark's environment alone; the versions that the page was made with."""

_BUILD_TOOLS = ("setuptools", "wheel")
_STAMP = ".ready"
_BORROWED = "borrowed.pth"


def prepare(folder: Path) -> tuple[Path, str]:
    """Make the environment, or take the one that is there.

    Everything that this interpreter can import can be imported there, so torch is not installed a second time.

    Args:
        folder: Of the environment.

    Returns:
        The interpreter to run peers with, and a sentence on what is missing, or "". Where packages cannot be
        installed, the benchmark goes on without them.
    """
    python = folder / ("Scripts" if os.name == "nt" else "bin") / "python"
    stamp = folder / _STAMP
    wanted = "\n".join(PACKAGES)
    if stamp.exists() and stamp.read_text(encoding="utf-8") == wanted:
        return python, ""
    try:
        venv.EnvBuilder(with_pip=True, clear=True).create(folder)
        _borrow(folder)
        _install(python, _BUILD_TOOLS)
        _install(python, ("--no-build-isolation", *PACKAGES))  # their build looks at torch
    except (OSError, subprocess.CalledProcessError) as error:
        return Path(sys.executable), f"{', '.join(PACKAGES)} could not be installed: {_last_line(error)}"
    stamp.write_text(wanted, encoding="utf-8")
    return python, ""


def borrowed_lines(folders: list[str]) -> str:
    """The content of a .pth file that adds folders of packages, their own .pth files (editable installs) included."""
    return "".join(f"import site; site.addsitedir({folder!r})\n" for folder in folders)


def _borrow(folder: Path) -> None:
    """Make this interpreter's packages visible from there."""
    (packages,) = folder.glob("lib/python*/site-packages") if os.name != "nt" else [folder / "Lib" / "site-packages"]
    (packages / _BORROWED).write_text(borrowed_lines(site.getsitepackages()), encoding="utf-8")


def _install(python: Path, what: tuple[str, ...]) -> None:
    """By pip; nothing is compiled for the packages' optional kernels."""
    command = [str(python), "-m", "pip", "install", "--quiet", *what]
    subprocess.run(command, env={**os.environ, "DS_BUILD_OPS": "0"}, check=True, capture_output=True, text=True)


def _last_line(error: OSError | subprocess.CalledProcessError) -> str:
    told = error.stderr if isinstance(error, subprocess.CalledProcessError) else str(error)
    return (told or str(error)).strip().splitlines()[-1]
