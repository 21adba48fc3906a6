"""Experts whose weights are one tensor over all experts: each rank keeps and computes some of them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ParallelStyle

from megatron_fsdp.automodel.tensor_parallel.layouts import summed, with_summed_gradient
from megatron_fsdp.automodel.tensor_parallel.local_parameters import LocalUse, place, use_plain_tensors
from megatron_fsdp.errors import ParallelSizeError


def can_divide_experts(module: nn.Module) -> bool:
    """Whether experts skip tokens that belong to no expert of theirs, as those of transformers' interface do."""
    count = getattr(module, "num_experts", None)
    own = [param for param in module._parameters.values() if param is not None]
    return hasattr(module, "_is_expert_parallel") and bool(own) and all(param.shape[0] == count for param in own)


def check_experts(name: str, module: nn.Module, ranks: int) -> None:
    """See that the ranks divide the experts.

    Raises:
        ParallelSizeError: They do not.
    """
    count = int(module.num_experts)  # type: ignore[arg-type] # can_divide_experts has seen that it is a number
    if can_divide_experts(module) and count % ranks:
        raise ParallelSizeError(
            f"{name} has {count} experts, which {ranks} tensor-parallel ranks cannot share evenly; choose a "
            f"tensor-parallel size that divides {count}"
        )


class DividedExperts(ParallelStyle):
    """Each rank computes its own experts on all tokens, and the outputs are summed.

    Experts keep their order: rank r has experts r * n ... (r + 1) * n - 1. Routes to other ranks' experts get the
    index n and the weight 0, which the experts of transformers skip (`_is_expert_parallel`).
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        names = [name for name, param in module._parameters.items() if param is not None]
        for name in names:
            place(module, name, device_mesh, Shard(0))
        local_count = int(module.num_experts) // device_mesh.size()  # type: ignore[arg-type] # a number, see above
        module.num_experts = local_count  # type: ignore[assignment] # plain attributes
        module._is_expert_parallel = True  # type: ignore[assignment]
        first = local_count * device_mesh.get_local_rank()

        def own_routes(_module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
            hidden, experts, weights, *rest = args
            experts = experts - first
            elsewhere = (experts < 0) | (experts >= local_count)
            weights = with_summed_gradient(weights, device_mesh).masked_fill(elsewhere, 0.0)
            return (
                with_summed_gradient(hidden, device_mesh),
                torch.where(elsewhere, local_count, experts),
                weights,
                *rest,
            )

        def sum_outputs(owner: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
            if torch.is_grad_enabled() and _runs_eagerly(owner):
                # Without tokens the loop leaves weights and inputs out of the graph: the optimizer of this rank would
                # skip the weights, and the sums of the inputs' gradients would wait for it for ever.
                used = (args[0], args[2], *(param for param in owner._parameters.values() if param is not None))
                for tensor in used:
                    output = output + tensor.flatten()[0] * 0.0
            return summed(output, device_mesh)

        module.register_forward_pre_hook(own_routes)
        module.register_forward_hook(sum_outputs)
        use_plain_tensors(module, tuple(LocalUse("", name, Shard(0)) for name in names))
        return module


def _runs_eagerly(module: nn.Module) -> bool:
    """Whether the forward is the loop over the experts that have tokens."""
    return getattr(getattr(module, "config", None), "_experts_implementation", None) in (None, "eager")
