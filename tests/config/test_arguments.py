"""Invariants of ``megatron_ext/config/arguments.py``."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pytest

from megatron_ext.config.arguments import REQUIRED, Argument, arguments, summary
from megatron_ext.config.instantiate import import_target
from megatron_ext.config.shipped import SHIPPED


@dataclass
class Below:
    """What it derives from. ``rate``: how fast; ``width`` is the second."""

    rate: float = 0.5


@dataclass
class Thing(Below):
    """A thing, of ``kind`` a or b.
    It has more to say.

    Args:
        low, high: both ends of a band
            that goes on here.
        words: what it says.

    Raises:
        ValueError: words: never this.
    """

    low: int = 0
    high: int | None = None
    words: Sequence[str] = ()
    kind: str = "a"
    silent: Mapping[str, int] | None = None


class Plain:
    def __init__(self, *rest: int, size, near: float = 1.0, **more: object) -> None:  # type: ignore[no-untyped-def]
        """Makes one.

        Args:
            size: how large.
        """
        raise AssertionError("nothing is built")


@dataclass
class Bare:
    a: int = 1


def test_type_default_and_help_of_every_argument() -> None:
    assert arguments(Thing) == [
        Argument("rate", "float", 0.5, "how fast"),
        Argument("low", "int", 0, "both ends of a band that goes on here"),
        Argument("high", "int | null", None, "both ends of a band that goes on here"),
        Argument("words", "Sequence[str]", (), "what it says"),
        Argument("kind", "str", "a", "A thing, of kind a or b"),
        Argument("silent", "Mapping[str, int] | null", None, ""),
    ]
    assert arguments(Plain) == [Argument("size", "", REQUIRED, "how large"), Argument("near", "float", 1.0, "")]
    assert arguments(Bare) == [Argument("a", "int", 1, "")]


def test_the_first_sentence() -> None:
    assert summary(Thing) == "A thing, of kind a or b" and summary(Plain) == ""


@pytest.mark.parametrize("target", [target for targets in SHIPPED.values() for target in targets])
def test_every_argument_of_what_is_shipped_is_there(target: str) -> None:
    found = import_target(target)
    names = [p.name for p in inspect.signature(found).parameters.values() if p.kind is not p.VAR_KEYWORD]
    assert [argument.name for argument in arguments(found)] == names
    assert all(argument.type_name for argument in arguments(found))


@pytest.mark.parametrize("target", SHIPPED["model.router"])
def test_every_argument_of_a_router_policy_is_explained(target: str) -> None:
    assert [argument.name for argument in arguments(import_target(target)) if not argument.help] == []
