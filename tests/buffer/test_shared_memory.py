"""Collectives through shared memory on 2 to 4 ranks: the values of sockets bit for bit; when it is used, when not."""

import copy
import os
import threading
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron_fsdp.shm import share, shared_arena, shared_memory
from megatron_fsdp.shm.futex import has_futex
from megatron_fsdp.shm.share import VARIABLE, over_shared_memory, resolve_shared_memory
from megatron_fsdp.shm.shared_arena import started_at

from megatron_fsdp import fully_shard, fully_shard_model
from megatron_fsdp.comm.axis import Axis, Traffic
from megatron_fsdp.comm.reduction import sum_received
from megatron_fsdp.engine.memory import pack_bytes
from megatron_fsdp.errors import ConfigurationError
from tests.conftest import RunRanks

pytestmark = pytest.mark.skipif(not has_futex(), reason="needs Linux on x86-64")
CPU = torch.device("cpu")
FLOATING = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
SIZES = [0, 1, 1000]


def world_axis() -> Axis:
    return Axis(dist.group.WORLD, dist.get_rank(), dist.get_world_size())


def shared_axis() -> Axis:
    axis = over_shared_memory(world_axis(), CPU)
    assert axis.shared is not None
    return axis


def values(rank: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    return (torch.randn(numel, generator=generator) * 100).to(dtype)


def finish(work: dist.Work | None) -> None:
    assert work is not None
    assert work.wait() is True
    assert work.is_completed()


def _gathers() -> list[bool]:
    axis, found = shared_axis(), []
    for dtype in (*FLOATING, torch.int64, torch.uint8, torch.bool):
        for numel in SIZES:
            for is_in_place in (True, False):
                full = torch.zeros(axis.num_ranks * numel, dtype=dtype)
                own = values(axis.rank, numel, dtype)
                shard = full[axis.rank * numel : (axis.rank + 1) * numel].copy_(own) if is_in_place else own.clone()
                work = axis.all_gather(full, shard)
                if not is_in_place:
                    shard.zero_()  # what was launched needs nothing more
                finish(work)
                expected = torch.cat([values(rank, numel, dtype) for rank in range(axis.num_ranks)])
                found.append(torch.equal(full, expected))
    return found


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_gathers_put_the_shards_in_rank_order(run_ranks: RunRanks, num_ranks: int) -> None:
    assert run_ranks(num_ranks, _gathers) == [[True] * 7 * 3 * 2] * num_ranks


def _reductions() -> tuple[list[bool], Traffic]:
    axis, found = shared_axis(), []
    for dtype in FLOATING:
        for numel in SIZES:
            full = values(axis.rank, axis.num_ranks * numel, dtype)
            received = torch.empty_like(full)
            dist.all_to_all_single(received, full)
            work, again = axis.add_up(full.clone()), axis.add_up(full.clone())
            finish(work)
            ours, theirs = work.total(), sum_received(received, axis.num_ranks)
            found.append(ours.dtype == theirs.dtype and torch.equal(ours, theirs))
            finish(again)
            scaled = torch.empty(numel, dtype=dtype)
            again.total_into(scaled, 0.3)
            found.append(torch.equal(scaled, torch.mul(theirs, 0.3, out=torch.empty_like(scaled))))
    return found, axis.traffic


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_sums_are_those_of_the_exchange_bit_for_bit(run_ranks: RunRanks, num_ranks: int) -> None:
    sent = sum(numel * (num_ranks - 1) * dtype.itemsize for dtype in FLOATING for numel in SIZES)
    for found, traffic in run_ranks(num_ranks, _reductions):
        assert found == [True] * 24
        assert traffic == Traffic(reductions=24, reduce_bytes=2 * sent)


def _all_reductions() -> list[list[float]]:
    axis = shared_axis()
    results = []
    for dtype, average in ((torch.float32, False), (torch.float32, True), (torch.bfloat16, True), (torch.int64, False)):
        full = torch.arange(3).add(axis.rank).to(dtype)
        finish(axis.all_reduce(full, average))
        assert full.dtype == dtype
        results.append(full.tolist())
    return results


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_all_reduce_sums_or_averages_in_place(run_ranks: RunRanks, num_ranks: int) -> None:
    ranks = sum(range(num_ranks))
    sums = [float(ranks + place * num_ranks) for place in range(3)]
    averages = [total / num_ranks for total in sums]
    rounded = torch.tensor(averages).bfloat16().tolist()
    assert run_ranks(num_ranks, _all_reductions) == [[sums, averages, rounded, sums]] * num_ranks


def _average_of_what_has_no_sum() -> list[list[float]]:
    axis = shared_axis()
    half, brain = torch.tensor([60000.0, 3.0]).half(), torch.tensor([1.0 + axis.rank / 128]).bfloat16()
    for full in (half, brain):
        finish(axis.all_reduce(full, average=True))
    return [half.tolist(), brain.tolist()]


def test_an_average_of_16_bits_is_rounded_once(run_ranks: RunRanks) -> None:
    rounded = torch.tensor((3 + 3 / 128) / 3).bfloat16().item()
    assert run_ranks(3, _average_of_what_has_no_sum) == [[[60000.0, 3.0], [rounded]]] * 3


def _a_whole_model() -> list[float]:
    """As at the beginning of a forward: all parts of a model's weights start to cross an axis before any is awaited."""
    axis = shared_axis()
    fulls = [torch.zeros(axis.num_ranks) for _ in range(400)]
    works = [axis.all_gather(full, torch.full((1,), float(place))) for place, full in enumerate(fulls)]
    for work in works:
        finish(work)
    return [place for place, full in enumerate(fulls) if full.tolist() != [float(place)] * axis.num_ranks]


def test_hundreds_of_gathers_may_be_under_way(run_ranks: RunRanks) -> None:
    assert run_ranks(2, _a_whole_model) == [[], []]


def _interrupted() -> tuple[bool, list[float], list[float], list[float]]:
    axis = shared_axis()
    gathered, whole = torch.zeros(2 * axis.num_ranks), torch.full((2,), 1.0 + axis.rank)
    works = [axis.all_gather(gathered, torch.full((2,), 1.0 + axis.rank)), axis.all_reduce(whole)]
    scatter = axis.add_up(torch.full((2 * axis.num_ranks,), 1.0 + axis.rank))
    works.append(scatter)
    module: Any = shared_memory
    read_part, calls = module.SharedMemory._part, []

    def interrupt(*arguments: Any) -> torch.Tensor:
        part: torch.Tensor = read_part(*arguments)
        calls.append(part)
        if len(calls) == 1:
            raise KeyboardInterrupt
        return part

    for work in works:
        calls.clear()
        module.SharedMemory._part = interrupt
        try:
            with pytest.raises(KeyboardInterrupt):
                work.wait()  # type: ignore[union-attr]
        finally:
            module.SharedMemory._part = read_part
    dist.barrier()
    for work in works:
        finish(work)
    return axis.shared is not None, gathered.tolist(), whole.tolist(), scatter.total().tolist()


def test_a_wait_that_was_interrupted_may_be_repeated(run_ranks: RunRanks) -> None:
    assert run_ranks(2, _interrupted) == [(True, [1.0, 1.0, 2.0, 2.0], [3.0, 3.0], [3.0, 3.0])] * 2


def _many_under_way() -> tuple[bool, list[int]]:
    """Gathers and reductions three deep, waited for out of order, for long; rank 1 is slow."""
    axis, right, held = shared_axis(), True, []
    for number in range(60):
        fulls = [torch.zeros(axis.num_ranks * 500) for _ in range(3)]
        works = [
            axis.all_gather(full, torch.full((500,), float(number * 10 + place + axis.rank)))
            for place, full in enumerate(fulls)
        ]
        sum_work = axis.add_up(torch.full((axis.num_ranks * 500,), float(number + axis.rank)))
        if axis.rank == 1 and number % 7 == 0:
            threading.Event().wait(0.01)
        for place in (2, 0, 1):
            finish(works[place])
            expected = [float(number * 10 + place + rank) for rank in range(axis.num_ranks) for _ in range(500)]
            right = right and fulls[place].tolist() == expected
        finish(sum_work)
        total = float(sum(number + rank for rank in range(axis.num_ranks)))
        right = right and sum_work.total().tolist() == [total] * 500
        assert axis.shared is not None
        held.append(axis.shared.held_bytes)
    return right, held


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_many_at_a_time_in_any_order_and_memory_does_not_grow(run_ranks: RunRanks, num_ranks: int) -> None:
    for right, held in run_ranks(num_ranks, _many_under_way):
        assert right
        assert held[-1] == held[20]
        assert held[-1] <= 3 * (3 * 4096 + num_ranks * 4096)


def _read_late() -> list[list[float]]:
    """Several reductions of one kind under way; rank 1 is done with all of them before rank 0 looks at the first."""
    axis = shared_axis()
    fulls = [torch.full((axis.num_ranks * 100,), 10.0 * number + axis.rank) for number in range(3)]
    works = [axis.all_reduce(full) for full in fulls]
    sums = [axis.add_up(torch.full((axis.num_ranks * 100,), 10.0 * number + axis.rank)) for number in range(3)]
    found = []
    if axis.rank == 0:
        dist.barrier()
        full = torch.zeros(axis.num_ranks * 100)
        late = axis.all_reduce(full), axis.add_up(full)
    for full, work in zip(fulls, works, strict=True):
        finish(work)
        found.append(full.unique().tolist())
    for scattered in sums:
        finish(scattered)
        found.append(scattered.total().unique().tolist())
    if axis.rank != 0:
        dist.barrier()
        late = axis.all_reduce(full), axis.add_up(full)
    for work in late:
        finish(work)
    return found


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_a_rank_may_be_the_last_to_look_at_its_own_part(run_ranks: RunRanks, num_ranks: int) -> None:
    expected = [[10.0 * number * num_ranks + sum(range(num_ranks))] for number in range(3)]
    assert run_ranks(num_ranks, _read_late) == [expected * 2] * num_ranks


def _dropped() -> int:
    axis = shared_axis()
    for _ in range(300):
        axis.all_gather(torch.zeros(axis.num_ranks), torch.zeros(1))
        dist.barrier()
    assert axis.shared is not None
    return axis.shared.held_bytes


def test_work_that_nobody_waits_for_keeps_no_memory(run_ranks: RunRanks) -> None:
    assert all(held <= 2 * 4096 for held in run_ranks(2, _dropped))


def _alone(expected: str) -> str:
    """Rank 0 waits for rank 1, which does not come, does something else, or lets go."""
    axis = shared_axis()
    told = ""
    if axis.rank == 0:
        work = axis.all_gather(torch.zeros(4), torch.zeros(2))
        assert work is not None
        assert not work.is_completed()
    dist.barrier()
    if axis.rank == 1 and expected == "differ":
        axis.all_gather(torch.zeros(2), torch.zeros(1))
    if axis.rank == 1 and expected == "gone":
        del axis
    dist.barrier()
    if dist.get_rank() == 0:
        with pytest.raises(dist.DistBackendError) as raised:
            work.wait(timedelta(seconds=0.1))
        told = str(raised.value)
    dist.barrier()
    return told


def _named_by_global_rank() -> str:
    """Ranks 1 and 3 are an axis; rank 3 lets go."""
    rank = dist.get_rank()
    group = [dist.new_group([other, other + 2]) for other in (0, 1)][rank % 2]
    axis: Axis | None = over_shared_memory(Axis(group, dist.get_rank(group), 2), CPU)
    told = ""
    if rank == 3:
        axis = None
    dist.barrier()
    if axis is not None and rank == 1:
        work = axis.all_gather(torch.zeros(4), torch.zeros(2))
        assert work is not None
        with pytest.raises(dist.DistBackendError) as raised:
            work.wait()
        told = str(raised.value)
    dist.barrier()
    return told


def test_ranks_are_named_as_everywhere_not_by_their_place_on_an_axis(run_ranks: RunRanks) -> None:
    told = run_ranks(4, _named_by_global_rank)[1]
    assert told == "rank 3 has let go of its model and has not come to gather 1, which rank 1 waits for"


@pytest.mark.parametrize(
    ("case", "told"),
    [("late", "Timed out after 0.1 s: rank 1 has not come"), ("differ", "ranks differ in gather"), ("gone", "let go")],
)
def test_what_other_ranks_do_wrong_is_told(run_ranks: RunRanks, case: str, told: str) -> None:
    assert told in run_ranks(2, _alone, case)[0]


def _when(case: str) -> bool:
    axis, device = world_axis(), CPU
    if case == "another host":
        machine = share.machine_of_process() if axis.rank == 0 else ("elsewhere",)
        module: Any = share
        before, module.machine_of_process = module.machine_of_process, lambda: machine
        try:
            return over_shared_memory(axis, device).shared is not None
        finally:
            module.machine_of_process = before
    if case == "not built in":
        system: Any = os
        make = system.memfd_create
        if axis.rank == 1:
            del system.memfd_create
        try:
            return over_shared_memory(axis, device).shared is not None
        finally:
            system.memfd_create = make
    if case == "not allowed":
        module = share
        before = module.open_arena

        def refuse(place: object) -> None:  # noqa: ARG001
            raise PermissionError("no")

        module.open_arena = refuse if axis.rank == 1 else before
        try:
            return over_shared_memory(axis, device).shared is not None
        finally:
            module.open_arena = before
    return over_shared_memory(axis, torch.device("meta" if case == "device" else "cpu")).shared is not None


@pytest.mark.parametrize(
    ("case", "expected"),
    [("here", True), ("another host", False), ("not allowed", False), ("not built in", False), ("device", False)],
)
def test_it_is_used_where_all_ranks_can(run_ranks: RunRanks, case: str, expected: bool) -> None:
    assert run_ranks(2, _when, case) == [expected] * 2


def _train(model: torch.nn.Module, samples: torch.Tensor, sharded: bool) -> tuple[list[float], Any]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trained = model
    if sharded:
        trained, optimizer = fully_shard(model, optimizer)
    losses = []
    for _ in range(3):
        loss = trained(samples).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, trained


def _clones(claim: str) -> tuple[list[float], list[float], str]:
    """Losses of ranks that wrongly believe that they share memory, those of one process, and what connects ranks."""
    rank, module = dist.get_rank(), shared_arena
    torch.manual_seed(0)
    samples, model = torch.randn(4, 4), torch.nn.Linear(4, 4)
    expected, _ = _train(copy.deepcopy(model), samples, sharded=False)
    with pytest.MonkeyPatch.context() as patch:
        if claim == "same process":  # what is called so here is one's own: process and file have the same numbers
            own: list[str] = []
            named = module._path

            def path(pid: int, descriptor: int) -> str:
                own.append(named(pid, descriptor))
                return own[0]

            patch.setattr(module, "_path", path)
        elif rank == 1:  # what bears its number was started at another time
            patch.setattr(share, "started_at", lambda pid: (started_at(pid) or 0) + 1)
        patch.setattr(share, "machine_of_process", lambda: ("same",))
        losses, trained = _train(model, samples.chunk(2)[rank], sharded=True)
    mean = torch.tensor(losses, dtype=torch.float64)
    dist.all_reduce(mean)
    told = next(line for line in str(trained.describe()).splitlines() if "gloo" in line)
    return (mean / 2).tolist(), expected, told


@pytest.mark.parametrize("claim", ["same process", "process started at another time"])
def test_ranks_that_wrongly_believe_that_they_share_a_machine_use_sockets(run_ranks: RunRanks, claim: str) -> None:
    for losses, expected, told in run_ranks(2, _clones, claim):
        assert losses == pytest.approx(expected, rel=1e-6)
        assert "shared memory" not in told


def _open_files() -> int:
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    axes = [shared_axis() for _ in range(5)]
    return len(os.listdir("/proc/self/fd")) - before if axes else -1  # noqa: PTH208


def test_no_file_stays_open(run_ranks: RunRanks) -> None:
    assert run_ranks(3, _open_files) == [0] * 3


def test_the_variable_is_0_or_1() -> None:
    assert [resolve_shared_memory({VARIABLE: value}) for value in ("", "1", "0")] == [True, True, False]
    assert resolve_shared_memory({})
    with pytest.raises(ConfigurationError, match="MFSDP_SHARED_MEMORY='yes'; give 1"):
        resolve_shared_memory({VARIABLE: "yes"})


def _told() -> tuple[str, tuple[int, int], tuple[int, int], int]:
    """What a model that was trained says of its axis and memory, with and without."""
    found: list[Any] = []
    for value in ("1", "0"):
        os.environ[VARIABLE] = value
        try:
            torch.manual_seed(0)
            model = fully_shard_model(torch.nn.Linear(40, 40))
            model(torch.ones(2, 40)).sum().backward()
            memory = model.memory()
            found += [str(model.describe()), (memory.shared_bytes, memory.copied_bytes), memory.transient_peak_bytes]
        finally:
            del os.environ[VARIABLE]
    line = next(line for line in found[0].splitlines() if "gloo" in line)
    assert line.replace(" and shared memory", "") in found[3]
    return line, found[1], found[4], found[5] - found[2]


def test_a_model_says_that_its_axis_shares_memory_and_how_much(run_ranks: RunRanks) -> None:
    bucket = (40 * 40 + 40) * 4
    taken = bucket + 2 * bucket  # over sockets: scratch, and weights that are gathered
    for line, shared, without, scratch in run_ranks(2, _told):
        assert "gloo and shared memory, global ranks 0, 1" in line
        assert (shared, without) == ((bucket // 2 + pack_bytes([bucket])[1], 0), (0, 0))
        assert bucket <= scratch <= taken
