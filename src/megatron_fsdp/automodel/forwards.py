"""Changes to modules' forwards: activation checkpointing, compilation, autocast, no packed sequences.

They keep the class of a module, its hooks and the names of its parameters.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from megatron_fsdp.automodel.architecture import find_layers, text_config
from megatron_fsdp.errors import ConfigurationError
from megatron_fsdp.plan.recompute import GROUPED, PRODUCTS, every_second_product, keeping_every_second_product

MLP_NAMES = ("mlp", "feed_forward", "ffn", "block_sparse_moe", "moe")
_MARK = "_models_without_packed_sequences"


def _run_inside(module: nn.Module, around: Callable[..., Any]) -> None:
    """Wrap a module's forward in `around(forward, module, *args, **kwargs)`.

    The forward is a function of the module, bound anew by deep copies, so that these use their own weights.
    """
    bound: Any = module.forward
    if isinstance(bound, MethodType) and bound.__self__ is module:
        forward: Callable[..., Any] = bound.__func__
    else:

        @functools.wraps(bound)
        def forward(_: nn.Module, *args: Any, **kwargs: Any) -> Any:
            return bound(*args, **kwargs)

    @functools.wraps(forward)
    def run(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return around(forward, self, *args, **kwargs)

    module.forward = MethodType(run, module)


def _unchanged_products(module: nn.Module) -> frozenset[Any]:
    """Return the products whose results a checkpoint of a module may keep."""
    # transformers adds the biases of stacked experts to the result of their product in place.
    adds_in_place = any(getattr(part, "has_bias", False) for part in module.modules())
    return PRODUCTS - {GROUPED} if adds_in_place else PRODUCTS


class _Keeping:
    """The operators that a checkpoint keeps: products inside of some modules, and those that a policy names."""

    def __init__(self, modules: Sequence[nn.Module], products: frozenset[Any] | None) -> None:
        self.products = products  # None: only those inside of the modules
        self.inside = 0
        for module in modules:
            module.register_forward_pre_hook(self._enter)
            module.register_forward_hook(self._leave, always_call=True)

    def _enter(self, *_: Any) -> None:
        self.inside += 1

    def _leave(self, *_: Any) -> None:
        self.inside -= 1

    def contexts(self) -> tuple[Any, Any]:
        """Return the contexts of one forward and of its recomputation."""
        policy = None if self.products is None else every_second_product(self.products)

        def decide(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
            # Not all results: routers change some of them in place, which may then not be kept.
            if self.inside and operator.overloadpacket in PRODUCTS:
                return CheckpointPolicy.MUST_SAVE
            return policy(context, operator, *args, **kwargs) if policy else CheckpointPolicy.PREFER_RECOMPUTE

        made: tuple[Any, Any] = create_selective_checkpoint_contexts(decide)
        return made


def recompute_in_backward(
    module: nn.Module, *, is_selective: bool = False, contexts: Callable[[], tuple[Any, Any]] | None = None
) -> None:
    """Keep only the inputs of a module's forward, and run it again in backward (non-reentrant).

    `is_selective`: keep also the results of attention and of every second matrix product. `contexts`: what to keep
    instead, as torch's `context_fn`.

    Hooks of the module, such as those that gather its weights, run outside: once in forward, and for recomputation the
    weights are gathered by the hooks of backward.
    """
    keeping = functools.partial(keeping_every_second_product, _unchanged_products(module))
    chosen = contexts or (keeping if is_selective else None)
    options: dict[str, Any] = {} if chosen is None else {"context_fn": chosen}

    def around(forward: Callable[..., Any], self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not (self.training and torch.is_grad_enabled()):
            return forward(self, *args, **kwargs)
        return checkpoint(forward, self, *args, use_reentrant=False, **options, **kwargs)

    _run_inside(module, around)


def run_under_autocast(module: nn.Module, device_type: str, dtype: torch.dtype) -> None:
    """Run a module's forward under `torch.autocast`."""

    def around(forward: Callable[..., Any], self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with torch.autocast(device_type, dtype):
            return forward(self, *args, **kwargs)

    _run_inside(module, around)


def checkpoint_layers(
    model: nn.Module,
    *,
    is_selective: bool = False,
    layers: Sequence[nn.Module] | None = None,
    kept: Sequence[nn.Module] = (),
) -> None:
    """Recompute layers (None: the decoder's): forward keeps one hidden state per layer, unless selective.

    Results of matrix products inside of the modules `kept` are kept in any case.
    """
    contexts = _Keeping(kept, _unchanged_products(model) if is_selective else None).contexts if kept else None
    for layer in find_layers(model).modules() if layers is None else layers:
        recompute_in_backward(layer, is_selective=is_selective, contexts=contexts)
    _switch_cache_off(model)


def checkpoint_mlps(model: nn.Module) -> None:
    """Recompute the MLP (or mixture of experts) of each decoder layer."""
    for name, layer in find_layers(model).named():
        found = [part for part_name, part in layer.named_children() if part_name in MLP_NAMES]
        if not found:
            raise ConfigurationError(
                f"activation_checkpointing=True, but {name} ({type(layer).__name__}) has no module called "
                f"{', '.join(MLP_NAMES)} to recompute; set it to False"
            )
        for part in found:
            recompute_in_backward(part)
    _switch_cache_off(model)


def _switch_cache_off(model: nn.Module) -> None:
    """Disable the key and value cache, which recomputation would write to a second time."""
    for config in (getattr(model, "config", None), text_config(model)):
        if hasattr(config, "use_cache"):
            settable: Any = config
            settable.use_cache = False


def assume_no_packed_sequences(model: nn.Module) -> None:
    """Patch `_is_packed_sequence` to return False while any model needs it."""
    from transformers import modeling_flash_attention_utils as flash

    module: Any = flash
    users: set[int] | None = getattr(module._is_packed_sequence, _MARK, None)
    if users is None:
        users, looks = set(), module._is_packed_sequence

        def is_never_packed(*_: Any, **__: Any) -> bool:
            return False

        setattr(is_never_packed, _MARK, users)
        is_never_packed.__wrapped__ = looks  # type: ignore[attr-defined]
        module._is_packed_sequence = is_never_packed
    if id(model) not in users:
        users.add(id(model))
        weakref.finalize(model, _release, module, id(model))


def _release(module: Any, key: int) -> None:
    current = module._is_packed_sequence
    users: set[int] = getattr(current, _MARK, set())
    users.discard(key)
    if not users and hasattr(current, _MARK):
        module._is_packed_sequence = current.__wrapped__
