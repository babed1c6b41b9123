"""Which protocol the plug points at a key keep, and what an object or a class lacks of it.

Invariants (``tests/config/test_protocols.py``):

1. A built plug point has every member of its protocol. Of one that is built later (environment, engine, task source)
   the class has every method; attributes may be set when it is built.
2. What is called by itself (a reward, a loss term) takes as many arguments as it is called with, and the first of their
   class, as far as annotations are classes.
3. Each is one line: the key, the class, what is missing.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, get_origin, get_type_hints

from megatron_ext.credit.protocol import CreditEdit
from megatron_ext.environments.protocol import Environment
from megatron_ext.harness.protocol import Harness
from megatron_ext.losses.protocol import LossTerm
from megatron_ext.moe.protocol import RouterPolicy
from megatron_ext.rewards.protocol import Reward
from megatron_ext.rollout.engine import EngineControl
from megatron_ext.rollout.task_source import TaskSource
from megatron_ext.tracking.protocol import Tracker


@dataclass(frozen=True)
class PlugPoint:
    """What the plug points of a key are: in words, and as a protocol."""

    what: str
    protocol: type


PLUG_POINTS: Mapping[str, PlugPoint] = {
    "environments": PlugPoint("environment", Environment),
    "harness": PlugPoint("harness", Harness),
    "rollout.engine": PlugPoint("engine", EngineControl),
    "tasks.source": PlugPoint("task source", TaskSource),
    "rewards": PlugPoint("reward part", Reward),
    "credit.edits": PlugPoint("credit edit", CreditEdit),
    "loss.terms": PlugPoint("loss term", LossTerm),
    "model.router": PlugPoint("router policy", RouterPolicy),
    "tracking": PlugPoint("tracker", Tracker),
}
SPECIAL = ("__call__", "__len__")


def members(protocol: type) -> dict[str, bool]:
    """Names of a protocol's members, and whether each is a method."""
    found: dict[str, bool] = {}
    for base in protocol.__mro__:
        if base is not object and base is not Protocol:
            own = {**dict.fromkeys(base.__dict__.get("__annotations__", ())), **vars(base)}
            found |= {n: inspect.isfunction(v) for n, v in own.items() if not n.startswith("_") or n in SPECIAL}
    return found


def class_problem(path: str, found: object) -> str | None:
    """What the class ``found``, named at ``path``, lacks of its protocol, before it is built; a function may make
    anything."""
    if not isinstance(found, type):
        return None
    point = _of(path)
    wanted, has = members(point.protocol), set(_names(found))
    if any(method and name not in has for name, method in wanted.items()):
        return _lacks(path, found, point, [name for name in wanted if name not in has])
    return _called_with(path, found, point) if "__call__" in wanted else None


def built_problem(path: str, built: object) -> str | None:
    """What the plug point ``built`` at ``path`` lacks of its protocol."""
    point = _of(path)
    missing = [name for name in members(point.protocol) if not _holds(built, name)]
    return _lacks(path, built if isinstance(built, type) else type(built), point, missing) if missing else None


def _of(path: str) -> PlugPoint:
    return next(point for key, point in PLUG_POINTS.items() if path == key or path.startswith(f"{key}."))


def _names(found: type) -> Iterator[str]:
    for base in found.__mro__[:-1]:
        yield from vars(base)
        yield from base.__dict__.get("__annotations__", ())


def _holds(built: object, name: str) -> bool:
    # A class is an object that can be called, whatever it makes.
    return name in set(_names(built)) if isinstance(built, type) else hasattr(built, name)


def _lacks(path: str, found: type, point: PlugPoint, missing: list[str]) -> str:
    return (
        f"{path}: {_path(found)} is no {point.what}: it has no {', '.join(sorted(missing))} "
        f"(see {_path(point.protocol)})"
    )


def _called_with(path: str, found: Any, point: PlugPoint) -> str | None:
    """What is wrong with how an instance is called: with so many arguments, the first of another class."""
    wanted: Any = point.protocol
    given = list(inspect.signature(wanted.__call__).parameters)
    try:
        takes = inspect.signature(found.__call__)
        takes.bind(*given)
    except ValueError:  # written in C
        return None
    except TypeError:
        return _calls(path, found, point, ", ".join(list(takes.parameters)[1:]) or "nothing", ", ".join(given[1:]))
    own, theirs = _first_class(found.__call__), _first_class(wanted.__call__)
    if own is None or theirs is None or issubclass(theirs, own) or issubclass(own, theirs):
        return None
    return _calls(path, found, point, own.__name__, theirs.__name__)


def _calls(path: str, found: type, point: PlugPoint, own: str, wanted: str) -> str:
    return (
        f"{path}: {_path(found)} is no {point.what}: it is called with {own}, a {point.what} with {wanted} "
        f"(see {_path(point.protocol)})"
    )


def _first_class(call: Any) -> type | None:
    """The class of a method's first argument; None where no annotation says so."""
    name = list(inspect.signature(call).parameters)[1:2]
    try:
        hint = get_type_hints(call).get(name[0]) if name else None
    except (NameError, TypeError):  # imported for type checkers alone
        return None
    return hint if isinstance(hint, type) and hint is not Any and get_origin(hint) is None else None


def _path(found: type) -> str:
    return f"{found.__module__}.{found.__qualname__}"
