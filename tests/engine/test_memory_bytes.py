"""What one rank holds, to the byte, against the formulas of `tests.support.formulas`."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from megatron_fsdp import MixedPrecisionPolicy, fully_shard
from megatron_fsdp.config.strategy import ShardingStrategy
from megatron_fsdp.describe.model import MemoryUse
from tests.conftest import RunRanks
from tests.support.counting import LiveBytes, held_bytes
from tests.support.formulas import (
    GroupFootprint,
    PersistentBytes,
    TransientBytes,
    exchange_scratch_bytes,
    footprints_of,
    passing_bytes,
    persistent_bytes,
    transient_bytes,
)
from tests.support.zoo import MODEL_CASES, Floor, Tower, tower_loss

pytestmark = pytest.mark.unmerged

BF16, FP32 = torch.bfloat16, torch.float32
STRATEGIES = list(ShardingStrategy)
POLICIES = {
    "fp32": (FP32, MixedPrecisionPolicy()),
    "bf16 on the wire": (BF16, MixedPrecisionPolicy(main_grads_dtype=FP32, grad_comm_dtype=BF16)),
}


@dataclass(frozen=True)
class Reading:
    """What one rank measured.

    Attributes:
        groups: What the formulas take.
        memory: What the engine says it holds.
        state_bytes: Optimizer state, counters of steps left out.
        held_bytes: Every storage of the process that was not there before the model, after an optimizer step, gradients
            not cleared yet; counters of steps left out.
        cleared_bytes: The same after `zero_grad`.
        deferred_bytes: What a backward inside `no_sync` adds to that.
        first_bytes: Peak of what forward and backward allocate in the first step, ...
        later_bytes: ... and in the third.
        unsharded_bytes: The same of the model on its own, where every gradient is dropped at once.
    """

    groups: tuple[GroupFootprint, ...]
    memory: MemoryUse
    state_bytes: int
    held_bytes: int
    cleared_bytes: int
    deferred_bytes: int
    first_bytes: int
    later_bytes: int
    unsharded_bytes: int


def measure_all() -> dict[ShardingStrategy, Reading]:
    """Every strategy under a policy, which is the other one on four ranks than on two."""
    ranks = dist.get_world_size()
    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("dp",))
    cases = [(strategy, list(POLICIES)[(int(strategy) + ranks // 2) % 2]) for strategy in STRATEGIES]
    return {strategy: _measure(mesh, strategy, policy) for strategy, policy in cases}


def _measure(mesh: DeviceMesh, strategy: ShardingStrategy, policy_name: str) -> Reading:
    dtype, policy = POLICIES[policy_name]
    x = torch.randn(2, 16, dtype=dtype)
    unsharded_bytes = _unsharded_peak(Tower().to(dtype), x)
    before = held_bytes()
    model = Tower().to(dtype)
    optimizer = torch.optim.AdamW(model.parameters())
    model, optimizer = fully_shard(
        model,
        optimizer,
        mesh,
        "dp",
        zero_dp_strategy=int(strategy),
        fsdp_unit_modules=[Floor],
        mixed_precision_policy=policy,
    )
    peaks = []
    for _ in range(3):
        optimizer.zero_grad()
        peaks.append(_backward_peak(model, x))
        optimizer.step()
    counters = sum(state["step"].nbytes for state in optimizer.state.values())
    held = held_bytes() - before - counters
    optimizer.zero_grad()
    cleared = held_bytes() - before - counters
    with model.no_sync():
        tower_loss(model, x).backward()
    deferred = held_bytes() - before - counters - cleared
    return Reading(
        groups=footprints_of(model),
        memory=model.memory(),
        state_bytes=_state_bytes(optimizer),
        held_bytes=held,
        cleared_bytes=cleared,
        deferred_bytes=deferred,
        first_bytes=peaks[0],
        later_bytes=peaks[2],
        unsharded_bytes=unsharded_bytes,
    )


def _backward_peak(model: nn.Module, x: torch.Tensor) -> int:
    with LiveBytes() as live:
        tower_loss(model, x).backward()
    return live.peak_bytes


def _unsharded_peak(model: nn.Module, x: torch.Tensor) -> int:
    for param in model.parameters():
        param.register_post_accumulate_grad_hook(lambda param: setattr(param, "grad", None))
    return _backward_peak(model, x)


def _state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of the local parts of everything but the 0-d counters of steps."""
    found = [value for state in optimizer.state.values() for key, value in state.items() if key != "step"]
    return sum((value.to_local() if isinstance(value, DTensor) else value).nbytes for value in found)


