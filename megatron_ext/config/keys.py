"""The keys of a configuration: every dotted path of a dataclass schema, its type, and the names nearest a wrong one.

Invariants (``tests/config/test_keys.py``):

1. ``walk`` lists sections and keys in the order they are declared; below a map or an ``Any`` nothing is listed.
2. ``find`` answers for a path inside a map with that map: a plug point holds whatever its target accepts.
3. ``type_problem`` and OmegaConf agree on which values a typed key takes.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException


class Kind(Enum):
    SECTION = "section"
    VALUE = "value"
    MAP = "map"  # a plug point, or names -> plug points
    ANY = "any"  # a recipe's own dataclass


@dataclass(frozen=True)
class Key:
    """One section or key. ``owner`` and ``name`` say where it is declared; ``default`` is None for sections."""

    path: str
    kind: Kind
    type_name: str
    help: str
    owner: type
    name: str


def _type_name(hint: Any) -> str:
    return hint.__name__ if isinstance(hint, type) and not typing.get_args(hint) else str(hint).replace("typing.", "")


@functools.cache
def walk(schema: type) -> tuple[Key, ...]:
    """Sections and keys of dataclass ``schema``, depth first."""
    return tuple(_walk(schema, ""))


def _walk(schema: type, prefix: str) -> Iterator[Key]:
    hints = typing.get_type_hints(schema)
    for field in dataclasses.fields(schema):
        hint, path = hints[field.name], f"{prefix}{field.name}"
        if dataclasses.is_dataclass(hint) and isinstance(hint, type):
            yield Key(path, Kind.SECTION, hint.__name__, field.metadata.get("help", ""), schema, field.name)
            yield from _walk(hint, f"{path}.")
            continue
        kind = Kind.MAP if typing.get_origin(hint) is dict else Kind.ANY if hint is Any else Kind.VALUE
        yield Key(path, kind, _type_name(hint), field.metadata.get("help", ""), schema, field.name)


def find(schema: type, path: str) -> Key | None:
    """The key at ``path``, the map (or ``Any`` key) that ``path`` lies in, or None."""
    for key in walk(schema):
        if key.path == path or (key.kind in (Kind.MAP, Kind.ANY) and path.startswith(f"{key.path}.")):
            return key
    return None


def value(tree: Any, path: str) -> Any:
    """What a configuration (or a section of one) holds at a dotted path of its schema."""
    for part in path.split("."):
        tree = getattr(tree, part)
    return tree


def nearest(schema: type, path: str, limit: int = 3) -> list[str]:
    """Full paths like ``path``: similar ones, and those whose last name is the same or similar."""
    paths = [key.path for key in walk(schema)]
    known = {key.path for key in walk(schema) if key.kind is Kind.SECTION}
    parts = path.split(".")
    # The first part that does not exist is what was misspelt; what follows it says nothing about the schema.
    wrong = next((".".join(parts[: n + 1]) for n in range(len(parts)) if ".".join(parts[: n + 1]) not in known), path)
    found = difflib.get_close_matches(path, paths, limit, 0.75)
    found += [p for p in paths if p.rsplit(".", 1)[-1] == parts[-1]]
    found += difflib.get_close_matches(wrong, paths, limit, 0.75)
    last = {p.rsplit(".", 1)[-1] for p in paths}
    close = set(difflib.get_close_matches(parts[-1], sorted(last), limit, 0.75))
    found += [p for p in paths if p.rsplit(".", 1)[-1] in close]
    return list(dict.fromkeys(found))[:limit]


def unknown(schema: type, path: str, root: str = "") -> str:
    """The line for a key that does not exist. ``root`` is the dotted path that ``schema`` sits at."""
    names = [f"{root}{name}" for name in nearest(schema, path)]
    return f"{root}{path}: no such key" + (f"; nearest: {', '.join(names)}" if names else "")


def type_problem(key: Key, value: object) -> str | None:
    """What is wrong with ``value`` at a VALUE key, or None. An interpolation is judged once it is resolved."""
    if isinstance(value, str) and "${" in value:
        return None
    try:
        OmegaConf.update(_section(key.owner), key.name, value, merge=False)
    except OmegaConfBaseException:
        return f"needs {key.type_name}, got {value!r}"
    return None


@functools.cache
def _section(schema: type) -> DictConfig:
    """An OmegaConf section of a dataclass, to try values on; what was tried before does not matter to it."""
    return OmegaConf.structured(schema)
