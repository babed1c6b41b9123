"""The reward part that a judge labels (``megatron_ext/rewards/judge_reward.py``), by rule and by a served model."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from megatron_ext.config import targets
from megatron_ext.environments.protocol import Observation
from megatron_ext.rewards.compose import RewardPart, RewardSet
from megatron_ext.rewards.judge import JudgeView, Verdict
from megatron_ext.rewards.judge_reward import JudgeReward
from megatron_ext.rewards.protocol import Episode, EpisodeStep, SlowReward
from megatron_ext.tracking.names import check
from megatron_ext.trajectory.record import Status
from megatron_ext.trajectory.task import Task
from tests.helpers.judge_server import Say, judge_server

LABELS = {"D": 0, "E": 1, "N": 2, "R": 3}
NOVELTY = {
    "_target_": "megatron_ext.rewards.rule_judge.NoveltyJudge",
    "new": "E",
    "repeated": "R",
    "unchanged": "N",
}


def episode(*states: str, malformed: Sequence[int] = ()) -> Episode:
    steps = [
        EpisodeStep(f"say {t}", None if t in malformed else f"go {t}", Observation(f"room {s}"), t, s)
        for t, s in enumerate(states)
    ]
    return Episode(Task("t/1", "e", 1, "train"), Observation("find it"), steps, Status.DONE, "a")


class Told:
    """Answers what the actions' numbers say, and keeps what it saw."""

    def __init__(self, verdicts: Sequence[Verdict]) -> None:
        self.verdicts = verdicts
        self.seen: list[JudgeView] = []
        self.labels: dict[str, str] = {}

    def __call__(self, views: Sequence[JudgeView], labels: Mapping[str, str]) -> list[Verdict]:
        self.seen, self.labels = list(views), dict(labels)
        return [self.verdicts[int(view.current.action.split()[-1])] for view in views]


def told(verdicts: Sequence[Verdict], **changes: Any) -> JudgeReward:
    node = {"_target_": f"{__name__}.Told", "verdicts": verdicts}
    return JudgeReward(node, LABELS, "N", **changes)


def test_novelty_by_hand() -> None:
    part = JudgeReward(NOVELTY, LABELS, "N", before=None, state=True, values={"E": 0.5, "R": -1.0})
    value = part(episode("b", "b", "c", "a", "d"))
    assert value.labels == {"role": [1, 2, 1, 3, 1]} and value.value == 0.5
    assert not value.missing and value.counts["judge/label/role/E"] == 3 and value.counts["judge/label/role/D"] == 0
    check(value.counts)
    for wrong, says in (({"state": False}, "set state: true"), ({"before": 2}, "set before: null")):
        broken = RewardSet([RewardPart("role", JudgeReward(NOVELTY, LABELS, "N", **({"state": True} | wrong)))])
        result = broken(episode("b", "c", "d", "e"))
        assert not result.valid and says in result.problem


def test_labels_values_and_averages() -> None:  # invariant 4
    verdicts = [Verdict("D", score=2.0), Verdict("r", score=1.0), Verdict(" N ", score=0.0)]
    played = episode("a", "b", "c")
    assert told(verdicts)(played).value == 0.0
    assert told(verdicts, values={"D": 1.0, "R": -0.25})(played).value == 0.75
    assert told(verdicts, values={"D": 1.0, "R": -0.25}, average=True)(played).value == 0.25
    assert told(verdicts, score_weight=0.5)(played).value == 1.5
    assert told(verdicts, label="kind")(played).labels == {"kind": [0, 3, 2]}
    nothing = told(verdicts, values={"D": 1.0}, average=True)(replace(played, steps=[]))
    assert (nothing.value, nothing.labels, nothing.missing) == (0.0, {"role": []}, False)


def test_steps_without_an_action_are_not_asked_about() -> None:  # invariant 1
    part = told([Verdict("D")] * 3, meanings={"D": "decisive"})
    value = part(episode("a", "b", "c", malformed=[1]))
    judge = part._judge
    assert isinstance(judge, Told) and [view.step for view in judge.seen] == [0, 2]
    assert judge.labels == {"D": "decisive", "E": "", "N": "", "R": ""}
    assert [e.action for e in judge.seen[0].after] == ["say 1", "go 2"], "what it said instead is seen around others"
    assert value.labels == {"role": [0, -1, 0]} and value.counts["judge/asked"] == 2
    named = told([Verdict("D")] * 3, malformed="R", values={"R": -9.0})(episode("a", "b", "c", malformed=[1]))
    assert named.labels == {"role": [0, 3, 0]} and named.value == 0.0


def test_unknown_labels_are_the_default_and_counted() -> None:  # invariant 2
    value = told([Verdict("magnificent"), Verdict(""), Verdict("D")], values={"N": 1.0})(episode("a", "b", "c"))
    assert value.labels == {"role": [2, 2, 0]} and value.counts["judge/unknown"] == 2
    assert value.value == 2.0 and not value.missing


