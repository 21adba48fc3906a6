"""Parallel styles that torch does not have. Parameters are always placed as plain `Shard` or `Replicate`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel

from megatron_fsdp.automodel.tensor_parallel.layouts import summed, with_summed_gradient
from megatron_fsdp.automodel.tensor_parallel.local_parameters import LocalUse, place, use_plain_tensors


class PartialGradientColwise(ColwiseParallel):
    """Column-wise on an input that is whole, and whose gradient whoever gathered it sums by reduce-scatter."""

    @staticmethod
    def _prepare_input_fn(
        input_layouts: Any, desired_input_layouts: Any, mod: nn.Module, inputs: Any, device_mesh: DeviceMesh
    ) -> Any:
        del input_layouts, desired_input_layouts, mod
        return DTensor.from_local(inputs[0], device_mesh, [Replicate()], run_check=False, grad_placements=[Partial()])


class PackedColwise(ParallelStyle):
    """A linear layer whose output is two packed halves (gate and up); each rank gets its part of both.

    The weight is cut in one piece, so its output is gathered before it is cut again: right for any packing.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        inner = ColwiseParallel(output_layouts=Replicate(), use_local_output=False)
        inner.src_data_rank = self.src_data_rank
        inner._apply(module, device_mesh)

        def cut(_module: nn.Module, _args: Any, output: DTensor) -> Tensor:
            halves = output.unflatten(-1, (2, -1)).redistribute(placements=[Shard(output.ndim)])
            return halves.to_local().flatten(-2)

        module.register_forward_hook(cut)
        return module


class PackedRowwise(ParallelStyle):
    """A linear layer whose input is two packed halves, of each of which a rank has its part."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def join(_module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Any, ...]:
            halves = args[0].unflatten(-1, (2, -1))
            parts = DTensor.from_local(halves, device_mesh, [Shard(halves.ndim - 1)], run_check=False)
            return (parts.redistribute(placements=[Replicate()]).flatten(-2), *args[1:])

        module.register_forward_pre_hook(join)
        inner = RowwiseParallel(input_layouts=Replicate())
        inner.src_data_rank = self.src_data_rank
        return inner._apply(module, device_mesh)


class SummedGradient(ParallelStyle):
    """A module that is whole on every rank but computes on a part of the heads or tokens: gradients are summed."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        uses = []
        for path, part in module.named_modules():
            for name, param in part._parameters.items():
                if param is not None:
                    place(part, name, device_mesh, Replicate())
                    uses.append(LocalUse(path, name, Partial()))
        use_plain_tensors(module, tuple(uses))
        return module


class LocalParts(ParallelStyle):
    """A module that computes with this rank's parts of parameters of its own, such as attention sinks by head.

    Args:
        placements: By name of the parameter.
        sums: Whether the output is a part of a sum, as after a row-wise weight: then it is summed over ranks, and so
            are the gradients of the inputs.
        whole: Whether the parameters are gathered for use and only stored in parts.
    """

    def __init__(self, placements: dict[str, Placement], *, sums: bool = False, whole: bool = False) -> None:
        super().__init__()
        self._placements, self._sums, self._whole = placements, sums, whole

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for name, placement in self._placements.items():
            place(module, name, device_mesh, placement)
        gradients = {name: Replicate() if self._whole else where for name, where in self._placements.items()}
        use_plain_tensors(module, tuple(LocalUse("", name, where, self._whole) for name, where in gradients.items()))
        if self._sums:
            if self._placements:
                module.register_forward_pre_hook(_sum_input_gradients(device_mesh), with_kwargs=True)
            module.register_forward_hook(_sum_output(device_mesh))
        return module


class MixedProjection(ParallelStyle):
    """The first projection of latent attention: whole, but its rotary part goes to this rank's heads only.

    The rest goes through a column-wise projection, which sums its gradient; that of the rotary part is summed here.

    Args:
        rotary_numel: Width of the rotary part, the last of the output.
    """

    def __init__(self, rotary_numel: int) -> None:
        super().__init__()
        self._rotary_numel = rotary_numel

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def sum_rotary_gradient(_module: nn.Module, _args: Any, output: Tensor) -> Tensor:
            latent, rotary = output.split([output.shape[-1] - self._rotary_numel, self._rotary_numel], dim=-1)
            return torch.cat([latent, with_summed_gradient(rotary, device_mesh)], dim=-1)

        module.register_forward_hook(sum_rotary_gradient)
        return module


def _sum_input_gradients(mesh: DeviceMesh) -> Callable[..., Any]:
    def hook(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        def shared(value: Any) -> Any:
            is_activation = isinstance(value, Tensor) and value.is_floating_point()
            return with_summed_gradient(value, mesh) if is_activation else value

        return tuple(map(shared, args)), {name: shared(value) for name, value in kwargs.items()}

    return hook


def _sum_output(mesh: DeviceMesh) -> Callable[..., Any]:
    def hook(_module: nn.Module, _args: Any, output: Tensor) -> Tensor:
        return summed(output, mesh)

    return hook
