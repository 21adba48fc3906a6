"""Which plan a model is divided by, and which modules and parameters its entries name."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

from torch import nn
from torch.distributed.tensor.parallel import ParallelStyle

from megatron_fsdp.automodel.architecture import model_type
from megatron_fsdp.automodel.tensor_parallel.translation import check_style_name
from megatron_fsdp.config.import_path import import_by_path
from megatron_fsdp.errors import ConfigurationError

Plan = Mapping[str, ParallelStyle | str]


@dataclass(frozen=True)
class ChosenPlan:
    """A plan and where it is from.

    Attributes:
        entries: Style by name of a module or parameter; `*` and other signs of fnmatch stand for a part of the
            name, or within one.
        source: For people.
        is_given: Whether the user gave it, so that every entry must match.
    """

    entries: Plan
    source: str
    is_given: bool


def choose_plan(model: nn.Module, plan: Plan | str | None) -> ChosenPlan:
    """The plan that was given, else that of transformers for the model.

    Args:
        model: Of transformers.
        plan: As of `parallelize_tensors`.

    Raises:
        ConfigurationError: There is none, or it is no plan.
    """
    if isinstance(plan, str):
        found = import_by_path(plan, "tp_plan")
        found = found() if callable(found) else found
        return ChosenPlan(_checked(found, f"tp_plan={plan!r} leads to"), f"import path {plan}", True)
    if plan is not None:
        return ChosenPlan(_checked(plan, "tp_plan is"), "given", True)
    own = getattr(model, "_tp_plan", None) or getattr(getattr(model, "config", None), "base_model_tp_plan", None)
    if not own:
        raise ConfigurationError(
            f"transformers has no tensor-parallel plan for {type(model).__name__} ({model_type(model) or 'no type'}); "
            "give tp_plan, a dict from names of modules to styles or its import path, or use tp_size=1"
        )
    return ChosenPlan(_checked(own, "transformers' plan is"), f"transformers, {model_type(model)}", False)


def _checked(plan: object, where: str) -> Plan:
    if not isinstance(plan, Mapping) or not plan or not all(isinstance(key, str) for key in plan):
        raise ConfigurationError(
            f"{where} {plan!r:.80}; a tensor-parallel plan is a dict, not empty, from names of modules to styles"
        )
    for key, style in plan.items():
        check_style_name(key, style)
    return plan


@dataclass(frozen=True)
class MatchedPlan:
    """A plan by the names of this model.

    Attributes:
        modules: Style by name of the module, in order of the model.
        parameters: Style by name of the parameter, where a plan names parameters.
    """

    modules: dict[str, ParallelStyle | str]
    parameters: dict[str, str]


def match_plan(model: nn.Module, plan: ChosenPlan) -> MatchedPlan:
    """Find what the entries of a plan name; an entry without `*` goes before one with it.

    Raises:
        ConfigurationError: A given entry names nothing, no entry names anything, two entries contradict each other, or
            a style of torch is given to a parameter.
    """
    modules = [name for name, _ in model.named_modules(remove_duplicate=False) if name]
    parameters = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    chosen: dict[str, str] = {}
    for key in plan.entries:
        named = [name for name in (*modules, *parameters) if _names(key, name)]
        if not named and plan.is_given and not _was_taken_out(model, key):
            raise ConfigurationError(_names_nothing(key, modules))
        for name in named:
            chosen[name] = _more_special(name, key, chosen.get(name), plan)
    if not chosen:
        raise ConfigurationError(
            f"the tensor-parallel plan ({plan.source}) names nothing in this model, whose modules are called like "
            f"{', '.join(modules[-3:])}; write the keys as such names"
        )
    for name in parameters:
        if name in chosen and not isinstance(plan.entries[chosen[name]], str):
            raise ConfigurationError(
                f"the tensor-parallel plan gives the parameter {name} a style of torch; name its module, or give the "
                "name of a style"
            )
    return MatchedPlan(
        {name: plan.entries[chosen[name]] for name in modules if name in chosen},
        {name: str(plan.entries[chosen[name]]) for name in parameters if name in chosen},
    )


def _names(key: str, name: str) -> bool:
    """Whether an entry names this, part by part as in `parallelize_module`."""
    patterns, parts = key.split("."), name.split(".")
    return len(patterns) == len(parts) and all(map(fnmatchcase, parts, patterns))


def _more_special(name: str, key: str, other: str | None, plan: ChosenPlan) -> str:
    if other is None or plan.entries[other] == plan.entries[key]:
        return key
    if key.count("*") == other.count("*"):
        raise ConfigurationError(
            f"the tensor-parallel plan gives {name} two styles, by {other!r} and by {key!r}; keep one of them"
        )
    return min(key, other, key=lambda entry: entry.count("*"))


def _was_taken_out(model: nn.Module, key: str) -> bool:
    """Whether the entry names a module whose place is kept but empty, as in a pipeline stage."""
    return any(_names(key, name) for name in _empty_places(model))


def _empty_places(model: nn.Module) -> Iterator[str]:
    for name, part in model.named_modules():
        for child, value in (*part._modules.items(), *part._parameters.items()):
            if value is None:
                yield f"{name}.{child}" if name else child


def _names_nothing(key: str, modules: list[str]) -> str:
    generic = {re.sub(r"\.\d+(?=\.|$)", ".*", name) for name in modules}
    nearest = difflib.get_close_matches(key, sorted(generic), n=3)
    hint = f"the nearest names are {', '.join(nearest)}" if nearest else f"names are like {sorted(generic)[-1]}"
    return f"the tensor-parallel plan has {key!r}, which names no module of this model; {hint}"
