"""Tensor-parallel plans: the choice of a plan, the modules that its entries name, and the check of sizes.

transformers 5.23 defines the names of styles in `transformers/distributed/tensor_parallel.py`. Where it stores packed
weights interleaved, each rank with its part of each packed piece, we cut in one piece, and gather for use.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel
from torch.distributed.tensor.parallel import SequenceParallel as TorchSequenceParallel

from megatron_fsdp.automodel.architecture import head_counts, layer_configs, model_type, parameter_names
from megatron_fsdp.automodel.tensor_parallel.styles import (
    SEQUENCE_DIM,
    Apply,
    PartialGradientColwise,
    can_divide_experts,
    check_experts,
    divided_experts,
    divided_rows,
    local_parts,
    mixed_projection,
    packed_colwise,
    packed_rowwise,
    with_summed_gradients,
)
from megatron_fsdp.automodel.tensor_parallel.trial import Division
from megatron_fsdp.config.import_path import import_by_path
from megatron_fsdp.errors import ConfigurationError, ParallelSizeError

Plan = Mapping[str, ParallelStyle | str]
COLWISE = frozenset({"colwise", "colwise_gather_output", "colwise_rep", "packed_colwise"})
ROWWISE = frozenset({"rowwise", "rowwise_split_input", "rowwise_split_output", "rowwise_rep", "packed_rowwise"})
EMBEDDING = frozenset({"embedding_rowwise", "embedding_colwise"})
LINEAR = COLWISE | ROWWISE
NOT_DIVIDED = frozenset({"replicate", "moe_identity_expert"})
"""Nothing to do: whole on every rank. We compute a token's expert output either on one rank or whole on all of them, so
that identity experts, whose output transformers would sum over the ranks, need no scaling."""

_OTHER = ("replicated_with_grad_allreduce", "sequence_parallel", "mla_kv_a_proj", "all_reduce", "local_params")
STYLE_NAMES = LINEAR | EMBEDDING | NOT_DIVIDED | {*_OTHER, "moe_tp_experts"}
"""Every name that a plan may have."""

_ATTENTION = "model.layers.*.self_attn"
_LEFT_OUT = {
    "cohere": {f"{_ATTENTION}.[qk]_norm": "local_params", f"{_ATTENTION}.[qk]_norm.weight": "colwise"},
    "doge": {_ATTENTION: "local_params", f"{_ATTENTION}.A": "colwise", f"{_ATTENTION}.dt_proj": "rowwise_split_output"},
}
"""Entries that plans of transformers lack, by model type: parameters and outputs with a row for each head."""

_PLAIN = frozenset({"colwise", "colwise_gather_output", "colwise_rep", "rowwise", "rowwise_split_input", "rowwise_rep"})


def _checked(plan: object, where: str) -> Plan:
    if not isinstance(plan, Mapping) or not plan or not all(isinstance(key, str) for key in plan):
        raise ConfigurationError(
            f"{where} {plan!r:.80}; a tensor-parallel plan is a dict, not empty, from names of modules to styles"
        )
    for key, style in plan.items():
        if isinstance(style, ParallelStyle) or (isinstance(style, str) and style in STYLE_NAMES):
            continue
        nearest = difflib.get_close_matches(str(style), sorted(STYLE_NAMES), n=1)
        hint = f"did you mean {nearest[0]!r}? " if nearest else ""
        raise ConfigurationError(
            f"the tensor-parallel plan gives {key!r} the style {style!r}; {hint}allowed are a ParallelStyle of torch "
            f"and the names {', '.join(sorted(STYLE_NAMES))}"
        )
    return plan


@dataclass(frozen=True)
class MatchedPlan:
    """A plan by the names of one model."""

    modules: dict[str, ParallelStyle | str]  # style by name of the module, in order of the model
    parameters: dict[str, str]  # style by name of the parameter, where a plan names parameters


def match_plan(model: nn.Module, given: Plan | str | None) -> MatchedPlan:
    """Match the entries of a plan, the given one or transformers' own, with the names of a model.

    Patterns of fnmatch in the entries match a part of a name, or within one; an entry without `*` precedes one with it.
    Entries of a given plan must each match something.
    """
    plan, source = _find_plan(model, given)
    modules = [name for name, _ in model.named_modules(remove_duplicate=False) if name]
    parameters = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    chosen: dict[str, str] = {}
    for key in plan:
        named = [name for name in (*modules, *parameters) if _names(key, name)]
        if not named and given is not None and not any(_names(key, name) for name in _empty_places(model)):
            raise ConfigurationError(_names_nothing(key, modules))
        for name in named:
            chosen[name] = _more_special(name, key, chosen.get(name), plan)
    if not chosen:
        raise ConfigurationError(
            f"the tensor-parallel plan ({source}) names nothing in this model, whose modules are called like "
            f"{', '.join(modules[-3:])}; write the keys as such names"
        )
    for name in parameters:
        if name in chosen and not isinstance(plan[chosen[name]], str):
            raise ConfigurationError(
                f"the tensor-parallel plan gives the parameter {name} a style of torch; name its module, or give the "
                "name of a style"
            )
    return MatchedPlan(
        {name: plan[chosen[name]] for name in modules if name in chosen},
        {name: str(plan[chosen[name]]) for name in parameters if name in chosen},
    )


def _find_plan(model: nn.Module, given: Plan | str | None) -> tuple[Plan, str]:
    """Return a plan and its origin."""
    if isinstance(given, str):
        found = import_by_path(given, "tp_plan")
        found = found() if callable(found) else found
        return _checked(found, f"tp_plan={given!r} leads to"), f"import path {given}"
    if given is not None:
        return _checked(given, "tp_plan is"), "given"
    own = getattr(model, "_tp_plan", None) or getattr(getattr(model, "config", None), "base_model_tp_plan", None)
    if not own:
        raise ConfigurationError(
            f"transformers has no tensor-parallel plan for {type(model).__name__} ({model_type(model) or 'no type'}); "
            "give tp_plan, a dict from names of modules to styles or its import path, or use tp_size=1"
        )
    plan = {**_checked(own, "transformers' plan is"), **_LEFT_OUT.get(model_type(model), {})}
    return plan, f"transformers, {model_type(model)}"


def _names(key: str, name: str) -> bool:
    """Return True if an entry matches this name, part by part as in `parallelize_module`."""
    patterns, parts = key.split("."), name.split(".")
    return len(patterns) == len(parts) and all(map(fnmatchcase, parts, patterns))


def _more_special(name: str, key: str, other: str | None, plan: Plan) -> str:
    if other is None or plan[other] == plan[key]:
        return key
    if key.count("*") == other.count("*"):
        raise ConfigurationError(
            f"the tensor-parallel plan gives {name} two styles, by {other!r} and by {key!r}; keep one of them"
        )
    return min(key, other, key=lambda entry: entry.count("*"))


def _empty_places(model: nn.Module) -> Iterator[str]:
    """Yield the names of modules and parameters that were removed, as in a pipeline stage."""
    for name, part in model.named_modules():
        for child, value in (*part._modules.items(), *part._parameters.items()):
            if value is None:
                yield f"{name}.{child}" if name else child


def _names_nothing(key: str, modules: list[str]) -> str:
    generic = {re.sub(r"\.\d+(?=\.|$)", ".*", name) for name in modules}
    nearest = difflib.get_close_matches(key, sorted(generic), n=3)
    hint = f"the nearest names are {', '.join(nearest)}" if nearest else f"names are like {sorted(generic)[-1]}"
    return f"the tensor-parallel plan has {key!r}, which names no module of this model; {hint}"


def style_of(
    name: str, module: nn.Module, splits_tokens: bool, own: Mapping[str, Placement], config: Any
) -> ParallelStyle | Apply:
    """Return the style that a name means for a module.

    Under sequence parallelism (`splits_tokens`) a linear layer is at the edge of a block whose input is gathered from
    the ranks' tokens, and whose output is scattered to them. An embedding has whole input and output on every rank.
    `own` are the placements of parameters that the plan names themselves.
    """
    if isinstance(module, nn.Embedding):
        if name == "colwise":
            return ColwiseParallel()
        by_columns = name in ("embedding_colwise", "colwise_gather_output", "colwise_rep")
        return ColwiseParallel(output_layouts=Replicate()) if by_columns else divided_rows
    output: Placement = Shard(SEQUENCE_DIM) if splits_tokens else Replicate()
    match name:
        case "packed_colwise":
            return packed_colwise
        case "packed_rowwise":
            return packed_rowwise
        case "rowwise":
            return RowwiseParallel(output_layouts=output)
        case "rowwise_split_input" | "rowwise_rep":
            return RowwiseParallel(input_layouts=Replicate(), output_layouts=output)
        case "rowwise_split_output":
            return RowwiseParallel(output_layouts=Shard(-1))
        case "colwise" | "colwise_gather_output" | "colwise_rep":
            colwise = PartialGradientColwise if splits_tokens else ColwiseParallel
            return colwise(output_layouts=Shard(-1) if name == "colwise" else Replicate())
        case "moe_tp_experts":
            if can_divide_experts(module):
                return divided_experts
            stored = {key: Shard(0) for key, param in module._parameters.items() if param is not None}
            return partial(local_parts, placements=stored, whole=True)
        case "replicated_with_grad_allreduce":
            return with_summed_gradients
        case "sequence_parallel":
            return TorchSequenceParallel(use_local_output=True)
        case "all_reduce" | "local_params":
            return partial(local_parts, placements=dict(own), sums=name == "all_reduce")
    rotary_numel = getattr(config, "qk_rope_head_dim", None)
    if not isinstance(rotary_numel, int):
        raise ConfigurationError(
            f"the style {name!r} needs to know the width of the rotary part, but the config has no qk_rope_head_dim; "
            "leave that module out of the plan, and those whose input it makes"
        )
    return partial(mixed_projection, rotary_numel=rotary_numel)


def division_of(
    style: ParallelStyle | str, module: nn.Module, splits_tokens: bool, own: Mapping[str, Placement], ranks: int
) -> Division | None:
    """Return a style's division, for a trial; None: the module stays whole. Raise for styles that may do anything."""
    if isinstance(style, ParallelStyle):
        style = _name_of(style)
    if isinstance(module, nn.Embedding):
        return Division(outs=ranks if style == "colwise" else 1)
    match style:
        case "rowwise" | "packed_rowwise":
            return Division(ins=ranks)
        case "rowwise_split_input" | "rowwise_rep":
            return Division()
        case "rowwise_split_output":
            return Division(ins=ranks, outs=ranks)
        case "colwise" | "packed_colwise":
            return Division(outs=ranks, leaves_parts=splits_tokens)
        case "colwise_gather_output" | "colwise_rep":
            return Division(leaves_parts=splits_tokens)
        case "moe_tp_experts":
            return Division() if can_divide_experts(module) else None
        case "mla_kv_a_proj":
            return Division(sums_gradient=True)
        case "all_reduce" | "local_params":
            cut = {name: where.dim for name, where in own.items() if isinstance(where, Shard)}
            return Division(runs=True, sums=style == "all_reduce", parameters=cut, ranks=ranks)
    return None


