"""Real ranks that wait for one another in vain: each kind of misbehaviour is named, with rank, unit and parameters."""

import functools
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron_fsdp import MegatronFSDP, fully_shard_model
from megatron_fsdp.cli.main import main
from megatron_fsdp.comm.groups import set_timeout
from megatron_fsdp.hang.explain import Explanation, Kind, explain
from megatron_fsdp.hang.log_file import read_folder
from tests.support.on_ranks import engine_of
from tests.support.settling import PATIENCE_S, settled, steady
from tests.support.worker_pool import preloaded_modules
from tests.support.zoo import FEATURES, Layer, Ordered

# ---- ranks of their own that stop one another ------------------------------------------------------------------------

DEADLINE_S = 600.0
STUCK_AFTER_S = 1.0
NORMAL_STEPS = 2

# Runs in the third training step of a rank, a process of its own that is started from a fork server, and killed.
Misbehave = Callable[[MegatronFSDP, int], None]


def step(model: nn.Module) -> Tensor:
    """One forward and backward."""
    loss = model(torch.ones(2, FEATURES)).square().mean()
    loss.backward()
    return loss


def _main(rank: int, num_ranks: int, folder: str, store: str, misbehave: Misbehave, *settings: Any) -> None:
    """One rank: two steps as they should be, and the third with the misbehaviour."""
    limit_s, watch_s = settings
    os.environ["MFSDP_MESSAGE_BYTES"] = "0"  # the fork server has that of the test which started it
    torch.set_num_threads(1)
    error = os.open(str(Path(folder) / f"stderr-{rank}"), os.O_WRONLY | os.O_CREAT)
    os.dup2(error, 2)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=num_ranks)
    torch.manual_seed(0)
    model = fully_shard_model(Ordered(), fsdp_unit_modules=[Layer])
    model.log_for_hangs(folder, timeout_s=watch_s or None)
    try:
        _train(model, rank, misbehave, limit_s)
    except BaseException as error:
        # What the interpreter does where a script ends by an error, and a process of multiprocessing does not.
        sys.last_value = error
        for log in engine_of(model).observers.watching:
            log.close()  # type: ignore[attr-defined]
        raise
    time.sleep(DEADLINE_S)


def _train(model: MegatronFSDP, rank: int, misbehave: Misbehave, limit_s: float) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(NORMAL_STEPS):
        step(model)
        optimizer.step()
        optimizer.zero_grad()
    # Only now, so that a slow start is not taken for a hang.
    set_timeout(timedelta(seconds=limit_s))
    misbehave(model, rank)
    step(model)
    optimizer.step()


@contextmanager
def misbehaving(
    misbehave: Misbehave, folder: Path, num_ranks: int = 2, limit_s: float = DEADLINE_S, watch_s: float = 0.0
) -> Iterator[None]:
    """Ranks that run a scenario, until the block ends; logs and error streams go to the folder.

    The time limit of their process group holds from the misbehaviour on; after `watch_s` they explain by themselves.
    """
    context = get_context("forkserver")
    context.set_forkserver_preload([*preloaded_modules(), __name__])
    with tempfile.TemporaryDirectory() as beside:
        given = (num_ranks, str(folder), f"{beside}/store", misbehave, limit_s, watch_s)
        ranks = [context.Process(target=_main, args=(rank, *given)) for rank in range(num_ranks)]
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
    return until(folder, lambda found: any(finding.kind is kind for finding in found.findings))


def until(folder: Path, is_there: Callable[[Explanation], bool]) -> Explanation:
    """What the logs say, as soon as it is what is waited for; or when ranks have done nothing more for two minutes.

    Under load ranks may take minutes to get to their misbehaviour, which is no part of what is waited for.
    """
    deadline = time.monotonic() + DEADLINE_S
    found, done = None, None
    while time.monotonic() < deadline:
        time.sleep(0.1)
        if not list(folder.glob("*.mfsdplog")):
            continue
        found = explain(read_folder(folder), STUCK_AFTER_S)
        if is_there(found):
            return found
        before, done = done, [(row.rank, row.operations) for row in found.rows]
        if done != before:
            deadline = time.monotonic() + PATIENCE_S
    assert found is not None, "no rank has begun a log"
    return found


def until_said(path: Path, words: str) -> str:
    """What a rank has said, whole lines, as soon as some words are in it; at the deadline, whatever it said."""

    def said() -> str:
        return path.read_text() if path.exists() else ""

    settled(said, lambda text: words in text and text.endswith("\n"))
    return steady(said)


# ---- tests -----------------------------------------------------------------------------------------------------------

_LAYER_2 = (
    "layers.2 holds layers.2.up.weight, layers.2.up.bias, layers.2.down.weight, layers.2.down.bias "
    "(4 parameters, 492 bytes)"
)
_ROOT = "(root) holds first.weight, first.bias, last.weight, last.bias (4 parameters, 336 bytes)"


def only_on_rank_1(act: Callable[[MegatronFSDP], object]) -> Misbehave:
    @functools.wraps(act)
    def misbehave(model: MegatronFSDP, rank: int) -> None:
        if rank == 1:
            act(model)

    return misbehave


@only_on_rank_1
def skip_a_unit(model: MegatronFSDP) -> None:
    model.module.order = (0, 1, 3)


@only_on_rank_1
def sleep_outside(_model: MegatronFSDP) -> None:
    time.sleep(DEADLINE_S)


@only_on_rank_1
def sleep_in_a_unit(model: MegatronFSDP) -> None:
    model.module.layers[2].up.register_forward_pre_hook(lambda *_: time.sleep(DEADLINE_S))


