"""Sorting the parameters of one unit into groups that can share a flat buffer."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from megatron_fsdp.errors import ConfigurationError
from megatron_fsdp.layout import Granularity


@dataclass(frozen=True)
class ParameterInfo:
    """What grouping and layout need to know of one parameter.

    Attributes:
        name: Fully qualified name in the model.
        shape: Shape in the model, in elements per dimension; ``()`` for a scalar.
        dtype: Dtype in the model.
        requires_grad: Whether it is trained.
        is_expert: Whether it belongs to an expert, which is replicated over the expert group and not the dense one.
        sums_in_fp32: Whether its gradients are accumulated in float32, whatever they travel in.
        granularity: The pieces that sharding must not cut.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    is_expert: bool = False
    sums_in_fp32: bool = False
    granularity: Granularity = Granularity.ROWS

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class GroupKey:
    """What the parameters of one group have in common.

    Attributes:
        dtype: Dtype in the model.
        requires_grad: Whether they are trained.
        is_expert: Whether they belong to experts.
        is_scalar: Whether they have no dimension to shard, so that every rank holds them whole.
        sums_in_fp32: Whether their gradients are accumulated in float32, whatever they travel in.
    """

    dtype: torch.dtype
    requires_grad: bool
    is_expert: bool
    is_scalar: bool = False
    sums_in_fp32: bool = False


@dataclass(frozen=True)
class ParameterGroupSpec:
    """The parameters of one unit that share a flat buffer.

    Attributes:
        key: What they have in common.
        parameters: The parameters, in the order in which they were given.
    """

    key: GroupKey
    parameters: tuple[ParameterInfo, ...]


def key_of(parameter: ParameterInfo) -> GroupKey:
    """What has to be the same for another parameter to share a flat buffer with this one."""
    return GroupKey(
        parameter.dtype, parameter.requires_grad, parameter.is_expert, not parameter.shape, parameter.sums_in_fp32
    )


def group_parameters(parameters: Sequence[ParameterInfo]) -> tuple[ParameterGroupSpec, ...]:
    """Put parameters together that agree in dtype, requires_grad, is_expert, sums_in_fp32 and in having dimensions.

    Args:
        parameters: The parameters of one unit, in model order.

    Returns:
        The groups in the order in which their first parameter appears; inside a group the given order is kept.

    Raises:
        ConfigurationError: Two parameters have the same name.
    """
    members: dict[GroupKey, list[ParameterInfo]] = {}
    names: set[str] = set()
    for parameter in parameters:
        if parameter.name in names:
            raise ConfigurationError(
                f"parameter {parameter.name!r} is given twice; give each parameter once, tied ones under one name."
            )
        names.add(parameter.name)
        key = key_of(parameter)
        members.setdefault(key, []).append(parameter)
    return tuple(ParameterGroupSpec(key, tuple(group)) for key, group in members.items())


def cut_groups(groups: Sequence[ParameterGroupSpec], bucket_numel: int | None) -> tuple[ParameterGroupSpec, ...]:
    """Cut groups into buckets: a bucket is closed by the parameter with which it reaches a number of elements.

    Args:
        groups: Of the parameters outside of units.
        bucket_numel: Elements; None: nothing is cut.

    Returns:
        The buckets in the order of the groups; a parameter is never cut.
    """
    if bucket_numel is None:
        return tuple(groups)
    buckets: list[ParameterGroupSpec] = []
    for group in groups:
        filling: list[ParameterInfo] = []
        for parameter in group.parameters:
            filling.append(parameter)
            if sum(info.numel for info in filling) >= bucket_numel:
                buckets.append(ParameterGroupSpec(group.key, tuple(filling)))
                filling = []
        if filling:
            buckets.append(ParameterGroupSpec(group.key, tuple(filling)))
    return tuple(buckets)