def borrowed(reading: Reading, strategy: ShardingStrategy) -> TransientBytes:
    scratch = exchange_scratch_bytes(reading.groups, strategy)
    return transient_bytes(reading.groups, strategy, scratch_bytes=scratch)


def given_back(reading: Reading, strategy: ShardingStrategy) -> int:
    """Bytes of the root's gathered weights, which are there from forward to the last backward of a step; less the
    element that each of its groups then points to."""
    if not borrowed(reading, strategy).gathered:
        return 0
    root = [group for group in reading.groups if group.unit == 0]
    return sum((group.numel - 1) * group.compute.itemsize for group in root)


Readings = Callable[[int], list[dict[ShardingStrategy, Reading]]]


@pytest.fixture(scope="module")
def readings(run_ranks: RunRanks) -> Readings:
    """For a number of ranks, what each rank measured, when it is first asked for."""
    return cache(lambda num_ranks: run_ranks(num_ranks, measure_all))


@pytest.mark.full(short=[f"{strategy!s}-2" for strategy in STRATEGIES])
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
def test_every_byte_that_is_held_is_in_a_formula(
    readings: Readings, strategy: ShardingStrategy, num_ranks: int
) -> None:
    for rank in readings(num_ranks):
        reading = rank[strategy]
        memory = reading.memory
        persistent = persistent_bytes(reading.groups, strategy)
        assert persistent == PersistentBytes(
            memory.compute_weight_bytes, memory.main_weight_bytes, memory.main_grad_bytes, reading.state_bytes
        )
        transient, passing = borrowed(reading, strategy), passing_bytes(reading.groups, strategy)
        assert memory.transient_peak_bytes == transient.total
        kept = transient.gathered - given_back(reading, strategy)
        assert reading.held_bytes == persistent.total + kept + passing.cast_grads
        assert reading.cleared_bytes == persistent.total - persistent.main_grad + kept
        # Deferring holds one whole gradient.
        deferring = persistent_bytes(reading.groups, strategy, deferred=True)
        assert reading.deferred_bytes == deferring.total - persistent.total
        # The peak of a step, beyond the model's own activations and gradients, as the same model unsharded has them.
        own = reading.unsharded_bytes + passing.local_sum + passing.cast_grads + given_back(reading, strategy)
        least = transient.buckets + persistent.main_grad
        most = least + transient.scratch
        assert least <= reading.later_bytes <= most + own
        assert least + transient.gathered <= reading.first_bytes <= most + transient.gathered + own


def _odd_memory(strategy: int) -> tuple[tuple[GroupFootprint, ...], MemoryUse, int]:
    case = MODEL_CASES["scalars"]
    model = case.build()
    optimizer = torch.optim.AdamW(model.parameters())
    model, optimizer = fully_shard(
        model, optimizer, zero_dp_strategy=strategy, fsdp_unit_modules=list(case.unit_classes)
    )
    for _ in range(2):
        case.loss(model, case.make_batch(4, torch.Generator())).backward()
        optimizer.step()
        optimizer.zero_grad()
    return footprints_of(model), model.memory(), _state_bytes(optimizer)


@pytest.mark.full(short=["3"])
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_padding_costs_what_the_formula_says_but_the_optimizer_keeps_no_state_for_it(
    run_ranks: RunRanks, num_ranks: int
) -> None:
    params = list(MODEL_CASES["scalars"].build().parameters())
    numel = sum(param.numel() for param in params)
    scalars = sum(param.dim() == 0 for param in params)  # every rank holds these whole
    for strategy in STRATEGIES:
        results = run_ranks(num_ranks, _odd_memory, int(strategy))
        for groups, memory, _ in results:
            persistent = persistent_bytes(groups, strategy)
            assert memory.persistent_bytes == persistent.total - persistent.optimizer
            scratch = exchange_scratch_bytes(groups, strategy)
            assert memory.transient_peak_bytes == transient_bytes(groups, strategy, scratch_bytes=scratch).total
        state_numel = num_ranks * numel if strategy == ShardingStrategy.no_shard else numel + (num_ranks - 1) * scalars
        assert sum(state_bytes for *_, state_bytes in results) == 8 * state_numel
