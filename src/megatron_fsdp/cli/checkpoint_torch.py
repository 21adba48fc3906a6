"""`to-torch` and `from-torch`: a checkpoint as one file of `torch.save`, and back."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from megatron_fsdp.checkpoint.tools.locate import open_checkpoint
from megatron_fsdp.checkpoint.tools.torch_save import RepackReport, from_torch_save, to_torch_save
from megatron_fsdp.cli.arguments import add_folder
from megatron_fsdp.cli.output import in_bytes, write_line
from megatron_fsdp.config.command_parser import EXIT_SAME


def add_parser(subparsers: Any) -> None:
    """Add both commands."""
    out = subparsers.add_parser(
        "to-torch",
        help="a checkpoint as one torch.save file",
        description="Write the whole state dict of a checkpoint, nested as it was saved, as one file that "
        "torch.load(weights_only=True) reads.",
    )
    add_folder(out)
    out.add_argument("file", metavar="FILE", type=Path, help="must not exist")
    out.add_argument("--tensors-only", action="store_true", help="leave out everything that is no tensor")
    out.set_defaults(run=run_to_torch)
    back = subparsers.add_parser(
        "from-torch",
        help="a torch.save file as a checkpoint",
        description="Write the state dict of a torch.save file as a checkpoint that torch.distributed.checkpoint.load "
        "reads on any number of ranks. The file is read without running code from it.",
    )
    back.add_argument("file", metavar="FILE", type=Path, help="of torch.save, in the zip format (torch 1.6 and later)")
    back.add_argument("output_dir", metavar="DIR", type=Path, help="the checkpoint; must not exist, or be empty")
    back.add_argument(
        "--nesting",
        choices=("torch", "own"),
        default="torch",
        help="torch: keys as torch.distributed.checkpoint.save gives them (default); own: as this library's training "
        "writes them, with lists in one piece",
    )
    back.set_defaults(run=run_from_torch)


def run_to_torch(args: argparse.Namespace) -> int:
    """Write a file.

    Raises:
        CheckpointError: The checkpoint cannot be read, or the file not be written.
    """
    _write(args.file, to_torch_save(open_checkpoint(args.checkpoint_dir), args.file, tensors_only=args.tensors_only))
    return EXIT_SAME


def run_from_torch(args: argparse.Namespace) -> int:
    """Write a folder.

    Raises:
        CheckpointError: The file cannot be read, or the folder not be written.
    """
    _write(args.output_dir, from_torch_save(args.file, args.output_dir, nesting=args.nesting))
    return EXIT_SAME


def _write(target: Path, found: RepackReport) -> None:
    write_line(f"{target}: {found.tensors} tensors, {in_bytes(found.nbytes)}, {found.objects} other values")
    for note in found.notes:
        write_line(f"note: {note}")
