"""Linear layers whose backward multiplies the weight gradient straight into the communication bucket.

    without    grad_out^T x input -> a tensor of its own -> copied, cast -> bucket
    with       grad_out^T x input -> bucket; later gradients of the same backward are added by the product itself

The function takes the weight as F.linear does, so there is an edge to the leaf, and whether to write into the bucket
is decided in backward. Where it cannot be done, the gradient is returned as usual. Where it was done, None is
returned, and autograd calls the leaf's hook as always, which then finds no gradient.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import forward_ad
from torch.nn import functional as F

from megatron_fsdp.errors import warn_caller
from megatron_fsdp.sharding.units import parameter_sites

if TYPE_CHECKING:
    from megatron_fsdp.engine.engine import Engine

PLAIN = (torch.Tensor, nn.Parameter, FakeTensor)
"""Types that compute as plain tensors; DTensors and other subclasses have their own arithmetic."""


class Target(Protocol):
    """What takes weight gradients in backward."""

    def write(self, weight: torch.Tensor, grad: torch.Tensor, operand: torch.Tensor) -> bool:
        """Take the product that is a weight's gradient, or return False, and autograd gets it as usual.

        Args:
            weight: The full weight, a leaf.
            grad: Gradient of the output, (rows, out_features).
            operand: The input, (rows, in_features).
        """


class _GradientTarget:
    """Where one weight's gradient goes. All references are weak: a module must not keep its engine alive."""

    __slots__ = ("_engine", "_group", "_parameter", "_unit", "_weight")

    def __init__(self, engine: Engine, unit: int, group: int, parameter: int) -> None:
        self._engine = weakref.ref(engine)
        self._unit, self._group, self._parameter = unit, group, parameter
        self._weight = weakref.ref(engine.units[unit].groups[group].full[parameter])

    def takes(self, tensor: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> bool:
        """Return whether a forward is a plain product: the full weight in one dtype, no cast, no transform."""
        return (
            weight is self._weight()
            and is_plain_product(tensor, weight, bias)
            and tensor.dtype is weight.dtype
            and (bias is None or bias.dtype is weight.dtype)
            and not _autocast_casts(tensor)
        )

    def write(self, weight: torch.Tensor, grad: torch.Tensor, operand: torch.Tensor) -> bool:
        """Multiply the weight gradient into the bucket, or add it to what came before in this backward.

        Not where a check or hook needs the gradient by itself, or where it is cast or scaled on its way.
        """
        engine = self._engine()
        if engine is None or engine.large_check is not None or is_watched(weight):
            return False
        gradients = engine.filling(self._unit, self._group)
        target, adds = gradients.target_of(self._parameter, grad.dtype)
        if target is None:
            return False
        if adds:
            target.addmm_(grad.t(), operand)
        else:
            torch.mm(grad.t(), operand, out=target)
        gradients.note_written(self._parameter)
        if engine.finite_check is not None:
            engine.finite_check.record(engine.units[self._unit].groups[self._group].names[self._parameter], target)
        return True


def is_plain_product(tensor: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> bool:
    """Return whether `F.linear` of a plain weight may be `linear_into`: with gradients and without transforms."""
    return (
        torch.is_grad_enabled()
        and weight.requires_grad  # it may have been frozen since
        and type(tensor) in PLAIN
        and tensor.dim() > 1
        and tensor.layout is torch.strided
        and (bias is None or type(bias) in PLAIN)
        and not torch._C._are_functorch_transforms_active()
        and forward_ad._current_level < 0
    )


class _FusedLinear(torch.autograd.Function):
    """`F.linear` of operands in one dtype."""

    @staticmethod
    def forward(
        ctx: Any, tensor: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, target: Target
    ) -> torch.Tensor:
        ctx.target = target
        ctx.save_for_backward(tensor, weight if ctx.needs_input_grad[0] else None)
        return F.linear(tensor, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        tensor, weight = ctx.saved_tensors
        rows = grads[0].flatten(0, -2)
        tensor_grad = None if weight is None else rows.mm(weight).view(tensor.shape)
        bias_grad = rows.sum(0) if ctx.needs_input_grad[2] else None
        return tensor_grad, _weight_gradient(ctx, rows, tensor.flatten(0, -2)), bias_grad, None


# Without torch's wrapper, which looks for transforms that `is_plain_product` rules out: a third of the cost of a call.
linear_into: Any = super(torch.autograd.Function, _FusedLinear).apply


def _weight_gradient(ctx: Any, rows: torch.Tensor, operand: torch.Tensor) -> torch.Tensor | None:
    """Return the gradient of the weight; None where it is in the bucket, or not needed."""
    leaf = ctx.next_functions[1][0]
    while leaf.next_functions:  # behind a cast of autocast
        ((leaf, _),) = leaf.next_functions
    try:
        accumulates = torch._C._will_engine_execute_node(leaf)
    except RuntimeError:  # torch.autograd.grad asks for this very gradient
        return rows.t().mm(operand)
    if not accumulates:
        return None
    differentiates = torch.is_grad_enabled()  # create_graph=True: the gradient has a graph of its own
    if not differentiates and ctx.target.write(leaf.variable, rows, operand):
        return None
    return rows.t().mm(operand)


def is_watched(weight: torch.Tensor) -> bool:
    """Return whether hooks of the user need this rank's gradient."""
    return bool(weight._backward_hooks) or len(weight._post_accumulate_grad_hooks or ()) != 1


def _autocast_casts(tensor: torch.Tensor) -> bool:
    """Return whether autocast would compute in another dtype than that of the operands."""
    if not torch._C._is_any_autocast_enabled():
        return False
    kind = tensor.device.type
    return torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) is not tensor.dtype


class FusedLinear(nn.Linear):
    """The class of an `nn.Linear` whose weight gradients are written into a bucket; its copies are plain again."""

    _fused_target: _GradientTarget

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 (the name in nn.Linear)
        """Compute the linear, with fused weight gradients where possible."""
        if torch.compiler.is_compiling():
            return F.linear(input, self.weight, self.bias)
        params, target = self._parameters, self._fused_target
        weight, bias = params["weight"], params["bias"]
        assert weight is not None
        if not target.takes(input, weight, bias):
            return F.linear(input, weight, bias)
        fused: torch.Tensor = linear_into(input, weight, bias, target)
        return fused

    def _get_name(self) -> str:
        return "Linear"

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """Copy as a plain `nn.Linear`."""
        state = {name: value for name, value in self.__dict__.items() if name != "_fused_target"}
        return nn.Linear.__new__, (nn.Linear,), state


def fuse_weight_gradients(engine: Engine, module: nn.Module) -> None:
    """Make every plain `nn.Linear` of a sharded model write its weight gradient into the bucket.

    Left alone are subclasses of `nn.Linear`, linears with a forward of their own or a parametrized weight, and weights
    that are frozen, cut by tensor parallelism, shared with another module, or whose gradients travel in another dtype
    than they are computed in.
    """
    targets = _targets_by_weight(engine)
    sites = parameter_sites(module)
    count = 0
    for linear in module.modules():
        if type(linear) is not nn.Linear or "forward" in linear.__dict__:
            continue
        weight = linear._parameters.get("weight")
        if weight is not None and id(weight) in targets and len(sites[id(weight)]) == 1:
            linear.__class__ = FusedLinear
            linear._fused_target = targets[id(weight)]  # type: ignore[assignment]
            count += 1
    if not count:
        warn_caller(
            "gradient_accumulation_fusion=True has no effect on this model: no plain nn.Linear with a weight of its "
            "own computes its gradient in the dtype that it travels in; set grad_comm_dtype to the dtype of the model, "
            "or leave the option out"
        )


def _targets_by_weight(engine: Engine) -> dict[int, _GradientTarget]:
    """Map ids of sharded parameters to where their gradient goes, if it is not cast and the parameter is plain."""
    return {
        id(param): _GradientTarget(engine, unit.index, group_index, index)
        for unit in engine.units
        for group_index, group in enumerate(unit.groups)
        if group.gradients is not None and group.plan.precision.grad_comm is group.plan.precision.compute
        for index, param in enumerate(group.sharded)
        if type(group.full[index]) in PLAIN
    }
