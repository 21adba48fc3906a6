"""torchrun as users start it: ranks that are executed, each with its own environment and its own hash seed.

Ranks of `run_ranks` and of `forked_programs` are forked from one server, so that all hash strings alike and sets show
the same order everywhere. Here they never do. A start costs what the imports of every rank cost: share it.
"""

import os
import subprocess
import sys
from collections.abc import Sequence

from tests.support.settling import LIMIT_S
from tests.support.source_tree import ROOT

_OWN_HASH_SEED = 'PYTHONHASHSEED=$((RANK + 1)) exec "$0" "$@"'


def real_torchrun(words: Sequence[str]) -> str:
    """What ranks of `torchrun --standalone --nproc-per-node 2` write, with a script or "-m" and a module."""
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--no-python")
    done = subprocess.run(
        [sys.executable, *launcher, "sh", "-c", _OWN_HASH_SEED, sys.executable, *words],
        env={**os.environ, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
