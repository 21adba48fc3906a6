"""Ranks of their own that stop one another, for tests of what is said about it: started from a fork server, and killed.

A scenario is a module-level function `misbehave(model, rank)`; it runs in the third training step.
"""

import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron_fsdp import MegatronFSDP, fully_shard_model
from megatron_fsdp.hang.explain import Explanation, Kind, explain
from megatron_fsdp.hang.log_file import read_folder
from tests.support.settling import PATIENCE_S, settled, steady
from tests.support.usage_models import FEATURES, Layer, Ordered
from tests.support.worker_pool import preloaded_modules

DEADLINE_S = 600.0
STUCK_AFTER_S = 1.0
NORMAL_STEPS = 2

Misbehave = Callable[[MegatronFSDP, int], None]


def step(model: nn.Module) -> Tensor:
    """One forward and backward."""
    loss = model(torch.ones(2, FEATURES)).square().mean()
    loss.backward()
    return loss


def _main(rank: int, world: int, folder: str, store: str, misbehave: Misbehave, *settings: Any) -> None:
    """One rank: two steps as they should be, and the third with the misbehaviour."""
    limit_s, watch_s = settings
    torch.set_num_threads(1)
    error = os.open(str(Path(folder) / f"stderr-{rank}"), os.O_WRONLY | os.O_CREAT)
    os.dup2(error, 2)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    torch.manual_seed(0)
    model = fully_shard_model(Ordered(), fsdp_unit_modules=[Layer])
    model.log_for_hangs(folder, timeout_s=watch_s or None)
    try:
        _train(model, rank, misbehave, limit_s)
    except BaseException as error:
        # What the interpreter does where a script ends by an error, and a process of multiprocessing does not.
        sys.last_value = error
        assert model._hang_log is not None
        model._hang_log.close()
        raise
    time.sleep(DEADLINE_S)


def _train(model: MegatronFSDP, rank: int, misbehave: Misbehave, limit_s: float) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(NORMAL_STEPS):
        step(model)
        optimizer.step()
        optimizer.zero_grad()
    # Only now, so that a slow start is not taken for a hang.
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=limit_s))
    misbehave(model, rank)
    step(model)
    optimizer.step()


@contextmanager
def misbehaving(
    misbehave: Misbehave,
    folder: Path,
    world: int = 2,
    limit_s: float = DEADLINE_S,
    watch_s: float = 0.0,
) -> Iterator[None]:
    """Ranks that run a scenario, until the block ends.

    Args:
        misbehave: The scenario.
        folder: Where logs and error streams go.
        world: How many ranks.
        limit_s: The time limit of their process group, from the misbehaviour on.
        watch_s: The time after which they explain by themselves; 0: never.
    """
    context = get_context("forkserver")
    context.set_forkserver_preload([*preloaded_modules(), __name__])
    with tempfile.TemporaryDirectory() as beside:
        ranks = [
            context.Process(
                target=_main,
                args=(rank, world, str(folder), f"{beside}/store", misbehave, limit_s, watch_s),
            )
            for rank in range(world)
        ]
        try:
            for process in ranks:
                process.start()
            yield
        finally:
            for process in ranks:
                process.kill()
            for process in ranks:
                process.join()


def explained(folder: Path, kind: Kind) -> Explanation:
    """What the logs say, as soon as they say something of a kind; at the deadline, whatever they say."""
    return until(folder, lambda found: any(finding.kind is kind for finding in found.findings))


def until(folder: Path, is_there: Callable[[Explanation], bool]) -> Explanation:
    """What the logs say, as soon as it is what is waited for; at the deadline, whatever they say."""
    deadline = time.monotonic() + PATIENCE_S
    found = None
    while time.monotonic() < deadline:
        time.sleep(0.1)
        if not list(folder.glob("*.mfsdplog")):
            continue
        found = explain(read_folder(folder), STUCK_AFTER_S)
        if is_there(found):
            return found
    assert found is not None, "no rank has begun a log"
    return found


def until_said(path: Path, words: str) -> str:
    """What a rank has said, whole lines, as soon as some words are in it; at the deadline, whatever it said."""

    def said() -> str:
        return path.read_text() if path.exists() else ""

    settled(said, lambda text: words in text and text.endswith("\n"))
    return steady(said)
