"""Arguments that several commands share."""

from __future__ import annotations

import argparse

from megatron_fsdp.errors import ConfigurationError


def add_folder(parser: argparse.ArgumentParser, name: str = "checkpoint_dir", metavar: str = "DIR") -> None:
    """A checkpoint to read."""
    parser.add_argument(name, metavar=metavar, help="folder of one checkpoint, or of a run: its latest one")


def add_filter(parser: argparse.ArgumentParser) -> None:
    """A choice of keys."""
    parser.add_argument("--filter", metavar="REGEX", help="only keys that contain a match of this regular expression")


def add_json(parser: argparse.ArgumentParser) -> None:
    """Output for programs."""
    parser.add_argument("--json", action="store_true", help="print JSON")


def add_msc(parser: argparse.ArgumentParser) -> None:
    """An option of Megatron-LM's inspector that cannot be honoured; it is known so that it can be refused in words."""
    parser.add_argument("--enable-msc", action="store_true", help=argparse.SUPPRESS)


def refuse_msc(args: argparse.Namespace) -> None:
    """Refuse `--enable-msc`.

    Raises:
        ConfigurationError: It was given.
    """
    if args.enable_msc:
        raise ConfigurationError(
            "--enable-msc is not supported: only folders of the file system can be read; mount or copy the checkpoint, "
            "and leave the option out"
        )
