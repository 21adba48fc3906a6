"""Plans against the real runtime, stepped with fake tensors as one rank of many: every figure is the same."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_map

from megatron_fsdp import MixedPrecisionPolicy
from megatron_fsdp.config.engine_options import MemoryOptions, WeightAllocator
from megatron_fsdp.describe.text import in_bytes
from megatron_fsdp.plan.activations import call_model, scalar_loss
from megatron_fsdp.plan.planning import Plan, plan
from megatron_fsdp.plan.report import facts, plan_dict
from megatron_fsdp.plan.simulate import simulated_model
from tests.plan.test_activations import mean_square
from tests.support.zoo import TOWER_FEATURES, Block, Floor, TinyTransformer, Tower

WIDE = MixedPrecisionPolicy(main_grads_dtype=torch.float32, grad_comm_dtype=torch.bfloat16)


def tower(dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    return Tower(hidden=(48, 32, 40, 32, 56)).to(dtype)


def odd() -> nn.Module:
    return TinyTransformer(layers=4, tied=True)


INPUTS: dict[Callable[[], nn.Module], Callable[[], torch.Tensor]] = {
    tower: lambda: torch.empty(6, TOWER_FEATURES, dtype=torch.bfloat16, device="meta"),
    odd: lambda: torch.empty(3, 8, dtype=torch.long, device="meta"),
}


def planned(build: Callable[[], nn.Module], ranks: dict[str, int], strategy: int = 3, **options: Any) -> Plan:
    units = [Floor] if build is tower else [Block]
    return plan(build, ranks, strategy, inputs=INPUTS[build](), loss_fn=mean_square, fsdp_unit_modules=units, **options)


def figures(found: Plan) -> dict[str, Any]:
    """What a plan says of the bytes that a rank holds and borrows, and of gathers, reductions and bytes by axis."""
    held = found.memory
    sent = {axis.axis: (axis.gathers, axis.reductions, axis.sent_bytes) for axis in found.traffic}
    weights = held.compute_weights, held.main_weights, held.main_gradients
    borrowed = found.step.borrowed_bytes
    return {"weights": weights, "optimizer": held.optimizer, "borrowed": borrowed, "sent": sent}


def figures_of_the_engine(found: Plan, build: Callable[[], nn.Module]) -> dict[str, Any]:
    """What one rank of the planned job holds, borrows and sends in its second step."""
    setup = found.setup
    sizes = {"dp_outer": setup.ranks.dp_outer, "dp_shard": setup.ranks.inner}
    if setup.ranks.dp_outer == 1:
        del sizes["dp_outer"]
    with simulated_model(
        build,
        num_ranks=sizes,
        rank=setup.device_rank,
        backend=setup.backend,
        build_optimizer=partial(_optimizer, setup.optimizer.name),
        zero_dp_strategy=int(setup.strategy),
        outer_dp_sharding_strategy=int(setup.outer_strategy),
        mixed_precision_policy=setup.policy,
        fsdp_unit_modules=found.workload.unit_modules,
        **({"dp_outer_dim": "dp_outer"} if "dp_outer" in sizes else {}),
    ) as simulated:
        model, optimizer = simulated.model, simulated.optimizer
        assert optimizer is not None
        inputs = tree_map(lambda leaf: torch.empty_like(leaf, device="cpu"), found.workload.inputs)
        for _ in range(2):
            before = model.traffic_by_axis()
            for _ in range(setup.microbatches):
                scalar_loss(call_model(model, inputs), found.workload.loss_fn).backward()
            optimizer.step()
            optimizer.zero_grad()
        memory = model.memory()
        sent = {axis: traffic.since(before[axis]) for axis, traffic in model.traffic_by_axis().items()}
        state = [value for each in optimizer.state.values() for value in each.values()]
    rows = {axis: (one.gathers, one.reductions, one.gather_bytes + one.reduce_bytes) for axis, one in sent.items()}
    return {
        "weights": (memory.compute_weight_bytes, memory.main_weight_bytes, memory.main_grad_bytes),
        "optimizer": sum(getattr(value, "_local_tensor", value).nbytes for value in state),
        "borrowed": memory.transient_peak_bytes,
        "sent": {axis: row for axis, row in rows.items() if any(row)},
    }


def _optimizer(name: str, params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """An optimizer with the planned kind of state; its temporaries do not matter here."""
    trained = [param for param in params if param.requires_grad]
    if name.startswith("adamw"):
        return torch.optim.AdamW(trained, foreach=False)
    return torch.optim.SGD(trained, lr=0.1, momentum=0.9 if name == "momentum" else 0.0, foreach=False)


def _id(value: Any) -> str:
    return value.__name__ if callable(value) else "wide" if value is WIDE else str(value)


SHORT = ["odd-{'dp_shard': 5}-0-wide-1-3-gloo", "tower-{'dp_shard': 8, 'dp_outer': 4}-0-wide-2-0-gloo"]


@pytest.mark.full(short=SHORT)
@pytest.mark.parametrize(
    ("build", "ranks", "outer", "policy", "microbatches", "strategy", "backend"),
    [
        (tower, {"dp_shard": 1}, 0, None, 1, 2, "gloo"),
        (odd, {"dp_shard": 64}, 0, None, 1, 1, "nccl"),
        (odd, {"dp_shard": 5}, 0, WIDE, 1, 3, "gloo"),
        (tower, {"dp_shard": 8, "dp_outer": 4}, 0, WIDE, 2, 0, "gloo"),
        (tower, {"dp_shard": 4, "dp_outer": 16}, 1, None, 2, 3, "nccl"),
        (odd, {"dp_shard": 4, "dp_outer": 3}, 0, None, 2, 2, "nccl"),
    ],
    ids=_id,
)
def test_a_plan_is_what_the_engine_does(
    build: Callable[[], nn.Module],
    ranks: dict[str, int],
    outer: int,
    policy: MixedPrecisionPolicy | None,
    microbatches: int,
    strategy: int,
    backend: str,
) -> None:
    options = {"outer_strategy": outer, "policy": policy, "backend": backend, "microbatches": microbatches}
    found = planned(build, ranks, strategy, optimizer="adamw-loop", **options)
    assert figures(found) == figures_of_the_engine(found, build)
    assert ("dp_outer" in figures(found)["sent"]) is ("dp_outer" in ranks)


@pytest.mark.full(short=["momentum"])
@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "adamw"])
def test_state_of_optimizers_is_what_torch_keeps(optimizer: str) -> None:
    found = planned(tower, {"dp_shard": 4}, optimizer=optimizer, backend="gloo")
    assert figures(found) == figures_of_the_engine(found, tower)


@pytest.mark.parametrize("strategy", [1, 3])
def test_the_planned_pool_is_that_of_the_engine(strategy: int) -> None:
    ranks, options = {"dp_shard": 4}, {"fsdp_unit_modules": [Floor], "nccl_ub": True}
    with (
        pytest.warns(UserWarning, match="nccl_ub"),
        simulated_model(tower, num_ranks=ranks, backend="gloo", zero_dp_strategy=strategy, **options) as simulated,
    ):
        told = simulated.model.describe().memory
    memory = MemoryOptions(WeightAllocator(told.allocator), message_bytes=0, is_persistent=True)
    found = planned(tower, ranks, strategy, backend="gloo", memory=memory)
    assert plan_dict(found)["memory"]["pool"] == list(told.pool)
    assert found.model.memory.pool is not None
    assert found.model.memory.pool.num_bytes == told.pool_bytes
    row = dict(facts(found))["pool"]
    assert row.startswith(f"{in_bytes(told.pool_bytes)} are taken when wrapping")
    assert "root bucket" in row
    assert "pool" not in dict(facts(planned(tower, ranks, strategy, backend="gloo")))
