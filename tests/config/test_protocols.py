"""Invariants of ``megatron_ext/config/protocols.py``, through ``plug_points``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from megatron_ext.config import plug_points, protocols
from megatron_ext.config.instantiate import import_target
from megatron_ext.config.protocols import PLUG_POINTS
from megatron_ext.config.shipped import SHIPPED
from megatron_ext.rewards.protocol import Episode
from tests.helpers.configs import HERE, config

KL = "megatron_ext.losses.kl.KLToReference"
SUCCESS = "megatron_ext.rewards.outcome.Success"
WRONG: list[tuple[str, str, str]] = [
    ("model.router", KL, "has no apply, check, config_overrides, "),
    ("model.router", f"{HERE}.Keeping", "has no check, config_overrides, "),
    ("harness", KL, "has no answer_call, compress, "),
    ("environments.game", KL, "has no close, copy, reset, state_hash, step, tasks, tools "),
    ("rollout.engine", f"{HERE}.Game", "has no connect, pids, publish, sleep, version, wake "),
    ("tasks.source", KL, "has no __len__, draw, load_state_dict, report, state_dict "),
    ("rewards.a", f"{HERE}.Keeping", "has no __call__ "),
    ("rewards.a", KL, "is called with LossInputs, a reward part with Episode "),
    (
        "rewards.a",
        "megatron_ext.rewards.subgoal_judge.SubgoalJudge",
        "is called with views, labels, a reward part with episode ",
    ),
    ("loss.terms.a", f"{HERE}.Keeping", "has no __call__, coefficient, needs_entropy, needs_reference, unit "),
    ("loss.terms.a", SUCCESS, "is called with Episode, a loss term with LossInputs "),
    ("credit.edits.a", KL, "has no apply, load_state_dict, local_stats, requests, state_dict, traits "),
    ("tracking.a", KL, "has no advance, finish, log, phase, start "),
]
LATER: list[tuple[str, str, str]] = [  # what only the built object tells
    ("loss.terms.a", f"{__name__}.AnyLoss", "AnyLoss is no loss term: it has no coefficient, needs_entropy, "),
    ("rewards.a", f"{__name__}.makes_a_number", "builtins.int is no reward part: it has no __call__ "),
    ("rewards.a", f"{__name__}.makes_a_class", "AnyLoss is no reward part: it has no __call__ "),
]


class AnyLoss:
    def __call__(self, inputs: Any) -> Any: ...


class Unsaid:
    """A reward whose annotation says nothing."""

    def __call__(self, what):  # type: ignore[no-untyped-def]
        return 0.0


class Wide:
    def __call__(self, what: object) -> float:
        return 0.0


def makes_a_number() -> int:
    return 3


def makes_a_class() -> type:
    class Mute: ...

    Mute.__qualname__ = "AnyLoss"
    return Mute


def makes_a_reward() -> Callable[[Episode], float]:
    return lambda episode: 0.0


def found(path: str, target: str, **arguments: Any) -> list[str]:
    node: Any = {"_target_": target, **arguments}
    key = next(key for key in PLUG_POINTS if path.startswith(key))
    return list(
        plug_points.problems(config(**{key.replace(".", "__"): node if path == key else {path[len(key) + 1 :]: node}}))
    )


def test_every_kind_is_here() -> None:
    assert {next(key for key in PLUG_POINTS if path.startswith(key)) for path, _, _ in WRONG} == set(PLUG_POINTS)


@pytest.mark.parametrize(("path", "target", "words"), WRONG)
def test_a_class_of_another_kind_is_one_line(path: str, target: str, words: str) -> None:
    (line,) = found(path, target)
    assert line.startswith(f"{path}: {target} is no ") and words in line and "(see megatron_ext." in line


@pytest.mark.parametrize(("path", "target", "words"), LATER)
def test_what_only_the_built_object_tells(path: str, target: str, words: str) -> None:
    (line,) = found(path, target)
    assert line.startswith(f"{path}: ") and words in line


@pytest.mark.parametrize("target", ["Unsaid", "Wide", "makes_a_reward"])
def test_what_is_not_said_is_no_reason_to_refuse(target: str) -> None:
    assert found("rewards.a", f"{__name__}.{target}") == []


@pytest.mark.parametrize(("key", "target"), [(key, target) for key, targets in SHIPPED.items() for target in targets])
def test_what_is_shipped_keeps_its_protocol(key: str, target: str) -> None:
    assert protocols.class_problem(key, import_target(target)) is None
