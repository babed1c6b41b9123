"""The reward of a trajectory: a weighted, capped sum of named parts.

Invariants (``tests/rewards/test_compose.py`` asserts each):

1. ``total`` is the sum of ``parts``, and ``parts[name]`` is weight x value, clamped to [-cap, cap].
2. A part that raises, or whose value is not a finite number, makes the whole result invalid: ``total`` is NaN and
   ``problem`` names the part. An invalid reward is never 0 by accident.
3. Parts see the same episode and are summed in a fixed order, whatever order the configuration was written in.
4. A missing part is NaN in ``parts``, is not in ``total``, keeps its labels and is named with why: it is neither 0 nor
   an error. A part that is broken beside it still makes the result invalid.
5. A slow part is begun without waiting, and is missing when its time is over.
6. A label is written by one part alone, which has declared it: two that declare it are refused, and one that was not
   declared makes the result invalid.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent import futures
from concurrent.futures import Future
from copy import copy
from dataclasses import dataclass, field, replace
from numbers import Real
from typing import Any

from megatron_ext.config.instantiate import instantiate, ordered
from megatron_ext.rewards.protocol import Episode, Reward, RewardValue, SlowReward, written_labels

PLUG_KEYS = ("order", "weight", "cap")
GRACE_S = 5.0
"""Seconds beyond its own deadline after which a slow part is given up: it should have said so itself."""


@dataclass(frozen=True)
class RewardPart:
    """``weight`` x reward, clamped to [-``cap``, ``cap``] (infinite = not clamped)."""

    name: str
    reward: Reward
    weight: float = 1.0
    cap: float = math.inf


@dataclass(frozen=True)
class RewardResult:
    """``total`` and ``parts`` (contributions that add up to it). Invalid: ``total`` and the failed parts are NaN, and
    the trajectory's status must become ``REWARD_INVALID``.

    ``labels`` name -> one number a step; ``missing`` part -> why it has no value (the part is NaN and not in the
    total); ``counts`` metric name -> what the parts counted.
    """

    total: float
    parts: dict[str, float] = field(default_factory=dict)
    valid: bool = True
    problem: str = ""
    labels: dict[str, tuple[int, ...]] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)
    counts: dict[str, float] = field(default_factory=dict)


class RewardSet:
    """All parts of the configured reward."""

    def __init__(self, parts: Sequence[RewardPart]) -> None:
        """Raises ``ValueError`` on no parts, two of one name or of one label, a weight that is not finite or a cap that
        is not > 0."""
        if not parts:
            raise ValueError("rewards: there is no part, so every reward would be 0; configure at least one")
        names = [part.name for part in parts]
        for part in parts:
            if names.count(part.name) > 1:
                raise ValueError(f"rewards: two parts are named {part.name!r}")
            if not math.isfinite(part.weight):
                raise ValueError(f"rewards.{part.name}.weight must be finite, got {part.weight}")
            if not part.cap > 0:
                raise ValueError(f"rewards.{part.name}.cap must be > 0, got {part.cap}")
        writer: dict[str, str] = {}
        for part in parts:
            for label in sorted(written_labels(part.reward)):
                if label in writer:
                    raise ValueError(
                        f"rewards.{writer[label]} and rewards.{part.name} both label turns as {label!r}; rename one's "
                        "label"
                    )
                writer[label] = part.name
        self.parts = tuple(parts)

    @staticmethod
    def from_config(nodes: Mapping[str, Any], where: str = "rewards") -> RewardSet:
        """From ``name -> {_target_, weight = 1, cap = null, order = 0, ...}``; null entries are left out."""
        return RewardSet(
            [
                RewardPart(
                    name,
                    instantiate(node, skip=PLUG_KEYS, where=f"{where}.{name}"),
                    _number(node, "weight", 1.0, f"{where}.{name}"),
                    _number(node, "cap", math.inf, f"{where}.{name}"),
                )
                for name, node in ordered(nodes, where)
            ]
        )

    def quick(self) -> RewardSet:
        """The parts that wait for nothing; there may be none, and the reward is 0."""
        chosen = copy(self)
        chosen.parts = tuple(p for p in self.parts if not (isinstance(p.reward, SlowReward) and p.reward.deadline_s))
        return chosen

    def start(self, episode: Episode) -> Grading:
        """Begins to grade; what waits for nothing is computed here."""
        started = [(part, _start(part, episode)) for part in self.parts]
        slow = [part.reward.deadline_s for part, _ in started if isinstance(part.reward, SlowReward)]
        return Grading(episode, started, max(slow, default=0.0))

    def __call__(self, episode: Episode) -> RewardResult:
        """The whole reward; waits for slow parts."""
        grading = self.start(episode)
        grading.wait()
        return grading.result()

    def close(self) -> None:
        """Ends what slow parts run in the background."""
        for part in self.parts:
            if isinstance(part.reward, SlowReward):
                part.reward.close()


class Grading:
    """The reward of one episode while slow parts may be outstanding."""

    def __init__(
        self, episode: Episode, started: Sequence[tuple[RewardPart, Future[RewardValue]]], deadline_s: float
    ) -> None:
        self._episode, self._started = episode, started
        self._deadline = time.monotonic() + deadline_s + GRACE_S
        self._deadline_s = deadline_s

    @property
    def done(self) -> bool:
        """Whether ``result`` waits for nothing: every part answered, or the time for it is over."""
        return all(future.done() for _, future in self._started) or time.monotonic() > self._deadline

    def wait(self) -> None:
        """Until it is ``done``."""
        futures.wait([future for _, future in self._started], max(0.0, self._deadline - time.monotonic()))

    def when_done(self, call: Callable[[], None]) -> None:
        """Calls ``call`` each time a part is done, from any thread (at once for those that are)."""
        for _, future in self._started:
            future.add_done_callback(lambda _: call())

    def result(self) -> RewardResult:
        """The reward. A part that has not answered by now is missing."""
        episode, problems = self._episode, []
        parts: dict[str, float] = {}
        labels: dict[str, tuple[int, ...]] = {}
        missing: dict[str, str] = {}
        counts: dict[str, float] = {}
        for part, future in self._started:
            value, problem = _evaluate(part, future, self._deadline_s)
            problem = problem or _label_problem(value, written_labels(part.reward), len(episode.steps))
            parts[part.name] = math.nan
            if problem:
                problems.append(f"reward {part.name!r} of task {episode.task.task_id!r} {problem}")
                continue
            labels |= {name: tuple(numbers) for name, numbers in value.labels.items()}
            for name, count in value.counts.items():
                counts[name] = counts.get(name, 0.0) + count
            if value.missing:
                missing[part.name] = f"reward {part.name!r} of task {episode.task.task_id!r} is missing: {value.why}"
            else:
                parts[part.name] = max(-part.cap, min(part.cap, part.weight * value.value))
        if problems:
            return RewardResult(math.nan, parts, False, "; ".join(problems), counts=counts)
        total = math.fsum(value for name, value in parts.items() if name not in missing)
        return RewardResult(total, parts, labels=labels, missing=missing, counts=counts)


def _start(part: RewardPart, episode: Episode) -> Future[RewardValue]:
    """The part's answer to be. Whatever a user's reward raises is kept for ``_evaluate``: one bad episode must not end
    a run."""
    answer: Future[RewardValue] = Future()
    try:
        if isinstance(part.reward, SlowReward):
            return part.reward.start(episode)
        given = part.reward(episode)
        answer.set_result(given if isinstance(given, RewardValue) else RewardValue(given))
    except Exception as error:
        answer.set_exception(error)
    return answer


def _evaluate(part: RewardPart, answer: Future[RewardValue], deadline_s: float) -> tuple[RewardValue, str]:
    """The part's value, whose ``value`` is a finite float unless it is missing, and what is wrong with it."""
    if not answer.done():
        return RewardValue(missing=True, why=f"no answer within {deadline_s:g} s"), ""
    if answer.cancelled():
        return RewardValue(missing=True, why="it was cancelled"), ""
    error = answer.exception()
    if error is not None:
        return RewardValue(), f"raised {type(error).__name__}: {error}{_place(error)}"
    given = answer.result()
    if not isinstance(given, RewardValue):
        return RewardValue(), f"answered with {type(given).__name__}, not a RewardValue"
    if given.missing:
        return given, ""
    if not isinstance(given.value, Real):
        return given, f"returned {type(given.value).__name__}, not a number"
    try:
        number = float(given.value)
    except OverflowError:
        return given, "is too large for a float"
    if not math.isfinite(number) or not math.isfinite(part.weight * number):
        return given, f"is {number}, not finite"
    return replace(given, value=number), ""


def _label_problem(value: RewardValue, declared: frozenset[str], steps: int) -> str:
    for name, numbers in value.labels.items():
        if name not in declared:
            return f"labels turns as {name!r}, which is not among its written_labels"
        if len(numbers) != steps:
            return f"gives {len(numbers)} labels {name!r} for {steps} steps"
        bad = next((n for n in numbers if not isinstance(n, int) or isinstance(n, bool) or not -1 <= n < 2**15), None)
        if bad is not None:
            return f"gives the label {name!r} the value {bad!r}; labels are whole numbers from -1 to 32767"
    return ""


def _place(error: BaseException) -> str:
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return f" ({trace.tb_frame.f_code.co_filename}:{trace.tb_lineno})" if trace is not None else ""


def _number(node: Mapping[str, Any], key: str, default: float, where: str) -> float:
    value = node.get(key)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError(f"{where}.{key}: expected a number, got {value!r}")
    return float(value)
