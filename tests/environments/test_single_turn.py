"""Reasoning-gym families and task files."""

from __future__ import annotations

import json
import math
from pathlib import Path
from random import Random
from typing import Any

import pytest

from megatron_ext.environments.reasoning_gym import ReasoningGym
from megatron_ext.environments.splits import NotEnoughTasks
from megatron_ext.environments.task_file import TaskFile, TaskFileError


@pytest.fixture(autouse=True)
def _helpers_importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))


def write(path: Path, *lines: dict[str, Any] | str) -> str:
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return str(path)


# -- reasoning gym -------------------------------------------------------------------------------------------------
def test_families_take_turns_and_are_judged_by_their_own_verifier() -> None:
    families = {"chain_sum": {"min_terms": 2, "max_terms": 2}, "countdown": {}, "gcd": None}
    environment = ReasoningGym(families)
    seen = set()
    for seed in range(9):
        assert environment.reset(seed).text
        gold = environment.expert_action(Random(0), 0.0)
        observation = environment.step(gold)
        assert observation.success and observation.reward == observation.score == 1.0
        assert observation.info["family"] == list(families)[seed % 3]
        seen.add(observation.info["family"])
        environment.reset(seed)
        slip = environment.expert_action(Random(0), 1.0)
        assert slip != gold and not environment.step(slip).success
    assert seen == set(families)


def test_empty_and_partly_right_answers() -> None:
    environment = ReasoningGym({"chain_sum": {}}, success_at=0.005)
    environment.reset(1)
    empty = environment.step("  ")
    assert not empty.valid and empty.score == 0.0 and empty.done
    environment.reset(1)
    wrong = environment.step("I do not know")
    assert wrong.valid and wrong.success == (wrong.score >= 0.005)


@pytest.mark.parametrize(
    ("families", "says"),
    [
        ({}, "families is empty"),
        ({"chain_sums": {}}, "unknown families chain_sums"),
        ({"chain_sum": {"terms": 3}}, "family 'chain_sum'.*terms"),
        ({"chain_sum": {"min_terms": 0}}, "family 'chain_sum'"),
    ],
)
def test_bad_families_are_one_line(families: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        ReasoningGym(families)


# -- task file -----------------------------------------------------------------------------------------------------
ROW = {"id": "a", "prompt": "Say one.", "answer": "one"}


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        (['{"id": "a", "prompt": '], "line 1: not JSON"),
        ([ROW, "", "[1]"], "line 3: a JSON object is needed, this is list"),
        ([ROW, {"id": "b"}], "line 2: 'prompt' is missing or no text"),
        ([ROW, {"id": 3, "prompt": "x"}], "line 2: 'id' is missing or no text"),
        ([ROW, {**ROW, "prompt": "Say two."}], "line 2: id 'a' was used on line 1"),
        ([{**ROW, "split": "training"}], "line 1: split 'training' is none of"),
        ([{**ROW, "split": "train"}, {**ROW, "id": "b", "split": "test"}], "line 2: the prompt is that of line 1"),
        ([], "holds no tasks"),
    ],
)
def test_complaints_name_file_and_line(tmp_path: Path, lines: list[Any], says: str) -> None:
    path = write(tmp_path / "broken.jsonl", *lines)
    with pytest.raises(TaskFileError, match=says) as complaint:
        TaskFile(path, "grading:exact")
    assert "broken.jsonl" in str(complaint.value)


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(TaskFileError, match="no such task file"):
        TaskFile(str(tmp_path / "none.jsonl"), "grading:exact")


@pytest.mark.parametrize(
    ("reward", "says"),
    [
        ("grading.exact", "name a function as package.module:function"),
        ("grading:missing", "has no function 'missing'"),
        ("grading:not_callable", "has no function 'not_callable'"),
        ("gradign:exact", "cannot import 'gradign'"),
        ("elsewhere/grading.py:exact", "no such file"),
        ("math:sqrt", r"must take the arguments \(answer, row\)"),
    ],
)
def test_bad_reward_paths(tmp_path: Path, reward: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        TaskFile(write(tmp_path / "t.jsonl", ROW), reward)


def test_a_reward_function_of_a_file(tmp_path: Path) -> None:
    environment = TaskFile(write(tmp_path / "t.jsonl", ROW), f"{Path(__file__).parent / 'grading.py'}:exact")
    environment.reset(0, data={"id": "a"})
    assert environment.step("wrong").reward == 0.0


def test_rewards_of_both_shapes_and_none_that_is_a_number(tmp_path: Path) -> None:
    path = write(tmp_path / "t.jsonl", {**ROW, "split": "train"})
    exact = TaskFile(path, "grading:exact")
    exact.reset(0)
    right = exact.step(" one ")
    assert right.success and right.reward == right.score == 1.0 and right.info == {"id": "a"}
    detailed = TaskFile(path, "grading:detailed")
    detailed.reset(0)
    assert detailed.step("one").success
    detailed.reset(0)
    wrong = detailed.step("two")
    assert not wrong.success and wrong.reward == 0.5
    undefined = TaskFile(path, "grading:undefined")
    undefined.reset(0)
    assert math.isnan(undefined.step("one").reward)


def test_tasks_name_rows_by_id_so_that_the_file_can_grow(tmp_path: Path) -> None:
    rows = [{"id": f"r{i}", "prompt": f"Say {i}.", "split": "train" if i % 2 else "test"} for i in range(6)]
    path = write(tmp_path / "t.jsonl", *rows)
    tasks = TaskFile(path, "grading:exact").tasks("train", 3)
    assert [task.data["id"] for task in tasks] == ["r1", "r3", "r5"]
    write(tmp_path / "t.jsonl", {"id": "new", "prompt": "Say new.", "split": "train"}, *rows)
    grown = TaskFile(path, "grading:exact")
    assert [grown.reset(t.seed, split=t.split, data=t.data).text for t in tasks] == ["Say 1.", "Say 3.", "Say 5."]
    write(tmp_path / "t.jsonl", *rows[:2])
    with pytest.raises(TaskFileError, match="no row with id 'r5'"):
        TaskFile(path, "grading:exact").reset(0, data=tasks[2].data)
    with pytest.raises(NotEnoughTasks, match="split 'train' has 1 tasks, 2 were asked for"):
        TaskFile(path, "grading:exact").tasks("train", 2)
    with pytest.raises(NotEnoughTasks, match="split 'dev' is empty"):
        TaskFile(path, "grading:exact").reset(0, split="dev")


def test_demonstration_needs_answers(tmp_path: Path) -> None:
    environment = TaskFile(write(tmp_path / "t.jsonl", {"id": "a", "prompt": "p", "split": "train"}), "grading:exact")
    environment.reset(0)
    with pytest.raises(TaskFileError, match="line 1: no text 'answer'"):
        environment.expert_action(Random(0), 0.0)
