"""Compare random models, meshes, strategies and options with one process.

    python tools/fuzz.py --cases 500 --first-seed 1000
    python tools/fuzz.py --cases 500 --doors
    python tools/fuzz.py --cases 500 --checkpoints

With `--doors` each model is also sharded by `DistributedDataParallel`, `megatron_fsdp.experimental` and
`megatron_fsdp.fsdp2`, as far as these can express it, and doors with the same arithmetic are compared bit for bit.

With `--checkpoints` each model is trained and saved by one of these doors under one random arrangement, loaded by one
under another, and compared bit for bit.

Each case follows from its seed alone; a failure prints the seed, the case and what differed, and
`--first-seed SEED --cases 1` runs it again.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable
from functools import partial

import torch

from tests.fuzzing.case import Case, draw_case, draw_doors
from tests.fuzzing.checkpoints import differing, draw_pair, load_on_rank, save_on_rank, saved_plainly
from tests.fuzzing.doors import judge_doors, play_doors
from tests.support.worker_pool import WorkerError, WorkerPool

Pools = dict[int, WorkerPool]


def run_cases(cases: list[Case], pools: Pools) -> list[str]:
    """Run a model's cases, one for each door; return their differences from one process, in words."""
    return judge_doors(cases, _pool(cases[0].mesh.num_ranks, pools).run(play_doors, cases, timeout_s=120.0))


def run_pair(saved: Case, loaded: Case, pools: Pools) -> list[str]:
    """Save by one door under one arrangement, and load by one under another; return the differences."""
    plainly = saved_plainly(saved, loaded)
    with tempfile.TemporaryDirectory() as folder:
        wanted, *_ = _pool(saved.mesh.num_ranks, pools).run(save_on_rank, saved, folder, plainly, timeout_s=60.0)
        held = _pool(loaded.mesh.num_ranks, pools).run(load_on_rank, loaded, folder, plainly, timeout_s=60.0)
    return [text for found in held for text in differing(wanted, found)]


def _pool(ranks: int, pools: Pools) -> WorkerPool:
    if ranks not in pools:
        pools[ranks] = WorkerPool(ranks)
    return pools[ranks]


def guarded(run: Callable[[], list[str]], ranks: set[int], pools: Pools) -> list[str]:
    """Return the differences or the error of a case; replace failed workers."""
    try:
        return run()
    except Exception as error:  # noqa: BLE001 (whatever it is, it is what was looked for)
        for each in ranks:
            pool = pools.pop(each, None)
            if pool is not None:
                pool.stop()
        return [str(error)[-2500:] if isinstance(error, WorkerError) else traceback.format_exc(limit=-6)]


def main() -> int:
    """Run the cases; return exit status 1 if one failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=200)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--max-ranks", type=int, default=4)
    parser.add_argument("--doors", action="store_true")
    parser.add_argument("--checkpoints", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    pools: Pools = {}
    failed: list[int] = []
    seen: Counter[str] = Counter()
    for seed in range(arguments.first_seed, arguments.first_seed + arguments.cases):
        cases = draw_doors(seed, arguments.max_ranks) if arguments.doors else [draw_case(seed, arguments.max_ranks)]
        run = partial(run_cases, cases, pools)
        if arguments.checkpoints:
            saved, loaded = draw_pair(seed, arguments.max_ranks)
            cases, run = [saved, loaded], partial(run_pair, saved, loaded, pools)
        seen.update(case.door for case in cases)
        told = guarded(run, {case.mesh.num_ranks for case in cases}, pools)
        if told:
            failed.append(seed)
            print(f"seed {seed} FAILED:", *cases, *told[:8], sep="\n    ", flush=True)
    for pool in pools.values():
        pool.stop()
    print(f"{arguments.cases} cases, {len(failed)} failed {failed or ''}, by door: {dict(seen)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
