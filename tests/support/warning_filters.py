"""The suite's warning filters, for processes that pytest does not run in."""

import warnings
from collections.abc import Sequence
from importlib import import_module
from typing import Literal, cast

_Action = Literal["default", "error", "ignore", "always", "module", "once"]


def apply_warning_filters(filters: Sequence[str]) -> None:
    """Set exactly the filters of a pytest `filterwarnings` list, in its order (later entries win).

    Args:
        filters: entries `action[:message[:category[:module]]]`; message and module are regular expressions.
    """
    warnings.resetwarnings()
    for entry in filters:
        action, message, category, module = (part.strip() for part in (entry + ":::").split(":")[:4])
        warnings.filterwarnings(cast(_Action, action), message, _category(category), module)


def _category(name: str) -> type[Warning]:
    if not name:
        return Warning
    module_name, _, class_name = name.rpartition(".")
    category = getattr(import_module(module_name or "builtins"), class_name)
    if not (isinstance(category, type) and issubclass(category, Warning)):
        raise TypeError(f"filterwarnings names {name!r}, which is no Warning; name a class derived from Warning.")
    return category
