"""Entry point of `python -m megatron_fsdp.cli`, the same as `mfsdp`."""

import sys

from megatron_fsdp.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
