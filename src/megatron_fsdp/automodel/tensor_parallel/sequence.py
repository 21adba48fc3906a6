"""Sequence parallelism: between its blocks a decoder layer holds only this rank's tokens.

Norms, dropouts and sums of the residual stream run on a part of the tokens, so their activations take 1 / ranks of the
memory (Korthikanti et al., Reducing Activation Recomputation in Large Transformer Models, 2022). The decoder layers are
the region: the first one cuts the tokens, the last one gathers them, so what is outside, position ids and masks
included, sees whole tensors. A block (attention, feed-forward) gathers the tokens at its entry. Where all of its entry
projections are column-wise and its exit is row-wise, gradients are reduce-scattered at the entry and outputs at the
exit; any other block (experts with their router) runs on whole tokens as without sequence parallelism.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Replicate
from torch.distributed.tensor.parallel import ParallelStyle

from megatron_fsdp.automodel.architecture import Layers, find_layers, model_type
from megatron_fsdp.automodel.tensor_parallel.plans import COLWISE, ROWWISE
from megatron_fsdp.automodel.tensor_parallel.styles import SEQUENCE_DIM, gather_tokens, not_a_view, own_tokens
from megatron_fsdp.errors import ConfigurationError, ParallelSizeError

SEQUENCE_PARALLEL_TYPES = (
    "deepseek_v3",
    "gemma",
    "gemma2",
    "gemma3_text",
    "granite",
    "llama",
    "mistral",
    "mixtral",
    "olmo2",
    "phi",
    "phi3",
    "qwen2",
    "qwen2_moe",
    "qwen3",
    "qwen3_moe",
)
"""Model types whose layers are proven to compute nothing across tokens outside of their blocks."""

_AT_EDGES = (COLWISE | ROWWISE | {"replicated_with_grad_allreduce"}) - {"packed_colwise", "packed_rowwise"}


@dataclass(frozen=True)
class SequenceRegion:
    """The parts of the decoder layers, by their names in the model."""

    layers: Layers
    scattering: tuple[str, ...]  # blocks that take partial gradients and scatter their output themselves
    whole: tuple[str, ...]  # blocks that run on whole tokens
    on_parts: tuple[str, ...]  # modules with parameters that run on this rank's tokens

    def scatters(self, name: str) -> bool:
        """Tell whether a module belongs to a block that scatters its output."""
        return any(name.startswith(f"{block}.") for block in self.scattering)


def sequence_region(model: nn.Module, styles: Mapping[str, ParallelStyle | str]) -> SequenceRegion:
    """Sort the parts of the decoder layers; refuse model types not proven, and plans with styles of torch."""
    if model_type(model) not in SEQUENCE_PARALLEL_TYPES:
        raise ConfigurationError(
            f"sequence_parallel=True is not offered for {type(model).__name__} ({model_type(model) or 'no type'}), but "
            f"for the model types {', '.join(SEQUENCE_PARALLEL_TYPES)}; set it to False, and give a tp_plan of torch's "
            "styles with sequence layouts where you need it"
        )
    own = [name for name, style in styles.items() if not isinstance(style, str)]
    if own:
        raise ConfigurationError(
            f"sequence_parallel=True cannot change the styles of torch that the plan gives (to {own[0]}); write the "
            "sequence layouts into them and set it to False, or give names of styles"
        )
    layers = find_layers(model)
    sorted_parts: dict[str, list[str]] = {"scattering": [], "whole": [], "on_parts": []}
    for layer_name, layer in layers.named():
        for child, part in layer.named_children():
            name = f"{layer_name}.{child}"
            inside = [str(style) for key, style in styles.items() if key == name or key.startswith(f"{name}.")]
            kind = _kind(part, inside)
            if kind is not None:
                sorted_parts[kind].append(name)
    return SequenceRegion(layers, *(tuple(names) for names in sorted_parts.values()))


def _kind(part: nn.Module, styles: list[str]) -> str | None:
    if styles:
        exits = sum(style in ROWWISE for style in styles)
        return "scattering" if set(styles) <= _AT_EDGES and exits == 1 else "whole"
    has_parameters = next(part.parameters(), None) is not None
    if "norm" in type(part).__name__.lower():
        return "on_parts" if has_parameters else None
    return "whole" if has_parameters else None


def split_tokens(model: nn.Module, region: SequenceRegion, mesh: DeviceMesh) -> None:
    """Install the cuts and gathers of a region."""
    layers = region.layers.modules()
    layers[0].register_forward_pre_hook(_on_input(partial(_cut, mesh=mesh)), with_kwargs=True)
    layers[-1].register_forward_hook(_on_output(lambda tensor: not_a_view(gather_tokens(tensor, mesh, Replicate()))))
    for names, gradient in ((region.scattering, Partial()), (region.whole, Replicate())):
        gather = _on_input(partial(gather_tokens, mesh=mesh, gradient=gradient))
        for name in names:
            model.get_submodule(name).register_forward_pre_hook(gather, with_kwargs=True)
    for name in region.whole:
        model.get_submodule(name).register_forward_hook(_on_output(partial(own_tokens, mesh=mesh)))


def _cut(tensor: Tensor, mesh: DeviceMesh) -> Tensor:
    if tensor.shape[SEQUENCE_DIM] % mesh.size():
        raise ParallelSizeError(
            f"the batch has {tensor.shape[SEQUENCE_DIM]} tokens in a row, which {mesh.size()} tensor-parallel ranks "
            "cannot share evenly under sequence parallelism; pad rows to a multiple of that"
        )
    return own_tokens(tensor, mesh)


def _on_input(change: Any) -> Any:
    """Make a hook that changes the hidden states that go in, the first argument or the one of that name."""

    def hook(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if args:
            return (change(args[0]), *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": change(kwargs["hidden_states"])}

    return hook


def _on_output(change: Any) -> Any:
    """Make a hook that changes the hidden states that come out, alone or first of a tuple."""

    def hook(_module: nn.Module, _args: Any, output: Any) -> Any:
        return (change(output[0]), *output[1:]) if isinstance(output, tuple) else change(output)

    return hook
