"""The commands of `mfsdp checkpoint`, under the name and spellings of Megatron-LM's checkpoint inspector.

Usage: python tools/checkpoint/checkpoint_inspector.py COMMAND ...     (--help lists the commands)
"""

import importlib.util
import sys
from pathlib import Path

if importlib.util.find_spec("megatron_fsdp") is None:  # a checkout that is not installed
    sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "src"))

from megatron_fsdp.cli.checkpoint import inspector

if __name__ == "__main__":
    sys.exit(inspector())
