"""Parallel styles that torch lacks, and the plain tensors with which modules of transformers compute.

Every parameter of a divided model is a DTensor over the tensor-parallel mesh, also one that is equal on all ranks:
torch's optimizers (foreach, fused) and `clip_grad_norm_` refuse lists that mix DTensors and plain tensors. A module
whose forward does not know DTensors sees its parameters as plain tensors while it runs. The meaning of a plain
activation ("equal on every rank", "a part on every rank") is stated where it enters or leaves a divided module.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils._pytree import tree_iter

from megatron_fsdp.errors import ParallelSizeError

SEQUENCE_DIM = 1
"""The dimension of the tokens in activations of transformers, (batch, sequence, hidden)."""

Apply = Callable[[nn.Module, DeviceMesh], object]
"""Divides a module over tensor-parallel ranks, in place."""


@dataclass(frozen=True)
class LocalUse:
    """A module's view of one of its parameters while it runs.

    The gradient that a rank computes is whole under `Replicate()`, a part of a sum over the ranks under `Partial()`,
    that of its own part under `Shard(dim)`.
    """

    path: str  # of the submodule that owns the parameter, from the module that runs; "" for itself
    name: str  # of the parameter in its owner
    gradient: Placement
    whole: bool = False  # the module sees all ranks' parts, gathered, else this rank's own part

    def of(self, param: DTensor) -> Tensor:
        """Return the plain tensor to compute with; the parameter's gradient gets the parameter's placement."""
        if self.whole or isinstance(self.gradient, Replicate) or not param.placements[0].is_shard():
            # From Replicate to Replicate nothing is sent, but a partial gradient is summed on the way back.
            param = param.redistribute(placements=[Replicate()])
        return param.to_local(grad_placements=[self.gradient])


_Shown = list[tuple[nn.Module, str, DTensor, Tensor]]
"""Modules, names of parameters, the parameters, and the plain tensors that replace them."""


class _Swap:
    """Hooks that replace a module's parameters by plain tensors while it runs.

    A function inside of the forward that is recomputed (`checkpoint(lambda x: self.weight * x, ...)`) runs again in
    backward, outside of the module's call. So the same plain tensors are shown again from the moment when the gradient
    of an output is known until all of their own gradients are.
    """

    def __init__(self, uses: tuple[LocalUse, ...]) -> None:
        self._uses = uses
        self._running: list[_Shown] = []

    def before(self, module: nn.Module, _args: Any) -> None:
        shown: _Shown = []
        for use in self._uses:
            owner = module.get_submodule(use.path)
            param: Any = owner._parameters[use.name]
            if isinstance(param, DTensor):
                shown.append((owner, use.name, param, use.of(param)))
        _show(shown)
        self._running.append(shown)

    def after(self, _module: nn.Module, _args: Any, output: Any) -> None:
        shown = self._running.pop() if self._running else []
        _hide(shown)
        if not shown or not torch.is_grad_enabled() or torch.compiler.is_compiling():
            return
        for tensor in tree_iter(output):
            if isinstance(tensor, Tensor) and tensor.grad_fn is not None:
                tensor.register_hook(partial(_show_in_backward, shown))
        for owner, name, param, plain in shown:
            if plain.grad_fn is not None:
                plain.register_hook(partial(_hide_one, owner, name, param, weakref.ref(plain)))


def _show(shown: _Shown) -> None:
    for owner, name, _, plain in shown:
        values: dict[str, Any] = owner._parameters  # a plain tensor for a while
        values[name] = plain


def _hide_one(
    owner: nn.Module, name: str, param: DTensor, plain: weakref.ref[Tensor], _grad: Tensor | None = None
) -> None:
    values: dict[str, Any] = owner._parameters
    if values[name] is plain():  # else whoever shards the model further has put another one there
        values[name] = param


def _hide(shown: _Shown) -> None:
    for owner, name, param, plain in shown:
        _hide_one(owner, name, param, weakref.ref(plain))


def _show_in_backward(shown: _Shown, _grad: Tensor) -> None:
    _show([each for each in shown if id(each[0]._parameters[each[1]]) == id(each[2])])
    # At the end at the latest: one that is frozen, or that this forward did not use, gets no gradient.
    torch.autograd.Variable._execution_engine.queue_callback(partial(_hide, shown))


def use_plain_tensors(module: nn.Module, uses: tuple[LocalUse, ...]) -> None:
    """Replace these parameters of a module, which are DTensors, by plain tensors while it runs."""
    swap = _Swap(uses)
    module.register_forward_pre_hook(swap.before)
    module.register_forward_hook(swap.after, always_call=True)


def place(owner: nn.Module, name: str, mesh: DeviceMesh, placement: Placement) -> None:
    """Make a parameter a DTensor with this placement; each rank keeps its part of its values, nothing is sent."""
    param = owner._parameters[name]
    if param is None or isinstance(param, DTensor):
        return
    placed = distribute_tensor(param.detach(), mesh, [placement], src_data_rank=None)
    owner.register_parameter(name, nn.Parameter(placed, requires_grad=param.requires_grad))


def undivided_units(
    model: nn.Module, planned: set[nn.Module], partial: set[int]
) -> Iterator[tuple[nn.Module, tuple[LocalUse, ...]]]:
    """Yield the outermost modules in which nothing is divided, with their parameters; whole layers at most.

    `partial`: ids of the parameters of which each rank computes a partial gradient.

    A module is taken with all its children, since some modules of transformers compute with the weights of their
    children without calling them. Members of a list of modules are taken one by one, since each may be a data-parallel
    unit. Parameters that a partly divided module owns directly, or through convolutions, which are often called by
    function, are shown by it.
    """
    is_whole = not any(
        part in planned
        or isinstance(part, nn.ModuleList | nn.ModuleDict)
        or any(isinstance(param, DTensor) for param in part._parameters.values())
        for part in model.modules()
    )
    uses = tuple(_plain_uses(model, "", partial, recurse=is_whole))
    for child, part in () if is_whole else model.named_children():
        if type(part).__name__.startswith("Conv") and part not in planned:
            uses += tuple(_plain_uses(part, child, partial))
        else:
            yield from undivided_units(part, planned, partial)
    if uses:
        yield model, uses


def _plain_uses(module: nn.Module, path: str, partial: set[int], recurse: bool = True) -> Iterator[LocalUse]:
    parts = module.named_modules() if recurse else [("", module)]
    for name, part in parts:
        for key, param in part._parameters.items():
            if param is not None and not isinstance(param, DTensor):
                gradient = Partial() if id(param) in partial else Replicate()
                yield LocalUse(".".join(filter(None, (path, name))), key, gradient)


def with_summed_gradient(tensor: Tensor, mesh: DeviceMesh) -> Tensor:
    """Return a tensor, equal on all ranks, whose gradient is summed over the ranks: each computes a part of it."""
    return DTensor.from_local(tensor, mesh, [Replicate()], run_check=False).to_local(grad_placements=[Partial()])


def summed(tensor: Tensor, mesh: DeviceMesh) -> Tensor:
    """Sum each rank's part over the ranks; the gradient, equal on all ranks, passes unchanged."""
    parts = DTensor.from_local(tensor, mesh, [Partial()], run_check=False)
    return parts.redistribute(placements=[Replicate()]).to_local()


