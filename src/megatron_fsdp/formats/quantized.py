"""Frozen quantised weights: sharded and gathered as the bytes that are stored, and put together where they are read.

A quantised weight is several tensors, codes and scales, in one object: a tensor class that flattens into them (those
of torchao), or a parameter of bitsandbytes with its state. Before a model is sharded, each becomes frozen parameters of
bytes, `...parametrizations.weight.original0` and so on, by torch's parametrizations; reading the attribute inside of a
forward makes an equal object around views of the gathered bytes. All are of one dtype, so that a unit's lie in one
group, and none is a floating-point number that a precision policy would round.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import parametrize
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from megatron_fsdp.dtensor.shard_spec import is_tensor_extension
from megatron_fsdp.errors import ConfigurationError

STORED_DTYPE = torch.uint8
"""Dtype of the parameters that a quantised weight is stored as."""

Rebuild = Callable[[Iterator[torch.Tensor]], Any]
"""Makes a tensor from those that it was taken apart into, which it takes from an iterator."""


class StoredWeight(nn.Module):
    """The parametrization of one quantised weight by the bytes of its tensors."""

    def __init__(self, name: str, module: nn.Module, weight: nn.Parameter) -> None:
        super().__init__()
        self.name, self.kind = name, type(weight).__name__
        self._context = _context_of(weight)
        tensors, self._rebuild = _take_apart(module, weight)
        self._views = [_Bytes(tensor) for tensor in tensors]
        self._stored: list[torch.Tensor] = [view.bytes_of(t) for view, t in zip(self._views, tensors, strict=True)]

    def right_inverse(self, _weight: torch.Tensor) -> Sequence[torch.Tensor]:
        """Return the bytes, once: torch asks for them to register them, and again where a weight is assigned."""
        if not self._stored:
            raise self._refusal()
        stored, self._stored = self._stored, []
        return stored

    def forward(self, *stored: torch.Tensor) -> Any:
        """Return the weight around gathered bytes."""
        if any(isinstance(each, DTensor) for each in stored):
            raise self._refusal()
        return self._rebuild(view.view_in(each) for view, each in zip(self._views, stored, strict=True))

    def check_same(self, own: Any, other: Any) -> None:
        """Raise unless two tensors are one in memory."""
        if is_traceable_wrapper_subclass(own) or getattr(other, "data_ptr", int)() != own.data_ptr():
            raise self._refusal()

    def _refusal(self) -> ConfigurationError:
        return ConfigurationError(
            f"{self.name} is a quantised weight of a sharded model, which can be read inside of a forward alone, and "
            "not assigned; add adapters before sharding, and to merge them, save them (save_adapter) and load them "
            "beside a base that is not sharded"
        )

    def extra_repr(self) -> str:
        """Return the class of the weight and the tensors that it is stored as."""
        return f"{self.kind}: {', '.join(map(repr, self._views))}"

    def format(self) -> str:
        """Return the kind of the weight in text, the same on ranks that were given the same."""
        return re.sub(r" at 0x[0-9a-f]+", "", f"{self.extra_repr()}, {self._context}")


def _assign(module: nn.Module, name: str, value: Any) -> None:
    """Assign an attribute of a module with quantised weights; such a weight can be given its own memory alone."""
    of_module: Any = module._modules.get("parametrizations", {})
    if name in of_module and isinstance(of_module[name][0], StoredWeight):
        of_module[name][0].check_same(getattr(module, name), value)  # peft assigns what it has read (DoRA)
    else:
        nn.Module.__setattr__(module, name, value)


class _Bytes:
    """A tensor as a flat one of uint8, in the order of its memory."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._dtype = tensor.dtype
        self._order = sorted(range(tensor.ndim), key=tensor.stride().__getitem__, reverse=True)
        self._shape = [tensor.shape[dim] for dim in self._order]

    def bytes_of(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach().permute(self._order).contiguous().view(-1).view(STORED_DTYPE)

    def view_in(self, stored: torch.Tensor) -> torch.Tensor:
        back = sorted(range(len(self._order)), key=self._order.__getitem__)
        return stored.data.view(self._dtype).view(self._shape).permute(back)

    def __repr__(self) -> str:
        return f"{str(self._dtype).removeprefix('torch.')}{self._shape}"


def take_quantized_apart(modules: Sequence[nn.Module], ignored: Collection[int] = ()) -> None:
    """Replace the frozen quantised weights of modules by the bytes that they are stored as; in place.

    What modules compute does not change. A weight that is tied stays one, and what is `ignored`, by id, stays as it is.

    Raises:
        ConfigurationError: One is trained, not quantised yet, or divided over tensor-parallel ranks.
    """
    found = [
        (f"{path}.{attribute}".lstrip("."), owner, attribute, param)
        for module in modules
        for path, owner in module.named_modules()
        for attribute, param in owner._parameters.items()
        if param is not None and id(param) not in ignored and _is_quantized(param, owner)
    ]
    for name, owner, _, param in found:
        _check(name, owner, param)
    known: dict[int, parametrize.ParametrizationList] = {}
    for name, owner, attribute, param in found:
        parametrize.register_parametrization(owner, attribute, StoredWeight(name, owner, param), unsafe=True)
        # bitsandbytes saves the state of a weight besides, which is among the parameters here
        type(owner)._save_to_state_dict = nn.Module._save_to_state_dict
        cast(Any, type(owner)).__setattr__ = _assign
        made = cast(Any, owner).parametrizations[attribute]
        made._parameters.update(known.setdefault(id(param), made)._parameters)


def stored_formats(module: nn.Module) -> dict[str, str]:
    """Return the formats of quantised weights, which have to be the same on all ranks."""
    return {f"the format of {part.name}": part.format() for part in module.modules() if isinstance(part, StoredWeight)}


def stored_note(roots: Iterable[nn.Module]) -> str:
    """Return a sentence about the quantised weights of a sharded model; empty where there are none."""
    found = {id(part): part for root in roots for part in root.modules() if isinstance(part, StoredWeight)}
    kinds = Counter(part.kind for part in found.values())
    counts = ", ".join(f"{count} {kind}" for kind, count in kinds.items())
    return f"frozen quantised weights ({counts}) are kept and gathered as their bytes (uint8)" if found else ""


def _is_bitsandbytes(made: object) -> bool:
    return type(made).__module__.partition(".")[0] == "bitsandbytes"


def _is_quantized(param: torch.Tensor, owner: nn.Module) -> bool:
    """Return True for a parameter of several tensors in one object; a DTensor of one has lost its class."""
    local = param._local_tensor if isinstance(param, DTensor) else param
    if _is_bitsandbytes(local) or (local is not param and _is_bitsandbytes(owner)):
        return True
    flatten: Any = getattr(local, "__tensor_flatten__", None)  # a DTensor has it, too
    if flatten is None or isinstance(local, DTensor):
        return False
    return not is_tensor_extension(local) or (not param.requires_grad and len(flatten()[0]) > 1)


def _check(name: str, module: nn.Module, param: nn.Parameter) -> None:
    """Raise for a quantised weight that cannot be taken apart."""
    what = f"{name} is a {type(param).__name__}, a quantised weight"
    if isinstance(param, DTensor) or any(isinstance(inner, DTensor) for inner in module._parameters.values()):
        raise ConfigurationError(f"{what} on tensor-parallel ranks; quantise a model that is not divided (tp_size=1)")
    if param.requires_grad:
        raise ConfigurationError(
            f"{what}, and is trained; freeze it (requires_grad_(False)) and train adapters (peft), or give a plain "
            "parameter and MixedPrecisionPolicy(weight_format=...)"
        )
    if not _is_bitsandbytes(param):
        return
    state = getattr(param, "quant_state", None)
    if getattr(state, "packing_format_for_cpu", False):
        raise ConfigurationError(f"{what} that an evaluation on the CPU has packed anew; shard before evaluating")
    if state is None and (param.dtype is not torch.int8 or _scales_of(module, param) is None):
        raise ConfigurationError(f"{what} of bitsandbytes that is not quantised yet; move the model to its device")


def _take_apart(module: nn.Module, tensor: Any) -> tuple[list[torch.Tensor], Rebuild]:
    """Return the plain tensors of a quantised weight, and the way back."""
    if _is_bitsandbytes(tensor):
        return _take_apart_4bit(module, tensor) if hasattr(tensor, "quant_state") else _take_apart_8bit(module, tensor)
    if not is_traceable_wrapper_subclass(tensor):
        return [tensor], next
    inner, context = tensor.__tensor_flatten__()
    parts = [_take_apart(module, getattr(tensor, each)) for each in inner]
    back = {each: of_part for each, (_, of_part) in zip(inner, parts, strict=True)}
    kind, size, stride = type(tensor), tensor.size(), tensor.stride()

    def rebuild(stored: Iterator[torch.Tensor]) -> Any:
        made = {each: of_part(stored) for each, of_part in back.items()}
        return kind.__tensor_unflatten__(made, context, size, stride)

    return [each for tensors, _ in parts for each in tensors], rebuild


def _context_of(weight: Any) -> Any:
    """Return the part of a weight's format that is not in its tensors."""
    if _is_bitsandbytes(weight):
        return getattr(getattr(weight, "quant_state", None), "quant_type", None)
    return weight.__tensor_flatten__()[1]


def _take_apart_4bit(module: Any, weight: Any) -> tuple[list[torch.Tensor], Rebuild]:
    """Take a `Params4bit` apart: codes, scales and table, and those of the scales where these are quantised, too."""
    kind, state = type(weight), weight.quant_state
    outer = {name: getattr(state, name) for name in ("shape", "blocksize", "quant_type", "dtype")}
    second = state.state2
    inner = None if second is None else {name: getattr(second, name) for name in ("blocksize", "dtype")}
    kept = {name: getattr(weight, name) for name in ("blocksize", "compress_statistics", "quant_type", "quant_storage")}
    make_state = type(state)
    tensors = [weight.data, state.absmax, state.code]
    if second is not None:
        tensors += [state.offset, second.absmax, second.code]
    module.quant_state = None  # a second reference to whole scales
    # An evaluation on some processors would pack weights anew, in place, and take what is gathered for packed.
    module.support_avx512bf16_for_cpu = False

    def rebuild(stored: Iterator[torch.Tensor]) -> Any:
        data, absmax, code = (next(stored) for _ in range(3))
        offset, state2 = None, None
        if inner is not None:
            offset, *of_scales = (next(stored) for _ in range(3))
            state2 = make_state(**inner, **dict(zip(("absmax", "code"), of_scales, strict=True)))
        made = make_state(absmax, code=code, offset=offset, state2=state2, **outer)
        return kind(data, requires_grad=False, quant_state=made, bnb_quantized=True, **kept)

    return tensors, rebuild


def _take_apart_8bit(module: Any, weight: Any) -> tuple[list[torch.Tensor], Rebuild]:
    """Take an `Int8Params` apart: codes and the scales of rows, which the first forward moves into the module."""
    kind, tensors = type(weight), [weight.data, _scales_of(module, weight)]
    if hasattr(module, "state"):
        module.state.reset_grads()

    def rebuild(stored: Iterator[torch.Tensor]) -> Any:
        codes, scales = next(stored), next(stored)
        return kind(codes, requires_grad=False, has_fp16_weights=False, CB=codes, SCB=scales)

    return tensors, rebuild


def _scales_of(module: nn.Module, weight: Any) -> Any:
    """Return the scales of an `Int8Params`; None where it is not quantised."""
    own = getattr(weight, "SCB", None)
    return getattr(getattr(module, "state", None), "SCB", None) if own is None else own
