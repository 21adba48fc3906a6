"""Entry point of `python -m megatron_fsdp.train`, the same as `mfsdp train`."""

import sys

from megatron_fsdp.config.command_parser import end_quietly
from megatron_fsdp.train import main

if __name__ == "__main__":
    end_quietly()
    sys.exit(main(sys.argv[1:]))
