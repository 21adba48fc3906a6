"""Import of an object by its dotted path, with errors that say which part of the path is wrong."""

import difflib
import importlib
import pkgutil
import sys
from types import ModuleType

from megatron_fsdp.errors import ConfigurationError


def import_by_path(path: str, argument: str, suggestions: tuple[str, ...] = ()) -> object:
    """Import what a path names.

    Args:
        path: ``"package.module.Name"`` or ``"package.module:Name"``; the name may have parts itself (``Outer.Inner``).
        argument: The name of the argument that the path came from, for the error message.
        suggestions: Complete paths that are likely meant, for the error message.

    Raises:
        ConfigurationError: A part of the path does not exist.
        Exception: Whatever a module of the path raises when it is imported.
    """
    module_path, colon, name = path.partition(":")
    parts = [*module_path.split("."), *(name.split(".") if colon else [])]
    if len(parts) < 2 or not all(parts):
        hint = _same_name(path, suggestions) or "write 'package.module.Class'."
        raise ConfigurationError(f"{argument} has {path!r}, which is not a complete import path; {hint}")
    return _walk(path, parts, argument, _same_name(parts[-1], suggestions))


def _same_name(name: str, suggestions: tuple[str, ...]) -> str:
    """Suggest the known path that ends with a name; empty where none does."""
    return next((f"did you mean {known!r}?" for known in suggestions if known.rsplit(".", 1)[-1] == name), "")


def _walk(path: str, parts: list[str], argument: str, same_name: str) -> object:
    """Follow the path part by part: an attribute where there is one, else a submodule."""
    current: object = None
    for depth, part in enumerate(parts):
        reached = ".".join(parts[:depth])
        if depth and hasattr(current, part):
            current = getattr(current, part)
            continue
        module = None
        if not depth or hasattr(current, "__path__"):
            module = _import_module(".".join(parts[: depth + 1]))
        if module is None:
            problem = f"{reached!r} has no {part!r}" if depth else f"there is no module {part!r}"
            raise ConfigurationError(f"{argument} has {path!r}, but {problem}; {_hint(part, current, same_name)}")
        current = module
    return current


def _import_module(module_name: str) -> ModuleType | None:
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name != module_name:  # the module exists, but something that it imports does not
            raise
    return None


def _hint(part: str, parent: object, same_name: str) -> str:
    """Suggest a name like `part` in `parent`, the object that the path has reached (None: nothing yet)."""
    if parent is None:
        names = {name.partition(".")[0] for name in sys.modules} | {module.name for module in pkgutil.iter_modules()}
    else:
        search_path = getattr(parent, "__path__", [])
        names = {*dir(parent), *(module.name for module in pkgutil.iter_modules(search_path))}
    # Among all installed modules, a name that is only somewhat similar belongs to another program.
    nearest = difflib.get_close_matches(part, sorted(names), 1, 0.8 if parent is None else 0.6)
    if nearest:
        return f"the nearest name is {nearest[0]!r}."
    return same_name or (
        "no name there is like it." if parent is not None else "give a path by which Python can import it."
    )
