"""The convert command as a program of its own, for tests that start processes."""

import argparse
import sys
from collections.abc import Sequence

from megatron_fsdp.cli import checkpoint_convert


def main(argv: Sequence[str] | None = None) -> int:
    """Parse and run; the exit status."""
    parser = argparse.ArgumentParser()
    checkpoint_convert.add_parser(parser.add_subparsers(required=True))
    args = parser.parse_args(argv)
    status: int = args.run(args)
    return status


if __name__ == "__main__":
    sys.exit(main())
