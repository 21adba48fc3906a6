"""`mfsdp train` under the name that users of Megatron-LM type: `torchrun --nproc-per-node 2 pretrain_gpt.py ...`."""

import sys

from megatron_fsdp.config.command_parser import end_quietly
from megatron_fsdp.train import main

if __name__ == "__main__":
    end_quietly()
    sys.exit(main(sys.argv[1:]))