def _name_of(style: ParallelStyle) -> str:
    """Return the name of the division of a style of torch."""
    layouts = [getattr(style, name, (None,))[0] for name in ("input_layouts", "output_layouts")]
    for kind, usual, names in (
        (ColwiseParallel, [Replicate(), Shard(-1)], ("colwise", "colwise_gather_output")),
        (RowwiseParallel, [Shard(-1), Replicate()], ("rowwise", "rowwise_split_input")),
    ):
        if type(style) is kind:
            if layouts == usual:
                return names[0]
            if layouts == [Replicate(), Replicate()]:
                return names[1]
    raise ConfigurationError(f"{style} may do anything; a trial cannot follow it")


def parameter_placement(style: str, ndim: int) -> Placement:
    """Return the placement of a parameter that a plan names itself: column-wise cuts outputs, row-wise cuts inputs."""
    if style in COLWISE:
        return Shard(max(ndim - 2, 0))
    return Shard(ndim - 1) if style in ROWWISE else Replicate()


def check_heads(model: nn.Module, styles: Mapping[str, ParallelStyle | str], ranks: int) -> None:
    """Raise unless the ranks divide the heads, if attention is divided by heads."""
    if not any(style in ("colwise", "packed_colwise") and in_attention(name) for name, style in styles.items()):
        return
    found: list[tuple[str, Any]] = []
    for config in layer_configs(model):
        counts = head_counts(config)
        found += zip(("num_attention_heads", "num_key_value_heads"), counts or (), strict=False)
        found += (item for item in getattr(config, "__dict__", {}).items() if item[0].endswith("key_value_heads"))
    for key, value in found:
        for count in value if isinstance(value, list | tuple) else [value]:
            if isinstance(count, int) and count % ranks:
                raise ParallelSizeError(
                    f"the model has {key}={count}, which {ranks} tensor-parallel ranks cannot share evenly; choose a "
                    f"tensor-parallel size that divides {count}"
                )