def gather_tokens(tensor: Tensor, mesh: DeviceMesh, gradient: Placement) -> Tensor:
    """Gather all tokens on each rank: (batch, sequence / ranks, hidden) -> (batch, sequence, hidden).

    The gradient of the whole on each rank is `Partial()`, a part of a sum, or `Replicate()`, the sum.
    """
    parts = DTensor.from_local(tensor, mesh, [Shard(SEQUENCE_DIM)], run_check=False)
    return parts.redistribute(placements=[Replicate()]).to_local(grad_placements=[gradient])


def own_tokens(tensor: Tensor, mesh: DeviceMesh) -> Tensor:
    """Return this rank's tokens of a tensor that is equal on all ranks; backward gathers the gradient of all tokens.

    (batch, sequence, hidden) -> (batch, sequence / ranks, hidden).
    """
    whole = DTensor.from_local(tensor, mesh, [Replicate()], run_check=False)
    return whole.redistribute(placements=[Shard(SEQUENCE_DIM)]).to_local()


def not_a_view(tensor: Tensor) -> Tensor:
    """Return the same values and memory, but no view for autograd.

    The local tensor of a DTensor counts as a view; FSDP2 warns if a sharded module returns one.
    """
    own: Tensor = _NotAView.apply(tensor)  # type: ignore[no-untyped-call] # torch gives it no hints
    return own


class _NotAView(torch.autograd.Function):
    @staticmethod
    def forward(_ctx: Any, tensor: Tensor) -> Tensor:
        return tensor.detach()

    @staticmethod
    def backward(_ctx: Any, *gradients: Any) -> Any:
        return gradients[0]


class PartialGradientColwise(ColwiseParallel):
    """Column-wise style for a whole input whose gradient is summed by its gatherer's reduce-scatter."""

    @staticmethod
    def _prepare_input_fn(
        input_layouts: Any, desired_input_layouts: Any, mod: nn.Module, inputs: Any, device_mesh: DeviceMesh
    ) -> Any:
        del input_layouts, desired_input_layouts, mod
        return _WithPartialGradient.apply(inputs[0], device_mesh)  # type: ignore[no-untyped-call]


