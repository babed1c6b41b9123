"""A reward part from a judge's labels: they go to the turns of the record, and weigh into the reward.

Invariants (``tests/rewards/test_judge_reward.py``):

1. The judge is asked about each step that held an action, with the views of a ``Whitelist``, and about nothing else.
2. A label that is not among ``labels`` (in any case of letters) is ``default``, and counted.
3. A step without an answer has no label (-1), and makes the part missing, with why: never 0, never ``default``.
4. The value is the sum (or the mean) over the judged steps of ``values[label] + score_weight x score``; with no value
   configured it is 0 and the part only labels.
5. A judge that waits runs beside the episodes: ``start`` returns at once.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from megatron_ext.config.instantiate import instantiate
from megatron_ext.rewards.judge import Judge, SlowJudge, Verdict, Whitelist
from megatron_ext.rewards.protocol import Episode, RewardValue


class JudgeReward:
    """Labels turns as ``turn_labels[label]`` and gives the sum of their values."""

    def __init__(
        self,
        judge: Mapping[str, Any],
        labels: Mapping[str, int],
        default: str,
        *,
        label: str = "role",
        meanings: Mapping[str, str] | None = None,
        values: Mapping[str, float] | None = None,
        score_weight: float = 0.0,
        average: bool = False,
        malformed: str | None = None,
        before: int | None = 5,
        after: int | None = 5,
        info: Sequence[str] = (),
        state: bool = False,
        show_last: bool = False,
    ) -> None:
        """
        Args:
            judge: node of a ``Judge`` (``_target_`` and its arguments).
            labels: label -> the number it has in the record, 0 to 32767, each its own.
            default: the label of an answer whose label is none of these.
            label: name under which the record keeps the labels.
            meanings: label -> what it means, for judges that are told.
            values: label -> what a step of it is worth; 0 where not given.
            score_weight: what one unit of the judge's score is worth; 0 ignores scores, otherwise a step without one
                has no answer.
            average: the mean over the judged steps instead of the sum.
            malformed: label of a step that held no action and is not judged; null gives it none.
            before, after, info, state, show_last: what the judge sees, see ``Whitelist``.

        Raises:
            ValueError: labels that are not told apart, names that are no label, or a whitelist that is refused.
        """
        self.whitelist = Whitelist(before, after, tuple(info), state, show_last)
        self.label, self.labels = label, dict(labels)
        self._meanings, self._values = dict(meanings or {}), dict(values or {})
        self._default, self._malformed = default, malformed
        self._score_weight, self._average = score_weight, average
        self._check()
        self._known = {name.lower(): name for name in self.labels}
        self._told = {name: self._meanings.get(name, "") for name in self.labels}
        self._judge: Judge = instantiate(judge, where="judge")

    def _check(self) -> None:
        if not self.labels:
            raise ValueError("labels: none; name at least one, as label: number")
        for name in (self.label, *self.labels):
            if not re.fullmatch(r"[A-Za-z0-9_.-]+", name):  # it becomes part of a metric's name
                raise ValueError(f"label {name!r}: a name of letters, digits, '_', '.' and '-' is needed")
        if len({name.lower() for name in self.labels}) < len(self.labels):
            raise ValueError(f"labels {', '.join(self.labels)}: two differ in the case of letters alone")
        for name, number in self.labels.items():
            if not isinstance(number, int) or isinstance(number, bool) or not 0 <= number < 2**15:
                raise ValueError(f"labels.{name}: needs a whole number from 0 to 32767, got {number!r}")
            if list(self.labels.values()).count(number) > 1:
                raise ValueError(f"labels.{name}: {number} is another label's number too")
        named = {"default": [self._default], "malformed": [self._malformed] if self._malformed is not None else []}
        for where, names in {**named, "meanings": self._meanings, "values": self._values}.items():
            for name in names:
                if name not in self.labels:
                    raise ValueError(f"{where} names {name!r}, which is not among labels: {', '.join(self.labels)}")
        for name, value in {**self._values, "score_weight": self._score_weight}.items():
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
                raise ValueError(f"values: {name} needs a finite number, got {value!r}")

    @property
    def written_labels(self) -> frozenset[str]:
        return frozenset({self.label})

    @property
    def deadline_s(self) -> float:
        return self._judge.deadline_s if isinstance(self._judge, SlowJudge) else 0.0

    def close(self) -> None:
        if isinstance(self._judge, SlowJudge):
            self._judge.close()

    def __call__(self, episode: Episode) -> RewardValue:
        """Waits for the judge, at most its deadline."""
        return self.start(episode).result(self.deadline_s or None)

    def start(self, episode: Episode) -> Future[RewardValue]:
        views = self.whitelist.views(episode)
        asked = [t for t, step in enumerate(episode.steps) if step.action is not None]
        began, value = time.monotonic(), Future[RewardValue]()

        def answered(verdicts: Sequence[Verdict]) -> None:
            value.set_result(self._value(len(episode.steps), asked, verdicts, time.monotonic() - began))

        chosen = [views[t] for t in asked]
        if not isinstance(self._judge, SlowJudge):
            answered(self._judge(chosen, self._told))
            return value

        def done(future: Future[Sequence[Verdict]]) -> None:
            try:
                answered(future.result())
            except BaseException as error:  # it would be lost in the thread that runs this
                value.set_exception(error)

        self._judge.start(chosen, self._told).add_done_callback(done)
        return value

    def _value(self, steps: int, asked: Sequence[int], verdicts: Sequence[Verdict], seconds: float) -> RewardValue:
        if len(verdicts) != len(asked):
            raise ValueError(f"the judge gave {len(verdicts)} verdicts on {len(asked)} steps")
        found = [-1 if self._malformed is None else self.labels[self._malformed]] * steps
        total, failures, unknown = [], [], 0
        counts = {f"judge/label/{self.label}/{name}": 0.0 for name in self.labels}
        for t, verdict in zip(asked, verdicts, strict=True):
            failed = verdict.failed
            if not failed and self._score_weight and (verdict.score is None or not math.isfinite(verdict.score)):
                failed = "the answer has no score"
            if failed:
                failures.append(f"step {t}: {failed}")
                found[t] = -1
                continue
            name = self._known.get(verdict.label.strip().lower())
            unknown += name is None
            name = self._default if name is None else name
            found[t] = self.labels[name]
            counts[f"judge/label/{self.label}/{name}"] += 1.0
            score = 0.0 if verdict.score is None else verdict.score
            total.append(self._values.get(name, 0.0) + self._score_weight * score)
        counts |= {
            "judge/trajectories": 1.0,
            "judge/asked": float(len(asked)),
            "judge/calls": float(sum(verdict.calls for verdict in verdicts)),
            "judge/failed": float(len(failures)),
            "judge/unknown": float(unknown),
            "judge/seconds": seconds,
        }
        value = math.fsum(total) / (max(len(total), 1) if self._average else 1)
        why = f"{len(failures)} of {len(asked)} steps have no answer ({failures[0]})" if failures else ""
        return RewardValue(value, {self.label: found}, bool(failures), why, counts)
