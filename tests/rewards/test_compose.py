"""Rewards: the built-in parts, the user's own function, and their weighted, capped sum."""

from __future__ import annotations

import math
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf

from megatron_ext.config.instantiate import InstantiateError
from megatron_ext.environments.protocol import Observation
from megatron_ext.rewards import compose
from megatron_ext.rewards.compose import RewardPart, RewardSet
from megatron_ext.rewards.outcome import MalformedPenalty, Score, StepRewardSum, Success, TurnPenalty
from megatron_ext.rewards.protocol import Episode, EpisodeStep, Reward, RewardValue
from megatron_ext.rewards.python_reward import PythonReward
from megatron_ext.trajectory.record import Status
from megatron_ext.trajectory.task import Task

OUTCOME = "megatron_ext.rewards.outcome"


def episode(*observations: Observation, actions: Sequence[str | None] | None = None) -> Episode:
    said = actions or ["go"] * len(observations)
    steps = [EpisodeStep(a or "?", a, o) for a, o in zip(said, observations, strict=True)]
    return Episode(Task("t/1", "e", 1, "train"), Observation("start", score=0.25), steps, Status.DONE)


PLAYED = episode(
    Observation("a", reward=1.0),
    Observation("b", reward=2.0, valid=False),
    Observation("c", reward=4.0, done=True, success=True, score=0.75),
    actions=["go", None, "stop"],
)


def test_parts_by_hand() -> None:
    assert Success()(PLAYED) == 1.0 and Success()(episode(Observation("x", done=True))) == 0.0
    assert Score()(PLAYED) == 0.75
    assert Score()(episode()) == 0.25  # an episode without a turn is judged by its first observation
    assert StepRewardSum()(PLAYED) == 7.0
    assert StepRewardSum(discount=0.5)(PLAYED) == 1 + 1 + 1
    assert MalformedPenalty()(PLAYED) == -1.0
    refused = episode(Observation("a", valid=False), Observation("b"))
    assert (MalformedPenalty()(refused), MalformedPenalty(count_refused=True)(refused)) == (0.0, -1.0)
    assert (TurnPenalty()(PLAYED), TurnPenalty(free=2)(PLAYED), TurnPenalty(free=9)(PLAYED)) == (-3.0, -1.0, 0.0)


def test_sum_by_hand_is_independent_of_the_order_written() -> None:
    nodes = {
        "success": {"_target_": f"{OUTCOME}.Success", "weight": 2.0},
        "turns": {"_target_": f"{OUTCOME}.TurnPenalty", "weight": 0.1, "cap": 0.2},
        "steps": {"_target_": f"{OUTCOME}.StepRewardSum", "cap": 5, "order": -1},
        "gone": None,
    }
    result = RewardSet.from_config(nodes)(PLAYED)
    assert result.parts == {"success": 2.0, "turns": -0.2, "steps": 5.0}
    assert list(result.parts) == ["steps", "success", "turns"]
    assert result.valid and result.problem == "" and result.total == pytest.approx(6.8, abs=1e-15)
    again = RewardSet.from_config(dict(reversed(nodes.items())))(PLAYED)
    assert again == result and list(again.parts) == list(result.parts)


def test_omegaconf_nodes_are_understood() -> None:
    nodes = OmegaConf.create({"w": 3, "r": {"s": {"_target_": f"{OUTCOME}.Success", "weight": "${w}"}, "gone": None}})
    assert RewardSet.from_config(nodes.r)(PLAYED).total == 3.0


class Fixed:
    def __init__(self, value: object) -> None:
        self.value = value

    def __call__(self, episode: Episode) -> float:
        return self.value  # type: ignore[return-value]


class Labels(Fixed):
    written_labels = frozenset({"role"})


class Raises:
    def __call__(self, episode: Episode) -> float:
        raise KeyError("gold")


