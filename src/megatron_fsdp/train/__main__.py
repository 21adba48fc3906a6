"""Entry point of `python -m megatron_fsdp.train`, the same as `mfsdp train`."""

import sys

from megatron_fsdp.train.program import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
