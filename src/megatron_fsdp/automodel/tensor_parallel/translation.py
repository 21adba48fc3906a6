"""The names of styles in plans of transformers, and the styles of torch or of our own that do what they mean.

transformers 5.23 says what the names mean in `transformers/distributed/tensor_parallel.py`. Where it stores packed
weights interleaved, so that each rank has its part of each packed piece, we cut in one piece, and gather for use.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.distributed.tensor import Placement, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel
from torch.distributed.tensor.parallel import SequenceParallel as TorchSequenceParallel

from megatron_fsdp.automodel.tensor_parallel.embedding import DividedRows
from megatron_fsdp.automodel.tensor_parallel.experts import DividedExperts, can_divide_experts
from megatron_fsdp.automodel.tensor_parallel.layouts import SEQUENCE_DIM
from megatron_fsdp.automodel.tensor_parallel.styles import (
    LocalParts,
    MixedProjection,
    PackedColwise,
    PackedRowwise,
    PartialGradientColwise,
    SummedGradient,
)
from megatron_fsdp.errors import ConfigurationError

COLWISE = frozenset({"colwise", "colwise_gather_output", "colwise_rep", "packed_colwise"})
ROWWISE = frozenset({"rowwise", "rowwise_split_input", "rowwise_rep", "packed_rowwise"})
EMBEDDING = frozenset({"embedding_rowwise", "embedding_colwise"})
LINEAR = COLWISE | ROWWISE
NOT_DIVIDED = frozenset({"replicate", "moe_identity_expert"})
"""Nothing to do: whole on every rank. We compute a token's expert output either on one rank or whole on all of them, so
that identity experts, whose output transformers would sum over the ranks, need no scaling."""
_OTHER = ("replicated_with_grad_allreduce", "sequence_parallel", "mla_kv_a_proj", "all_reduce", "local_params")
STYLE_NAMES = LINEAR | EMBEDDING | NOT_DIVIDED | {*_OTHER, "moe_tp_experts"}
"""Every name that a plan may have."""


def check_style_name(key: str, style: object) -> None:
    """See that a plan gives a style of torch or a known name.

    Raises:
        ConfigurationError: It gives something else.
    """
    if isinstance(style, ParallelStyle) or (isinstance(style, str) and style in STYLE_NAMES):
        return
    nearest = difflib.get_close_matches(str(style), sorted(STYLE_NAMES), n=1)
    hint = f"did you mean {nearest[0]!r}? " if nearest else ""
    raise ConfigurationError(
        f"the tensor-parallel plan gives {key!r} the style {style!r}; {hint}allowed are a ParallelStyle of torch and "
        f"the names {', '.join(sorted(STYLE_NAMES))}"
    )


def linear_style(name: str, splits_tokens: bool) -> ParallelStyle:
    """The style of a linear layer.

    Args:
        name: One of `LINEAR`.
        splits_tokens: Whether the layer stands at the edge of a block whose input is gathered from the ranks' tokens,
            and whose output is scattered to them (sequence parallelism).
    """
    output: Placement = Shard(SEQUENCE_DIM) if splits_tokens else Replicate()
    match name:
        case "packed_colwise":
            return PackedColwise()
        case "packed_rowwise":
            return PackedRowwise()
        case "rowwise":
            return RowwiseParallel(output_layouts=output)
        case "rowwise_split_input" | "rowwise_rep":
            return RowwiseParallel(input_layouts=Replicate(), output_layouts=output)
    colwise = PartialGradientColwise if splits_tokens else ColwiseParallel
    return colwise(output_layouts=Shard(-1) if name == "colwise" else Replicate())


def embedding_style(name: str) -> ParallelStyle:
    """The style of an embedding whose input and output are whole on every rank."""
    if name in ("embedding_colwise", "colwise_gather_output", "colwise_rep"):
        return ColwiseParallel(output_layouts=Replicate())
    if name == "colwise":
        return ColwiseParallel()
    return DividedRows()


def other_style(name: str, module: nn.Module, own: Mapping[str, Placement], config: Any) -> ParallelStyle:
    """The style of a module that is neither a linear layer nor an embedding.

    Args:
        name: A style's name that is neither of a linear layer nor of an embedding.
        module: What the plan gives it to.
        own: Placements that the plan gives to parameters of the module itself, by name.
        config: Of the language model.

    Raises:
        ConfigurationError: The config lacks what the style needs.
    """
    match name:
        case "moe_tp_experts":
            if can_divide_experts(module):
                return DividedExperts()
            return LocalParts(stored_parts(module), whole=True)
        case "replicated_with_grad_allreduce":
            return SummedGradient()
        case "sequence_parallel":
            return TorchSequenceParallel(use_local_output=True)
        case "all_reduce":
            return LocalParts(dict(own), sums=True)
        case "local_params":
            return LocalParts(dict(own))
    rotary_numel = getattr(config, "qk_rope_head_dim", None)
    if not isinstance(rotary_numel, int):
        raise ConfigurationError(
            f"the style {name!r} needs to know the width of the rotary part, but the config has no qk_rope_head_dim; "
            "leave that module out of the plan, and those whose input it makes"
        )
    return MixedProjection(rotary_numel)


def parameter_placement(style: str, ndim: int) -> Placement:
    """Where the parts of a parameter lie that a plan names itself: column-wise cuts outputs, row-wise cuts inputs."""
    if style in COLWISE:
        return Shard(max(ndim - 2, 0))
    return Shard(ndim - 1) if style in ROWWISE else Replicate()


def stored_parts(module: nn.Module) -> dict[str, Placement]:
    """Each own parameter cut along its first dimension, for parameters that are gathered for use."""
    return {name: Shard(0) for name, param in module._parameters.items() if param is not None}
