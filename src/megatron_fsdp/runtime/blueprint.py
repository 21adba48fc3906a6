"""What of a model has no memory yet, and which methods of its modules give it values."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from megatron_fsdp.errors import ConfigurationError

RESET_METHODS = ("reset_parameters", "_reset_parameters")
"""Of a module, without arguments; the first that exists is called."""

BUFFER_METHOD = "reset_buffers"
"""Of a module, without arguments; called after the reset method where both exist."""

MODEL_METHOD = "_init_weights"
"""Of a model, with a module as its one argument, as Hugging Face models have it."""

Site = tuple[int, str]
"""The id of a module and the name of its attribute."""


@dataclass(frozen=True)
class Blueprint:
    """A model as it was before sharding; holds no memory of its parameters.

    Attributes:
        shapes: Each parameter by canonical name, on the meta device: the original itself, or a twin of a real one.
        on_meta: Names of the parameters that have to be initialised.
        names: For each site of a parameter, several for a tied one, the canonical name.
        first_sites: The first site of each parameter in registration order.
        unfinished: Ids of the modules with parameters or buffers on the meta device in them or below them.
        module_names: Fully qualified name of each module by id.
    """

    shapes: Mapping[str, nn.Parameter]
    on_meta: frozenset[str]
    names: Mapping[Site, str]
    first_sites: frozenset[Site]
    unfinished: frozenset[int]
    module_names: Mapping[int, str]

    def label(self, module: nn.Module) -> str:
        """A module for messages."""
        return f"{self.module_names[id(module)] or '(root)'} ({type(module).__name__})"


def draw_blueprint(module: nn.Module, wanted: Collection[str] | None = None) -> Blueprint:
    """Note what is on the meta device.

    Args:
        module: The model.
        wanted: Canonical names of the parameters to initialise; others on the meta device are left there. None: all.
    """
    canonical = {id(param): name for name, param in module.named_parameters()}
    names: dict[Site, str] = {}
    first: dict[str, Site] = {}
    for owner in module.modules():
        for attribute, param in owner._parameters.items():
            if param is not None:
                name = names[id(owner), attribute] = canonical[id(param)]
                first.setdefault(name, (id(owner), attribute))
    params = dict(module.named_parameters())
    on_meta = frozenset(name for name, param in params.items() if param.is_meta and (wanted is None or name in wanted))
    given_up = {id(params[name]) for name in params.keys() - on_meta}
    return Blueprint(
        {name: param if param.is_meta else _twin(param) for name, param in params.items()},
        on_meta,
        names,
        frozenset(first.values()),
        frozenset(id(part) for part in module.modules() if any(has_meta(b, given_up) for b in part.modules())),
        {id(part): name for name, part in module.named_modules()},
    )


def has_meta(module: nn.Module, but: Collection[int] = ()) -> bool:
    """Whether a module itself holds a tensor without memory, besides those of certain ids; see `meta_tensors`."""
    return next(meta_tensors(module, but), None) is not None


def meta_tensors(module: nn.Module, but: Collection[int] = ()) -> Iterator[str]:
    """Attribute names of the parameters, buffers and plain tensors without memory that a module itself holds."""
    held: list[Mapping[str, object]] = [module._parameters, module._buffers, vars(module)]
    for holder in held:
        for name, value in holder.items():
            if isinstance(value, torch.Tensor) and value.is_meta and id(value) not in but:
                yield name


def reset_methods(module: nn.Module) -> tuple[Callable[[], object], ...]:
    """The methods that give values to what a module holds, in the order in which to call them."""
    found = [method for name in RESET_METHODS if (method := _method(module, name)) is not None][:1]
    buffers = _method(module, BUFFER_METHOD)
    return (*found, buffers) if buffers is not None else tuple(found)


def model_method(module: nn.Module) -> Callable[[nn.Module], object] | None:
    """The method by which a model gives values to each of the modules below it, if it has one."""
    return _method(module, MODEL_METHOD, module)


def check_can_initialise(module: nn.Module) -> None:
    """Refuse a model with modules that nothing can initialise; nothing is changed.

    Raises:
        ConfigurationError: Names every such module.
    """
    first: dict[int, tuple[nn.Module, str]] = {}
    for owner in module.modules():
        for attribute, param in owner._parameters.items():
            if param is not None:
                first.setdefault(id(param), (owner, attribute))
    helpless = [
        f"{name or '(root)'} ({type(part).__name__}: {', '.join(own)})"
        for name, part in _without_model_method(module, "")
        if not reset_methods(part) and (own := [n for n in meta_tensors(part) if not _is_alias(part, n, first)])
    ]
    if helpless:
        raise ConfigurationError(
            f"{len(helpless)} modules hold tensors on the meta device and have no method that initialises them: "
            f"{'; '.join(helpless)}; give each a reset_parameters() that sets all it holds (reset_buffers() for "
            f"buffers), or the model an {MODEL_METHOD}(module), or build these modules outside of the meta device"
        )


def _is_alias(module: nn.Module, attribute: str, first: Mapping[int, tuple[nn.Module, str]]) -> bool:
    """Whether an attribute is a parameter that was met before, elsewhere, and gets its value there."""
    param = module._parameters.get(attribute)
    return param is not None and first[id(param)] != (module, attribute)


def _without_model_method(module: nn.Module, name: str) -> Iterator[tuple[str, nn.Module]]:
    """The modules, each once, that no model around them initialises."""
    covered: set[int] = set()
    for _, part in module.named_modules():
        if id(part) not in covered and model_method(part) is not None:
            covered.update(id(below) for below in part.modules())
    for part_name, part in module.named_modules(prefix=name):
        if id(part) not in covered:
            yield part_name, part


def _method(module: nn.Module, name: str, *arguments: object) -> Callable[..., object] | None:
    method = getattr(module, name, None)
    if not callable(method) or isinstance(method, nn.Module):
        return None
    try:
        inspect.signature(method).bind(*arguments)
    except (TypeError, ValueError):  # wants other arguments, or does not say
        return None
    return method


def _twin(param: nn.Parameter) -> nn.Parameter:
    hollow = torch.empty(param.shape, dtype=param.dtype, device="meta")
    return nn.Parameter(hollow, requires_grad=param.requires_grad)
