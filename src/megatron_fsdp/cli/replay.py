"""`mfsdp replay`: run a recorded step of a deterministic run again on one rank, and compare it bit for bit."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path

from megatron_fsdp.cli.output import add_json, write_json, write_line
from megatron_fsdp.config.command_parser import EXIT_DIFFERENT, EXIT_SAME
from megatron_fsdp.optional_packages import require_installed


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.description = (
        "Execute a recorded step of a run of `mfsdp train --deterministic world`, on any number of ranks, "
        "again on one rank: load the last checkpoint before it, take the steps from there, and compare what the run "
        "recorded of each: data, loss, gradient norm, and with --log-digests-interval the digests of gradients and "
        "weights of each unit. Exit status: 0 all the same bits, 1 something differs, 2 it could not be compared."
    )
    parser.add_argument("run_folder", metavar="RUN", type=Path, help="the folder of results (--out) of the run")
    parser.add_argument("--step", type=int, metavar="K", help="the step, from 1 (default: the last one recorded)")
    parser.add_argument("--checkpoints", type=Path, metavar="PATH", help="where its checkpoints are (default: --save)")
    parser.add_argument("--data-path", type=Path, metavar="PATH", help="where its text is (default: where it was)")
    parser.add_argument("--from-start", action="store_true", help="begin with fresh weights, without a checkpoint")
    add_json(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Replay, print the result, and return the exit status."""
    require_installed("tokenizers", "the trainer")
    from megatron_fsdp.train.replay import replay

    found = replay(
        args.run_folder,
        args.step,
        checkpoints=args.checkpoints,
        data_path=args.data_path,
        from_start=args.from_start,
        say=(lambda _: None) if args.json else write_line,
    )
    if args.json:
        write_json(asdict(found))
    else:
        write_line(found.summary())
    return EXIT_SAME if found.difference is None else EXIT_DIFFERENT
