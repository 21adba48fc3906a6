"""Modules that are not divided themselves compute with plain tensors, though all parameters are DTensors.

Every parameter of a divided model is a DTensor over the tensor-parallel mesh, also one that is equal on all ranks:
torch's optimizers (foreach, fused) and `clip_grad_norm_` refuse lists that mix DTensors and plain tensors. A module
whose forward knows nothing of DTensors sees its parameters as plain tensors while it runs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, distribute_tensor


@dataclass(frozen=True)
class LocalUse:
    """How a module sees one of its parameters while it runs.

    Attributes:
        path: The submodule that owns the parameter, from the module that runs; "" for itself.
        name: Of the parameter in its owner.
        gradient: What each rank computes of the gradient of what it sees: `Replicate()`, all of it; `Partial()`, a
            part of a sum over the ranks; `Shard(dim)`, that of its own part.
        whole: Whether the module sees all ranks' parts, gathered, else this rank's own part.
    """

    path: str
    name: str
    gradient: Placement
    whole: bool = False

    def of(self, param: DTensor) -> Tensor:
        """The plain tensor to compute with; the parameter's gradient gets the parameter's placement."""
        if self.whole or isinstance(self.gradient, Replicate) or not param.placements[0].is_shard():
            # From Replicate to Replicate nothing is sent, but a partial gradient is summed on the way back.
            param = param.redistribute(placements=[Replicate()])
        return param.to_local(grad_placements=[self.gradient])


class _Swap:
    """The pair of hooks that shows a module plain tensors in place of its parameters."""

    def __init__(self, uses: tuple[LocalUse, ...]) -> None:
        self._uses = uses
        self._hidden: list[list[tuple[nn.Module, str, DTensor]]] = []

    def before(self, module: nn.Module, _args: Any) -> None:
        hidden = []
        for use in self._uses:
            owner = module.get_submodule(use.path)
            param: Any = owner._parameters[use.name]
            if isinstance(param, DTensor):
                hidden.append((owner, use.name, param))
                values: dict[str, Any] = owner._parameters  # a plain tensor for a while
                values[use.name] = use.of(param)
        self._hidden.append(hidden)

    def after(self, _module: nn.Module, _args: Any, _output: Any) -> None:
        for owner, name, param in self._hidden.pop() if self._hidden else ():
            values: dict[str, Any] = owner._parameters
            values[name] = param


def use_plain_tensors(module: nn.Module, uses: tuple[LocalUse, ...]) -> None:
    """Let a module compute with plain tensors in place of these parameters, which are DTensors."""
    swap = _Swap(uses)
    module.register_forward_pre_hook(swap.before)
    module.register_forward_hook(swap.after, always_call=True)


def place(owner: nn.Module, name: str, mesh: DeviceMesh, placement: Placement) -> None:
    """Make a parameter a DTensor with this placement; each rank keeps its part of what it holds, nothing is sent."""
    param = owner._parameters[name]
    if param is None or isinstance(param, DTensor):
        return
    placed = distribute_tensor(param.detach(), mesh, [placement], src_data_rank=None)
    owner.register_parameter(name, nn.Parameter(placed, requires_grad=param.requires_grad))


def undivided_units(model: nn.Module, planned: set[nn.Module]) -> Iterator[tuple[nn.Module, tuple[LocalUse, ...]]]:
    """The outermost modules in which nothing is divided, with the parameters that they own; whole layers at most.

    A module is taken with all that is in it, since some modules of transformers compute with the weights of their
    parts without calling them. Parts of a list of modules are each for themselves, since each of them may be a
    data-parallel unit of its own. Parameters that a partly divided module owns directly, or through convolutions,
    which modules like to call by function, are shown by it.
    """
    touched = {
        name
        for name, part in model.named_modules()
        if part in planned or any(isinstance(param, DTensor) for param in part._parameters.values())
    }
    yield from _units(model, "", touched, planned)


def _units(
    module: nn.Module, name: str, touched: set[str], planned: set[nn.Module]
) -> Iterator[tuple[nn.Module, tuple[LocalUse, ...]]]:
    below = f"{name}." if name else ""
    is_clear = not any(other == name or other.startswith(below) for other in touched)
    lists = any(isinstance(part, nn.ModuleList | nn.ModuleDict) for part in module.modules())
    if is_clear and not lists:
        uses = tuple(_plain_uses(module, ""))
        if uses:
            yield module, uses
        return
    uses = tuple(_plain_uses(module, "", recurse=False))
    for child, part in module.named_children():
        if type(part).__name__.startswith("Conv") and part not in planned:
            uses += tuple(_plain_uses(part, child))
        else:
            yield from _units(part, f"{below}{child}", touched, planned)
    if uses:
        yield module, uses


def _plain_uses(module: nn.Module, path: str, recurse: bool = True) -> Iterator[LocalUse]:
    parts = module.named_modules() if recurse else [("", module)]
    for name, part in parts:
        for key, param in part._parameters.items():
            if param is not None and not isinstance(param, DTensor):
                yield LocalUse(".".join(filter(None, (path, name))), key, Replicate())
