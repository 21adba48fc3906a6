"""Entry point of `python -m megatron_fsdp.train`, the same as `mfsdp train`."""

import sys

from megatron_fsdp.interruption import end_quietly

if __name__ == "__main__":
    end_quietly()
    from megatron_fsdp.train.program import main  # torch, which is slow to import

    sys.exit(main(sys.argv[1:]))
