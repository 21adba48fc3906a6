"""Simulate one rank of a job of any size: the real engine, fake tensors, and collectives that send nothing.

    with simulated_model(build, num_ranks=1024, rank=5, zero_dp_strategy=3) as simulated:
        print(simulated.model.memory())

Nothing is computed and no memory is taken for tensors, so that a large model is wrapped, and steps, in seconds. Shapes,
dtypes, buffers, their sizes and what would be sent are those of the rank that is simulated; values do not exist.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from megatron_fsdp.comm.collectives import SIMULATED, real_values
from megatron_fsdp.errors import ConfigurationError
from megatron_fsdp.fully_shard import fully_shard, fully_shard_model
from megatron_fsdp.megatron_fsdp import MegatronFSDP
from megatron_fsdp.wrap.meta_init import allocate

BACKENDS = ("gloo", "nccl")
"""The back ends that can be simulated."""

DEFAULT_DIM = "dp"
"""The name of the mesh dimension if only a number of ranks is given."""

_HYBRID_DIM = "hybrid_of_simulated"


@dataclass(frozen=True)
class SimulatedModel:
    """A wrapped model of one simulated rank."""

    model: MegatronFSDP  # wrapped by the real engine; its tensors are fake
    optimizer: torch.optim.Optimizer | None  # connected to it, where one was asked for
    mesh: DeviceMesh  # the one that it is sharded over


@contextmanager
def simulated_ranks(sizes: int | Mapping[str, int], *, rank: int = 0, backend: str = "gloo") -> Iterator[DeviceMesh]:
    """Simulate one rank of many inside the block: tensors are fake, and collectives move nothing.

    Args:
        sizes: Ranks; or the size of each mesh dimension by its name, outermost first.
        rank: Which one this process is.
        backend: "gloo" or "nccl": whose collectives the engine chooses (gloo's reduce-scatter is built from an
            all-to-all, which takes scratch memory). The tensors are on the CPU either way.

    Yields:
        The mesh of all ranks, with the dimension "dp" where only a number was given. What is cut out of it or
        flattened in the block has to be made `with real_values():` (of `megatron_fsdp.comm.collectives`).

    Raises:
        ConfigurationError: A size, the rank or the back end is impossible, or this process has process groups.
    """
    shape = {DEFAULT_DIM: sizes} if isinstance(sizes, int) else dict(sizes)
    _check(shape, rank, backend)
    _register(SIMULATED + backend)
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group(SIMULATED + backend, store=FakeStore(), rank=rank, world_size=prod(shape.values()))
    try:
        mesh = init_device_mesh("cpu", tuple(shape.values()), mesh_dim_names=tuple(shape))
        with FakeTensorMode(allow_non_fake_inputs=True):
            yield mesh
    finally:
        dist.destroy_process_group()


@contextmanager
def simulated_model(
    build: Callable[[], nn.Module],
    *,
    num_ranks: int | Mapping[str, int],
    rank: int = 0,
    backend: str = "gloo",
    build_optimizer: Callable[[Any], torch.optim.Optimizer] | None = None,
    **arguments: Any,
) -> Iterator[SimulatedModel]:
    """Build and shard a model as one rank of many; inside the block it can be called, differentiated and stepped.

    Args:
        build: () -> the model; called as by `built_without_memory`.
        num_ranks: Ranks, or the size of each mesh dimension by its name, outermost first.
        rank: Which one to be.
        backend: As in `simulated_ranks`.
        build_optimizer: (parameters) -> an optimizer, connected to the model; None: there is none.
        arguments: Further arguments of `fully_shard_model`. `device_mesh` is made here, `dp_shard_dim` is the last
            dimension that nothing else names unless it is given, and with `dp_outer_dim` the group of all data-parallel
            ranks is made too.

    Raises:
        ConfigurationError: As `simulated_ranks` and `fully_shard_model`, or an argument makes no sense for one process.
    """
    _refuse(arguments)
    with simulated_ranks(num_ranks, rank=rank, backend=backend) as mesh:
        model = built_without_memory(build)
        given = {"device_mesh": mesh, "verify_ranks": False, **_dimensions(mesh, arguments), **arguments}
        if build_optimizer is None:
            yield SimulatedModel(fully_shard_model(model, **given), None, mesh)
        else:
            wrapped, optimizer = fully_shard(model, build_optimizer(model.parameters()), **given)
            yield SimulatedModel(wrapped, optimizer, mesh)


def built_without_memory(build: Callable[[], nn.Module]) -> nn.Module:
    """Build a model on the meta device inside `simulated_ranks`, then make its tensors fake CPU tensors.

    torch refuses to cast some modules that are built of fake tensors, so models are built on the meta device first.
    Tensors that are built on another device on purpose stay as they are.
    """
    with real_values(), torch.device("meta"):
        model = build()
    allocate(model, torch.device("cpu"))
    return model


def _check(shape: Mapping[str, int], rank: int, backend: str) -> None:
    wrong = {name: size for name, size in shape.items() if size < 1}
    num_ranks = prod(shape.values())
    problems = [
        (not shape or bool(wrong), f"sizes={dict(shape)}: give every mesh dimension at least one rank"),
        (not 0 <= rank < num_ranks, f"rank={rank} is not one of {num_ranks} ranks; give 0 to {num_ranks - 1}"),
        (backend not in BACKENDS, f"backend={backend!r} cannot be simulated; give one of {', '.join(BACKENDS)}"),
        (
            dist.is_available() and dist.is_initialized(),
            "this process has process groups already, and a simulated rank needs its own; simulate in another process",
        ),
    ]
    for is_wrong, what in problems:
        if is_wrong:
            raise ConfigurationError(what)


def _refuse(arguments: Mapping[str, Any]) -> None:
    reasons = {
        "device_mesh": "is made here; give the sizes of its dimensions as num_ranks",
        "device": "has no effect on tensors without memory; leave it out",
        "verify_ranks": "compares ranks, and there is only one; leave it out",
    }
    for name, why in reasons.items():
        if arguments.get(name) not in (None, False):
            raise ConfigurationError(f"{name}={arguments[name]!r}: a simulated rank's {why}")


@real_values()
def _dimensions(mesh: DeviceMesh, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Derive the dimension arguments of `fully_shard_model` from the names of the mesh's dimensions."""
    outer, shard = arguments.get("dp_outer_dim"), arguments.get("dp_shard_dim")
    names = mesh.mesh_dim_names or ()
    if shard is None:
        free = [name for name in names if name not in (outer, arguments.get("tp_dim"))]
        if not free:
            raise ConfigurationError(f"the dimensions {names} leave none to shard over; name one more in num_ranks")
        shard = free[-1]
    found: dict[str, Any] = {"dp_shard_dim": shard}
    if outer is not None and arguments.get("hybrid_fsdp_group") is None:
        for name in (outer, shard):
            if name not in names:
                raise ConfigurationError(f"{name!r} is not one of the dimensions {names}; name it in num_ranks")
        found["hybrid_fsdp_group"] = mesh[outer, shard]._flatten(_HYBRID_DIM).get_group()
    return found


def _register(name: str) -> None:
    """Register a backend that moves nothing with torch, once per process."""
    if hasattr(dist.Backend, name.upper()):
        return
    from torch.testing._internal.distributed.fake_pg import _create_fake_pg

    dist.Backend.register_backend(name, _create_fake_pg, extended_api=True, devices=["cpu"])
