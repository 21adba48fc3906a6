"""Low-rank adapters of peft in linear layers: which style each part gets when a plan names the layer."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from megatron_fsdp.automodel.tensor_parallel.translation import COLWISE
from megatron_fsdp.errors import ConfigurationError

_PLAIN = frozenset({"colwise", "colwise_gather_output", "colwise_rep", "rowwise", "rowwise_split_input", "rowwise_rep"})


def is_adapted(module: nn.Module) -> bool:
    """Whether this is a layer of peft around another one."""
    return isinstance(getattr(module, "base_layer", None), nn.Module)


def styles_of_adapted(name: str, module: nn.Module, style: str, splits_tokens: bool) -> Iterator[tuple[str, str]]:
    """Which style each part of an adapted linear layer gets.

    Column-wise, y = W x + B (A x): W and B give this rank's columns, A is whole. Row-wise: W and A take this rank's
    part of the input, and the sum over ranks of A x is what B, whole, is applied to. With tokens split over ranks, the
    whole factor sees part of the gradient (A, since x's gradient is summed later) or part of the tokens (B).

    Args:
        name: Of the layer in the model.
        module: The layer of peft.
        style: What the plan gives the layer.
        splits_tokens: As of `linear_style`.

    Yields:
        (name of a part, its style).

    Raises:
        ConfigurationError: The adapter is not a plain LoRA of a linear layer.
    """
    if style not in _PLAIN or not _is_plain_lora(module):
        raise ConfigurationError(
            f"{name} is a {type(module).__name__} of peft, which tensor parallelism cannot divide by the style "
            f"{style!r}; use plain LoRA on linear layers (no DoRA, no variants), or leave the layer out of the plan"
        )
    yield f"{name}.base_layer", style
    divided, whole = ("lora_B", "lora_A") if style in COLWISE else ("lora_A", "lora_B")
    for adapter in getattr(module, divided):
        yield f"{name}.{divided}.{adapter}", style
        if splits_tokens:
            yield f"{name}.{whole}.{adapter}", "replicated_with_grad_allreduce"


def _is_plain_lora(module: nn.Module) -> bool:
    parts = [getattr(module, name, None) for name in ("lora_A", "lora_B")]
    is_linear = isinstance(module.base_layer, nn.Linear)
    is_plain = not getattr(module, "lora_variant", None) and not any(
        dict(getattr(module, "use_dora", {}) or {}).values()
    )
    return is_linear and is_plain and all(isinstance(part, nn.ModuleDict) and len(part) for part in parts)
