"""Import of an object by its dotted path, with errors that say which part of the path is wrong."""

import difflib
import importlib
import pkgutil
import sys

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
    same_name = next((f"did you mean {known!r}?" for known in suggestions if known.split(".")[-1] == parts[-1]), "")
    if len(parts) < 2 or not all(parts):
        hint = same_name or "write 'package.module.Class'."
        raise ConfigurationError(f"{argument} has {path!r}, which is not a complete import path; {hint}")
    current: object = None
    for depth, part in enumerate(parts):  # an attribute where there is one, else a submodule
        if depth and hasattr(current, part):
            current = getattr(current, part)
            continue
        reached, module = ".".join(parts[:depth]), ".".join(parts[: depth + 1])
        try:
            current = importlib.import_module(module)
        except ModuleNotFoundError as error:
            if not f"{module}.".startswith(f"{error.name}."):  # it exists, but something that it imports does not
                raise
            problem = f"{reached!r} has no {part!r}" if depth else f"there is no module {part!r}"
            hint = _hint(part, current, same_name)
            raise ConfigurationError(f"{argument} has {path!r}, but {problem}; {hint}") from None
    return current


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
