"""Checks plug points against what they name: the import path of ``_target_`` and its keyword arguments.

Invariants (``tests/config/test_targets.py``):

1. Nothing is constructed: a target is imported and its signature read.
2. An argument that the signature lacks is a problem with the nearest names; a missing one is not, since the stack
   passes what only it knows (models, clocks, folders).
3. A scalar argument whose annotation is a plain type (int, float, bool, str, or one of them or None) is type-checked.
4. A key that the stack reads itself holds a number.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from typing import Any

from megatron_ext.config.instantiate import InstantiateError, import_target
from megatron_ext.config.signature import Signature, fits

# Keys of an entry that the stack reads itself, all of them numbers; everything else goes to the target.
RESERVED: Mapping[str, frozenset[str]] = {
    "rewards": frozenset({"order", "weight", "cap"}),
    "credit.edits": frozenset({"order"}),
    "loss.terms": frozenset({"order"}),
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
    try:
        accepts = Signature.of(found)
    except ValueError:  # some classes written in C say nothing about their arguments
        yield f"{path}: _target_ {target} does not say what arguments it takes; name a class or function of Python"
        return
    for key, value in entry.items():
        name = str(key)
        if isinstance(value, Mapping) and "_target_" in value:
            yield from _entry(f"{path}.{name}", value, frozenset())
        if name == "_target_":
            continue
        if name in reserved and name not in accepts.names:
            if value is not None and (not fits(value, (int, float)) or value != value):
                yield f"{path}.{name}: needs a number, got {value!r}"
            continue
        if name not in accepts.names:
            if not accepts.anything:
                known = sorted(accepts.names | reserved)
                near = difflib.get_close_matches(name, known, 3, 0.6)
                hint = f"nearest: {', '.join(near)}" if near else f"it takes: {', '.join(known) or 'nothing'}"
                yield f"{path}.{name}: {target} takes no such argument; {hint}"
            continue
        problem = accepts.misfit(name, value)
        if problem is not None:
            yield f"{path}.{name}: {problem}"
