# ruff: noqa: ARG002 (not all quantizers need every argument)
"""Linears that multiply gathered float8 weights themselves, after weight_format="fp8_compute".

    gathered codes, e4m3, one scale ->  forward            input in e4m3            x codes^T   -> output
                                        backward           output gradient in e5m2  x codes     -> input gradient
                                        as without format  output gradient^T        x input     -> weight gradient

Input and output gradient are scaled by the amax of each, on this rank, in each call. A device with float8
products adds up as it does; others emulate: the sum in float64, where products of e4m3 are added without rounding, then
times both scales, rounded to the dtype of the output. The bias is added to that, as a sum of its own.

A product wants its right operand transposed in memory, which the codes are for forward. Backward's is made once per
gather if it is kept, else in each backward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.nn import functional as F
from torch.utils._pytree import tree_map_only

from megatron_fsdp.config.ddp_config import ShardingStrategy
from megatron_fsdp.config.precision import MixedPrecisionPolicy
from megatron_fsdp.dtensor.shard_spec import TensorParallelPart, is_tensor_extension
from megatron_fsdp.engine.param_group import ParameterGroup
from megatron_fsdp.engine.plans import GroupPlan
from megatron_fsdp.engine.weight_quantizer import WrappingQuantizer
from megatron_fsdp.errors import ConfigurationError, warn_caller
from megatron_fsdp.sharding.placement import Region
from megatron_fsdp.sharding.units import ParameterOwners, parameter_owners
from megatron_fsdp.sharding.weight_formats import WEIGHT_FORMATS, Fp8, Fp8Compute, WeightFormat, amaxes_of, scale_to

_E4M3, _E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
_MULTIPLE = 16  # of which both dimensions of a right operand have to be on a GPU
_LEAST_CAPABILITY = (8, 9)
_PLAIN = (torch.Tensor, torch.nn.Parameter, FakeTensor)  # inputs of other classes have their own arithmetic


def multiplies_float8(device: torch.device) -> bool:
    """Return True if a device has float8 products: NVIDIA GPUs from compute capability 8.9 on."""
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    cuda = torch.get_device_module(device)
    return bool(cuda.is_available()) and cuda.get_device_capability(device) >= _LEAST_CAPABILITY


def _emulates(device: torch.device, shape: Sequence[int]) -> bool:
    """Return True if codes of a shape are multiplied by emulation."""
    return not multiplies_float8(device) or any(size % _MULTIPLE for size in shape)


def to_float8(values: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Round values (m, k) to a float8 dtype; return codes and the scale, float32 ().

    What is not finite makes all codes or the scale so, and with them every element of a product.
    """
    amax = amaxes_of(values) if values.numel() else values.new_zeros((), dtype=torch.float32)
    scale, codes = scale_to(torch.finfo(dtype).max, amax), torch.empty_like(values, dtype=dtype)
    # A scale without dimensions would be rounded to half precision, if that is what values have.
    return torch.div(values, scale.view(1), out=codes), scale


def scaled_product(
    left: torch.Tensor,
    left_scale: torch.Tensor,
    right: torch.Tensor,
    right_scale: torch.Tensor,
    dtype: torch.dtype,
    emulates: bool = True,
) -> torch.Tensor:
    """Multiply float8 codes (m, k) and (n, k), the latter transposed, and their scales; returns (m, n) of `dtype`."""
    if not emulates and left.numel():
        scales = (left_scale, _aligned(right_scale))
        return torch._scaled_mm(left.contiguous(), right.t(), *scales, out_dtype=dtype)
    total = left.double() @ right.double().t()  # selective checkpointing may keep it, so nothing is done in place
    return (total * (left_scale.double() * right_scale.double())).to(dtype)


def _aligned(scale: torch.Tensor) -> torch.Tensor:
    """Return a scale at a multiple of 16 bytes, without which cuBLAS has no product."""
    return scale.clone() if scale.data_ptr() % 16 else scale


def emulation_note(groups: Iterable[ParameterGroup], device: torch.device) -> str:
    """Describe the weights that are multiplied by emulation, and why; empty if none is."""
    names = [
        name
        for group in groups
        if isinstance(group.plan.weight_format, Fp8Compute)
        for name, shape in zip(group.names, group.plan.layout.shapes, strict=True)
        if _emulates(device, shape)
    ]
    if not names:
        return ""
    sides = f"their sides are no multiples of {_MULTIPLE}"
    on_device = f"this {device.type} has no float8 products"
    reason = sides if multiplies_float8(device) else on_device
    return (
        f"fp8_compute: {len(names)} weights (first: {names[0]}) are multiplied in float64, exactly and slowly, since "
        f"{reason}; weight_format='fp8' gathers as few bytes, and multiplies in the dtype of the model"
    )


