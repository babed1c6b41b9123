"""Checks JSON values against the JSON-schema keywords that tool parameters use.

``type`` (a name or several), ``enum``, ``const``, ``anyOf``, ``properties``, ``required``, ``additionalProperties``,
``items``, ``minItems``/``maxItems``, ``minimum``/``maximum``, ``minLength``/``maxLength``. Other keywords are not
checked: they are left to the environment. Stricter than the standard in two points that help an agent: a property that
the schema does not declare is refused unless ``additionalProperties`` allows it, and 1.0 is no integer.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import Any

Schema = Mapping[str, Any]


def _has_type(value: object, name: str) -> bool:
    match name:
        case "string":
            return isinstance(value, str)
        case "integer":
            return isinstance(value, int) and not isinstance(value, bool)
        case "number":
            return isinstance(value, (int, float)) and not isinstance(value, bool)
        case "boolean":
            return isinstance(value, bool)
        case "null":
            return value is None
        case "array":
            return isinstance(value, list)
        case "object":
            return isinstance(value, dict)
    raise ValueError(f"JSON schema: unknown type {name!r}")


def _type_name(value: object) -> str:
    """The JSON type of a parsed JSON value."""
    names = ("null", "boolean", "integer", "number", "string", "array", "object")
    return next((name for name in names if _has_type(value, name)), type(value).__name__)


def _show(value: object, limit: int = 60) -> str:
    text = json.dumps(value)
    return text if len(text) <= limit else text[: limit - 3] + "..."


def first_problem(value: object, schema: Schema, where: str) -> str:
    """What is wrong with ``value`` first, in one short sentence about ``where``; empty when nothing is.

    Raises:
        ValueError: the schema itself names a type that does not exist (``check_schema`` finds it beforehand).
    """
    if "anyOf" in schema:
        problems = [first_problem(value, option, where) for option in schema["anyOf"]]
        if problems and all(problems):
            return problems[0] if len(problems) == 1 else f"{where} fits none of the allowed forms."
    if "type" in schema:
        names = [schema["type"]] if isinstance(schema["type"], str) else list(schema["type"])
        if not any(_has_type(value, name) for name in names):
            return f"{where} must be {' or '.join(names)}, not {_type_name(value)} ({_show(value)})."
    allowed = [schema["const"]] if "const" in schema else schema.get("enum")
    # 1 == True in Python but not in JSON, hence the comparison of types.
    if allowed is not None and not any(_type_name(value) == _type_name(one) and value == one for one in allowed):
        return f"{where} must be one of {', '.join(_show(one) for one in allowed)}, not {_show(value)}."
    if isinstance(value, dict):
        return _object_problem(value, schema, where)
    if isinstance(value, list):
        return _array_problem(value, schema, where)
    if isinstance(value, str):
        return _range_problem(len(value), schema, "minLength", "maxLength", f"The length of {where}")
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return _range_problem(value, schema, "minimum", "maximum", where)
    return ""


def _range_problem(size: int | float, schema: Schema, low: str, high: str, where: str) -> str:
    if low in schema and size < schema[low]:
        return f"{where} must be at least {schema[low]}, not {size}."
    if high in schema and size > schema[high]:
        return f"{where} must be at most {schema[high]}, not {size}."
    return ""


def _array_problem(value: list[Any], schema: Schema, where: str) -> str:
    problem = _range_problem(len(value), schema, "minItems", "maxItems", f"The length of {where}")
    if problem or "items" not in schema:
        return problem
    found = (first_problem(item, schema["items"], f"{where}[{i}]") for i, item in enumerate(value))
    return next((one for one in found if one), "")


def _object_problem(value: Mapping[str, Any], schema: Schema, where: str) -> str:
    properties: Mapping[str, Schema] = schema.get("properties", {})
    missing = [name for name in schema.get("required", ()) if name not in value]
    if missing:
        return f"{where} lacks {', '.join(repr(name) for name in missing)}."
    extra_schema = schema.get("additionalProperties", False)
    for name, item in value.items():
        if name in properties:
            problem = first_problem(item, properties[name], repr(name))
        elif isinstance(extra_schema, Mapping):
            problem = first_problem(item, extra_schema, repr(name[:60]))
        else:
            problem = "" if extra_schema else f"{where} has no {name[:60]!r}{hint(name[:60], list(properties))}."
        if problem:
            return problem
    return ""


def hint(name: str, known: Sequence[str]) -> str:
    """`` (did you mean ...?)`` or the known names, for the end of an error."""
    close = get_close_matches(name, known, n=1)
    if close:
        return f" (did you mean {close[0]!r}?)"
    return f" (there is {', '.join(repr(one) for one in known)})" if known else " (there is none)"


def check_schema(schema: Schema, where: str) -> None:
    """Raises ``ValueError`` naming ``where`` if the schema is one that ``first_problem`` cannot read."""
    names = schema.get("type", "object")
    for name in [names] if isinstance(names, str) else names:
        try:
            _has_type(None, name)
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from error
    for key, part in schema.get("properties", {}).items():
        _check_part(part, f"{where}.{key}")
    for i, part in enumerate(schema.get("anyOf", ())):
        _check_part(part, f"{where}.anyOf[{i}]")
    for key in ("items", "additionalProperties"):
        if key in schema and not isinstance(schema[key], bool):
            _check_part(schema[key], f"{where}.{key}")


def _check_part(part: object, where: str) -> None:
    if not isinstance(part, Mapping):
        raise ValueError(f"{where}: JSON schema: an object is wanted, got {part!r}")
    check_schema(part, where)
