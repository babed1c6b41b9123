"""Judges: who labels the turns of an episode, and what they may see.

Invariants (``tests/rewards/test_judge.py`` asserts each):

1. A judge sees a ``JudgeView`` and nothing else. A view holds what its ``Whitelist`` names: the task prompt, a window
   of action-observation pairs, named keys of the observations' ``info`` and, if asked for, state hashes.
2. No outcome reaches it: whatever ``reward``, ``done``, ``success`` and ``score`` of the observations, the task's data,
   the episode's end and unnamed ``info`` keys hold, the views are the same.
3. A whitelist that names an outcome is refused when it is made, and keys of that kind inside a named value are cut.
4. The last observation's text is shown on request only: that is where an environment says how it ended.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from megatron_ext.environments.protocol import canonical_action
from megatron_ext.rewards.protocol import Episode

OUTCOME_WORDS = frozenset(
    {
        *("reward", "rewards", "success", "succeeded", "solved", "score", "scores", "done", "answer", "answers"),
        *("gold", "solution", "solutions", "outcome", "outcomes", "correct", "correctness", "accuracy"),
        *("won", "win", "wins", "winner", "lost", "passed", "failed", "failure", "grounded"),
    }
)
"""Words that a key tells of an outcome with. Keys are cut into words at what is no letter and at capitals."""


@dataclass(frozen=True)
class Exchange:
    """One action and what the environment answered. ``action`` is the turn's whole text where none could be parsed;
    ``info`` holds the whitelisted keys that the observation has; ``state`` the hash of the state after the action."""

    action: str
    observation: str
    info: Mapping[str, Any] = field(default_factory=dict)
    state: str = ""


@dataclass(frozen=True)
class JudgeView:
    """All that a judge is told of one step: the ``current`` exchange among those ``before`` and ``after`` it.

    ``step`` counts from 0 in the episode. ``opening`` holds the whitelisted ``info`` and the state of the first
    observation, whose text is the ``prompt``.
    """

    step: int
    prompt: str
    before: tuple[Exchange, ...]
    current: Exchange
    after: tuple[Exchange, ...]
    opening: Exchange


@dataclass(frozen=True)
class Verdict:
    """A judge's answer about one view.

    Attributes:
        label: the label's name as the judge said it; "" when it said none.
        score: a number, if it gave one.
        reason: its reason, if it gave one.
        correction: what should have been done, if it said so.
        failed: why there is no answer; "" when there is one. Nothing else is read then.
        calls: requests sent for it (retries count, a cached answer and a rule send none).
    """

    label: str = ""
    score: float | None = None
    reason: str = ""
    correction: str = ""
    failed: str = ""
    calls: int = 0


class Judge(Protocol):
    """Labels the steps of one episode. ``labels`` maps the names that there are to what they mean ("" if not said).

    Deterministic; returns one verdict for each view, in order. A judge that cannot answer says so in
    ``Verdict.failed``; an error it raises makes the trajectory's reward invalid.
    """

    def __call__(self, views: Sequence[JudgeView], labels: Mapping[str, str]) -> Sequence[Verdict]: ...


@runtime_checkable
class SlowJudge(Protocol):
    """A judge that waits for something outside. ``start`` returns at once; its future is done within ``deadline_s``."""

    @property
    def deadline_s(self) -> float: ...

    def __call__(self, views: Sequence[JudgeView], labels: Mapping[str, str]) -> Sequence[Verdict]: ...

    def start(self, views: Sequence[JudgeView], labels: Mapping[str, str]) -> Future[Sequence[Verdict]]: ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class Whitelist:
    """What a judge may see: at most ``before`` and ``after`` exchanges around the judged one (None: all), the ``info``
    keys named, the state hashes if ``state``, and the last observation's text if ``show_last``.

    Raises ``ValueError`` on a window below 0 or an ``info`` key that tells an outcome.
    """

    before: int | None = 5
    after: int | None = 5
    info: tuple[str, ...] = ()
    state: bool = False
    show_last: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "info", tuple(self.info))
        for name in ("before", "after"):
            size: int | None = getattr(self, name)
            if size is not None and size < 0:
                raise ValueError(f"{name}={size}: a judge's window must be >= 0, or null for all")
        for key in self.info:
            if word := outcome_word(key):
                raise ValueError(
                    f"info names {key!r}, which tells the outcome ({word}): a judge must not see it; take it out"
                )

    def views(self, episode: Episode) -> list[JudgeView]:
        """One view for each step of the episode, in order."""
        last = len(episode.steps) - 1
        pairs = tuple(
            Exchange(
                action=step.text if step.action is None else canonical_action(step.action),
                observation=step.observation.text if t < last or self.show_last else "",
                info=self._named(step.observation.info),
                state=step.state if self.state else "",
            )
            for t, step in enumerate(episode.steps)
        )
        opening = Exchange(
            "", episode.first.text, self._named(episode.first.info), episode.first_state if self.state else ""
        )
        return [
            JudgeView(
                step=t,
                prompt=episode.first.text,
                before=pairs[0 if self.before is None else max(0, t - self.before) : t],
                current=pair,
                after=pairs[t + 1 : None if self.after is None else t + 1 + self.after],
                opening=opening,
            )
            for t, pair in enumerate(pairs)
        ]

    def _named(self, info: Mapping[str, Any]) -> dict[str, Any]:
        return {key: without_outcomes(info[key]) for key in self.info if key in info}


def outcome_word(key: str) -> str:
    """The word of ``key`` that tells an outcome, or ""."""
    words = re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", key)
    return next((word.lower() for word in words if word.lower() in OUTCOME_WORDS), "")


def without_outcomes(value: Any) -> Any:
    """A JSON value without the keys, at any depth, that tell an outcome."""
    if isinstance(value, Mapping):
        return {key: without_outcomes(item) for key, item in value.items() if not outcome_word(str(key))}
    if isinstance(value, (list, tuple)):
        return [without_outcomes(item) for item in value]
    return value
