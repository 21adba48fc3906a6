"""Compare random models, meshes, strategies and options with one process.

    python tools/fuzz.py --cases 500 --first-seed 1000
    python tools/fuzz.py --cases 500 --buckets
    python tools/fuzz.py --cases 500 --checkpoints

With `--buckets` models are wrapped by `DistributedDataParallel`.

With `--checkpoints` each model is trained and saved under one random arrangement, loaded under another one, and
compared bit for bit.

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

from tests.fuzzing.buckets import draw_bucket_case, play_buckets_on_rank
from tests.fuzzing.case import Case, draw_case
from tests.fuzzing.checkpoints import draw_pair, load_on_rank, save_on_rank
from tests.fuzzing.run import judge, play_on_rank
from tests.support.dcp_contents import assert_same_contents, contents
from tests.support.worker_pool import WorkerError, WorkerPool

Pools = dict[int, WorkerPool]


def run_case(case: Case, pools: Pools) -> list[str]:
    """Run a case; return its differences from one process, in words."""
    play_case = play_buckets_on_rank if case.wrap == "buckets" else play_on_rank
    return judge(case, _pool(case.mesh.num_ranks, pools).run(play_case, case, timeout_s=60.0))


def run_pair(saved: Case, loaded: Case, pools: Pools) -> list[str]:
    """Save under one arrangement and load under another; return the differences."""
    with tempfile.TemporaryDirectory() as folder:
        source, target = f"{folder}/source", f"{folder}/target"
        told = _pool(saved.mesh.num_ranks, pools).run(save_on_rank, saved, source, timeout_s=60.0)
        told += _pool(loaded.mesh.num_ranks, pools).run(load_on_rank, loaded, source, target, timeout_s=60.0)
        assert_same_contents(contents(target), contents(source))
    return [text for texts in told for text in texts]


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
    parser.add_argument("--buckets", action="store_true")
    parser.add_argument("--checkpoints", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    pools: Pools = {}
    failed: list[int] = []
    seen: Counter[str] = Counter()
    for seed in range(arguments.first_seed, arguments.first_seed + arguments.cases):
        case, loaded = draw_case(seed, arguments.max_ranks), None
        if arguments.buckets:
            case = draw_bucket_case(seed, arguments.max_ranks)
        run = partial(run_case, case, pools)
        if arguments.checkpoints:
            case, loaded = draw_pair(seed, arguments.max_ranks)
            run = partial(run_pair, case, loaded, pools)
        seen[f"strategy {case.strategy}, {case.mesh}, {loaded and (loaded.strategy, loaded.mesh)}"] += 1
        told = guarded(run, {each.mesh.num_ranks for each in (case, loaded) if each is not None}, pools)
        if told:
            failed.append(seed)
            print(f"seed {seed} FAILED: {case} {loaded or ''}", *told[:8], sep="\n    ", flush=True)
    for pool in pools.values():
        pool.stop()
    print(f"{arguments.cases} cases, {len(failed)} failed {failed or ''}, {len(seen)} kinds of arrangement")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
