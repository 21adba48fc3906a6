"""Experts of a model of transformers over expert-parallel ranks, as this package's engines take them."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from megatron_fsdp.automodel.expert_parallel import parallelize_experts
from megatron_fsdp.automodel.meshes import MeshContext

_EP = "ep"


@dataclass(frozen=True)
class ExpertRanks:
    """Where experts lie; without expert-parallel ranks every method does nothing.

    Attributes:
        mesh: The data-parallel dimension, by the name that it has for everything else, and the expert-parallel ranks,
            which are neighbours; across the ranks of one pipeline stage. None: experts are sharded as everything else.
    """

    mesh: DeviceMesh | None = None

    @property
    def tp_dim(self) -> str | None:
        """What to name to the engine: experts have no tensor-parallel ranks."""
        return "tp" if self.mesh is None else None

    def divide(self, model: nn.Module) -> None:
        """Leave this rank its experts, as plain parameters, and let tokens travel to the ranks of theirs; in place.

        Raises:
            ConfigurationError: The model has no experts that can be divided.
            ParallelSizeError: Their number does not divide.
        """
        if self.mesh is None:
            return
        for name in parallelize_experts(model, self.mesh[_EP]):
            experts = model.get_submodule(name)
            for key, param in list(experts.named_parameters(recurse=False)):
                assert isinstance(param, DTensor)
                own = nn.Parameter(param.to_local().detach(), requires_grad=param.requires_grad)
                own.__dict__.update(param.__dict__)
                experts.register_parameter(key, own)


def expert_ranks(context: MeshContext, expert: int, dim: str) -> ExpertRanks:
    """Lay out the expert-parallel ranks; collective.

    Args:
        context: Of all else.
        expert: Expert-parallel ranks.
        dim: Name of the data-parallel dimension.
    """
    if expert == 1:
        return ExpertRanks()
    sizes = context.sizes
    shape = (sizes.pp, sizes.dp_cp * sizes.tp // expert, expert)
    mesh = init_device_mesh(context.device.type, shape, mesh_dim_names=("pp_of_experts", dim, _EP))
    return ExpertRanks(mesh[dim, _EP])
