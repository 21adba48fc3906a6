"""Import of an object by its dotted path."""

import ast
import difflib
import pkgutil
from typing import Any

from megatron_fsdp.errors import ConfigurationError


def import_by_path(path: str, argument: str, suggestions: tuple[str, ...] = ()) -> object:
    """Import `package.module.Name` or `package.module:Name`; errors name the argument, and the nearest known name."""
    try:
        return pkgutil.resolve_name(path)
    except AttributeError as error:
        problem, names = f"{getattr(error.obj, '__name__', path)!r} has no {error.name!r}", dir(error.obj)
        nearest = difflib.get_close_matches(str(error.name), names, 1)
    except (ImportError, ValueError) as error:
        problem, nearest = str(error), [each for each in suggestions if each.endswith(f".{path}")]
    hint = f"the nearest name is {nearest[0]!r}" if nearest else "write 'package.module.Class', as Python can import it"
    raise ConfigurationError(f"{argument} has {path!r}, but {problem}; {hint}.")


def literal(text: str) -> Any:
    """Parse a Python literal such as 3, True or None; return anything else as text."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text
