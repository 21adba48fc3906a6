"""What the ranks of any arrangement would hold of some tensors, without ranks: the engine's own planning.

Only meshes and process groups are stand-ins; layouts, placements and descriptions come from the code that shards.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from megatron_fsdp.comm.axis import Axis, Traffic
from megatron_fsdp.config.engine_options import EngineOptions
from megatron_fsdp.config.strategy import ShardingStrategy
from megatron_fsdp.engine.group_plan import Domain, Sharding
from megatron_fsdp.sharding.shards import ShardDescription
from megatron_fsdp.sharding.units import GroupKey, ParameterInfo, group_parameters

_TENSOR_PARALLEL = {0: "column", 1: "row"}


@dataclass(frozen=True)
class Arrangement:
    """Ranks and how they share a model.

    Attributes:
        inner: Ranks of the sharding axis.
        outer: Ranks of the outer axis; 0: there is none.
        tensor: Tensor-parallel ranks; 0: there are none.
        strategy: 0 to 3.
        outer_strategy: 0 or 1.
    """

    inner: int
    outer: int = 0
    tensor: int = 0
    strategy: int = 3
    outer_strategy: int = 0

    @property
    def num_ranks(self) -> int:
        """Of all axes together."""
        return self.inner * max(self.outer, 1) * max(self.tensor, 1)


@dataclass(frozen=True)
class Tensors:
    """The tensors of a model.

    Attributes:
        shapes: Over all ranks.
        cuts: The dimension that tensor parallelism cuts, for each; None: its ranks hold the same. It must be divisible.
        frozen: Whether they are not trained.
    """

    shapes: tuple[tuple[int, ...], ...]
    cuts: tuple[int | None, ...]
    frozen: bool = False


class _Mesh:
    """As much of a DeviceMesh as planning looks at, seen from one place."""

    def __init__(self, sizes: Sequence[int], place: Sequence[int]) -> None:
        self.mesh = torch.zeros(tuple(sizes))
        self.ndim = len(sizes)
        self._place = tuple(place)

    def size(self) -> int:
        return self.mesh.numel()

    def get_coordinate(self) -> list[int]:
        return list(self._place)


def descriptions(tensors: Tensors, arrangement: Arrangement) -> list[list[ShardDescription]]:
    """For every rank what it holds of each tensor."""
    sizes = [size for size in (arrangement.outer, arrangement.inner, arrangement.tensor) if size]
    return [_on_rank(tensors, arrangement, sizes, at) for at in itertools.product(*(range(size) for size in sizes))]


def _on_rank(
    tensors: Tensors, arrangement: Arrangement, sizes: Sequence[int], at: Sequence[int]
) -> list[ShardDescription]:
    num_axes = len(sizes) - bool(arrangement.tensor)
    axes = tuple(Axis(None, place, size, Traffic()) for place, size in list(zip(at, sizes, strict=True))[:num_axes])
    tensor_mesh: Any = _Mesh([arrangement.tensor], [at[-1]]) if arrangement.tensor else None
    described: Any = _Mesh(sizes, at)
    domain = Domain(axes, ("dp_outer", "dp_shard")[-num_axes:], None, tensor_mesh, described)
    sharding = Sharding(
        EngineOptions(
            ShardingStrategy(arrangement.strategy),
            ShardingStrategy(arrangement.outer_strategy if arrangement.outer else 0),
        ),
        domain,
        None,
        torch.device("cpu"),
    )
    params = [_parameter(shape, cut, arrangement) for shape, cut in zip(tensors.shapes, tensors.cuts, strict=True)]
    infos = [
        ParameterInfo(str(index), tuple(param.shape), GroupKey(param.dtype, not tensors.frozen, False, not param.shape))
        for index, param in enumerate(params)
    ]
    found: dict[int, ShardDescription] = {}
    for spec in group_parameters(infos):
        indices = [int(info.name) for info in spec.parameters]
        plan = sharding.plan_group(spec, [params[index] for index in indices])
        found |= {index: plan.frame(position).description for position, index in enumerate(indices)}
    return [found[index] for index in range(len(infos))]


def _parameter(shape: tuple[int, ...], cut: int | None, arrangement: Arrangement) -> nn.Parameter:
    """This rank's part, marked as Megatron's tensor-parallel layers do."""
    local = list(shape)
    if cut is not None and arrangement.tensor:
        local[cut] //= arrangement.tensor
    param = nn.Parameter(torch.empty(local, device="meta"))
    if cut is not None:
        param._tensor_parallel_mode = _TENSOR_PARALLEL[cut]  # type: ignore[attr-defined]
    return param