class _WithPartialGradient(torch.autograd.Function):
    """Makes a tensor that is equal on all ranks a DTensor; torch 2.11's `from_local` takes no `grad_placements`."""

    @staticmethod
    def forward(_ctx: Any, tensor: Tensor, mesh: DeviceMesh) -> DTensor:
        return DTensor.from_local(tensor.view_as(tensor), mesh, [Replicate()], run_check=False)

    @staticmethod
    def backward(_ctx: Any, *gradients: Any) -> tuple[Tensor, None]:
        return gradients[0].redistribute(placements=[Partial()]).to_local(), None


def packed_colwise(module: nn.Module, mesh: DeviceMesh) -> None:
    """Divide a linear layer whose output is two packed halves (gate and up); each rank gets its part of both.

    The weight is cut in one piece, so its output is gathered before it is cut again: right for any packing.
    """

    def cut(_module: nn.Module, _args: Any, output: DTensor) -> Tensor:
        halves = output.unflatten(-1, (2, -1)).redistribute(placements=[Shard(output.ndim)])
        return halves.to_local().flatten(-2)

    style = ColwiseParallel(output_layouts=Replicate(), use_local_output=False)
    parallelize_module(module, mesh, style, src_data_rank=None)
    module.register_forward_hook(cut)


def packed_rowwise(module: nn.Module, mesh: DeviceMesh) -> None:
    """Divide a linear layer whose input is two packed halves, of each of which a rank has its part."""

    def join(_module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Any, ...]:
        halves = args[0].unflatten(-1, (2, -1))
        parts = DTensor.from_local(halves, mesh, [Shard(halves.ndim - 1)], run_check=False)
        return (parts.redistribute(placements=[Replicate()]).flatten(-2), *args[1:])

    module.register_forward_pre_hook(join)
    parallelize_module(module, mesh, RowwiseParallel(input_layouts=Replicate()), src_data_rank=None)


def with_summed_gradients(module: nn.Module, mesh: DeviceMesh) -> None:
    """Keep a module whole on every rank that computes on a part of the heads or tokens: gradients are summed."""
    uses = []
    for path, part in module.named_modules():
        for name, param in part._parameters.items():
            if param is not None:
                place(part, name, mesh, Replicate())
                uses.append(LocalUse(path, name, Partial()))
    use_plain_tensors(module, tuple(uses))


def local_parts(
    module: nn.Module,
    mesh: DeviceMesh,
    placements: Mapping[str, Placement],
    *,
    sums: bool = False,
    whole: bool = False,
) -> None:
    """Compute a module with this rank's parts of its own parameters, such as attention sinks by head.

    Placements are by name of the parameter. With `sums` the output is a part of a sum, as after a row-wise weight: it
    is summed over ranks, and so are the gradients of the inputs. With `whole` the parameters are only stored in parts,
    and gathered for use.
    """
    for name, placement in placements.items():
        place(module, name, mesh, placement)
    gradients = {name: Replicate() if whole else where for name, where in placements.items()}
    use_plain_tensors(module, tuple(LocalUse("", name, where, whole) for name, where in gradients.items()))
    if sums and placements:
        module.register_forward_pre_hook(_sum_input_gradients(mesh), with_kwargs=True)
    if sums:
        module.register_forward_hook(lambda _module, _args, output: summed(output, mesh))


def mixed_projection(module: nn.Module, mesh: DeviceMesh, rotary_numel: int) -> None:
    """Keep the first projection of latent attention whole, whose rotary part goes to this rank's heads only.

    The rest goes through a column-wise projection, which sums its gradient; that of the rotary part, the last
    `rotary_numel` of the output, is summed here.
    """

    def sum_rotary_gradient(_module: nn.Module, _args: Any, output: Tensor) -> Tensor:
        latent, rotary = output.split([output.shape[-1] - rotary_numel, rotary_numel], dim=-1)
        return torch.cat([latent, with_summed_gradient(rotary, mesh)], dim=-1)

    module.register_forward_hook(sum_rotary_gradient)


