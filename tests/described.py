"""Whether an answer is what the OpenAPI document says: no member that it does not name, none missing, each of its kind."""

from __future__ import annotations

from typing import Any

from corral.api import openapi

KINDS: dict[str, type | tuple[type, ...]] = {
    "object": dict,
    "array": list,
    "string": str,
    "boolean": bool,
    "integer": int,
    "number": (int, float),
    "null": type(None),
}


def unlike(answer: Any, name: str) -> list[str]:
    """What in it is not as the schema of that name says; empty where it is all right."""
    return list(_unlike(answer, {"$ref": f"#/components/schemas/{name}"}, name))


def _unlike(value: Any, schema: dict[str, Any], where: str) -> list[str]:
    if "$ref" in schema:
        return _unlike(value, openapi.document()["components"]["schemas"][schema["$ref"].rpartition("/")[2]], where)
    if "anyOf" in schema:
        tried = [_unlike(value, choice, where) for choice in schema["anyOf"]]
        return min(tried, key=len)
    if "enum" in schema and value not in schema["enum"]:
        return [f"{where}: {value!r} is none of {schema['enum']}"]
    if "type" in schema:
        kinds = [schema["type"]] if isinstance(schema["type"], str) else schema["type"]
        if not any(_is(value, kind) for kind in kinds):
            return [f"{where}: {value!r} is no {' or '.join(kinds)}"]
    found: list[str] = []
    if isinstance(value, dict):
        known, more = schema.get("properties", {}), schema.get("additionalProperties", "properties" not in schema)
        found += [f"{where}.{member}: is missing" for member in schema.get("required", ()) if member not in value]
        for member, inner in value.items():
            if member in known:
                found += _unlike(inner, known[member], f"{where}.{member}")
            elif more is False:
                found.append(f"{where}.{member}: is not described")
            elif isinstance(more, dict):
                found += _unlike(inner, more, f"{where}.{member}")
    if isinstance(value, list):
        for number, inner in enumerate(value):
            found += _unlike(inner, schema.get("items", {}), f"{where}[{number}]")
    return found


def _is(value: Any, kind: str) -> bool:
    return isinstance(value, KINDS[kind]) and (kind == "boolean" or not isinstance(value, bool))
