"""A trial forward of a divided model, which finds the whole parameters that get a partial gradient.

A parameter that is whole on every rank gets its whole gradient on each if it meets activations that are whole, too:
they are equal, and whatever divides them (a column-wise layer) sums their gradient over the ranks. If it meets divided
activations, between a column-wise and a row-wise layer, each rank computes a part of a sum. The model's own operations
decide which of the two holds, so one rank's part of it runs once, on a few tokens, on a copy without weights: divided
modules only give an output of the right size, and for each tensor the trial tracks whether it is divided, and else
which parameters its gradient reaches.
"""

from __future__ import annotations

import copy
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from megatron_fsdp.automodel.architecture import text_config
from megatron_fsdp.errors import first_line

_TOKENS = 8
_VALUE = 0.02  # of every weight and output; routers, norms and products get something to work with

_CONSTANT = ("zeros_like", "ones_like", "full_like", "empty_like", "rand_like", "randn_like", "new_")
"""Operations (beginnings of names) that take a shape from a tensor, and no values."""


@dataclass(frozen=True)
class Division:
    """The division of a module by a plan, as far as the trial needs it."""

    runs: bool = False  # runs its own forward, else only gives an output of the right size
    ins: int = 1  # parts of the input
    outs: int = 1  # parts of the output
    sums: bool = False  # the output is summed over the ranks, and so is the gradient of the input
    sums_gradient: bool = False  # the output may meet whole and divided activations
    leaves_parts: bool = False  # the gradient of the input is left as a part of a sum
    parameters: Mapping[str, int] = field(default_factory=dict)  # own parameters that are cut: dimension by name
    ranks: int = 1  # parts of these parameters


_COMBINES = ("_softmax", "_log_softmax", "native_layer_norm", "_fused_rms_norm", "cumsum", "topk", "sort")
"""Operations beside torch's reductions whose result is made of all elements along a dimension."""
_IS_REDUCTION = getattr(torch.Tag, "reduction", None)  # torch 2.11 has no such tag


