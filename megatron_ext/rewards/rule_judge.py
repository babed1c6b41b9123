"""A judge by rule, for any environment: has the agent been in this state before?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from megatron_ext.rewards.judge import JudgeView, Verdict


class NoveltyJudge:
    """Labels a step by the state it led to: ``new`` the first time in the episode, else ``repeated``; ``unchanged``
    where the action changed nothing. Needs ``state: true`` and ``before: null`` in its part."""

    def __init__(self, new: str, repeated: str, unchanged: str) -> None:
        self._new, self._repeated, self._unchanged = new, repeated, unchanged

    def __call__(self, views: Sequence[JudgeView], labels: Mapping[str, str]) -> list[Verdict]:
        """Raises ``ValueError`` when a view lacks a state or a part of the past."""
        return [self._verdict(view) for view in views]

    def _verdict(self, view: JudgeView) -> Verdict:
        past = [view.opening.state, *(exchange.state for exchange in view.before)]
        now = view.current.state
        if not now or not all(past):
            raise ValueError("NoveltyJudge: a view without a state hash; set state: true where it is configured")
        if len(view.before) < view.step:
            raise ValueError("NoveltyJudge: a view without the whole past; set before: null where it is configured")
        if now == past[-1]:
            return Verdict(self._unchanged, reason="the action changed nothing")
        if now in past:
            return Verdict(self._repeated, reason="the state has been seen before")
        return Verdict(self._new, reason="a new state")
