"""Entry point of `python -m megatron_fsdp.train`, the same as `mfsdp train`."""

import signal
import sys

if __name__ == "__main__":
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C among the imports ends it without a traceback
    from megatron_fsdp.train.program import main

    sys.exit(main(sys.argv[1:]))