class _Gathered:
    """State that the aliases of one weight share: its codes, and tensors derived from them."""

    def __init__(
        self,
        codes: torch.Tensor,
        scale: torch.Tensor,
        dtype: torch.dtype,
        keeps_transposed: bool,
        linear: Callable[..., torch.Tensor],
        part: TensorParallelPart | None,
    ) -> None:
        self.codes, self.scale, self.dtype, self.linear, self.part = codes, scale, dtype, linear, part
        self._keeps_transposed, self._emulates = keeps_transposed, _emulates(codes.device, codes.shape)
        self.transposed: torch.Tensor | None = None

    def multiply(self, rows: torch.Tensor) -> torch.Tensor:
        """Round inputs (m, in_features) to float8, and multiply them by the codes, transposed."""
        return scaled_product(*to_float8(rows, _E4M3), self.codes, self.scale, rows.dtype, self._emulates)

    def multiply_back(self, rows: torch.Tensor) -> torch.Tensor:
        """Round output gradients (m, out_features) to float8, and multiply them by the codes."""
        return scaled_product(*to_float8(rows, _E5M2), self.transpose(), self.scale, rows.dtype, self._emulates)

    def transpose(self) -> torch.Tensor:
        """Return the codes transposed in memory (in_features, out_features)."""
        made = self.codes.t().contiguous() if self.transposed is None else self.transposed
        if self._keeps_transposed:
            self.transposed = made
        return made

    def decode(self) -> torch.Tensor:
        return self.as_held((self.codes.float() * self.scale).to(self.dtype))

    def as_held(self, own: torch.Tensor) -> torch.Tensor:
        """Return a tensor of the codes' shape as modules expect the weight or its gradient: maybe as a DTensor."""
        return own if self.part is None else self.part.wrap(own)


class Fp8Weight(torch.Tensor):
    """The weight of a linear as gathered e4m3 codes; functions other than `F.linear` compute with a decoded copy."""

    held: _Gathered

    @staticmethod
    def __new__(cls: type[Fp8Weight], held: _Gathered) -> Fp8Weight:
        """Make an alias."""
        codes = held.codes
        shape = codes.shape if held.part is None else held.part.shape
        made = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=held.dtype, device=codes.device)
        made.held = held
        return made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Multiply codes in `F.linear`; see that function."""
        if func is F.linear:
            named = dict(zip(("input", "weight", "bias"), args, strict=False)) | (kwargs or {})
            if isinstance(named["weight"], cls):
                return named["weight"].held.linear(**named)
        with torch._C.DisableTorchFunctionSubclass():  # results are plain
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, _types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Compute with decoded weights."""
        if func is torch.ops.aten.detach.default:
            return cls(args[0].held)
        args, kwargs = tree_map_only(cls, lambda weight: weight.held.decode(), (args, kwargs or {}))
        return func(*args, **kwargs)


def _linear(input: torch.Tensor, weight: Fp8Weight, bias: torch.Tensor | None = None) -> torch.Tensor:  # noqa: A002
    """Compute `F.linear`, in float8 if the input is a plain tensor, or a DTensor as the weight is one."""
    tensor, kind, part = input, input.device.type, weight.held.part
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else weight.dtype
    fits = type(tensor) in _PLAIN if part is None else type(tensor) is DTensor and tensor.device_mesh == part.mesh
    if not fits or (tensor.dtype is not dtype and not torch.is_autocast_enabled(kind)):
        with torch._C.DisableTorchFunctionSubclass():
            return F.linear(tensor, weight, bias)
    multiply: Any = _Fp8Linear.apply if part is None else _multiply_part
    output: torch.Tensor = multiply(tensor.to(dtype), weight)
    if bias is None:
        return output
    if isinstance(output, DTensor) and output.placements == (Partial(),):
        output = output.redistribute(placements=[Replicate()])  # else each rank would add the bias
    return output + bias.to(dtype)


def _multiply_part(tensor: DTensor, weight: Fp8Weight) -> DTensor:
    """Multiply by a tensor-parallel part of a weight; sums over ranks stay partial.

    Rows of the weight give columns of the output, of whole inputs; its columns take those of the input.
    """
    part, last = weight.held.part, tensor.ndim - 1
    assert part is not None
    by_rows = part.placement == Shard(0)
    wanted, given_back = (Replicate(), Partial()) if by_rows else (Shard(last), Shard(last))
    local = tensor.redistribute(placements=[wanted]).to_local(grad_placements=[given_back])
    output = _Fp8Linear.apply(local, weight)  # type: ignore[no-untyped-call]
    shape = torch.Size((*tensor.shape[:-1], part.shape[0]))
    return DTensor.from_local(
        output,
        part.mesh,
        [Shard(last) if by_rows else Partial()],
        run_check=False,
        shape=shape,
        stride=torch.empty(shape, device="meta").stride(),
    )


