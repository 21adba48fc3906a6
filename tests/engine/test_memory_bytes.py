"""What one rank holds, to the byte, against the formulas of `tests.support.formulas`."""

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from megatron_fsdp import MixedPrecisionPolicy
from megatron_fsdp.config.ddp_config import ShardingStrategy
from tests.support.arrangements import mesh_of
from tests.support.case import adamw_above_noise, shard
from tests.support.counting import LiveBytes, held_bytes
from tests.support.formulas import (
    PersistentBytes,
    exchange_scratch_bytes,
    footprints_of,
    passing_bytes,
    persistent_bytes,
    transient_bytes,
)
from tests.support.on_ranks import on_ranks
from tests.support.zoo import tower_case, tower_loss

pytestmark = pytest.mark.unmerged

BF16, FP32 = torch.bfloat16, torch.float32
STRATEGIES = list(ShardingStrategy)
TOWERS = {dtype: tower_case(dtype=dtype) for dtype in (BF16, FP32)}
POLICIES = ((FP32, MixedPrecisionPolicy()), (BF16, MixedPrecisionPolicy(main_grads_dtype=FP32, grad_comm_dtype=BF16)))


def peak_of_backward(model: nn.Module, x: torch.Tensor) -> int:
    """Of a tower, with its forward."""
    with LiveBytes() as live:
        tower_loss(model, x).backward()
    return live.peak_bytes


def peak_of_unsharded(model: nn.Module, x: torch.Tensor) -> int:
    """Of a model that lets go of each gradient at once."""
    for param in model.parameters():
        param.register_post_accumulate_grad_hook(lambda param: setattr(param, "grad", None))
    return peak_of_backward(model, x)


def _state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of the local parts of everything but the 0-d counters of steps."""
    found = [value for state in optimizer.state.values() for key, value in state.items() if key != "step"]
    return sum((value.to_local() if isinstance(value, DTensor) else value).nbytes for value in found)


@pytest.mark.full(short=["3-4", "1-2"])
@pytest.mark.parametrize(("strategy", "num_ranks"), list(zip(STRATEGIES, [4, 2, 2, 4], strict=True)), ids=str)
@on_ranks()
def test_every_byte_that_is_held_is_in_a_formula(strategy: ShardingStrategy, num_ranks: int) -> None:
    """Under a policy which is the other one on four ranks than on two; counters of steps are left out."""
    dtype, policy = POLICIES[(int(strategy) + num_ranks // 2) % 2]
    x, mesh = torch.randn(2, 16, dtype=dtype), mesh_of((num_ranks,), ("dp",))
    unsharded_bytes = peak_of_unsharded(TOWERS[dtype].build(), x)
    before = held_bytes()
    options = {"zero_dp_strategy": int(strategy), "mixed_precision_policy": policy}
    model, optimizer = shard(TOWERS[dtype], adamw_above_noise, device_mesh=mesh, dp_shard_dim="dp", **options)
    peaks = []
    for _ in range(3):
        optimizer.zero_grad()
        peaks.append(peak_of_backward(model, x))
        optimizer.step()
    counters = sum(state["step"].nbytes for state in optimizer.state.values())
    held = held_bytes() - before - counters
    optimizer.zero_grad()
    cleared = held_bytes() - before - counters
    with model.no_sync():
        tower_loss(model, x).backward()
    deferred = held_bytes() - before - counters - cleared

    groups, memory = footprints_of(model), model.memory()
    persistent, passing = persistent_bytes(groups, strategy), passing_bytes(groups, strategy)
    assert persistent == PersistentBytes(
        memory.compute_weight_bytes, memory.main_weight_bytes, memory.main_grad_bytes, _state_bytes(optimizer)
    )
    scratch = exchange_scratch_bytes(groups, strategy)
    transient = transient_bytes(groups, strategy, scratch_bytes=scratch)
    assert memory.transient_peak_bytes == transient.total
    # Gathered weights are there until the last backward of a step; then each group of the root, and of the units that
    # were in the two slots, points to one element.
    last = [group.compute.itemsize for group in groups if group.unit <= 2]
    kept = sum(last) if transient.gathered else 0
    assert held == persistent.total + kept + passing.cast_grads
    assert cleared == persistent.total - persistent.main_grad + kept
    # Deferring holds one whole gradient.
    assert deferred == persistent_bytes(groups, strategy, deferred=True).total - persistent.total
    # The peak of a step, beyond the model's own activations and gradients, as the same model unsharded has them.
    own = unsharded_bytes + passing.local_sum + passing.cast_grads + transient.gathered - kept
    least = transient.buckets + persistent.main_grad
    most = least + transient.scratch
    assert least <= peaks[2] <= most + own
    assert least + transient.gathered <= peaks[0] <= most + transient.gathered + own