@only_on_rank_1
def die(model: MegatronFSDP) -> None:
    model.module.layers[2].up.register_forward_pre_hook(lambda *_: os.kill(os.getpid(), signal.SIGKILL))


@only_on_rank_1
def raise_in_forward(model: MegatronFSDP) -> None:
    model.module.layers[2].up.register_forward_hook(_raise)


@only_on_rank_1
def leave_early(model: MegatronFSDP) -> None:
    model.stop_logging_for_hangs()
    time.sleep(DEADLINE_S)


def _raise(*_unused: object) -> None:
    raise ValueError("bad batch")


_REDUCES = "starts to reduce the gradients of"
_LAYER_3 = "layers.3 holds layers.3.up.weight, "
_BYTES = f"rank 1 {_REDUCES} layers.{{}} ({{}} bytes) where rank 0 {_REDUCES} layers.{{}} (640 bytes) "
_IN_FORWARD = "computes the forward of layers.2 in the forward of step 2"
_WAITS = "rank 0 waits for the reduced gradients of layers.3 in the backward of step 2 (operation "
_RAISED = "rank 1 raised an error while it computes the forward of layers.2 in the forward of step 2:"
CASES: list[tuple[Misbehave, Kind, list[str]]] = [
    (skip_a_unit, Kind.DIFFERENT, [_BYTES.format(1, 640, 2), ", in the backward of step 2)", _LAYER_2]),
    (sleep_in_a_unit, Kind.ELSEWHERE, [f"rank 1 {_IN_FORWARD} since ", _WAITS, _LAYER_3]),
    (die, Kind.DIED, ["rank 1 died without a word (process ", f"; the last thing known: it {_IN_FORWARD}", _LAYER_2]),
    (raise_in_forward, Kind.RAISED, [_RAISED, 'in _raise: raise ValueError("bad batch")', _LAYER_2]),
]


@pytest.mark.full(short=["skip_a_unit", "sleep_in_a_unit", "die"])
@pytest.mark.parametrize(("misbehave", "kind", "told"), CASES, ids=[case[0].__name__ for case in CASES])
def test_each_kind_of_misbehaviour_is_named(misbehave: Misbehave, kind: Kind, told: list[str], tmp_path: Path) -> None:
    with misbehaving(misbehave, tmp_path):
        # A rank that a busy machine holds up for a second looks stuck for as long.
        found = until(tmp_path, lambda found: all(part in str(found) for part in told))
    odd = (0, 1) if kind is Kind.DIFFERENT else (1,)  # of two that differ, neither is the odd one
    assert [(finding.kind, finding.ranks) for finding in found.findings] == [(kind, odd)], str(found)
    assert tuple(row.rank for row in found.rows if row.is_odd) == odd


def test_a_rank_that_says_goodbye_is_told_from_one_that_died(tmp_path: Path) -> None:
    with misbehaving(leave_early, tmp_path):
        found = explained(tmp_path, Kind.ENDED)
    assert str(found).startswith("rank 1 ended its program, while others go on\nrank 0 waits for the weights of (root)")


@pytest.mark.full
def test_the_lowest_rank_that_waits_speaks_up_once_and_the_others_keep_quiet(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with misbehaving(sleep_outside, tmp_path, num_ranks=3, watch_s=3.0):  # a busy machine may take a second for a step
        explained(tmp_path, Kind.ELSEWHERE)
        said = until_said(tmp_path / "stderr-0", "nothing has happened for")
        time.sleep(4.0)  # long enough for a second message, if there were one
        assert said == (tmp_path / "stderr-0").read_text()
        assert main(["hang", str(tmp_path), "--after", "1"]) == 1
    lines = said.splitlines()
    assert lines[0].startswith("[rank 0] nothing has happened for ")
    assert lines[1].startswith("rank 1 runs code outside of the model (")
    assert lines[2].startswith("each of ranks 0, 2 waits for the weights of (root) in the forward of step 2")
    assert (tmp_path / "stderr-1").read_text() == (tmp_path / "stderr-2").read_text() == ""
    printed = capsys.readouterr().out.splitlines()
    assert printed[0].startswith("rank 1 runs code outside of the model (")
    assert [line.split(":")[0] for line in printed if "(suspect)" in line] == ["  rank 1 (suspect)"]


def test_an_error_that_ends_the_wait_carries_the_explanation_and_who_slept_is_named_after_its_end(
    tmp_path: Path,
) -> None:
    """No thread has to be awake for it. SIGTERM is how torchrun ends the rest of the ranks when one has failed."""
    with misbehaving(sleep_outside, tmp_path, limit_s=3.0):
        said = until_said(tmp_path / "stderr-0", "(root) holds ")
        os.kill(read_folder(tmp_path).ranks[1].writer.process.pid, signal.SIGTERM)
        found = until(tmp_path, lambda found: found.rows[1].process == "SIGTERM")
    assert "during 'wait' of unit (root)\nrank 1 runs code outside of the model (" in said
    assert "\nrank 0 raised an error while it waits for the weights of (root) since " in said
    assert _ROOT in said
    (finding,) = found.findings
    assert (finding.kind, finding.ranks) == (Kind.ELSEWHERE, (1,))
    assert finding.sentences[0].startswith("rank 1 runs code outside of the model (")
    assert finding.sentences[1].startswith("after that rank 1 was ended by SIGTERM (process ")
    assert finding.sentences[3].endswith(" in sleep_outside")
