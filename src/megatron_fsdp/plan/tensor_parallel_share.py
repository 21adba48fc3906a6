"""What one tensor-parallel rank holds, computes and sends of a model of transformers, by transformers' own plan.

The collectives are those of `parallelize_tensors` of automodel: one for each divided layer, as torch has them.
Layers that share an input, such as queries, keys and values, sum their gradients of it one by one, which makes five
all-reduces in the backward of a layer of Llama where two would do (Shoeybi et al., Megatron-LM, 2019).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from megatron_fsdp.errors import ConfigurationError
from megatron_fsdp.plan.decoder_parts import itemsize_of, text_config
from megatron_fsdp.plan.recompute import Recompute
from megatron_fsdp.plan.standing_collectives import gathered, own_part, summed, with_summed_gradient
from megatron_fsdp.plan.tensor_parallel_plan import COLWISE, ROWWISE, tensor_parallel_styles
from megatron_fsdp.plan.workload import Exchange

_GATHERING = COLWISE - {"colwise"}
_SPLITTING = ROWWISE - {"rowwise"}
_LAST = ("mlp", "feed_forward", "ffn")
_NORMS_BEHIND = ("post_feedforward_layernorm", "post_mlp_layernorm")


def take_tensor_parallel_part(model: nn.Module, ranks: int, tokens: int) -> tuple[Exchange, ...]:
    """Cut the parameters of a model to those of the first rank, in place, and let its forward do as that rank's.

    Parameters become plain ones of the local shape, on the meta device. Where ranks cannot share evenly (vocabularies)
    the first rank has the most.

    Args:
        model: Modules of its own; parameters may be another model's, which stays as it is.
        ranks: Tensor-parallel ranks.
        tokens: Of a microbatch on this rank.

    Returns:
        What is sent, under the names of the modules that send it.

    Raises:
        ConfigurationError: There is no plan for the model, or one with unknown styles.
        ParallelSizeError: The ranks cannot share evenly.
    """
    styles = tensor_parallel_styles(model, ranks)
    cut = _Cut(ranks)
    traffic = _Traffic(model, ranks, tokens, itemsize_of(model), [])
    for name, style in styles.items():
        module = model.get_submodule(name)
        if style in COLWISE:
            _divide_outputs(name, module, style, cut, traffic)
        elif style in ROWWISE:
            _divide_inputs(name, module, style, cut, traffic)
        elif style in ("embedding_rowwise", "embedding_colwise"):
            _divide_embedding(name, module, style, cut, traffic)
        elif style == "moe_tp_experts":
            _divide_experts(name, module, cut, traffic)
        elif style == "mla_kv_a_proj":
            _sum_rotary_gradient(name, module, model, traffic)
        else:  # whole, and the gradients of its weights are summed
            for param in module.parameters():
                traffic.gradient(name, param.numel())
    return tuple(traffic.found)


class _Cut:
    """Cuts parameters, each once: tied ones stay tied."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self._done: dict[int, nn.Parameter] = {}
        self._kept: list[nn.Parameter] = []  # ids are those of living tensors

    def __call__(self, module: nn.Module, name: str, dim: int) -> None:
        """Replace a parameter by the first rank's part."""
        whole = module._parameters.get(name)
        if whole is None:
            return
        if id(whole) not in self._done:
            shape = list(whole.shape)
            shape[dim] = self.part(shape[dim])
            part = whole.new_empty(shape, device="meta")
            self._done[id(whole)] = nn.Parameter(part, requires_grad=whole.requires_grad)
            self._kept.append(whole)
        module._parameters[name] = self._done[id(whole)]

    def part(self, size: int) -> int:
        """Of a dimension, on the first rank, as torch cuts."""
        return -(-size // self.ranks)


@dataclass(frozen=True)
class _Traffic:
    """Collects what is sent."""

    model: nn.Module
    ranks: int
    tokens: int
    itemsize: int
    found: list[Exchange]

    def all_reduce(self, name: str, width: int, *, in_backward: bool) -> None:
        """Of activations, over a ring: each rank sends its part twice to all others."""
        self._note(name, 2 * self._others(self.tokens * width * self.itemsize), in_backward, ends_part=True)

    def gather(self, name: str, width: int, *, in_backward: bool) -> None:
        """Of activations."""
        self._note(name, self._others(self.tokens * width * self.itemsize), in_backward, ends_part=False)

    def _note(self, name: str, sent: int, in_backward: bool, *, ends_part: bool) -> None:
        repeats = () if in_backward else _repeats(self.model, name, ends_part=ends_part)
        self.found.append(Exchange("tp", name, sent, in_backward, repeated_by=repeats))

    def gradient(self, name: str, numel: int) -> None:
        """An all-reduce of a whole weight's gradient."""
        self.found.append(Exchange("tp", name, 2 * self._others(numel * self.itemsize), True))

    def _others(self, size: int) -> int:
        return size * (self.ranks - 1) // self.ranks


def _repeats(model: nn.Module, name: str, *, ends_part: bool) -> tuple[Recompute, ...]:
    """Under which recomputation a forward collective runs again.

    Recomputation ends where all that was saved is there, so the sum at the end of a part is not repeated with the part;
    nor with the layer, where nothing is saved behind it.
    """
    layer, _, rest = name.rpartition(".")[0].rpartition(".")
    if not layer:
        return ()
    if "attn" in rest or "attention" in rest:
        return ("full",) if ends_part else ("full", "attention")
    ends_layer = ends_part and not any(hasattr(model.get_submodule(layer), norm) for norm in _NORMS_BEHIND)
    if rest in _LAST:
        return () if ends_layer else ("full",) if ends_part else ("full", "mlp")
    return ("full", "mlp")


def _hook(module: nn.Module, function: Callable[[Tensor], Tensor]) -> None:
    """Apply a function to the output of a module."""
    module.register_forward_hook(lambda _module, _args, output: function(output))


def _pre_hook(module: nn.Module, function: Callable[[Tensor], Tensor]) -> None:
    """Apply a function to the first input of a module."""
    module.register_forward_pre_hook(lambda _module, args: (function(args[0]), *args[1:]))


def _divide_outputs(name: str, module: Any, style: str, cut: _Cut, traffic: _Traffic) -> None:
    width, own = module.out_features, cut.part(module.out_features)
    cut(module, "weight", 0)
    cut(module, "bias", 0)
    module.out_features = own
    _pre_hook(module, with_summed_gradient)
    traffic.all_reduce(name, module.in_features, in_backward=True)
    if style in _GATHERING:
        _hook(module, partial(gathered, ranks=cut.ranks, width=width))
        traffic.gather(name, width, in_backward=False)
    if style == "packed_colwise":
        _hook(module, partial(own_part, ranks=cut.ranks, part=own))
        traffic.gather(name, width, in_backward=True)


def _divide_inputs(name: str, module: Any, style: str, cut: _Cut, traffic: _Traffic) -> None:
    width, own = module.in_features, cut.part(module.in_features)
    cut(module, "weight", 1)
    module.in_features = own
    if style == "packed_rowwise":
        _pre_hook(module, partial(gathered, ranks=cut.ranks, width=width))
        traffic.gather(name, width, in_backward=False)
    if style in _SPLITTING:
        _pre_hook(module, partial(own_part, ranks=cut.ranks, part=own))
        traffic.gather(name, width, in_backward=True)
    _hook(module, summed)
    traffic.all_reduce(name, module.out_features, in_backward=False)


def _divide_embedding(name: str, module: Any, style: str, cut: _Cut, traffic: _Traffic) -> None:
    width = module.embedding_dim
    if style == "embedding_colwise":
        cut(module, "weight", 1)
        module.embedding_dim = cut.part(width)
        _hook(module, partial(gathered, ranks=cut.ranks, width=width))
        traffic.gather(name, width, in_backward=False)
        return
    cut(module, "weight", 0)
    module.num_embeddings = cut.part(module.num_embeddings)
    module.register_forward_pre_hook(_own_ids)
    module.register_forward_hook(_sum_rows)
    traffic.all_reduce(name, width, in_backward=False)


def _own_ids(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    ids = args[0] - 0
    elsewhere = (ids < 0) | (ids >= module.num_embeddings)
    return (ids.masked_fill(elsewhere, 0), *args[1:])


def _sum_rows(_module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
    elsewhere = args[0] < 0  # as large as the mask of ids that other ranks look up
    return summed(output.masked_fill(elsewhere.unsqueeze(-1), 0.0))


def _divide_experts(name: str, module: Any, cut: _Cut, traffic: _Traffic) -> None:
    weights = list(_own_names(module))
    hidden = getattr(module, "hidden_dim", None) or getattr(getattr(module, "config", None), "hidden_size", None)
    if not isinstance(hidden, int):
        raise ConfigurationError(f"{name} does not say the width of its inputs; use tp=1")
    for key in weights:
        cut(module, key, 0)
    module.num_experts //= cut.ranks
    module._is_expert_parallel = True
    module.register_forward_pre_hook(_share_routes)
    _hook(module, summed)
    traffic.all_reduce(name, hidden, in_backward=False)
    traffic.all_reduce(name, hidden, in_backward=True)


def _own_names(module: nn.Module) -> Iterator[str]:
    return (name for name, param in module._parameters.items() if param is not None)


def _share_routes(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    hidden, experts, weights, *rest = args
    experts = experts - 0
    elsewhere = (experts < 0) | (experts >= module.num_experts)
    weights = with_summed_gradient(weights).masked_fill(elsewhere, 0.0)
    return with_summed_gradient(hidden), experts.masked_fill(elsewhere, 0), weights, *rest


def _sum_rotary_gradient(name: str, module: nn.Module, model: nn.Module, traffic: _Traffic) -> None:
    rotary = getattr(text_config(model), "qk_rope_head_dim", None)
    if not isinstance(rotary, int):
        raise ConfigurationError(
            f"the plan sums a part of the gradient of {name}, whose width (qk_rope_head_dim) the config lacks; use tp=1"
        )

    def sum_part(output: Tensor) -> Tensor:
        latent, rotated = output.split([output.shape[-1] - rotary, rotary], dim=-1)
        return torch.cat([latent, with_summed_gradient(rotated)], dim=-1)

    _hook(module, sum_part)
    traffic.all_reduce(name, rotary, in_backward=True)
