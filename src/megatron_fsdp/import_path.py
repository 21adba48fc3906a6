"""Import of an object by its dotted path, with errors that say which part of the path is wrong."""

import difflib
import importlib
import pkgutil
import sys
from collections.abc import Iterable
from types import ModuleType

from megatron_fsdp.errors import ConfigurationError


def import_by_path(path: str, argument: str, suggestions: tuple[str, ...] = ()) -> object:
    """Import what a path names.

    Args:
        path: ``"package.module.Name"`` or ``"package.module:Name"``; the name may have parts itself (``Outer.Inner``).
        argument: The name of the argument that the path came from, for the error message.
        suggestions: Complete paths that are likely meant, for the error message.

    Returns:
        The object.

    Raises:
        ConfigurationError: A part of the path does not exist.
        Exception: Whatever a module on the way raises when it is imported.
    """
    module_path, colon, name = path.partition(":")
    parts = [*module_path.split("."), *(name.split(".") if colon else [])]
    if len(parts) < 2 or not all(parts):
        by_name = [known for known in suggestions if known.rsplit(".", 1)[-1] == path]
        hint = f"did you mean {by_name[0]!r}?" if by_name else "write 'package.module.Class'."
        raise ConfigurationError(f"{argument} has {path!r}, which is not a complete import path; {hint}")
    return _walk(path, parts, argument)


def _walk(path: str, parts: list[str], argument: str) -> object:
    """Follow the path a part at a time: an attribute where there is one, else a submodule."""
    current: object = None
    for depth, part in enumerate(parts):
        reached = ".".join(parts[:depth])
        if depth and hasattr(current, part):
            current = getattr(current, part)
            continue
        if depth and not hasattr(current, "__path__"):
            raise _wrong_part(path, part, f"{reached!r} has no {part!r}", dir(current), argument)
        current = _import_module(path, ".".join(parts[: depth + 1]), argument, current)
    return current


def _import_module(path: str, module_name: str, argument: str, parent: object) -> ModuleType:
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name != module_name:  # the module exists, but something that it imports does not
            raise
    reached, _, part = module_name.rpartition(".")
    if not reached:
        raise _wrong_part(path, part, f"there is no module {part!r}", _top_level_names(), argument)
    search_path = getattr(parent, "__path__", [])
    names = {*dir(parent), *(module.name for module in pkgutil.iter_modules(search_path))}
    raise _wrong_part(path, part, f"{reached!r} has no {part!r}", names, argument)


def _top_level_names() -> set[str]:
    return {name.partition(".")[0] for name in sys.modules} | {module.name for module in pkgutil.iter_modules()}


def _wrong_part(path: str, part: str, problem: str, names: Iterable[str], argument: str) -> ConfigurationError:
    nearest = difflib.get_close_matches(part, sorted(names), n=1)
    hint = f"the nearest name is {nearest[0]!r}." if nearest else "no name there is like it."
    return ConfigurationError(f"{argument} has {path!r}, but {problem}; {hint}")