@dataclass(frozen=True)
class _Reduction:
    """An operation over dimensions of a tensor: its name, the module that runs it, the shape and those dimensions."""

    name: str
    where: str
    shape: tuple[int, ...]
    dims: frozenset[int]

    @classmethod
    def of(cls, func: Any, where: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> _Reduction | None:
        """Return the dimensions that an operation combines; None for an operation that combines none."""
        name = func._schema.name.partition("::")[2]
        if not (_IS_REDUCTION in func.tags or name in _COMBINES) or not args or not isinstance(args[0], Tensor):
            return None
        given = {**dict(zip((each.name for each in func._schema.arguments), args, strict=False)), **kwargs}
        ndim = args[0].ndim
        dims: Any = given.get("dim")
        if "normalized_shape" in given:
            dims = range(-len(given["normalized_shape"]), 0)
        elif name in ("topk", "sort") and dims is None:
            dims = -1
        elif dims is None or dims == []:
            dims = range(ndim)
        wanted = [dims] if isinstance(dims, int) else dims
        return cls(name, where, tuple(args[0].shape), frozenset(dim % max(ndim, 1) for dim in wanted))


class DivisionError(Exception):
    """A division that does not fit; the message is the reason."""


@dataclass(frozen=True)
class _Mark:
    """The state of a tensor: this rank has a part of it or all, and its gradient reaches `sources` (bits)."""

    is_divided: bool = False
    sources: int = 0


_NOTHING = _Mark()


class _Following(TorchDispatchMode):
    """Tracks marks through every operation. They belong to storages, so that views and writes into views share them.

    Attributes:
        inside: Names of the modules whose forward runs, outermost first.
        whole: Sources (bits) whose gradient comes from whole activations somewhere.
        partial: Sources whose gradient comes from divided activations -> the module where.
        reductions: Operations over dimensions, in their order.
        running: By storage of a parameter, the modules that run at all of its uses; None before the first.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch gives it no hints
        self.inside: list[str] = []
        self.whole = 0
        self.partial: dict[int, str] = {}
        self.reductions: list[_Reduction] = []
        self.running: dict[int, set[str] | None] = {}
        self._marks: dict[int, tuple[Any, _Mark]] = {}  # with the storage, whose address must not be used again

    def of(self, *values: Any) -> _Mark:
        """Join the marks of all tensors in nested values."""
        marks = [self._marks.get(storage._cdata, (None, _NOTHING))[1] for storage in _storages(values)]
        sources = 0
        for mark in marks:
            sources |= mark.sources
        return _Mark(any(mark.is_divided for mark in marks), sources)

    def mark(self, values: Any, mark: _Mark) -> None:
        """Give all tensors in nested values a mark; indices have no gradient."""
        for tensor in _tensors(values):
            sources = mark.sources if tensor.is_floating_point() or tensor.is_complex() else 0
            storage = tensor.untyped_storage()
            self._marks[storage._cdata] = (storage, _Mark(mark.is_divided, sources))

    def use(self, values: Any, is_partial: bool = False) -> None:
        """Record a use of tensors that gives their whole gradient, or a part of it."""
        sources = self.of(values).sources
        if is_partial:
            where = self.inside[-1] if self.inside else ""
            while sources:
                self.partial.setdefault(sources & -sources, where)  # the lowest set bit
                sources &= sources - 1
        else:
            self.whole |= sources

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        found = _Reduction.of(func, self.inside[-1] if self.inside else "", args, kwargs or {})
        self.reductions.extend([found] if found is not None else ())
        for storage in _storages((args, kwargs)):
            if storage._cdata in self.running:
                before = self.running[storage._cdata]
                self.running[storage._cdata] = set(self.inside) if before is None else before & set(self.inside)
        if not func.__name__.startswith(_CONSTANT):
            mark = self.of(args, kwargs)
            if mark.is_divided:
                self.use((args, kwargs), is_partial=True)
                # The result has no sources: gradients that pass through it are partial already, and recorded.
                mark = _Mark(is_divided=True)
            self.mark(result, mark)
        return result


def _tensors(values: Any) -> Iterator[Tensor]:
    return (value for value in tree_iter(values) if isinstance(value, Tensor))


def _storages(values: Any) -> Iterator[Any]:
    return (tensor.untyped_storage() for tensor in _tensors(values))


class Trial:
    """The trial of one rank's part of a model.

    The model is not divided yet, and only read; `prepare` is called with its copy, before that runs. `blocks` are names
    of modules whose input is gathered from the tokens of all ranks, which sums its gradient.
    """

    def __init__(
        self,
        model: nn.Module,
        divisions: Mapping[str, Division],
        blocks: tuple[str, ...] = (),
        prepare: Callable[[nn.Module], object] | None = None,
    ) -> None:
        self._flow = _Following()
        self._model = _copy_without_weights(model)
        self._names: list[str] = []  # of sources, in the order of their bits
        self._params: set[int] = set()  # sources that are parameters which no division names
        self.failed_in = ""
        if prepare is not None:
            prepare(self._model)
        parts = dict(self._model.named_modules(remove_duplicate=False))
        for name, part in parts.items():
            part.register_forward_pre_hook(lambda *_, name=name: self._flow.inside.append(name))
        for name, division in divisions.items():
            self._divide(name, parts[name], division)
        for name, param in self._model.named_parameters():
            if self._flow.of(param) == _NOTHING:
                self._params.add(self._mark_source(name, param))
        self._flow.running = {param.untyped_storage()._cdata: None for param in self._model.parameters()}
        for name in blocks:
            parts[name].register_forward_pre_hook(self._gather, with_kwargs=True)
        for part in parts.values():
            part.register_forward_hook(self._leave, always_call=True)

    @property
    def partial(self) -> set[str]:
        """The names of the whole parameters of which each rank computes a partial gradient."""
        return {self._names[source.bit_length() - 1] for source in self._flow.partial}

    @property
    def running(self) -> dict[str, set[str]]:
        """The modules that run at all uses of a parameter, by its name; without shared and unused parameters."""
        named = list(self._model.named_parameters(remove_duplicate=False))
        shared = Counter(id(param) for _, param in named)
        found = {
            name: self._flow.running[param.untyped_storage()._cdata] for name, param in named if shared[id(param)] == 1
        }
        return {name: modules for name, modules in found.items() if modules is not None}

    def run(self) -> str | None:
        """Run the forward on a few tokens; return the reason if the division does not fit."""
        try:
            with torch.no_grad(), self._flow:
                self._flow.use(self._forward())
        except Exception as error:  # noqa: BLE001 - whatever a model cannot do with parts of its weights
            text = first_line(error)
            return text if isinstance(error, DivisionError) else f"{self._described(self.failed_in)} fails ({text})"
        for source, where in self._flow.partial.items():
            # No sum over the ranks is right for a whole activation, nor for a parameter with gradients of both kinds.
            if source not in self._params or source & self._flow.whole:
                self.failed_in = where
                return (
                    f"{self._names[source.bit_length() - 1]} is whole on every rank, and meets activations in "
                    f"{self._described(where)} of which each rank has a part, so no rank gets its whole gradient"
                )
        return None

    def differing_reduction(self, whole: Trial) -> str | None:
        """Describe an operation that combines one rank's elements where the whole model combines all.

        Ranks would compute equal wrong values, which no comparison of ranks can find. The two trials run the same
        operations, so the divided dimensions of each are those in which its shapes differ.
        """
        pairs = list(zip(self._flow.reductions, whole._flow.reductions, strict=False))
        if any((part.name, len(part.shape)) != (all_.name, len(all_.shape)) for part, all_ in pairs):
            return None  # another branch, so nothing can be compared
        for part, all_ in pairs:
            if any(part.shape[dim] != all_.shape[dim] for dim in part.dims):
                self.failed_in = part.where
                return (
                    f"{part.name} in {self._described(part.where)} runs over {list(part.shape)} on a rank, a part of "
                    f"{list(all_.shape)}"
                )
        return None

    def _forward(self) -> Any:
        inputs = torch.arange(_TOKENS, device="cpu")[None] % 4 + 1
        is_first = getattr(self._model, "_stage_is_first", None)  # of a stage of a pipeline
        if is_first is None:
            return self._model(inputs, use_cache=False)
        hidden_shape = (1, _TOKENS, text_config(self._model).hidden_size)
        return self._model(inputs if is_first else torch.full(hidden_shape, _VALUE, device="cpu"))

    def _described(self, name: str) -> str:
        module = self._model.get_submodule(name)
        own = [f"{key} {list(param.shape)}" for key, param in module._parameters.items() if param is not None]
        return f"{name} ({', '.join([type(module).__name__, *own])})" if name else "the model"

    def _mark_source(self, name: str, values: Any) -> int:
        self._names.append(name)
        source = 1 << (len(self._names) - 1)
        self._flow.mark(values, _Mark(sources=source))
        return source

    def _leave(self, _module: nn.Module, _args: Any, _output: Any) -> None:
        left = self._flow.inside.pop()
        if sys.exc_info()[0] is not None:
            # Hooks run from the inside out, so the first module is the one that raised.
            self.failed_in = self.failed_in or left

    def _gather(self, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return fresh inputs, since the gather before the module sums their gradient."""

        def gathered(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            self._flow.use(value)
            # A fresh tensor: the gather sums the gradient, so sources before it end here.
            return value.new_full(value.shape, _VALUE) if value.is_floating_point() else value

        return tuple(map(gathered, args)), {key: gathered(value) for key, value in kwargs.items()}

    def _divide(self, name: str, module: nn.Module, division: Division) -> None:
        for key, param in list(module._parameters.items()):
            if param is not None and key in division.parameters:
                dim = division.parameters[key]
                shape = [size // division.ranks if at == dim else size for at, size in enumerate(param.shape)]
                module._parameters[key] = constant = _constant(param, shape)
                self._flow.mark(constant, _Mark(is_divided=division.ranks > 1))
        if not division.runs:
            for key, param in module.named_parameters():
                if self._flow.of(param) == _NOTHING:
                    self._mark_source(f"{name}.{key}", param)
            settable: Any = module
            settable.forward = self._substitute(name, module, division)
        elif division.sums:
            module.register_forward_pre_hook(self._gather, with_kwargs=True)
            # `and None`, since a hook that returns something would replace the output.
            module.register_forward_hook(lambda *given: self._mark_source(f"the output of {name}", given[-1]) and None)

    def _substitute(self, name: str, module: nn.Module, division: Division) -> Callable[..., Tensor]:
        """Return a forward that only gives an output of the right size."""

        def forward(given: Tensor, *others: Any) -> Tensor:
            width = given.shape[-1:].numel()
            if isinstance(module, nn.Linear):
                if width != module.in_features // division.ins:
                    raise DivisionError(
                        f"{name} gets {width} features on a rank, and has weights for "
                        f"{module.in_features // division.ins}"
                    )
                width = module.out_features // division.outs
            elif isinstance(module, nn.Embedding):
                width = module.embedding_dim // division.outs
            if division.ins == 1:
                if self._flow.of(given).is_divided:
                    raise DivisionError(f"{name} takes whole activations, and gets those that are divided already")
                self._flow.use((given, others), is_partial=division.leaves_parts)
            shape = given.shape if isinstance(module, nn.Embedding) else given.shape[:-1]
            dtype = module.weight.dtype if isinstance(module, nn.Embedding) else given.dtype
            output = given.new_full((*shape, width), _VALUE, dtype=dtype)
            if division.outs > 1:
                self._flow.mark(output, _Mark(is_divided=True))
            elif not division.sums_gradient:
                self._mark_source(f"the output of {name}", output)
            return output

        return forward


def _constant(tensor: Tensor, shape: Any) -> nn.Parameter:
    """Return a parameter of this dtype on the CPU that takes no memory."""
    value = _VALUE if tensor.is_floating_point() else 0
    return nn.Parameter(torch.full((), value, dtype=tensor.dtype, device="cpu").expand(shape), requires_grad=False)


def _copy_without_weights(model: nn.Module) -> nn.Module:
    """Copy a model without its weights to the CPU."""
    memo: dict[int, Any] = {id(param): _constant(param, param.shape) for param in model.parameters()}
    for part in model.modules():
        for value in (*part._buffers.values(), *vars(part).values()):
            if isinstance(value, Tensor) and value.device.type != "cpu":
                is_here = not value.is_meta
                memo[id(value)] = value.detach().cpu() if is_here else torch.zeros_like(value, device="cpu")
    copied = copy.deepcopy(model, memo).eval()
    config: Any = getattr(copied, "config", None)
    if hasattr(config, "_attn_implementation"):
        config._attn_implementation = "eager"  # others may have no kernels for the CPU
    return copied
