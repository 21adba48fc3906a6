"""`mfsdp docs`: the pages, as text."""

from __future__ import annotations

import argparse
from importlib.resources import files

from megatron_fsdp.cli.output import write_text
from megatron_fsdp.config.command_parser import EXIT_SAME
from megatron_fsdp.errors import ConfigurationError, nearest_name


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the name of a page to the parser."""
    parser.description = "Print a page of the documentation, or the names of all pages."
    parser.add_argument("page", metavar="PAGE", nargs="?", help="such as debugging")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print a page or the list of pages, and return the exit status.

    Raises:
        ConfigurationError: There is no page of this name.
    """
    folder = files("megatron_fsdp") / "docs"
    pages = sorted(each.name.removesuffix(".md") for each in folder.iterdir() if each.name.endswith(".md"))
    if args.page is None:
        write_text("\n".join(pages))
        return EXIT_SAME
    if args.page not in pages:
        raise ConfigurationError(f"there is no page {args.page!r}; {nearest_name(args.page, pages)}")
    write_text((folder / f"{args.page}.md").read_text(encoding="utf-8").rstrip())
    return EXIT_SAME
