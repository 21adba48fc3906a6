"""Divide the experts of a model over expert-parallel ranks, in place."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from megatron_fsdp.automodel.expert_parallel.dispatch import DividedExperts, ExpertShare
from megatron_fsdp.automodel.expert_parallel.interface import check_divisible, find_experts
from megatron_fsdp.errors import ConfigurationError

EP_DIM = "ep"


def parallelize_experts(model: nn.Module, ep_mesh: DeviceMesh) -> list[str]:
    """Leave each rank an equal share of the experts of every layer, and let tokens travel to them.

    Weights of experts become DTensors, `Shard(0)` on `ep_mesh`, under their former names. Routers and all else stay as
    they are: whole on every rank, for its own tokens. Auxiliary losses of routers (`output_router_logits=True`) are
    computed from a rank's own tokens, as under data parallelism.

    Args:
        model: A model of transformers with fused experts, on the meta device or with the same weights on all ranks.
        ep_mesh: One-dimensional, called "ep"; the "ep" dimension of a mesh (ep_shard, ep) where experts are to be
            sharded over data-parallel ranks as well.

    Returns:
        Names of the experts modules, for `shard_experts`.

    Raises:
        ConfigurationError: The model has no experts, or they have another interface; or the mesh is no "ep" mesh.
        ParallelSizeError: The number of experts does not divide by the ranks.
    """
    if ep_mesh.mesh_dim_names != (EP_DIM,):
        raise ConfigurationError(
            f"a mesh with the dimensions {ep_mesh.mesh_dim_names} was given for experts; give a one-dimensional mesh "
            'named "ep"'
        )
    experts = find_experts(model)
    check_divisible(model, experts, ep_mesh.size())
    for part in experts.values():
        _divide(part, ep_mesh)
    return list(experts)


def _divide(part: nn.Module, mesh: DeviceMesh) -> None:
    num_local = len(next(part.parameters())) // mesh.size()
    for name, param in list(part.named_parameters()):
        part.register_parameter(name, _share_of(param, mesh, num_local))
    former: Any = type(part)
    part.__class__ = _divided_class(former)
    assert isinstance(part, DividedExperts)
    part.expert_share = ExpertShare(mesh, num_local)


@functools.cache
def _divided_class(former: type[nn.Module]) -> type[DividedExperts]:
    return type(f"Divided{former.__name__}", (DividedExperts, former), {})


def _share_of(param: nn.Parameter, mesh: DeviceMesh, num_local: int) -> nn.Parameter:
    """This rank's rows in memory of their own, so that those of the others can be freed."""
    local = (
        param.detach()
        .narrow(0, mesh.get_local_rank() * num_local, num_local)
        .clone(memory_format=torch.contiguous_format)
    )
    contiguous = torch.empty(param.shape, device="meta").stride()
    share = DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=param.shape, stride=contiguous)
    divided = nn.Parameter(share, requires_grad=param.requires_grad)
    divided.__dict__.update(param.__dict__)  # marks of transformers, such as that a weight is initialised
    return divided
