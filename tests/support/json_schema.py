"""Just enough of JSON Schema to hold our own output against our own schema; an unknown keyword is an error."""

from typing import Any

_TYPES: dict[str, tuple[type, ...]] = {
    "object": (dict,),
    "array": (list,),
    "string": (str,),
    "boolean": (bool,),
    "integer": (int,),
    "number": (int, float),
    "null": (type(None),),
}
_KNOWN = {"$schema", "title", "description", "type", "enum", "minimum", "items", "required", "properties"}
_KNOWN |= {"additionalProperties"}


def problems(value: Any, schema: dict[str, Any], path: str = "$") -> list[str]:
    """What in a value does not follow a schema, one line each."""
    unknown = schema.keys() - _KNOWN
    if unknown:
        return [f"{path}: the schema uses {sorted(unknown)}, which this checker does not know"]
    found = []
    if "type" in schema and not any(_is_a(value, name) for name in _names(schema["type"])):
        return [f"{path}: {value!r} is not of type {schema['type']}"]
    if "enum" in schema and not any(value == one and type(value) is type(one) for one in schema["enum"]):
        found.append(f"{path}: {value!r} is none of {schema['enum']}")
    if "minimum" in schema and value < schema["minimum"]:
        found.append(f"{path}: {value!r} is below {schema['minimum']}")
    if isinstance(value, list) and "items" in schema:
        found += [text for i, item in enumerate(value) for text in problems(item, schema["items"], f"{path}[{i}]")]
    if isinstance(value, dict):
        found += _of_object(value, schema, path)
    return found


def _of_object(value: dict[str, Any], schema: dict[str, Any], path: str) -> list[str]:
    known, others = schema.get("properties", {}), schema.get("additionalProperties", True)
    found = [f"{path}: {name} is missing" for name in schema.get("required", []) if name not in value]
    for name, inner in value.items():
        if name in known:
            found += problems(inner, known[name], f"{path}.{name}")
        elif others is False:
            found.append(f"{path}: {name} is not in the schema")
        elif isinstance(others, dict):
            found += problems(inner, others, f"{path}.{name}")
    return found


def _names(names: str | list[str]) -> list[str]:
    return [names] if isinstance(names, str) else names


def _is_a(value: Any, name: str) -> bool:
    return isinstance(value, _TYPES[name]) and (name in ("boolean",) or not isinstance(value, bool))
