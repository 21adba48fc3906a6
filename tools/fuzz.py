"""Compare random models, meshes, strategies and options with one process, for as many cases as asked for.

    python tools/fuzz.py --cases 500 --first-seed 1000

Each case follows from its seed alone; a failure prints the seed, the case and what differed, and
`--first-seed SEED --cases 1` runs it again.
"""

from __future__ import annotations

import argparse
import sys
import traceback
from collections import Counter

import torch

from tests.fuzzing.case import Case, draw_case
from tests.fuzzing.run import OneProcess, differences, play, play_on_rank
from tests.support.worker_pool import WorkerError, WorkerPool


def run_case(case: Case, pools: dict[int, WorkerPool]) -> list[str]:
    """What differed, in words; empty where nothing did."""
    ranks = case.mesh.num_ranks
    try:
        expected = play(OneProcess(case))
        if ranks not in pools:
            pools[ranks] = WorkerPool(ranks)
        found = pools[ranks].run(play_on_rank, case, timeout_s=60.0)
        return [
            f"rank {rank}: {text}"
            for rank, trace in enumerate(found)
            for text in differences(expected, trace, case.precision.tolerance)
        ]
    except Exception as error:  # noqa: BLE001 (whatever it is, it is what was looked for)
        pool = pools.pop(ranks, None)
        if pool is not None:
            pool.stop()
        return [str(error)[-2500:] if isinstance(error, WorkerError) else traceback.format_exc(limit=-6)]


def main() -> int:
    """Run the cases; the exit status is 1 where one failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=200)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--max-ranks", type=int, default=4)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    pools: dict[int, WorkerPool] = {}
    failed: list[int] = []
    seen: Counter[str] = Counter()
    for seed in range(arguments.first_seed, arguments.first_seed + arguments.cases):
        case = draw_case(seed, arguments.max_ranks)
        seen[f"strategy {case.strategy}, {case.mesh}"] += 1
        told = run_case(case, pools)
        if told:
            failed.append(seed)
            print(f"seed {seed} FAILED: {case}", *told[:8], sep="\n    ", flush=True)
    for pool in pools.values():
        pool.stop()
    print(f"{arguments.cases} cases, {len(failed)} failed {failed or ''}, {len(seen)} pairs of strategy and mesh")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
