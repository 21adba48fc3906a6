"""Just enough of JSON Schema to hold our own output against our own schema; an unknown keyword is an error."""

from typing import Any

_TYPES = {"object": dict, "array": list, "string": str, "boolean": bool, "integer": int, "number": float}
_TYPES["null"] = type(None)
_KNOWN = {"$schema", "title", "description", "type", "enum", "minimum", "items", "required", "properties"}
_KNOWN |= {"additionalProperties"}


def problems(value: Any, schema: dict[str, Any], path: str = "$") -> list[str]:
    """What in a value does not follow a schema, one line each."""
    if unknown := schema.keys() - _KNOWN:
        return [f"{path}: the schema uses {sorted(unknown)}, which this checker does not know"]
    names = schema.get("type", [])
    kinds = [_TYPES[name] for name in ([names] if isinstance(names, str) else names)]
    kinds += [int] if float in kinds else []
    if kinds and type(value) not in kinds:  # to which True is no number
        return [f"{path}: {value!r} is not of type {names}"]
    found = []
    if "enum" in schema and not any(value == one and type(value) is type(one) for one in schema["enum"]):
        found.append(f"{path}: {value!r} is none of {schema['enum']}")
    if "minimum" in schema and value < schema["minimum"]:
        found.append(f"{path}: {value!r} is below {schema['minimum']}")
    if isinstance(value, list) and "items" in schema:
        found += [text for i, item in enumerate(value) for text in problems(item, schema["items"], f"{path}[{i}]")]
    if isinstance(value, dict):
        found += [f"{path}: {name} is missing" for name in schema.get("required", []) if name not in value]
        for name, inner in value.items():
            wanted = schema.get("properties", {}).get(name, schema.get("additionalProperties", True))
            if wanted is False:
                found.append(f"{path}: {name} is not in the schema")
            elif wanted is not True:
                found += problems(inner, wanted, f"{path}.{name}")
    return found
