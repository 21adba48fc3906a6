"""Compare random models, meshes, strategies and options with one process.

    python tools/fuzz.py --cases 500 --first-seed 1000
    python tools/fuzz.py --cases 500 --doors
    python tools/fuzz.py --cases 500 --checkpoints

With `--doors` each model is also sharded by `DistributedDataParallel`, `megatron_fsdp.experimental` and
`megatron_fsdp.fsdp2`, as far as these can express it, and doors with the same arithmetic are compared bit for bit.

With `--checkpoints` each model is trained and saved by one of these doors under one random arrangement, loaded by one
under another, and compared bit for bit.

What differs a little more than its dtypes allow is run again with everything in float64; where nothing differs there by
1e-9 it is told, and counted, as rounding, which is no failure.

Each case follows from its seed alone; a failure prints the seed, the case and what differed, and
`--first-seed SEED --cases 1` runs it again.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import traceback
from collections import Counter, defaultdict
from collections.abc import Callable
from functools import partial

import torch

from tests.fuzzing.case import Case, draw_case, draw_doors
from tests.fuzzing.checkpoints import differing, draw_pair, load_on_rank, save_on_rank, saved_plainly
from tests.fuzzing.doors import ROUNDING, WRONG, play_doors, verdict
from tests.support.worker_pool import WorkerError, WorkerPool

Pools = dict[int, WorkerPool]


def run_cases(cases: list[Case], pools: Pools) -> list[str]:
    """Run a model's cases, one for each door; return the verdict and their differences from one process, in words."""
    return verdict(cases, partial(_pool(cases[0].mesh.num_ranks, pools).run, play_doors, timeout_s=120.0))


def run_pair(saved: Case, loaded: Case, pools: Pools) -> list[str]:
    """Save by one door under one arrangement, and load by one under another; return the verdict and differences."""
    plainly = saved_plainly(saved, loaded)
    with tempfile.TemporaryDirectory() as folder:
        wanted, *_ = _pool(saved.mesh.num_ranks, pools).run(save_on_rank, saved, folder, plainly, timeout_s=60.0)
        held = _pool(loaded.mesh.num_ranks, pools).run(load_on_rank, loaded, folder, plainly, timeout_s=60.0)
    told = [text for found in held for text in differing(wanted, found)]
    return [WRONG, *told] if told else []


def _pool(ranks: int, pools: Pools) -> WorkerPool:
    if ranks not in pools:
        pools[ranks] = WorkerPool(ranks)
    return pools[ranks]


def guarded(run: Callable[[], list[str]], ranks: set[int], pools: Pools) -> list[str]:
    """Return the verdict and the differences, or the error, of a case; replace failed workers."""
    try:
        return run()
    except Exception as error:  # noqa: BLE001 (whatever it is, it is what was looked for)
        for each in ranks:
            pool = pools.pop(each, None)
            if pool is not None:
                pool.stop()
        return [WRONG, str(error)[-2500:] if isinstance(error, WorkerError) else traceback.format_exc(limit=-6)]


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
    seeds: dict[str, list[int]] = defaultdict(list)  # by verdict
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
            seeds[told[0]].append(seed)
            print(f"seed {seed} {told[0]}:", *cases, *told[1:9], sep="\n    ", flush=True)
    for pool in pools.values():
        pool.stop()
    verdicts = [f"{len(of)} {verdict}: {of}" for verdict, of in seeds.items()]
    print(f"{arguments.cases} cases, by door: {dict(seen)}", *verdicts, sep="\n")
    return 1 if seeds.keys() - {ROUNDING} else 0


if __name__ == "__main__":
    sys.exit(main())
