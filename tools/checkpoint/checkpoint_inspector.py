"""The commands of `mfsdp checkpoint`, under the name and spellings of Megatron-LM's checkpoint inspector.

Usage: python tools/checkpoint/checkpoint_inspector.py COMMAND ...     (--help lists the commands)
"""

import sys

from megatron_fsdp.cli.checkpoint import inspector

if __name__ == "__main__":
    sys.exit(inspector())
