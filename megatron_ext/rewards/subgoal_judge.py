"""A judge by rule over sub-goals: did a step reach one, undo one, come back to an old state, or find a new one?

For environments whose observations say in ``info`` which sub-goal holds: the number of the last one from 1, 0 for none.

Invariants (``tests/rewards/test_subgoal_judge.py``):

1. A verdict follows from levels and state hashes alone: the text, the task and the end of the episode do not matter.
2. The first of these that is true decides: a level never reached before is ``reached``; a level below the one before
   the step is ``undone``; a state seen before is ``repeated``; a state that the step left as it was is ``unchanged``;
   else it is ``new``.
3. A sub-goal reached again is not ``reached``: undoing and doing it over earns nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from megatron_ext.rewards.judge import Exchange, JudgeView, Verdict


class SubgoalJudge:
    """Needs ``state: true``, ``before: null`` and ``info: [level]`` in its part."""

    def __init__(
        self, reached: str, undone: str, repeated: str, unchanged: str, new: str, *, level: str = "level"
    ) -> None:
        """
        Args:
            reached, undone, repeated, unchanged, new: the label of each case; two may share one.
            level: key of ``info`` that holds the number of the last sub-goal that holds.
        """
        self._labels = {"reached": reached, "undone": undone, "repeated": repeated, "unchanged": unchanged, "new": new}
        self._level = level

    def __call__(self, views: Sequence[JudgeView], labels: Mapping[str, str]) -> list[Verdict]:
        """Raises ``ValueError`` when a view lacks a level, a state or a part of the past."""
        verdicts = []
        for view in views:
            case, reason = self._case(view)
            verdicts.append(Verdict(self._labels[case], reason=reason))
        return verdicts

    def _case(self, view: JudgeView) -> tuple[str, str]:
        if len(view.before) < view.step:
            raise ValueError("SubgoalJudge: a view without the whole past; set before: null where it is configured")
        past = [self._place(exchange) for exchange in (view.opening, *view.before)]
        level, state = self._place(view.current)
        last_level, last_state = past[-1]
        if level > max(number for number, _ in past):
            return "reached", f"sub-goal {level} holds for the first time"
        if level < last_level:
            return "undone", f"sub-goal {last_level} holds no more"
        if state == last_state:
            return "unchanged", "the action changed nothing"
        if any(state == seen for _, seen in past):
            return "repeated", "the state has been seen before"
        return "new", "a new state"

    def _place(self, exchange: Exchange) -> tuple[int, str]:
        """(level, state) after an exchange."""
        level = exchange.info.get(self._level)
        if not isinstance(level, int) or isinstance(level, bool):
            raise ValueError(
                f"SubgoalJudge: a view without info {self._level!r}; name it in info where it is configured, and use "
                "an environment that gives it"
            )
        if not exchange.state:
            raise ValueError("SubgoalJudge: a view without a state hash; set state: true where it is configured")
        return level, exchange.state
