"""Saving while training goes on: what is saved, who hears of errors, and how it ends."""

import os
import subprocess
import sys
import threading
from contextlib import closing
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor

from megatron_fsdp.checkpoint import Checkpointer
from megatron_fsdp.checkpoint.background import BackgroundSaver
from megatron_fsdp.checkpoint.save import SealingWriter
from megatron_fsdp.checkpoint.store import CheckpointStore
from megatron_fsdp.checkpoint.verify import verify
from megatron_fsdp.comm.groups import timeout_of
from megatron_fsdp.errors import CheckpointError, ConfigurationError
from tests.checkpoint.test_load import wrap
from tests.support.dcp_contents import state_of
from tests.support.doors import step
from tests.support.on_ranks import assert_equal_tensors, on_ranks, refusal, same_on_ranks
from tests.support.settling import LIMIT_S
from tests.support.source_tree import SOURCE
from tests.support.worker_pool import WorkerPool
from tests.support.zoo import MODEL_CASES, ModelName

# ---- one process ----------------------------------------------------------------------------------------------------


def test_a_second_save_waits_for_the_first_and_uses_its_memory() -> None:
    weight, order, go = torch.zeros(10), list[tuple[str, int]](), threading.Event()

    def slow(state: dict[str, Any], _group: object) -> None:
        assert go.wait(LIMIT_S)
        order.append(("first", state["weight"].data_ptr()))

    def quick(state: dict[str, Any], _group: object) -> None:
        order.append(("second", state["weight"].data_ptr()))

    with closing(BackgroundSaver()) as saver:
        saver.start({"weight": weight}, slow)
        threading.Timer(0.05, go.set).start()
        saver.start({"weight": weight}, quick)
        assert [name for name, _ in order[:1]] == ["first"]
    assert [name for name, _ in order] == ["first", "second"]
    assert order[0][1] == order[1][1] != weight.data_ptr()


def failing(_state: object, _group: object) -> None:
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize("then", ["wait", "start", "close"])
def test_an_error_is_raised_once_by_whatever_comes_next(then: str) -> None:
    saver = BackgroundSaver()
    saver.start({}, failing)
    acts = {"wait": saver.wait, "start": lambda: saver.start({}, failing), "close": saver.close}
    with pytest.raises(
        CheckpointError, match=r"^saving in the background failed \(OSError: \[Errno 28\] No space left"
    ):
        acts[then]()
    saver.wait()
    saver.close()
    with pytest.raises(ConfigurationError, match="this BackgroundSaver is closed"):
        saver.start({}, failing)


@pytest.mark.full
def test_python_ends_when_the_save_has_ended(tmp_path: Path) -> None:
    script = (
        "import sys, time, torch\n"
        "from pathlib import Path\n"
        "from megatron_fsdp.checkpoint.background import BackgroundSaver\n"
        "from megatron_fsdp.checkpoint.store import CheckpointStore\n"
        "store, saver = CheckpointStore(sys.argv[1]), BackgroundSaver()\n"
        "def save(state, group):\n"
        "    time.sleep(0.3)\n"
        "    total = str(state['a'].sum().item())\n"
        "    store.write(1, lambda folder: (folder / '.metadata').write_text(total), group=group)\n"
        "    raise ValueError('told at the end')\n"
        "saver.start({'a': torch.ones(5)}, save)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(SOURCE)}
    ended = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)], env=environment, capture_output=True, text=True, timeout=LIMIT_S
    )
    assert ended.returncode == 0, ended.stderr
    assert (CheckpointStore(tmp_path).resolve() / ".metadata").read_text() == "5.0"
    assert "nobody has asked: saving in the background failed (ValueError: told at the end)" in ended.stderr


# ---- ranks ----------------------------------------------------------------------------------------------------------


def locals_of(state: Any) -> dict[str, Tensor]:
    """This rank's elements by path."""
    found: dict[str, Tensor] = {}
    pairs = state.items() if isinstance(state, dict) else enumerate(state) if isinstance(state, list) else ()
    for key, value in pairs:
        if isinstance(value, Tensor):
            found[str(key)] = getattr(value, "_local_tensor", value).clone()
        else:
            found.update({f"{key}/{path}": tensor for path, tensor in locals_of(value).items()})
    return found