def _sum_input_gradients(mesh: DeviceMesh) -> Callable[..., Any]:
    def hook(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        def shared(value: Any) -> Any:
            is_activation = isinstance(value, Tensor) and value.is_floating_point()
            return with_summed_gradient(value, mesh) if is_activation else value

        return tuple(map(shared, args)), {name: shared(value) for name, value in kwargs.items()}

    return hook


def divided_rows(module: nn.Module, mesh: DeviceMesh) -> None:
    """Divide an embedding's rows: each rank looks up its ids and adds zeros for the others; the output is the sum.

    torch's own `RowwiseParallel` computes the same, but makes a gradient of all rows on every rank.
    """
    place(module, "weight", mesh, Shard(0))
    for part in module.children():  # such as a norm of the looked-up rows
        with_summed_gradients(part, mesh)
    lookup = _Lookup(module, mesh)
    module.register_forward_pre_hook(lookup.before)
    module.register_forward_hook(lookup.after, always_call=True)
    use_plain_tensors(module, (LocalUse("", "weight", Shard(0)),))


class _Lookup:
    """The hooks around the lookup; `padding_idx` is this rank's own only inside, since others read it too."""

    def __init__(self, module: nn.Module, mesh: DeviceMesh) -> None:
        weight: Any = module.weight
        assert isinstance(weight, DTensor)
        self._mesh = mesh
        self._stop_row = weight.shape[0]
        self._rows = -(-weight.shape[0] // mesh.size())  # of all ranks but the last ones, as torch cuts
        self._first = min(self._rows * mesh.get_local_rank(), self._stop_row)
        self._count = weight.to_local().shape[0]
        self._padding: int | None = None
        self._elsewhere: list[Tensor] = []

    def before(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        ids = args[0] - self._first
        elsewhere = (ids < 0) | (ids >= self._count)
        self._elsewhere.append(elsewhere)
        self._padding = module.padding_idx  # type: ignore[assignment] # a plain attribute of nn.Embedding
        if self._padding is not None:
            own = self._padding - self._first
            module.padding_idx = own if 0 <= own < self._count else None  # type: ignore[assignment] # likewise
        return (ids.masked_fill(elsewhere, 0), *args[1:])

    def after(self, module: nn.Module, _args: Any, output: Tensor | None) -> Tensor | None:
        if not self._elsewhere:
            return output
        elsewhere = self._elsewhere.pop()
        module.padding_idx = self._padding  # type: ignore[assignment] # likewise
        return None if output is None else summed(output.masked_fill(elsewhere.unsqueeze(-1), 0.0), self._mesh)


def can_divide_experts(module: nn.Module) -> bool:
    """Return True if experts skip tokens of no local expert, as those of transformers' interface do."""
    count = getattr(module, "num_experts", None)
    own = [param for param in module._parameters.values() if param is not None]
    return hasattr(module, "_is_expert_parallel") and bool(own) and all(param.shape[0] == count for param in own)


def check_experts(name: str, module: nn.Module, ranks: int) -> None:
    """Raise unless the ranks divide the experts."""
    count = int(module.num_experts)  # type: ignore[arg-type] # can_divide_experts has seen that it is a number
    if can_divide_experts(module) and count % ranks:
        raise ParallelSizeError(
            f"{name} has {count} experts, which {ranks} tensor-parallel ranks cannot share evenly; choose a "
            f"tensor-parallel size that divides {count}"
        )


def divided_experts(module: nn.Module, mesh: DeviceMesh) -> None:
    """Divide experts: each rank computes its own on all tokens, and the outputs are summed.

    Experts keep their order: rank r has experts r * n ... (r + 1) * n - 1. Routes to other ranks' experts get the index
    n and the weight 0, which the experts of transformers skip (`_is_expert_parallel`).
    """
    names = [name for name, param in module._parameters.items() if param is not None]
    for name in names:
        place(module, name, mesh, Shard(0))
    local_count = int(module.num_experts) // mesh.size()  # type: ignore[arg-type] # a number, see above
    module.num_experts = local_count  # type: ignore[assignment] # plain attributes
    module._is_expert_parallel = True  # type: ignore[assignment]
    first = local_count * mesh.get_local_rank()

    def own_routes(_module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        hidden, experts, weights, *rest = args
        experts = experts - first
        elsewhere = (experts < 0) | (experts >= local_count)
        weights = with_summed_gradient(weights, mesh).masked_fill(elsewhere, 0.0)
        return with_summed_gradient(hidden, mesh), torch.where(elsewhere, local_count, experts), weights, *rest

    def sum_outputs(owner: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
        kind = getattr(getattr(owner, "config", None), "_experts_implementation", None)
        if torch.is_grad_enabled() and kind in (None, "eager"):  # the loop over the experts that have tokens
            # Without tokens the loop leaves weights and inputs out of the graph: the optimizer of this rank would
            # skip the weights, and the sums of the inputs' gradients would wait for it for ever.
            used = (args[0], args[2], *(param for param in owner._parameters.values() if param is not None))
            for tensor in used:
                output = output + tensor.flatten()[0] * 0.0
        return summed(output, mesh)

    module.register_forward_pre_hook(own_routes)
    module.register_forward_hook(sum_outputs)
    use_plain_tensors(module, tuple(LocalUse("", name, Shard(0)) for name in names))
