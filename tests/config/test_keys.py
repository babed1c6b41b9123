from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

from megatron_ext.config import keys
from megatron_ext.config.keys import Kind
from megatron_ext.config.schema import Config


@dataclass
class Inner:
    rate: float = field(default=0.5, metadata={"help": "a rate"})
    names: list[str] = field(default_factory=list)


@dataclass
class Outer:
    size: int = 3
    on: bool = False
    inner: Inner = field(default_factory=Inner)
    parts: dict[str, Any] = field(default_factory=dict)
    own: Any = None


def test_walk_lists_in_declared_order() -> None:
    assert [(k.path, k.kind) for k in keys.walk(Outer)] == [
        ("size", Kind.VALUE),
        ("on", Kind.VALUE),
        ("inner", Kind.SECTION),
        ("inner.rate", Kind.VALUE),
        ("inner.names", Kind.VALUE),
        ("parts", Kind.MAP),
        ("own", Kind.ANY),
    ]
    assert next(k for k in keys.walk(Outer) if k.path == "inner.rate").help == "a rate"


def test_find_answers_inside_maps_with_the_map() -> None:
    for path in ("parts", "parts.a", "parts.a.b"):
        key = keys.find(Outer, path)
        assert key is not None and key.path == "parts"
    assert keys.find(Outer, "parts_a") is None
    assert keys.find(Outer, "inner.rate.deeper") is None


@pytest.mark.parametrize(
    ("path", "value", "good"),
    [
        ("size", 4, True),
        ("size", "4", True),
        ("size", 4.5, False),
        ("size", "four", False),
        ("size", None, False),
        ("on", True, True),
        ("on", "maybe", False),
        ("inner.rate", 1, True),
        ("inner.rate", "1e-3", True),
        ("inner.rate", [1.0], False),
        ("inner.names", ["a"], True),
        ("inner.names", "a", False),
        ("size", "${inner.rate}", True),  # judged once it is resolved
    ],
)
def test_types(path: str, value: object, good: bool) -> None:
    key = keys.find(Outer, path)
    assert key is not None
    problem = keys.type_problem(key, value)
    assert (problem is None) == good
    if problem is not None:
        assert key.type_name in problem and repr(value) in problem


@pytest.mark.parametrize(
    ("wrong", "expected"),
    [
        ("run.stepss", "run.steps"),
        ("optimzer.lr", "optimizer.lr"),
        ("lr", "optimizer.lr"),
        ("loss.term.kl.coefficient", "loss.terms"),
        ("batch.task_per_step", "batch.tasks_per_step"),
    ],
)
def test_nearest_names(wrong: str, expected: str) -> None:
    assert keys.find(Config, wrong) is None
    assert expected in keys.nearest(Config, wrong)
    assert expected in keys.unknown(Config, wrong)


def test_every_key_has_a_line_of_help() -> None:
    assert [k.path for k in keys.walk(Config) if k.kind is not Kind.SECTION and not k.help] == []
