"""`verify`: whether checkpoints are whole."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from megatron_fsdp.checkpoint.folder import METADATA
from megatron_fsdp.checkpoint.manifest import FILE_NAME
from megatron_fsdp.checkpoint.run_folder import POINTER, RunFolder, iteration_of
from megatron_fsdp.checkpoint.verify import VerifyReport, verify
from megatron_fsdp.errors import CheckpointError

EXIT_WHOLE, EXIT_DAMAGED = 0, 1


def add_parser(subparsers: Any) -> None:
    """Add the command.

    Args:
        subparsers: What `ArgumentParser.add_subparsers` returned.
    """
    parser = subparsers.add_parser(
        "verify",
        help="find damaged, missing and unexpected tensors, objects and files",
        description="Read a checkpoint and compare every tensor and object with its manifest. One process, no GPU, one "
        "chunk in memory at a time, and no code from the checkpoint is run. Exit status: 0 whole, 1 damaged, 2 it "
        "cannot be looked at.",
    )
    parser.add_argument(
        "checkpoint_dir", metavar="DIR", type=Path, help="an iter_* folder, or the folder of a run: then the latest"
    )
    parser.add_argument("--all", action="store_true", help="every checkpoint of the run")
    parser.add_argument("--quick", action="store_true", help="names, shapes and files only; contents are not read")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Verify.

    Returns:
        The exit status.

    Raises:
        CheckpointError: There is nothing to look at.
    """
    folders, pointer_problem = _folders(args.checkpoint_dir, every=args.all)
    reports = [verify(folder, deep=not args.quick) for folder in folders]
    if args.json:
        told = {"checkpoints": [report.to_dict() for report in reports], "pointer": pointer_problem}
        sys.stdout.write(json.dumps(told, indent=2) + "\n")
    else:
        lines = [str(report) for report in reports] + ([pointer_problem] if pointer_problem else [])
        sys.stdout.write(_escaped("\n".join(lines)) + "\n")
    return EXIT_WHOLE if _is_well(reports, pointer_problem) else EXIT_DAMAGED


def _is_well(reports: list[VerifyReport], pointer_problem: str | None) -> bool:
    return pointer_problem is None and all(report.is_whole for report in reports)


def _folders(given: Path, *, every: bool) -> tuple[list[Path], str | None]:
    """Which folders to look at, and what is wrong with the pointer to the latest."""
    if _is_checkpoint(given):
        if every:
            raise CheckpointError(f"{given} is one checkpoint; --all takes the folder of a run")
        return [given], None
    if not given.is_dir():
        raise CheckpointError(f"{given} is not a folder; give a checkpoint or the folder of a run")
    run_folder, problem, latest = RunFolder(given), None, None
    try:
        latest = run_folder.latest()
    except CheckpointError as error:
        problem = str(error)
    inside = sorted(path for path in given.iterdir() if iteration_of(path.name) is not None and path.is_dir())
    if every and latest is not None and latest not in inside:
        inside.append(latest)
    chosen = inside if every or latest is None else [latest]
    if not chosen and problem is None:
        raise CheckpointError(f"{given} holds no checkpoint: neither {METADATA} nor {POINTER} nor iter_* folders")
    return chosen, problem


def _is_checkpoint(path: Path) -> bool:
    """Whether it is, or has been, one: its metadata may be what is missing."""
    return (
        (path / METADATA).exists()
        or (path / FILE_NAME).exists()
        or (path.is_dir() and iteration_of(path.name) is not None)
    )


def _escaped(text: str) -> str:
    """Without what could steer a terminal; names come from files."""
    return (
        "".join(char if char.isprintable() or char == "\n" else ascii(char)[1:-1] for char in text)
        .encode(sys.stdout.encoding or "utf-8", "backslashreplace")
        .decode(sys.stdout.encoding or "utf-8")
    )