@given(st.lists(st.tuples(st.floats(-1e6, 1e6), st.floats(-10, 10), st.floats(1e-3, 1e7)), min_size=1, max_size=5))
def test_total_is_the_sum_of_clamped_parts(parts: list[tuple[float, float, float]]) -> None:
    result = RewardSet([RewardPart(str(i), Fixed(v), w, c) for i, (v, w, c) in enumerate(parts)])(PLAYED)
    assert result.total == math.fsum(result.parts.values())
    for i, (value, weight, cap) in enumerate(parts):
        assert result.parts[str(i)] == max(-cap, min(cap, value * weight))


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        (Fixed(math.nan), "is nan, not finite"),
        (Fixed(math.inf), "is inf, not finite"),
        (Fixed(10**400), "too large"),
        (Fixed(None), "returned NoneType, not a number"),
        (Fixed("1"), "returned str, not a number"),
        (Raises(), "raised KeyError: 'gold'"),
    ],
)
@pytest.mark.parametrize(("weight", "cap"), [(1.0, math.inf), (0.0, math.inf), (1.0, 0.5)])
def test_bad_part_makes_all_invalid_and_is_named(bad: Reward, says: str, weight: float, cap: float) -> None:
    """Neither a weight of 0 nor a cap hides a broken part."""
    result = RewardSet([RewardPart("fine", Success()), RewardPart("broken", bad, weight, cap)])(PLAYED)
    assert not result.valid and math.isnan(result.total) and math.isnan(result.parts["broken"])
    assert result.parts["fine"] == 1.0
    assert "'broken' of task 't/1'" in result.problem and says in result.problem
    if isinstance(bad, Raises):
        assert f"{Path(__file__).name}:" in result.problem  # where it was raised


MISSING = RewardValue(9.0, {"role": [1, -1, 0]}, missing=True, why="nobody answered", counts={"judge/failed": 1.0})


def test_a_missing_part_is_neither_zero_nor_an_error() -> None:  # invariant 4
    result = RewardSet([RewardPart("judge", Labels(MISSING), 2.0), RewardPart("fine", Success())])(PLAYED)
    assert result.valid and result.total == 1.0 and math.isnan(result.parts["judge"]) and result.parts["fine"] == 1.0
    assert result.missing == {"judge": "reward 'judge' of task 't/1' is missing: nobody answered"}
    assert result.labels == {"role": (1, -1, 0)} and result.counts == {"judge/failed": 1.0}
    broken = RewardSet([RewardPart("judge", Labels(MISSING)), RewardPart("broken", Raises())])(PLAYED)
    assert not broken.valid and math.isnan(broken.total) and "'broken'" in broken.problem and broken.labels == {}


@pytest.mark.parametrize(
    ("labels", "says"),
    [
        ([1, 2], "gives 2 labels 'role' for 3 steps"),
        ([1, 2, -2], "the value -2"),
        ([1, 2, 2**15], "the value 32768"),
        ([1, 2, True], "the value True"),
        ([1, 2, 0.5], "the value 0.5"),
    ],
)
def test_labels_that_fit_no_record_are_named(labels: list[int], says: str) -> None:
    result = RewardSet([RewardPart("judge", Labels(RewardValue(1.0, {"role": labels})))])(PLAYED)
    assert not result.valid and says in result.problem


def test_a_label_is_written_by_one_part_that_declares_it() -> None:  # invariant 6
    value = RewardValue(1.0, {"role": [0, 0, 0]})
    with pytest.raises(ValueError, match=r"rewards.a and rewards.b both label turns as 'role'"):
        RewardSet([RewardPart("a", Labels(value)), RewardPart("b", Labels(value))])
    result = RewardSet([RewardPart("a", Labels(value)), RewardPart("b", Fixed(value))])(PLAYED)
    assert not result.valid and "reward 'b'" in result.problem and "not among its written_labels" in result.problem
    other = Labels(RewardValue(1.0, {"kind": [0, 0, 0]}))
    assert "labels turns as 'kind'" in RewardSet([RewardPart("a", other)])(PLAYED).problem


class Slow:
    deadline_s = 0.05

    def __init__(self) -> None:
        self.answer: Future[RewardValue] = Future()
        self.closed = False

    def __call__(self, episode: Episode) -> RewardValue:
        return self.start(episode).result(self.deadline_s)

    def start(self, episode: Episode) -> Future[RewardValue]:
        return self.answer

    def close(self) -> None:
        self.closed = True