def in_attention(name: str) -> bool:
    """Return True if a module's name says that it belongs to attention."""
    return "attn" in name or "attention" in name


def check_module(name: str, module: nn.Module, style: str, ranks: int) -> None:
    """Raise for a style of another kind of module, and for ranks that do not divide a size evenly.

    Uneven parts are right only if no other module computes with them: gathered outputs, split inputs, embeddings.
    """
    if style == "moe_tp_experts" and hasattr(module, "num_experts"):
        check_experts(name, module, ranks)
    if style in EMBEDDING or isinstance(module, nn.Embedding):
        if not isinstance(module, nn.Embedding) or style not in EMBEDDING | LINEAR:
            raise _wrong_kind(name, module, style, "an nn.Embedding" if style in EMBEDDING else "other modules")
        _check_even(f"{name} (embedding_dim)", module.embedding_dim if style == "colwise" else ranks, ranks)
    elif style in LINEAR:
        if not isinstance(module, nn.Linear):
            raise _wrong_kind(name, module, style, "an nn.Linear or nn.Embedding")
        what = "out_features" if style in COLWISE else "in_features"
        width = getattr(module, what)
        if style.startswith("packed"):
            _check_even(f"half of {name} ({what})", width // 2, ranks)
        elif style in ("colwise", "rowwise", "rowwise_split_output"):
            _check_even(f"{name} ({what})", width, ranks)


def check_parameter(name: str, param: nn.Parameter, style: str, ranks: int) -> None:
    """Raise unless the ranks divide a parameter that a plan names itself."""
    placement = parameter_placement(style, param.ndim)
    if placement.is_shard():
        dim: int = placement.dim  # type: ignore[attr-defined] # it is a Shard
        _check_even(f"{name} (dimension {dim})", param.shape[dim], ranks)


def _check_even(what: str, size: int, ranks: int) -> None:
    if size % ranks:
        raise ParallelSizeError(
            f"{what} is {size}, which {ranks} tensor-parallel ranks cannot share evenly; choose a tensor-parallel size "
            f"that divides {size}, or a style that gathers or splits (colwise_gather_output, rowwise_split_input)"
        )


def _wrong_kind(name: str, module: nn.Module, style: str, right: str) -> ConfigurationError:
    return ConfigurationError(
        f"the tensor-parallel plan gives {name}, a {type(module).__name__}, the style {style!r}, which is for {right}; "
        "give it another style, or leave it out of the plan"
    )


def styles_of_adapted(name: str, module: nn.Module, style: str, splits_tokens: bool) -> Iterator[tuple[str, str]]:
    """Yield (name of a part, its style) of an adapted linear layer.

    Column-wise, y = W x + B (A x): W and B give this rank's columns, A is whole. Row-wise: W and A take this rank's
    part of the input, and B, whole, is applied to the sum over ranks of A x. With tokens split over ranks, the whole
    factor sees part of the gradient (A, since x's gradient is summed later) or part of the tokens (B).
    """
    if style not in _PLAIN or not _is_plain_lora(module):
        raise ConfigurationError(
            f"{name} is a {type(module).__name__} of peft, which tensor parallelism cannot divide by the style "
            f"{style!r}; use plain LoRA on linear layers (no DoRA, no variants, no target_parameters), or leave the "
            "layer out of the plan"
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
    is_plain = is_plain and not hasattr(module, "parameter_name")  # of LoRA on parameters, which adds to the weight
    return is_linear and is_plain and all(isinstance(part, nn.ModuleDict) and len(part) for part in parts)


@dataclass(frozen=True)
class Ties:
    """The parameters that several modules own; tied weights stay tied."""

    groups: tuple[tuple[str, ...], ...]  # names of each, the first being that of `named_parameters`

    @classmethod
    def of(cls, model: nn.Module) -> Ties:
        """Find the tied parameters of a model that is not divided yet."""
        return cls(tuple(tuple(group) for group in parameter_names(model).values() if len(group) > 1))

    def adapt(self, model: nn.Module, styles: Mapping[str, ParallelStyle | str]) -> dict[str, ParallelStyle | str]:
        """Give a tied embedding the style of the output projection, or vice versa if only the embedding has one."""
        adapted = dict(styles)
        for group in self.groups:
            owners = [name.removesuffix(".weight") for name in group if name.endswith(".weight")]
            linears, embeddings = (
                [owner for owner in owners if isinstance(model.get_submodule(owner), kind)]
                for kind in (nn.Linear, nn.Embedding)
            )
            if linears:
                _fit(adapted, linears, embeddings)
        return adapted

    def restore(self, model: nn.Module) -> None:
        """Restore one parameter per group; raise for a plan of torch's styles that divides its weights differently."""
        for first, *others in self.groups:
            param = model.get_parameter(first)
            for name in others:
                other = model.get_parameter(name)
                if isinstance(param, DTensor) and isinstance(other, DTensor) and param.placements != other.placements:
                    raise ConfigurationError(
                        f"{first} and {name} are one weight, but the tensor-parallel plan places them as "
                        f"{param.placements} and {other.placements}; give both modules the same cut"
                    )
                owner, _, key = name.rpartition(".")
                model.get_submodule(owner).register_parameter(key, param)


def _fit(styles: dict[str, ParallelStyle | str], linears: list[str], embeddings: list[str]) -> None:
    """Make the styles of modules with one weight agree; styles of torch are the user's choice."""
    by_linear = next(
        (style for name in linears if isinstance(style := styles.get(name), str) and style in LINEAR), None
    )
    by_embedding = next((style for name in embeddings if (style := styles.get(name)) in EMBEDDING | LINEAR), None)
    if by_linear is not None:
        cut = "embedding_rowwise" if by_linear in COLWISE else "embedding_colwise"
        styles.update((name, cut) for name in embeddings if not isinstance(styles.get(name), ParallelStyle))
    elif by_embedding is not None and not any(name in styles for name in linears):
        by_rows = by_embedding in ROWWISE | {"embedding_rowwise"}
        cut = "colwise_gather_output" if by_rows else "rowwise_split_input"
        styles.update((name, cut) for name in linears)
