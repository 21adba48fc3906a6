"""Compares a plan with the real engine: the same rank, wrapped and stepped with fake tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

from megatron_fsdp.comm.axis import Traffic
from megatron_fsdp.megatron_fsdp import MegatronFSDP
from megatron_fsdp.plan.activations import call_model, scalar_loss
from megatron_fsdp.plan.planning import Plan
from megatron_fsdp.plan.simulate import SimulatedModel, simulated_model


@dataclass(frozen=True)
class Checked:
    """One figure of a plan beside that of the simulated run."""

    name: str
    planned: int
    simulated: int

    @property
    def agrees(self) -> bool:
        """Whether both figures are equal."""
        return self.planned == self.simulated


def check_by_simulation(plan: Plan, build: Callable[[], nn.Module], *, steps: bool = True) -> tuple[Checked, ...]:
    """Wrap the planned rank with the real engine under a process group that sends nothing, take two steps, and compare.

    The plan is one of data parallelism only, without recomputation. Without `steps` only what wrapping takes is
    compared.
    """
    setup = plan.setup
    sizes = {"dp_outer": setup.ranks.dp_outer, "dp_shard": setup.ranks.inner}
    if setup.ranks.dp_outer == 1:
        del sizes["dp_outer"]
    with simulated_model(
        build,
        num_ranks=sizes,
        rank=setup.device_rank,
        backend=setup.backend.value,
        build_optimizer=partial(_optimizer, setup.optimizer.name),
        zero_dp_strategy=int(setup.strategy),
        outer_dp_sharding_strategy=int(setup.outer_strategy),
        mixed_precision_policy=setup.policy,
        fsdp_unit_modules=plan.workload.unit_modules,
        overlap_grad_reduce=setup.overlap_grad_reduce,
        **({"dp_outer_dim": "dp_outer"} if "dp_outer" in sizes else {}),
    ) as simulated:
        memory = simulated.model.memory()
        held = plan.memory
        found = [
            Checked("compute weights", held.compute_weights, memory.compute_weight_bytes),
            Checked("main weights", held.main_weights, memory.main_weight_bytes),
            Checked("main gradients", held.main_gradients, memory.main_grad_bytes),
        ]
        if steps:
            found += _after_steps(plan, simulated)
    return tuple(found)


def _optimizer(name: str, params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Build an optimizer with the planned kind of state; its temporaries do not matter here."""
    trained = [param for param in params if param.requires_grad]
    if name.startswith("adamw"):
        return torch.optim.AdamW(trained, foreach=False)
    return torch.optim.SGD(trained, lr=0.1, momentum=0.9 if name == "momentum" else 0.0, foreach=False)


def _after_steps(plan: Plan, simulated: SimulatedModel) -> list[Checked]:
    before: dict[str, Traffic] = {}
    assert simulated.optimizer is not None
    for _ in range(2):
        before = simulated.model.traffic_by_axis()
        for _ in range(plan.setup.microbatches):
            _backward(plan, simulated.model)
        simulated.optimizer.step()
        simulated.optimizer.zero_grad()
    borrowed = simulated.model.memory().transient_peak_bytes
    found = [
        Checked("gathered weights, buckets and scratch", plan.step.borrowed_bytes, borrowed),
        Checked("optimizer", plan.memory.optimizer, _state_bytes(simulated.optimizer)),
    ]
    for axis, traffic in simulated.model.traffic_by_axis().items():
        sent = traffic.since(before[axis])
        planned = next((each for each in plan.traffic if each.axis == axis), None)
        found += [
            Checked(f"{axis}: gathers", planned.gathers if planned else 0, sent.gathers),
            Checked(f"{axis}: reductions", planned.reductions if planned else 0, sent.reductions),
            Checked(f"{axis}: bytes sent", planned.sent_bytes if planned else 0, sent.gather_bytes + sent.reduce_bytes),
        ]
    return found


def _backward(plan: Plan, model: MegatronFSDP) -> None:
    def without_values(leaf: Any) -> Any:
        return torch.empty_like(leaf, device="cpu") if isinstance(leaf, torch.Tensor) else leaf

    output = call_model(model, tree_map(without_values, plan.workload.inputs))
    scalar_loss(output, plan.workload.loss_fn).backward()


def _state_bytes(optimizer: torch.optim.Optimizer) -> int:
    values = [value for state in optimizer.state.values() for value in state.values()]
    return sum(getattr(value, "_local_tensor", value).nbytes for value in values)
