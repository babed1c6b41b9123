"""What a plug point's class or function takes: the names and plain types of its keyword arguments.

Invariants (``tests/config/test_targets.py``, ``test_instantiate.py``):

1. Nothing is called: the signature is read, annotations that are text included.
2. Only plain types are judged (int, float, bool, str, None, maps, lists and unions of them, not what a map or a list
   holds); a whole number is a float too, and true and false are no numbers.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

_PLAIN: Mapping[str, type] = {
    "int": int,
    "float": float,
    "bool": bool,
    "str": str,
    "None": type(None),
    "NoneType": type(None),
    **dict.fromkeys(("dict", "Mapping"), Mapping),
    **dict.fromkeys(("list", "tuple", "Sequence"), list),  # how a configuration spells any of them
}
_NAMES: Mapping[type, str] = {type(None): "null", Mapping: "a map", list: "a list"}


@dataclass(frozen=True)
class Signature:
    """``names`` can be given by name, those in ``required`` must be; ``types`` holds the plainly typed ones;
    ``anything``: other names are taken too."""

    names: frozenset[str]
    required: tuple[str, ...]
    types: Mapping[str, tuple[type, ...]]
    anything: bool

    @staticmethod
    def of(target: Callable[..., Any]) -> Signature:
        """Raises ``ValueError`` for the few callables written in C that do not tell."""
        parameters = inspect.signature(target).parameters.values()
        named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
        plain = {p.name: plain for p in named if (plain := _plain(p.annotation)) is not None}
        return Signature(
            names=frozenset(p.name for p in named),
            required=tuple(p.name for p in named if p.default is p.empty),
            types=plain,
            anything=any(p.kind is p.VAR_KEYWORD for p in parameters),
        )

    def misfit(self, name: str, value: object) -> str | None:
        """``needs int, got 'two'`` when the argument ``name`` cannot be ``value``, else None."""
        wanted = self.types.get(name)
        if wanted is None or fits(value, wanted):
            return None
        names = " or ".join(_NAMES.get(t, t.__name__) for t in wanted)
        return f"needs {names}, got {value!r}"


def _plain(annotation: object) -> tuple[type, ...] | None:
    """The plain types of an annotation, whether it is a type or its text; None when it is anything else."""
    text = annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)
    while (shorter := re.sub(r"\[[^\[\]]*\]", "", text)) != text:  # what a map or a list holds
        text = shorter
    found = [_PLAIN.get(part.strip(" '\"").removeprefix("collections.abc.")) for part in text.split("|")]
    return None if None in found else tuple(member for member in found if member is not None)


def fits(value: object, wanted: tuple[type, ...]) -> bool:
    """Whether a configuration value may stand where one of ``wanted`` is needed."""
    if isinstance(value, bool):
        return bool in wanted
    if isinstance(value, int) and float in wanted:
        return True
    return isinstance(value, wanted)