def test_no_answer_is_missing_and_never_a_zero() -> None:  # invariant 3
    verdicts = [Verdict("D"), Verdict(failed="status 500"), Verdict("R")]
    result = RewardSet([RewardPart("role", told(verdicts, values={"D": 1.0}))])(episode("a", "b", "c"))
    assert result.valid and result.total == 0.0 and result.parts["role"] != result.parts["role"]
    assert result.labels == {"role": (0, -1, 3)}
    why = "reward 'role' of task 't/1' is missing: 1 of 3 steps have no answer (step 1: status 500)"
    assert result.missing == {"role": why} and result.counts["judge/failed"] == 1
    scored = told([Verdict("D", score=1.0), Verdict("D")], score_weight=1.0)(episode("a", "b"))
    assert scored.missing and scored.why == "1 of 2 steps have no answer (step 1: the answer has no score)"


def test_a_judge_that_answers_on_something_else_is_broken() -> None:
    class Short(Told):
        def __call__(self, views: Sequence[JudgeView], labels: Mapping[str, str]) -> list[Verdict]:
            return []

    part = told([Verdict("D")])
    part._judge = Short([])
    result = RewardSet([RewardPart("role", part)])(episode("a"))
    assert not result.valid and "0 verdicts on 1 steps" in result.problem


def test_a_served_model_beside_a_fast_part() -> None:  # invariant 5
    gate = threading.Event()

    def script(number: int, body: Mapping[str, Any]) -> Say:
        gate.wait(60.0)
        prompt = body["messages"][-1]["content"]
        judged = prompt.split("The step to judge:\n> ")[1].split("\n")[0]
        return Say({"go 0": "D", "go 1": "what?", "go 2": '{"label": "R"}'}[judged], after_s=0.1)

    with judge_server(script) as server:
        node = {
            "role": {
                "_target_": "megatron_ext.rewards.judge_reward.JudgeReward",
                "weight": 2.0,
                "labels": LABELS,
                "default": "N",
                "values": {"D": 1.0, "R": -0.5},
                "judge": {
                    "_target_": "megatron_ext.rewards.model_judge.ModelJudge",
                    "base_url": server.base_url,
                    "model": "m",
                    "deadline_s": 60.0,
                },
            },
            "success": {"_target_": "megatron_ext.rewards.outcome.Success"},
        }
        rewards = RewardSet.from_config(node)
        assert isinstance(rewards.parts[0].reward, SlowReward)
        grading = rewards.start(episode("a", "b", "c"))
        assert not grading.done
        gate.set()
        grading.wait()
        assert grading.done
        result = grading.result()
        rewards.close()
    assert result.valid and result.parts == {"role": 1.0, "success": 0.0} and result.labels == {"role": (0, 2, 3)}
    assert result.counts["judge/calls"] == 3 and result.counts["judge/unknown"] == 1
    assert result.counts["judge/seconds"] >= 0.1


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"labels": {}}, "labels: none"),
        ({"labels": {"D": 0, "N": 0}}, "labels.D: 0 is another label's number too"),
        ({"labels": {"D": -1, "N": 0}}, "labels.D: needs a whole number"),
        ({"labels": {"D": 1.5, "N": 0}}, "labels.D: needs a whole number"),
        ({"labels": {"n": 1, "N": 0}}, "differ in the case"),
        ({"labels": {"no progress": 1, "N": 0}}, "label 'no progress'"),
        ({"label": "a/b"}, "label 'a/b'"),
        ({"default": "X"}, "default names 'X'"),
        ({"malformed": "X"}, "malformed names 'X'"),
        ({"values": {"X": 1.0}}, "values names 'X'"),
        ({"values": {"D": "much"}}, "values: D needs a finite number"),
        ({"meanings": {"X": ""}}, "meanings names 'X'"),
        ({"info": ["score"]}, "info names 'score', which tells the outcome"),
        ({"before": -1}, "before=-1"),
        ({"judge": {"_target_": "megatron_ext.rewards.model_judge.ModelJudge"}}, "needs base_url, model"),
        ({"judge": {}}, "judge: the node needs _target_"),
    ],
)
def test_bad_settings_are_named(changes: dict[str, Any], says: str) -> None:
    settings: dict[str, Any] = {"judge": NOVELTY, "labels": LABELS, "default": "N"}
    with pytest.raises(ValueError, match=says):
        JudgeReward(**(settings | changes))


def test_a_misspelt_key_of_the_judge_is_found_before_anything_is_built() -> None:
    judge = {"_target_": "megatron_ext.rewards.model_judge.ModelJudge", "base_url": "http://h:1/v1", "modle": "m"}
    entry = {"_target_": "megatron_ext.rewards.judge_reward.JudgeReward", "judge": judge, "labels": LABELS}
    (line,) = targets.problems("rewards", {"roles": entry})
    assert line.startswith("rewards.roles.judge.modle: ") and "nearest: model" in line


def test_the_part_that_the_readme_shows(root: Path) -> None:
    (block,) = [b for b in (root / "README.md").read_text().split("```yaml\n") if b.startswith("rewards:\n")]
    rewards = RewardSet.from_config(OmegaConf.create(block.split("```")[0]).rewards)
    assert [part.name for part in rewards.parts] == ["roles", "success"]


def test_two_parts_with_one_label_are_refused() -> None:
    node = {
        "_target_": "megatron_ext.rewards.judge_reward.JudgeReward",
        "judge": NOVELTY,
        "labels": LABELS,
        "default": "N",
    }
    with pytest.raises(ValueError, match=r"rewards.a and rewards.b both label turns as 'role'"):
        RewardSet.from_config({"a": node, "b": node})
    assert len(RewardSet.from_config({"a": node, "b": {**node, "label": "other"}}).parts) == 2
