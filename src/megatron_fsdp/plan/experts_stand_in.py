"""Mixtures of experts without values: routing is balanced, and other ranks are stood in for.

Which rows an expert gets is data. What is alive depends on the number of rows of a rank only, where all its experts are
computed by one grouped product, as transformers 5 does by default: k rows for each token, however they are routed. With
experts divided over ranks, a rank gets as many rows as it sends when routing is balanced.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from megatron_fsdp.errors import ConfigurationError, ParallelSizeError
from megatron_fsdp.plan.experts_loop import balanced_loop, loops_plainly

_GROUPED = "grouped_mm"
_FIELD = "_experts_implementation"


@contextmanager
def balanced_experts(model: nn.Module, expert_ranks: int = 1) -> Iterator[None]:
    """Inside of it, fused experts of transformers compute without values, each rank its share.

    Experts that are computed one after another ("eager") get as many rows each as any other, up to one; families whose
    loop is not the common one are computed by grouped products instead. With `expert_ranks` > 1 a layer has the first
    ``1 / expert_ranks`` of its experts, and tokens travel to their experts and back as in `automodel.expert_parallel`:
    sorted rows, an exchange, the experts, an exchange.

    Args:
        model: Changed inside of the block only; without experts nothing is done.
        expert_ranks: How many ranks share the experts of a layer.

    Raises:
        ConfigurationError: `expert_ranks` > 1, and there are no fused experts.
        ParallelSizeError: It does not divide the experts.
    """
    experts = fused_experts(model)
    if expert_ranks > 1 and not experts:
        raise ConfigurationError(
            f"{type(model).__name__} has no fused experts, so nothing can be divided over {expert_ranks} ranks; use 1"
        )
    with ExitStack() as stack:
        for name, part in experts.items():
            stack.enter_context(_without_values(part))
            if expert_ranks > 1:
                stack.enter_context(_divided(name, part, expert_ranks))
        yield


def fused_experts(model: nn.Module) -> dict[str, nn.Module]:
    """Modules that hold the weights of all experts of a layer, stacked, by name."""
    return {name: part for name, part in model.named_modules() if _is_fused(name, part)}


def _is_fused(name: str, part: nn.Module) -> bool:
    weights = dict(part.named_parameters(recurse=False))
    if name.rpartition(".")[2] != "experts" or not isinstance(getattr(part, "num_experts", None), int):
        return False
    stacked = all(weight.dim() > 0 and len(weight) == part.num_experts for weight in weights.values())
    return stacked and any(weight.dim() == 3 for weight in weights.values()) and len(_arguments(part)) == 3


def _arguments(part: nn.Module) -> list[str]:
    parameters = inspect.signature(part.forward).parameters.values()
    return [known.name for known in parameters if known.kind is known.POSITIONAL_OR_KEYWORD]


@contextmanager
def _without_values(part: nn.Module) -> Iterator[None]:
    """Loops over experts depend on values: the common one runs balanced, others give way to grouped products."""
    config: Any = getattr(part, "config", None)
    before = getattr(config, _FIELD, None)
    if before not in (None, "eager"):
        yield
    elif loops_plainly(part):
        with _own_forward(part, functools.partial(balanced_loop, part)):
            yield
    elif config is None:
        raise ConfigurationError(
            f"{type(part).__name__} has no grouped product, so which rows are computed depends on values; profile "
            "experts of transformers 5 that have one"
        )
    else:
        setattr(config, _FIELD, _GROUPED)
        try:
            yield
        finally:
            setattr(config, _FIELD, before)


@contextmanager
def _own_forward(part: nn.Module, forward: Callable[..., Tensor]) -> Iterator[None]:
    had = part.__dict__.get("forward")
    part.__dict__["forward"] = forward
    try:
        yield
    finally:
        del part.__dict__["forward"]
        if had is not None:
            part.__dict__["forward"] = had


@contextmanager
def _divided(name: str, part: nn.Module, ranks: int) -> Iterator[None]:
    total = len(next(part.parameters()))
    if total % ranks:
        raise ParallelSizeError(f"{name} has {total} experts, which {ranks} ranks cannot share equally; use a divisor")
    weights = dict(part._parameters)
    for key, weight in weights.items():
        if weight is not None:
            shape = (total // ranks, *weight.shape[1:])
            part._parameters[key] = nn.Parameter(weight.new_empty(shape), requires_grad=weight.requires_grad)
    part.__dict__["num_experts"] = total // ranks
    try:
        with _own_forward(part, functools.partial(_exchanged, part.forward, ranks, total // ranks)):
            yield
    finally:
        part._parameters.update(weights)
        part.__dict__["num_experts"] = total


def _exchanged(
    forward: Callable[..., Tensor], ranks: int, local: int, hidden_states: Tensor, index: Tensor, weights: Tensor
) -> Tensor:
    """The steps of a rank's divided experts; rows that come are as many as those that go."""
    chosen = index.shape[-1]
    order = torch.argsort(index.flatten(), stable=True)
    local_index = _arriving(index, ranks, local)
    rows = hidden_states.repeat_interleave(chosen, dim=0)[order]
    computed = _compute(forward, _travel(rows), local_index)
    returned = _travel(computed)[torch.argsort(order)]
    weighted = returned.view(*index.shape, hidden_states.shape[-1]) * weights.unsqueeze(-1)
    return weighted.sum(dim=-2).to(hidden_states.dtype)


def _compute(forward: Callable[..., Tensor], rows: Tensor, local_index: Tensor) -> Tensor:
    return forward(rows, local_index.unsqueeze(-1), rows.new_ones(rows.shape[0], 1)).to(rows.dtype)


@torch.no_grad()
def _arriving(index: Tensor, ranks: int, local: int) -> Tensor:
    """The expert of each row that arrives, found by counting; (rows,) int64."""
    counts = torch.zeros(ranks * local, dtype=torch.int64, device=index.device)
    chosen = index.flatten().long()
    counts.scatter_add_(0, chosen, torch.ones_like(chosen))
    arriving = torch.empty_like(counts)
    per_rank = torch.stack([counts, arriving]).view(2, ranks, local)
    per_rank.sum(dim=-1)
    experts = torch.arange(local, device=counts.device).repeat(ranks)
    return experts.repeat_interleave(arriving, output_size=chosen.shape[0])


class _Travel(torch.autograd.Function):
    """Rows go and as many come: memory of its own on arrival, in forward and in backward."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor) -> Tensor:
        del ctx
        return torch.empty_like(rows.contiguous())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        del ctx
        return torch.empty_like(grads[0].contiguous())


def _travel(rows: Tensor) -> Tensor:
    arrived: Tensor = _Travel.apply(rows)  # type: ignore[no-untyped-call]  # torch's own, without hints
    return arrived
