"""Compare this engine with PyTorch's FSDP2 and DDP on the same model: `python benchmarks/compare.py --help`."""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a plain script, this folder is no package
    from benchmarks.cli import main

    sys.exit(main(sys.argv[1:]))
