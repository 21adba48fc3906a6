"""Entry point of `python -m megatron_fsdp.train`: starts the ranks, or is one of them."""

import os
import signal
import sys
from collections.abc import Sequence

import torch

from megatron_fsdp.errors import ConfigurationError
from megatron_fsdp.train.arguments import parse_arguments, resolve_settings
from megatron_fsdp.train.failures import EXIT_USAGE, report_failure
from megatron_fsdp.train.launcher import choose_ranks, count_cores, find_device_type, is_rank, launch
from megatron_fsdp.train.ranks import join_ranks


def main(argv: Sequence[str]) -> int:
    """Do what this process is for and return its exit code."""
    return run_rank(argv) if is_rank(os.environ) else start_ranks(argv)


def start_ranks(argv: Sequence[str]) -> int:
    """Check the options once, then start the ranks and wait for them."""
    arguments = parse_arguments(argv)
    try:
        device_type = find_device_type(arguments.device)
        resolve_settings(arguments, device_type)
        num_accelerators = 0 if device_type == "cpu" else torch.accelerator.device_count()
        ranks = choose_ranks(arguments.ranks, num_accelerators=num_accelerators, num_cores=count_cores())
    except ConfigurationError as error:
        sys.stderr.write(f"error: {error}\n")
        return EXIT_USAGE
    return launch(argv, ranks)


def run_rank(argv: Sequence[str]) -> int:
    """Train as one rank."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)  # end at once and quietly, even inside a collective
    index = int(os.environ["RANK"])
    try:
        from megatron_fsdp.train.job import run_job  # the slow imports, which the launcher does not need

        arguments = parse_arguments(argv, quiet=index != 0)
        device_type = find_device_type(arguments.device)
        with join_ranks(device_type) as rank:
            run_job(resolve_settings(arguments, device_type), rank)
    except Exception as error:  # noqa: BLE001  # the edge of the program: everything is reported
        code = report_failure(error, index)
        sys.stderr.flush()
        os._exit(code)  # peers may be gone: do not wait for them in destructors
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
