"""How ranks are arranged: their meshes and groups, who computes which data, and who holds which part of the model."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Placement, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from tests.support.worker_pool import ON_DROPPED_GROUPS
from tests.support.zoo import Batch

Values = Mapping[str, Tensor | None]


def _part_of_rank(whole: Batch) -> Batch:
    return whole.part(dist.get_rank(), dist.get_world_size())


def _as_it_is(given: Any) -> Any:
    return given


@dataclass(frozen=True)
class Arrangement:
    """What one rank does beside plain data parallelism over all ranks; all functions run on the rank."""

    name: str = "flat"
    arguments: Callable[[], dict[str, Any]] = dict  # what `fully_shard` is told of meshes and groups
    place: Callable[[nn.Module], None] = _as_it_is  # leaves a rank, in place, what it computes with, before sharding
    part: Callable[[Batch], Batch] = _part_of_rank  # of the batch of all ranks
    whole: Callable[[Values], Values] = _as_it_is  # collective: the whole model, of what data-parallel ranks hold


FLAT = Arrangement()


@cache
def mesh_of(shape: tuple[int, ...], names: tuple[str, ...]) -> DeviceMesh:
    """The CPU mesh over all ranks, the same object at every call of a test."""
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


@cache
def flattened(mesh: DeviceMesh, names: tuple[str, ...], flat_name: str) -> DeviceMesh:
    """One axis made of several, which the root mesh then knows by a name of its own."""
    return mesh[names]._flatten(flat_name)


ON_DROPPED_GROUPS.extend((mesh_of.cache_clear, flattened.cache_clear))


def arguments_of(mesh: DeviceMesh) -> dict[str, Any]:
    """What `fully_shard` is told of a mesh with the axis "dp_shard", and maybe "dp_outer" and "tp"."""
    found: dict[str, Any] = {"device_mesh": mesh, "dp_shard_dim": "dp_shard"}
    names = mesh.mesh_dim_names or ()
    if "tp" in names:
        found["tp_dim"] = "tp"
    if "dp_outer" in names:
        group = flattened(mesh, ("dp_outer", "dp_shard"), "dp_all").get_group()
        found |= {"dp_outer_dim": "dp_outer", "hybrid_fsdp_group": group}
    return found


def hybrid_arguments(outer: int, inner: int) -> dict[str, Any]:
    return arguments_of(mesh_of((outer, inner), ("dp_outer", "dp_shard")))


def hybrid(outer: int, inner: int) -> Arrangement:
    """Hybrid sharding on `outer * inner` ranks."""
    return Arrangement(f"hybrid {outer}x{inner}", partial(hybrid_arguments, outer, inner))


Divide = Callable[[nn.Module, DeviceMesh], None]


def tensor_mesh(outer: int | None = None) -> DeviceMesh:
    """Data parallel, with outer ranks on a second axis, times tensor parallel 2 over all ranks."""
    if outer is None:
        return mesh_of((dist.get_world_size() // 2, 2), ("dp_shard", "tp"))
    return mesh_of((outer, dist.get_world_size() // (2 * outer), 2), ("dp_outer", "dp_shard", "tp"))


def tensor_arguments(outer: int | None = None) -> dict[str, Any]:
    return arguments_of(tensor_mesh(outer))


def _part_of_pair(whole: Batch) -> Batch:
    return whole.part(dist.get_rank() // 2, dist.get_world_size() // 2)


def place_tensors(divide: Divide, model: nn.Module, outer: int | None = None) -> None:
    """Leave a rank its part of every tensor."""
    divide(model, tensor_mesh(outer)["tp"])


def tensor_parallel(divide: Divide, outer: int | None = None) -> Arrangement:
    """Tensor parallelism in pairs; below hybrid sharding where outer ranks are given."""
    name = f"tensor parallel, {divide.__name__}, outer ranks {outer}"
    place = partial(place_tensors, divide, outer=outer)
    return Arrangement(name, partial(tensor_arguments, outer), place, _part_of_pair)


def divide_tensors(model: nn.Module, mesh: DeviceMesh) -> None:
    """Divide embedding, attention, MLP and head; norms and positions stay plain tensors, the same on all ranks."""
    parallelize_module(model, mesh, _plan(Replicate()))


def divide_tensors_and_sequences(model: nn.Module, mesh: DeviceMesh) -> None:
    """The same, with activations between the layers divided along the tokens; all parameters are DTensors."""
    plan = _plan(Shard(1))
    plan |= {"positions": plan["tokens"]}
    plan |= {name: SequenceParallel() for name in ("norm", "blocks.*.attention_norm", "blocks.*.mlp_norm")}
    whole_input = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
    plan |= {"blocks.*.attention": whole_input, "blocks.*.mlp": whole_input}
    parallelize_module(model, mesh, plan)


def _plan(between: Placement) -> dict[str, ParallelStyle]:
    """With activations between the layers placed like this."""
    columns, rows = ("attention.q", "attention.k", "attention.v", "mlp.up"), ("attention.out", "mlp.down")
    return {
        "tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=between),
        "head": ColwiseParallel(input_layouts=between, output_layouts=Replicate()),
        **{f"blocks.*.{name}": ColwiseParallel() for name in columns},
        **{f"blocks.*.{name}": RowwiseParallel(output_layouts=between) for name in rows},
    }