@pytest.mark.full(short=["odd_shapes"])
@pytest.mark.parametrize("name", ["odd_shapes", "transformer"])
@on_ranks(2)
def test_training_does_not_leak_into_what_is_saved(tmp_path: Path, name: ModelName) -> None:
    """Save twice while training goes on: saved is what was there at the second start, by way of the same memory."""
    model, optimizer = wrap(name, 3, 0)
    step(model, optimizer, 1, MODEL_CASES[name])
    store, places = CheckpointStore(tmp_path / "run", keep_last=1), []
    with closing(BackgroundSaver()) as saver:
        for iteration in (1, 2):
            go = threading.Event()

            def save(state: dict[str, Any], group: Any, iteration: int = iteration, go: threading.Event = go) -> None:
                assert go.wait(LIMIT_S)
                places.append([tensor.to_local().data_ptr() for tensor in state["model"].values()])
                write = lambda folder: dcp.save(state, checkpoint_id=folder, process_group=group)  # noqa: E731
                store.write(iteration, write, group=group)

            state = state_of(model, optimizer)
            before = locals_of(state)
            saver.start(state, save)
            assert saver.buffers.staged_bytes == sum(tensor.nbytes for tensor in before.values())
            del state
            for seed in (2, 3):  # gathers and reductions while the thread holds the copy, or writes it
                step(model, optimizer, 10 * iteration + seed, MODEL_CASES[name])
                go.set()
    other, its_optimizer = wrap(name, 3, 7)
    step(other, its_optimizer, 1, MODEL_CASES[name])
    loaded = state_of(other, its_optimizer)
    dcp.load(loaded, checkpoint_id=store.resolve(2))
    assert len(before) > 10
    assert_equal_tensors(locals_of(loaded), before)
    assert places[0] == places[1]
    assert store.iterations() == [2]


@on_ranks(2)
def test_errors_of_one_rank_are_told_by_all(tmp_path: Path) -> None:
    store, rank = CheckpointStore(tmp_path / "run"), dist.get_rank()
    full = "rank 1: OSError: [Errno 28] No space left on device"
    with closing(BackgroundSaver()) as saver:
        assert saver.group is not dist.group.WORLD
        state = {"a": torch.ones(2)}

        def alone(_state: object, _group: object) -> None:
            if rank == 1:
                failing(_state, _group)

        def writer(folder: Path) -> None:
            (folder / ".metadata").write_text("whole")
            alone(folder, None)

        saver.start(state, alone)
        assert refusal(saver.wait) == f"saving in the background failed ({full})"
        saver.start(state, lambda _, group: store.write(10, writer, group=group))
        assert refusal(saver.start, state, alone) == f"saving {store.path_of(10)} failed ({full})"
        saver.start({"a": torch.ones(2, device="meta" if rank == 1 else "cpu")}, alone)
        assert "background save failed (rank 1: CheckpointError: a Tensor (torch.strided, on meta) ca" in refusal(
            saver.wait
        )
        with pytest.MonkeyPatch.context() as patch:
            if rank == 1:
                patch.setattr(saver.buffers, "wait_until_copied", lambda: failing(None, None))
            saver.start(state, lambda _, group: dist.barrier(group))  # waits for the other rank
            assert refusal(saver.wait) == f"copying the state for a background save failed ({full})"
        saver.start(state, lambda _, group: store.write(20, lambda folder: mark_from_first(folder, rank), group=group))
    assert same_on_ranks(store.iterations()) == [20]


def mark_from_first(folder: Path, rank: int) -> None:
    if rank == 0:
        (folder / ".metadata").write_text("whole")


# ---- an end under way ------------------------------------------------------------------------------------------------


def take_down(root: str) -> str:
    model, optimizer = wrap("odd_shapes", 3, 0)
    step(model, optimizer, 1, MODEL_CASES["odd_shapes"])
    checkpoints = Checkpointer(root, keep_last=1, in_background=True)
    checkpoints.save(1, model, optimizer)
    checkpoints.wait()
    writes, is_down, write = threading.Event(), threading.Event(), SealingWriter.write_data

    def write_later(*args: Any) -> Any:
        writes.set()
        assert is_down.wait(LIMIT_S)
        return write(*args)

    SealingWriter.write_data = write_later  # type: ignore[method-assign]  # this process ends with the test
    checkpoints.save(2, model, optimizer)
    assert writes.wait(LIMIT_S)
    dist.barrier()  # no rank is in a collective of the save, which another could leave by taking its groups down
    dist.destroy_process_group()
    is_down.set()
    with pytest.raises(CheckpointError) as caught:
        checkpoints.close()
    return str(caught.value)


@on_ranks(2)
def test_the_group_of_the_thread_has_the_timeout_of_the_given_one() -> None:
    group = dist.new_group(backend="gloo", timeout=timedelta(minutes=7))
    for given in (group, None):
        with closing(BackgroundSaver(given)) as saver:
            assert saver.group is not None
            assert timeout_of(saver.group) == timeout_of(given or dist.group.WORLD)
    assert timeout_of(group) == timedelta(minutes=7)


@pytest.mark.full
def test_half_a_checkpoint_is_not_published(tmp_path: Path) -> None:
    pool = WorkerPool(2, ())
    try:
        for told in pool.run(take_down, str(tmp_path)):
            assert "before destroy_process_group()" in told
    finally:
        pool.stop()
    store = CheckpointStore(tmp_path)
    assert store.iterations() == [1]
    latest = store.latest()
    assert latest is not None
    assert verify(latest).is_whole
