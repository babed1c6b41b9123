"""Checks plug points against what they name: the import path of ``_target_`` and its keyword arguments.

Invariants (``tests/config/test_targets.py``):

1. Nothing is constructed: a target is imported and its signature read.
2. An argument that the signature lacks is a problem with the nearest names; a missing one is not, since the stack
   passes what only it knows (models, clocks, folders).
3. A scalar argument whose annotation is a plain type (int, float, bool, str, or one of them or None) is type-checked.
"""

from __future__ import annotations

import difflib
import inspect
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from megatron_ext.config.instantiate import InstantiateError, import_target

# Keys of an entry that the stack reads itself; everything else goes to the target.
RESERVED: Mapping[str, frozenset[str]] = {
    "rewards": frozenset({"order", "weight", "cap"}),
    "credit.edits": frozenset({"order"}),
    "loss.terms": frozenset({"order", "coefficient"}),
    "environments": frozenset({"order"}),
    "tracking": frozenset({"order"}),
}


def problems(path: str, value: object) -> Iterator[str]:
    """Problems of the plug point, or of the map of plug points, at dotted ``path``."""
    if not isinstance(value, Mapping):
        yield f"{path}: needs a map, got {value!r}"
    elif "_target_" in value:
        yield from _entry(path, value, frozenset())
    else:
        for name, entry in value.items():
            if not isinstance(entry, Mapping) or "_target_" not in entry:
                yield f"{path}.{name}: needs _target_ (the import path of what it is), got {entry!r}"
            else:
                yield from _entry(f"{path}.{name}", entry, RESERVED.get(path, frozenset()))


def _entry(path: str, entry: Mapping[Any, object], reserved: frozenset[str]) -> Iterator[str]:
    target = entry["_target_"]
    if not isinstance(target, str):
        yield f"{path}._target_: needs an import path, got {target!r}"
        return
    try:
        found = import_target(target, path)
    except InstantiateError as error:
        yield str(error)
        return
    if not callable(found):
        yield f"{path}: _target_ {target} is not a class or a function"
        return
    accepts = _Signature.of(found)
    for key, value in entry.items():
        name = str(key)
        if isinstance(value, Mapping) and "_target_" in value:
            yield from _entry(f"{path}.{name}", value, frozenset())
        if name == "_target_" or (name in reserved and name not in accepts.names):
            continue
        if name not in accepts.names:
            if not accepts.anything:
                known = sorted(accepts.names | reserved)
                near = difflib.get_close_matches(name, known, 3, 0.6)
                hint = f"nearest: {', '.join(near)}" if near else f"it takes: {', '.join(known) or 'nothing'}"
                yield f"{path}.{name}: {target} takes no such argument; {hint}"
            continue
        wanted = accepts.types.get(name)
        if wanted is not None and not _fits(value, wanted):
            names = " or ".join("null" if t is type(None) else t.__name__ for t in wanted)
            yield f"{path}.{name}: needs {names}, got {value!r}"


class _Signature:
    """Keyword arguments of a callable: their names, the plain types of those that have one, and whether any go."""

    def __init__(self, names: frozenset[str], plain: Mapping[str, tuple[type, ...]], anything: bool) -> None:
        self.names, self.types, self.anything = names, plain, anything

    @classmethod
    def of(cls, target: Callable[..., Any]) -> _Signature:
        parameters = inspect.signature(target).parameters.values()
        keyword = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
        names = frozenset(p.name for p in parameters if p.kind in keyword)
        anything = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters)
        try:
            hints = typing.get_type_hints(vars(target).get("__init__", target) if isinstance(target, type) else target)
        except NameError:  # names imported for the type checker only
            hints = {}
        plain = {name: types_ for name, hint in hints.items() if (types_ := _plain(hint)) is not None}
        return cls(names, plain, anything)


_PLAIN = (int, float, bool, str, type(None))


def _plain(hint: object) -> tuple[type, ...] | None:
    members = typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)
    return tuple(members) if all(m in _PLAIN for m in members) else None


def _fits(value: object, wanted: tuple[type, ...]) -> bool:
    if isinstance(value, str) and "${" in value:
        return True
    if isinstance(value, bool):
        return bool in wanted
    if isinstance(value, int) and float in wanted:
        return True
    return isinstance(value, wanted)