def test_slow_parts_are_waited_for_until_their_deadline(monkeypatch: pytest.MonkeyPatch) -> None:  # invariant 5
    slow, woken = Slow(), list[int]()
    rewards = RewardSet([RewardPart("slow", slow, 0.5), RewardPart("fine", Success())])
    grading = rewards.start(PLAYED)
    grading.when_done(lambda: woken.append(1))
    assert not grading.done and woken == [1], "the fast part is done already"
    slow.answer.set_result(RewardValue(3.0))
    assert grading.done and woken == [1, 1] and grading.result().total == 2.5
    monkeypatch.setattr(compose, "GRACE_S", 0.0)
    late = RewardSet([RewardPart("slow", Slow()), RewardPart("fine", Success())])(PLAYED)
    assert late.total == 1.0 and "no answer within 0.05 s" in late.missing["slow"]
    cancelled = Slow()
    cancelled.answer.cancel()
    assert "cancelled" in RewardSet([RewardPart("slow", cancelled)])(PLAYED).missing["slow"]
    rewards.close()
    assert slow.closed


def test_interrupt_is_not_a_bad_reward() -> None:
    class Interrupted:
        def __call__(self, episode: Episode) -> float:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        RewardSet([RewardPart("x", Interrupted())])(PLAYED)


def test_bad_configuration_is_named() -> None:
    target = f"{OUTCOME}.Success"
    for nodes, says in [
        ({}, "no part"),
        ({"a": None}, "no part"),
        ({"a": {"_target_": target, "weight": "heavy"}}, r"rewards.a.weight: expected a number, got 'heavy'"),
        ({"a": {"_target_": target, "weight": math.nan}}, r"rewards.a.weight must be finite"),
        ({"a": {"_target_": target, "cap": 0}}, r"rewards.a.cap must be > 0"),
        ({"a": {"_target_": target, "wieght": 1}}, r"rewards.a: .*Success takes no argument 'wieght'"),
    ]:
        with pytest.raises(ValueError, match=says):
            RewardSet.from_config(nodes)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="two parts are named 'a'"):
        RewardSet([RewardPart("a", Success()), RewardPart("a", Score())])
    with pytest.raises(ValueError, match="discount"):
        StepRewardSum(discount=2)
    with pytest.raises(ValueError, match="free"):
        TurnPenalty(free=-1)


def test_users_function(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "graders_xyz.py").write_text(
        "from dataclasses import dataclass\n"
        "def length(episode):\n    return len(episode.steps) / 2\n"
        "def two(episode, gold):\n    return 0.0\n"
        "def bad(episode):\n    return 1 / 0\n"
    )
    file = tmp_path / "graders_xyz.py"
    assert PythonReward(f"{file}:length")(PLAYED) == 1.5
    with pytest.raises(ValueError, match="cannot import 'graders_xyz'.*PYTHONPATH"):
        PythonReward("graders_xyz:length")
    monkeypatch.syspath_prepend(tmp_path)
    assert PythonReward("graders_xyz:length")(PLAYED) == 1.5
    node = {"_target_": "megatron_ext.rewards.python_reward.PythonReward", "function": f"{file}:bad", "weight": 0.5}
    result = RewardSet.from_config({"mine": node})(PLAYED)
    assert not result.valid and "'mine'" in result.problem and "ZeroDivisionError" in result.problem
    assert "graders_xyz.py:7" in result.problem
    for function, says in [
        ("graders_xyz", "package.module:function"),
        (f"{tmp_path}/no.py:f", "no such file"),
        (f"{file}:lenght", "has no function 'lenght'"),
        (f"{file}:two", "must take the arguments \\(episode\\)"),
    ]:
        with pytest.raises(ValueError, match=says):
            PythonReward(function)
    with pytest.raises(InstantiateError, match="needs function"):
        RewardSet.from_config({"mine": {"_target_": node["_target_"]}})


def test_same_file_name_in_two_folders(tmp_path: Path) -> None:
    for folder, value in (("a", 1), ("b", 2)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "grade.py").write_text(f"def f(episode):\n    return {value}\n")
    assert [PythonReward(f"{tmp_path}/{folder}/grade.py:f")(PLAYED) for folder in "ab"] == [1, 2]
