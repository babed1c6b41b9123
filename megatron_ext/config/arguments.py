"""What a plug point's class says about its arguments: type, default and a line of help, for people.

Help is taken from docstrings, of the class, of its ``__init__`` and of what it derives from, in this order: an entry of
an ``Args`` or ``Attributes`` block, a sentence that begins with the argument's name in double backticks, a sentence
that has it in double backticks.

Invariants (``tests/config/test_arguments.py``):

1. Every argument of the signature is there, in its order; nothing is built.
2. Help is words of the class's own docstrings, or none.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

REQUIRED = inspect.Parameter.empty


@dataclass(frozen=True)
class Argument:
    """``default`` is ``REQUIRED`` where there is none; ``type_name`` and ``help`` are empty where nothing is said."""

    name: str
    type_name: str
    default: Any
    help: str


def arguments(target: Callable[..., Any]) -> list[Argument]:
    """Arguments that can be given to ``target`` by name. Raises ``ValueError`` for a callable that does not tell."""
    texts = list(_docstrings(target))
    named = [
        parameter
        for parameter in inspect.signature(target).parameters.values()
        if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
    ]
    return [Argument(p.name, _type_name(p.annotation), p.default, _help(p.name, texts)) for p in named]


def summary(target: object) -> str:
    """The first sentence of the docstring, in plain text; "" without one."""
    text = inspect.cleandoc((target.__doc__ if isinstance(target, type) else inspect.getdoc(target)) or "")
    return next(_sentences(text.split("\n\n")[0]), "")


def _docstrings(target: Callable[..., Any]) -> Iterator[str]:
    if not isinstance(target, type):
        yield inspect.getdoc(target) or ""
        return
    for base in target.__mro__[:-1]:
        for text in (vars(base).get("__doc__"), getattr(vars(base).get("__init__"), "__doc__", None)):
            # What a dataclass without a docstring is given is its signature.
            if text and not text.startswith(f"{base.__name__}("):
                yield inspect.cleandoc(text)


def _type_name(annotation: Any) -> str:
    if annotation is inspect.Parameter.empty:
        return ""
    text = annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)
    return re.sub(r"\b(?:collections\.abc|typing|pathlib)\.", "", text).strip("'\"").replace("None", "null")


def _help(name: str, texts: list[str]) -> str:
    for text in texts:
        if found := _from_block(name, text):
            return found
    begins, holds = re.compile(rf"``{name}``[:,]? ?"), re.compile(rf"``[^`]*\b{name}\b[^`]*``")
    sentences = [sentence for text in texts for sentence in _sentences(text, plain=False)]
    for sentence in sentences:
        if begins.match(sentence) and ":" in sentence[: len(name) + 6]:
            return _plain(begins.sub("", sentence, count=1))
    return next((_plain(sentence) for sentence in sentences if holds.search(sentence)), "")


def _from_block(name: str, text: str) -> str:
    """The text of ``name: ...`` or ``this, name, that: ...`` in a block of arguments."""
    entries: dict[str, list[str]] = {}
    inside, current = False, ""
    for line in text.splitlines():
        if line in ("Args:", "Attributes:"):
            inside = True
        elif inside and line and not line.startswith(" "):
            inside = False
        elif inside and (entry := re.match(r" {4}(\w+(?:, \w+)*): (.*)", line)):
            current = entry[1]
            entries[current] = [entry[2]]
        elif inside and current and line.strip():
            entries[current].append(line.strip())
    found = next((lines for names, lines in entries.items() if name in names.split(", ")), [])
    return _plain(" ".join(found))


def _sentences(text: str, *, plain: bool = True) -> Iterator[str]:
    for paragraph in text.split("\n\n"):
        for sentence in re.split(r"(?<=\.)\s+(?=[A-Z`])|(?<=;)\s+(?=``)", " ".join(paragraph.split())):
            if sentence:
                yield _plain(sentence) if plain else sentence


def _plain(text: str) -> str:
    return " ".join(text.replace("``", "").split()).rstrip(";.")
