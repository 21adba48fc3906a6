"""Which modules of a model are experts that can be divided over ranks; pure inspection.

transformers 5 keeps the experts of a layer as one module called `experts`. Its weights are stacked over the experts,
and it is called as `experts(hidden_states, top_k_index, top_k_weights)`: for each token the sum over its chosen experts
of weight times what the expert makes of the token.
"""

from __future__ import annotations

import inspect

from torch import nn
from torch.distributed.tensor import DTensor

from megatron_fsdp.automodel.architecture import text_config
from megatron_fsdp.errors import ConfigurationError, ParallelSizeError

_CONFIG_FIELDS = ("n_routed_experts", "num_experts", "num_local_experts", "moe_num_experts")
_WANTED = (
    "expert parallelism needs transformers' interface of fused experts: forward(hidden_states, top_k_index, "
    "top_k_weights), num_experts, and every weight a parameter of the module itself with num_experts rows, one of them "
    "of three dimensions; use ep_size=1 for this model"
)


def find_experts(model: nn.Module) -> dict[str, nn.Module]:
    """All experts modules by name, in the order of the model.

    Args:
        model: May be on the meta device.

    Raises:
        ConfigurationError: There are none, or one has another interface or is divided over ranks already.
    """
    found = {name: part for name, part in model.named_modules() if name.rpartition(".")[2] == "experts"}
    if not found:
        raise ConfigurationError(
            f"{type(model).__name__} has no module called experts, so there is nothing for ep_size > 1 to divide; give "
            "a mixture-of-experts model with fused experts (transformers 5), or ep_size=1"
        )
    for name, part in found.items():
        problem = _problem(part)
        if problem is not None:
            raise ConfigurationError(f"{name} ({type(part).__name__}) {problem}; {_WANTED}")
    return found


def _problem(part: nn.Module) -> str | None:
    """What keeps a module from being divided, as a predicate; None where nothing does."""
    own = dict(part.named_parameters(recurse=False))
    inner = [name for name, _ in part.named_parameters() if name not in own]
    num_experts = getattr(part, "num_experts", None)
    if inner:
        return f"has weights in modules of its own ({inner[0]})"
    if not own:
        return "has no weights"
    if any(True for _ in part.buffers()):
        return f"has a buffer ({next(name for name, _ in part.named_buffers())})"
    if not isinstance(num_experts, int):
        return "does not say num_experts"
    for name, param in own.items():
        if isinstance(param, DTensor):
            return f"has {name} divided over ranks already ({param.placements})"
        if param.ndim == 0 or param.shape[0] != num_experts:
            return f"has {name} of shape {tuple(param.shape)}, which is not a row for each of its {num_experts} experts"
    if all(param.ndim < 3 for param in own.values()):
        return "has no weight of three dimensions"
    return None if _takes_routing(part) else f"is called as forward{inspect.signature(part.forward)}"


def _takes_routing(part: nn.Module) -> bool:
    """Whether forward takes tokens, indices and weights: the names differ between families, their order does not."""
    names = [
        name
        for name, parameter in inspect.signature(part.forward).parameters.items()
        if parameter.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
    ]
    if len(names) != 3 or names[0] != "hidden_states":
        return False
    return names[1] in ("top_k_index", "router_indices") and names[2] in ("top_k_weights", "routing_weights")


def check_divisible(model: nn.Module, experts: dict[str, nn.Module], ep_size: int) -> None:
    """Check that each rank gets as many experts as any other, in every layer.

    Args:
        model: Its config is named in the message.
        experts: As of `find_experts`.
        ep_size: Expert-parallel ranks.

    Raises:
        ParallelSizeError: The experts of a layer do not divide.
    """
    for name, part in experts.items():
        num_experts = len(next(part.parameters()))
        if num_experts % ep_size:
            raise ParallelSizeError(
                f"{name} has {num_experts} experts ({_config_field(model, num_experts)}), which ep_size={ep_size} does "
                "not divide; give an ep_size that divides the number of experts"
            )


def _config_field(model: nn.Module, num_experts: int) -> str:
    stored = getattr(text_config(model), "__dict__", {})  # configs offer the number under names of other families too
    fields = [field for field in _CONFIG_FIELDS if stored.get(field) == num_experts]
    return f"config.{fields[0]}={num_experts}" if fields else f"num_experts={num_experts}"
