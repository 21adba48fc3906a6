"""Train small mixture-of-experts models with divided experts on real ranks, and the same on one process."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy, fully_shard

from megatron_fsdp.automodel.architecture import find_layers
from megatron_fsdp.automodel.expert_parallel import parallelize_experts, shard_experts
from tests.automodel.small_models import build
from tests.automodel.training import Trained, train
from tests.support.arrangements import mesh_of
from tests.support.parity import assert_equal_tensors

KINDS = ("mixtral", "qwen2_moe", "qwen3_moe", "deepseek_v3")


@dataclass(frozen=True)
class Case:
    """One run.

    Attributes:
        kind: Of model.
        ep: Expert-parallel ranks; the others of the world are ep_shard.
        rows: Rows of the batch on each rank; None: equal shares of four.
        changes: Of the config.
        edit: Changes the whole model in place before it is divided.
        recompute: How activations are recomputed; a key of `RECOMPUTE`.
        divisor: What the manager would give, if not the number of ranks.
    """

    kind: str
    ep: int
    rows: Sequence[int] | None = None
    changes: Mapping[str, Any] = field(default_factory=dict)
    edit: Callable[[Any], None] | None = None
    recompute: str = "not"
    divisor: int | None = None


def expert_mesh(ep: int) -> DeviceMesh:
    """The mesh of experts over all ranks."""
    return mesh_of((dist.get_world_size() // ep, ep), ("ep_shard", "ep"))


def wrap_blocks(model: Any) -> None:
    """Recompute every block that has a router and experts."""
    for layer in find_layers(model).modules():
        layer.mlp = checkpoint_wrapper(layer.mlp, checkpoint_impl=CheckpointImpl.NO_REENTRANT)


RECOMPUTE: dict[str, Callable[[Any], None]] = {
    "not": lambda model: None,  # noqa: ARG005
    "layers": lambda model: model.activation_checkpointing_enable(),
    "layers, reentrant": lambda model: model.activation_checkpointing_enable({"use_reentrant": True}),
    "blocks": wrap_blocks,
}


def divide(model: nn.Module, ep: int, divisor: int | None = None, recompute: str = "not") -> list[str]:
    """Divide experts and shard everything, as the manager does."""
    world = dist.get_world_size()
    mesh = expert_mesh(ep)
    names = parallelize_experts(model, mesh["ep"])
    RECOMPUTE[recompute](model)
    policy = MixedPrecisionPolicy()
    shard_experts(
        model,
        names,
        mesh["ep_shard"],
        mp_policy=policy,
        offload_policy=OffloadPolicy(),
        reshard_after_forward=True,
        gradient_divisor=divisor or world,
    )
    dense = mesh_of((world,), ("dp_shard",))
    for layer in find_layers(model).modules():
        fully_shard(layer, mesh=dense, mp_policy=policy)
    fully_shard(model, mesh=dense, mp_policy=policy, reshard_after_forward=False)
    return names


def train_divided(case: Case) -> Trained:
    """A case on the ranks of this world."""
    world = dist.get_world_size()
    model = build(case.kind, **case.changes)
    if case.edit is not None:
        case.edit(model)
    divide(model, case.ep, case.divisor, case.recompute)
    return train(model, rows=case.rows or [4 // world] * world)


def train_whole(case: Case) -> Trained:
    """The case on one process."""
    model = build(case.kind, **case.changes)
    if case.edit is not None:
        case.edit(model)
    return train(model, rows=sum(case.rows or [4]), data_rank=0, data_ranks=1)


def check_same(found: Trained, wanted: Any) -> None:
    """Assert that losses, all gradients and all updates are those of one process.

    Sums of float32 are grouped in another way on ranks, hence tolerances. AdamW divides by the root of squares, so
    what differs in a gradient near zero shows in the parameter: 1% of a step (the learning rate, 1e-2) is allowed.
    """
    torch.testing.assert_close(found.losses, wanted.losses, rtol=1e-5, atol=0)
    for step in range(len(wanted.losses)):
        assert_equal_tensors(found.gradients[step], wanted.gradients[step], rtol=1e-4, atol=1e-6)
        assert_equal_tensors(found.parameters[step], wanted.parameters[step], rtol=1e-4, atol=1e-4)