class _Fp8Linear(torch.autograd.Function):
    """The product of an input (..., in_features) and a weight (out_features, in_features), transposed."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, weight: Fp8Weight) -> torch.Tensor:
        needs_input, needs_weight = ctx.needs_input_grad
        # The weight is saved so that autograd notices when its memory is given away; hooks may return a decoded copy.
        ctx.save_for_backward(tensor if needs_weight else None, weight if needs_input else None)
        ctx.shape, ctx.held = tensor.shape, weight.held
        output = ctx.held.multiply(tensor.reshape(-1, tensor.shape[-1]))
        return output.view(*tensor.shape[:-1], output.shape[1])

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        tensor, weight = ctx.saved_tensors
        rows, tensor_grad = grad.reshape(-1, grad.shape[-1]), None
        if weight is not None:
            tensor_grad = ctx.held.multiply_back(rows).view(ctx.shape)
        if tensor is None:
            return tensor_grad, None
        return tensor_grad, ctx.held.as_held(rows.t().mm(tensor.reshape(-1, tensor.shape[-1])))


class Fp8Quantizer(WrappingQuantizer):
    """Encodes the weights of one layout in e4m3, and wraps the gathered codes."""

    def __init__(self, plan: GroupPlan) -> None:
        """Allocate the scales."""
        assert isinstance(plan.weight_format, Fp8Compute)
        super().__init__(plan.weight_format, plan.layout, plan.device)
        self._dtype, self._keeps_transposed = plan.precision.compute, plan.weight_format.keeps_transposed
        self._scales, self._parts = torch.ones_like(self.amaxes), plan.parts
        # Codes move with each gather, and what is kept of them is a side effect: a compiled graph could hold neither.
        reason = "a linear that multiplies float8 weights is not compiled"
        self._linear: Callable[..., torch.Tensor] = torch.compiler.disable(_linear, reason=reason)

    @property
    def num_bytes(self) -> int:
        """Bytes of amaxes and scales, which are kept on the device."""
        return self.amaxes.nbytes + self._scales.nbytes

    def encode(self, local: torch.Tensor, region: Region, out: torch.Tensor) -> None:
        """Encode the elements `local` of a region into uint8 `out`, and note the scales."""
        self._scales.copy_(self.format.scales(self.amaxes))
        super().encode(local, region, out)

    def codes_in(self, full: torch.Tensor, index: int) -> torch.Tensor:
        """Return the codes of tensor `index` as a view of gathered bytes without their version."""
        start, stop = self._layout.tensor_range(index)
        return full[start:stop].view(_E4M3).view(self._layout.shapes[index]).data

    def blank_codes(self, index: int) -> torch.Tensor:
        """Return placeholders without memory, shaped as tensor `index`."""
        return torch.zeros((), dtype=_E4M3, device=self.amaxes.device).expand(self._layout.shapes[index])

    def wrap(self, index: int, codes: torch.Tensor) -> torch.Tensor:
        """Return the tensor that modules compute with, around codes of tensor `index`."""
        part = self._parts[index]
        part = part if part is not None and part.is_dtensor else None
        return Fp8Weight(_Gathered(codes, self._scales[index], self._dtype, self._keeps_transposed, self._linear, part))

    def point(self, index: int, made: Any, codes: torch.Tensor) -> None:
        """Re-point a wrapped tensor at new codes."""
        made.held.codes, made.held.transposed = codes, None

    def update(self, index: int, made: Any, full: torch.Tensor) -> None:
        """Drop tensors derived from codes before these were gathered anew."""
        made.held.transposed = None

    def release(self, made: Any) -> None:
        """Drop tensors derived from codes that are resharded."""
        made.held.transposed = None


# The parameters that have a weight format: as a policy says, and "fp8_compute" where a linear multiplies them.

_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_MULTIPLIED, _DECODED = Fp8Compute().name, Fp8().name
"""The format of weights that linears multiply, and that of all others, which gathers the same bytes."""


def encoded_parameters(
    module: nn.Module, policy: MixedPrecisionPolicy, strategy: ShardingStrategy, *, keeps_transposed: bool = False
) -> dict[str, WeightFormat]:
    """Return the weight format of each parameter that has one, by name; the module is only read.

    Those with two dimensions or more do, but for embeddings and what is tied to one, and as the policy's patterns say.
    Where these say "fp8_compute", what no plain linear multiplies is decoded as "fp8". `strategy` is that on the
    sharding axis; `keeps_transposed`: "fp8_compute" keeps transposed codes (`keep_fp8_transpose_cache`).
    Refused are a format without sharded weights, and a pattern that takes effect on no parameter; keeping where nothing
    is transposed is warned of.
    """
    patterns, names = policy.weight_formats, [name for name, _ in module.named_parameters()]
    if keeps_transposed and _MULTIPLIED not in patterns.values():
        warn_caller(
            "keep_fp8_transpose_cache=True has no effect, since no linear multiplies float8 weights; set "
            f"MixedPrecisionPolicy(weight_format={_MULTIPLIED!r}), or leave it out"
        )
    if not patterns:
        return {}
    asked = f"weight_format={policy.weight_format!r}"
    if not strategy.shards_compute_weights:
        raise ConfigurationError(
            f"{asked} is a format of sharded weights, and strategy {strategy.name} keeps them whole; use "
            "zero_dp_strategy 3 (optim_grads_params) or leave it out"
        )
    chosen: dict[str, list[str]] = {pattern: [] for pattern in patterns}  # names whose first match it is
    found: dict[str, WeightFormat] = {}
    owners = parameter_owners(module)
    for name, param in module.named_parameters():
        pattern = next((each for each in patterns if fnmatchcase(name, each)), None)
        if pattern is None:
            continue
        chosen[pattern].append(name)
        form, at = patterns[pattern], owners[id(param)]
        is_looked_up = any(isinstance(owner, nn.Embedding | nn.EmbeddingBag) for owner, _ in at)
        if form is None or is_looked_up or param.ndim < 2 or param.dtype not in _DTYPES or is_tensor_extension(param):
            continue
        made = WEIGHT_FORMATS[_DECODED if form == _MULTIPLIED and not _is_multiplied(param, at) else form]
        found[name] = replace(made, keeps_transposed=keeps_transposed) if isinstance(made, Fp8Compute) else made
    _check_patterns(asked, patterns, chosen, names, found)
    return found


def _check_patterns(
    asked: str,
    patterns: Mapping[str, str | None],
    chosen: Mapping[str, Sequence[str]],
    names: Sequence[str],
    found: Mapping[str, WeightFormat],
) -> None:
    """Raise if a pattern takes effect on no parameter."""
    for pattern, form in patterns.items():
        if not any(fnmatchcase(name, pattern) for name in names):
            raise ConfigurationError(
                f"{asked} has {pattern!r}, which matches none of the {len(names)} parameters (such as "
                f"{', '.join(names[:2])}); patterns are those of fnmatch"
            )
        if not chosen[pattern]:
            raise ConfigurationError(
                f"{asked} has {pattern!r}, which has no effect, since an earlier pattern matches every parameter that "
                "it does, and the first one counts; put it before"
            )
        if form is not None and not any(name in found for name in chosen[pattern]):
            raise ConfigurationError(
                f"{asked} has {pattern!r}, which concerns no parameter: {', '.join(chosen[pattern][:2])} "
                f"{'and others ' * (len(chosen[pattern]) > 2)}are embeddings or tied to one, have fewer than two "
                "dimensions, another dtype or a class that gathers in its own way; leave it out"
            )
        if form == _MULTIPLIED and not any(name in found and found[name].stays_encoded for name in chosen[pattern]):
            raise ConfigurationError(
                f"{asked} has {pattern!r}, of whose parameters ({', '.join(chosen[pattern][:2])}"
                f"{', ...' * (len(chosen[pattern]) > 2)}) none is the weight of a plain torch.nn.Linear, which alone "
                "multiplies float8 weights (not a subclass, as with delay_wgrad_compute, nor a stack of experts); "
                f"give {_DECODED!r} there, to gather the same bytes and decode them"
            )


def _is_multiplied(param: torch.Tensor, owners: ParameterOwners) -> bool:
    """Return True if only linears, plain or cut by tensor parallelism, hold a parameter, as their weight."""
    is_cut = isinstance(param, DTensor) and all(placement.is_shard() for placement in param.placements)
    return (is_cut or type(param) in (nn.Parameter, FakeTensor)) and all(
        type(owner) is nn.Linear and attribute == "weight" and "forward" not in owner.__dict__
        for owner, attribute in owners
    )
