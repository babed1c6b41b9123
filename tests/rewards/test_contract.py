"""What every reward and every judge owes (``rewards/protocol.py``, ``rewards/judge.py``)."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatron_ext.config.instantiate import instantiate
from megatron_ext.environments.protocol import Observation, ToolCall
from megatron_ext.rewards.compose import RewardSet
from megatron_ext.rewards.judge import Judge, SlowJudge, Whitelist
from megatron_ext.rewards.protocol import Episode, EpisodeStep
from megatron_ext.trajectory.record import Status
from megatron_ext.trajectory.task import Task
from tests.helpers.judge_server import JudgeServer, Say, judge_server

LABELS = {"D": "decisive", "E": "", "N": "", "R": ""}
RULES: Mapping[str, Mapping[str, Any]] = {
    "novelty": {
        "_target_": "megatron_ext.rewards.rule_judge.NoveltyJudge",
        "new": "E",
        "repeated": "R",
        "unchanged": "N",
    },
    "subgoals": {
        "_target_": "megatron_ext.rewards.subgoal_judge.SubgoalJudge",
        "reached": "D",
        "undone": "R",
        "repeated": "R",
        "unchanged": "N",
        "new": "E",
    },
}
SEES: Mapping[str, Any] = {"before": None, "state": True, "info": ["level"]}


@pytest.fixture(scope="module")
def server() -> Iterator[JudgeServer]:
    with judge_server(lambda number, body: Say("D")) as made:
        yield made


def judge_nodes(server: JudgeServer) -> dict[str, Mapping[str, Any]]:
    model = {"_target_": "megatron_ext.rewards.model_judge.ModelJudge", "base_url": server.base_url, "model": "m"}
    return {**RULES, "model": model}


JUDGES = [*RULES, "model"]
PLAIN = {
    "success": {"_target_": "megatron_ext.rewards.outcome.Success"},
    "score": {"_target_": "megatron_ext.rewards.outcome.Score"},
    "steps": {"_target_": "megatron_ext.rewards.outcome.StepRewardSum", "discount": 0.9},
    "malformed": {"_target_": "megatron_ext.rewards.outcome.MalformedPenalty", "count_refused": True},
    "turns": {"_target_": "megatron_ext.rewards.outcome.TurnPenalty", "free": 2},
    "info": {"_target_": "megatron_ext.rewards.info.LastInfo", "key": "level"},
    "function": {"_target_": "megatron_ext.rewards.python_reward.PythonReward", "function": f"{__name__}:malformed"},
}


def malformed(episode: Episode) -> float:
    return sum(step.action is None for step in episode.steps) / (len(episode.steps) + 1)


def observation(text: str, level: int, done: bool = False) -> Observation:
    return Observation(text, 0.5 * level, done, done and level > 1, level / 4, info={"level": level, "more": [1]})


actions = st.one_of(st.none(), st.text(max_size=4), st.builds(ToolCall, st.just("f"), st.just({"a": [1]})))
played = st.lists(st.tuples(actions, st.text(max_size=6), st.integers(0, 3), st.sampled_from("abc")), max_size=5)


def episode(steps: Sequence[tuple[Any, str, int, str]]) -> Episode:
    made = [
        EpisodeStep(f"say {t}", action, observation(text, level, t == len(steps) - 1), t, state)
        for t, (action, text, level, state) in enumerate(steps)
    ]
    return Episode(Task("t", "e", 1, "train", {"gold": "x"}), observation("begin", 0), made, Status.DONE, "a")


@pytest.mark.parametrize("name", [*PLAIN, *JUDGES])
@given(steps=played)
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_rewards(name: str, steps: Sequence[tuple[Any, str, int, str]], server: JudgeServer) -> None:
    """Finite, the same when asked again, and the episode stays as it was; labels fit its steps."""
    node = PLAIN.get(name) or {
        "_target_": "megatron_ext.rewards.judge_reward.JudgeReward",
        "judge": judge_nodes(server)[name],
        "labels": dict(zip(LABELS, range(4), strict=True)),
        "default": "N",
        "values": {"D": 1.0, "R": -0.5},
        **SEES,
    }
    rewards = RewardSet.from_config({"part": node})
    given_episode = episode(steps)
    before = copy.deepcopy(given_episode)
    one, again = rewards(given_episode), rewards(given_episode)
    rewards.close()
    assert given_episode == before
    assert one.valid and not one.missing and math.isfinite(one.total), one.problem
    assert (one.total, one.parts, one.labels) == (again.total, again.parts, again.labels)
    assert all(len(numbers) == len(steps) for numbers in one.labels.values())


@pytest.mark.parametrize("name", JUDGES)
@given(steps=played)
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_judges(name: str, steps: Sequence[tuple[Any, str, int, str]], server: JudgeServer) -> None:
    """One verdict a view, the same in any company and when asked again."""
    judge: Judge = instantiate(judge_nodes(server)[name])
    views = Whitelist(**SEES).views(episode(steps))
    whole = [verdict.label for verdict in judge(views, LABELS)]
    assert len(whole) == len(views) and all(label in LABELS for label in whole)
    assert [judge([view], LABELS)[0].label for view in views] == whole
    assert [verdict.label for verdict in judge(list(reversed(views)), LABELS)] == whole[::-1]
    if isinstance(judge, SlowJudge):
        assert judge.deadline_s > 0
        judge.close()
