"""Which modules of a model of transformers tensor-parallel ranks divide, and how; all is checked before any is cut."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from megatron_fsdp.errors import ConfigurationError, ParallelSizeError
from megatron_fsdp.plan.decoder_parts import text_config

COLWISE = frozenset({"colwise", "colwise_gather_output", "colwise_rep", "packed_colwise"})
ROWWISE = frozenset({"rowwise", "rowwise_split_input", "rowwise_rep", "packed_rowwise"})
EMBEDDING = frozenset({"embedding_rowwise", "embedding_colwise"})
WHOLE = frozenset({"replicate", "moe_identity_expert"})
_OTHER = frozenset({"replicated_with_grad_allreduce", "mla_kv_a_proj", "moe_tp_experts"})
_KNOWN = COLWISE | ROWWISE | EMBEDDING | WHOLE | _OTHER


def tensor_parallel_styles(model: nn.Module, ranks: int) -> dict[str, str]:
    """The style of each module that transformers' plan for the model names, in order of the model.

    Args:
        model: A causal language model of transformers, or a pipeline stage of one.
        ranks: Tensor-parallel ranks.

    Raises:
        ConfigurationError: There is no plan, or it has styles that are not known here.
        ParallelSizeError: The ranks cannot share heads, layers or experts evenly.
    """
    plan = getattr(model, "_tp_plan", None) or getattr(getattr(model, "config", None), "base_model_tp_plan", None)
    if not plan:
        raise ConfigurationError(
            f"transformers has no tensor-parallel plan for {type(model).__name__}, so what tp={ranks} divides is not "
            "known; use tp=1"
        )
    styles = {}
    for name, module in model.named_modules(remove_duplicate=False):
        style = _style(name, plan)
        if name and style is not None and style not in WHOLE:
            _check_known(name, module, style)
            styles[name] = style
    styles = _fit_ties(model, styles)
    _refuse_own_parameters(model, plan, styles)
    _check_heads(model, styles, ranks)
    for name, style in styles.items():
        _check_sizes(name, model.get_submodule(name), style, ranks)
    return styles


def _style(name: str, plan: Mapping[str, str]) -> str | None:
    """The style of the entry for this name; one without `*` goes before one with it."""
    named = sorted((key for key in plan if _names(key, name)), key=lambda key: key.count("*"))
    return plan[named[0]] if named else None


def _names(key: str, name: str) -> bool:
    patterns, parts = key.split("."), name.split(".")
    return len(patterns) == len(parts) and all(map(fnmatchcase, parts, patterns))


def _check_known(name: str, module: nn.Module, style: object) -> None:
    fits = {
        **dict.fromkeys(COLWISE | ROWWISE, isinstance(module, nn.Linear)),
        **dict.fromkeys(EMBEDDING, isinstance(module, nn.Embedding)),
        "moe_tp_experts": _has_shared_experts(module),
    }
    if style not in _KNOWN or not fits.get(str(style), True):
        raise ConfigurationError(
            f"the tensor-parallel plan gives {name}, a {type(module).__name__}, the style {style!r}, of which the "
            f"planner does not know what a rank holds; known are {', '.join(sorted(_KNOWN))} for linear layers, "
            "embeddings and fused experts; use tp=1, or give the model as one rank computes it, with inputs="
        )


def _has_shared_experts(module: nn.Module) -> bool:
    """Whether these are stacked experts that skip tokens which belong to none of theirs."""
    count = getattr(module, "num_experts", None)
    own = [param for param in module._parameters.values() if param is not None]
    return hasattr(module, "_is_expert_parallel") and bool(own) and all(param.shape[0] == count for param in own)


def _fit_ties(model: nn.Module, styles: Mapping[str, str]) -> dict[str, str]:
    """Embedding and head that are one matrix are cut along the same dimension; the head decides."""
    fitted = dict(styles)
    holders: dict[int, list[tuple[str, nn.Module]]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        weight = module._parameters.get("weight")
        if weight is not None and isinstance(module, nn.Embedding | nn.Linear):
            holders.setdefault(id(weight), []).append((name, module))
    for tied in holders.values():
        heads = [name for name, module in tied if isinstance(module, nn.Linear)]
        embeddings = [name for name, module in tied if isinstance(module, nn.Embedding)]
        if not heads or not embeddings:
            continue
        by_head = next((styles[name] for name in heads if name in styles), None)
        by_embedding = next((styles[name] for name in embeddings if name in styles), None)
        if by_head is not None:
            cut = "embedding_rowwise" if by_head in COLWISE else "embedding_colwise"
            fitted.update((name, cut) for name in embeddings)
        elif by_embedding is not None:
            cut = "colwise_gather_output" if by_embedding == "embedding_rowwise" else "rowwise_split_input"
            fitted.update((name, cut) for name in heads)
    return fitted


def _refuse_own_parameters(model: nn.Module, plan: Mapping[str, str], styles: Mapping[str, str]) -> None:
    """Parameters that a plan names themselves are those of experts, or not known here."""
    for name, _ in model.named_parameters(remove_duplicate=False):
        style = _style(name, plan)
        if style is not None and style not in WHOLE and styles.get(name.rpartition(".")[0]) != "moe_tp_experts":
            raise ConfigurationError(
                f"the tensor-parallel plan cuts the parameter {name} by itself ({style!r}), which the planner does for "
                "fused experts only; use tp=1, or give the model as one rank computes it, with inputs="
            )


def _check_heads(model: nn.Module, styles: Mapping[str, str], ranks: int) -> None:
    if not any(style in ("colwise", "packed_colwise") and _in_attention(name) for name, style in styles.items()):
        return
    config: Any = text_config(model)
    queries = getattr(config, "num_attention_heads", None)
    for key, count in (
        ("num_attention_heads", queries),
        ("num_key_value_heads", getattr(config, "num_key_value_heads", None) or queries),
    ):
        if isinstance(count, int) and count % ranks:
            raise ParallelSizeError(
                f"the model has {key}={count}, which tp={ranks} ranks cannot share evenly; choose a tp that divides "
                f"{count}"
            )


def _in_attention(name: str) -> bool:
    return "attn" in name or "attention" in name


def _check_sizes(name: str, module: Any, style: str, ranks: int) -> None:
    sizes = {
        "colwise": ("out_features", 1),
        "rowwise": ("in_features", 1),
        "packed_colwise": ("out_features", 2),
        "packed_rowwise": ("in_features", 2),
        "moe_tp_experts": ("num_experts", 1),
    }
    what, pieces = sizes.get(style, ("", 1))
    size = getattr(module, what) // pieces if what else ranks
    if size % ranks:
        raise ParallelSizeError(
            f"{name} has {what}={size * pieces}, which tp={ranks} ranks cannot share evenly; choose a tp that divides "
            f"{size}"
        )
