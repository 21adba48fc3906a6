"""Processes that save are killed at random moments, and a whole checkpoint is found each time."""

import os
import random
import signal
import time
from multiprocessing import get_context
from pathlib import Path

from megatron_fsdp.checkpoint.store import CheckpointStore, RunFolder
from tests.support.save_loop import iteration_in, nursery, save

KILLS = 24
LONGEST_S = 0.06


def kill_savers(root: Path) -> tuple[int, int]:
    """Kill children again and again; how many left something behind, and the last iteration."""
    context = get_context("forkserver")
    here, there = context.Pipe()
    process = context.Process(target=nursery, args=(there, root), daemon=True)
    process.start()
    there.close()
    draw = random.Random(0)
    interrupted, newest = 0, 0
    for kill in range(10 * KILLS):  # a busy machine finishes few saves in so short a time
        if kill >= KILLS and newest > KILLS // 4:
            break
        here.send("save")
        child = here.recv()
        time.sleep(draw.uniform(0.0, LONGEST_S))
        os.kill(child, signal.SIGKILL)
        assert here.recv() == -signal.SIGKILL
        interrupted += bool(RunFolder(root).hidden())
        newest = check(root, newest)
    here.send(None)
    process.join()
    return interrupted, newest


def check(root: Path, newest: int) -> int:
    store = CheckpointStore(root, keep_last=2)
    latest = store.latest()
    if latest is None:
        assert newest == 0
        return 0
    found = iteration_in(latest)
    assert found >= newest
    assert store.resolve() == latest
    whole = store.iterations()
    assert found in whole
    assert [iteration_in(store.resolve(iteration)) for iteration in whole] == whole
    return found


def test_a_whole_checkpoint_is_found_whenever_the_saver_is_killed(tmp_path: Path) -> None:
    root = tmp_path / "run"
    interrupted, newest = kill_savers(root)
    assert interrupted >= KILLS // 4
    assert newest > KILLS // 4
    # Whoever comes next saves, and leaves nothing of the killed ones.
    save(CheckpointStore(root, keep_last=2), newest + 1, "last")
    save(CheckpointStore(root, keep_last=2), newest + 2, "last")
    assert sorted(path.name for path in root.iterdir()) == [
        f"iter_{newest + 1:07d}",
        f"iter_{newest + 2:07d}",
        "latest_checkpointed_iteration.txt",
    ]
