"""Plans of ranks that share memory: what a step borrows there, against real ranks."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from megatron_fsdp import MixedPrecisionPolicy, fully_shard
from megatron_fsdp.errors import ConfigurationError
from megatron_fsdp.plan.front import plan
from megatron_fsdp.shm.futex import has_futex
from tests.conftest import RunRanks
from tests.support.tower import FEATURES, Floor, Tower

pytestmark = pytest.mark.skipif(not has_futex(), reason="needs Linux on x86-64")
POLICY = MixedPrecisionPolicy(main_grads_dtype=torch.float32, grad_comm_dtype=torch.bfloat16)
WIDTHS = {"equal": (32, 32, 32), "wide first": (96, 32, 40, 32), "one": (48,)}


def build(widths: tuple[int, ...]) -> nn.Module:
    return Tower(hidden=widths)


def _measured(widths: tuple[int, ...], policy: MixedPrecisionPolicy | None) -> list[int]:
    torch.manual_seed(0)
    module = build(widths)
    options: dict[str, Any] = {} if policy is None else {"mixed_precision_policy": policy}
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
    model, optimizer = fully_shard(module, optimizer, fsdp_unit_modules=[Floor], **options)
    for _ in range(2):
        model(torch.ones(3, FEATURES)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    memory = model.memory()
    own = memory.compute_weight_bytes
    return [memory.transient_peak_bytes, memory.gathered_bytes, memory.copied_bytes, memory.shared_bytes - own]


@pytest.mark.parametrize("policy", [None, POLICY], ids=["fp32", "bf16 on the wire"])
@pytest.mark.parametrize("widths", WIDTHS.values(), ids=WIDTHS.keys())
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_a_step_borrows_what_was_planned(
    run_ranks: RunRanks, num_ranks: int, widths: tuple[int, ...], policy: MixedPrecisionPolicy | None
) -> None:
    found, over_gloo = (
        plan(
            partial(build, widths),
            num_ranks,
            backend=backend,
            policy=policy,
            fsdp_unit_modules=[Floor],
            inputs=torch.empty(3, FEATURES, device="meta"),
            loss_fn=torch.sum,
        )
        for backend in ("shared_memory", "gloo")
    )
    at_rest = found.step.moments[-1]
    for measured in run_ranks(num_ranks, _measured, widths, policy):
        assert measured == [found.step.borrowed_bytes, at_rest.gathered_bytes, 0, at_rest.bucket_bytes]
    assert at_rest.gathered_bytes == 0
    assert found.step.borrowed_bytes < over_gloo.step.borrowed_bytes


@pytest.mark.parametrize("other", [{"strategy": 2}, {"ranks": {"dp_shard": 2, "dp_outer": 2}}])
def test_what_depends_on_how_far_ranks_get_ahead_is_not_planned(other: dict[str, Any]) -> None:
    arguments: dict[str, Any] = {"ranks": 4, "inputs": torch.empty(3, FEATURES, device="meta"), "loss_fn": torch.sum}
    with pytest.raises(ConfigurationError, match='"shared_memory" is planned for strategy "optim_grads_params"'):
        plan(partial(build, (32,)), backend="shared_memory", **{**arguments, **other})
