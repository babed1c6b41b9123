"""Invariants of ``megatron_ext/config/needs.py``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from megatron_ext.config import needs
from megatron_ext.config.compose import ConfigError
from megatron_ext.config.plug_points import problems
from megatron_ext.harness.protocol import HarnessError
from tests.helpers.configs import HERE, config
from tests.helpers.errands import ERRANDS, RELAY, Errands, Relay

ROLES = {"a": {"_target_": f"{HERE}.ReadsRoles"}}
ANSWERS = {"a": {"_target_": f"{HERE}.ReadsAnswers"}}
STRUCTURED = {"_target_": "megatron_ext.moe.structured.StructuredRouter", "label": "operation"}
SUCCESS = {"_target_": "megatron_ext.rewards.outcome.Success"}
JUDGE = {
    "_target_": "megatron_ext.rewards.judge_reward.JudgeReward",
    "judge": {
        "_target_": "megatron_ext.rewards.rule_judge.NoveltyJudge",
        "new": "E",
        "repeated": "R",
        "unchanged": "R",
    },
    "labels": {"E": 0, "R": 1},
    "default": "E",
    "before": None,
    "state": True,
}
FUNCTION = {
    "_target_": "megatron_ext.rewards.python_reward.PythonReward",
    "function": "tests.helpers.plug_points:graded",
}
TOOLS = {"_target_": "megatron_ext.harness.tools.ToolHarness", "answer_tool": "finish"}


def found(environment: Mapping[str, Any] | None = None, **overrides: Any) -> list[str]:
    game = {"_target_": f"{HERE}.Game", "level": 1} if environment is None else dict(environment)
    return list(problems(config(environments={"game": game}, **overrides)))


# -- turn labels ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("rewards", "there"),
    [
        ({"success": SUCCESS}, "none is written"),
        ({"success": SUCCESS, "judge": JUDGE | {"label": "kind"}}, "written are: kind"),
        ({"mine": FUNCTION}, "none is written"),
        ({"mine": FUNCTION | {"labels": ["kind"]}, "judge": JUDGE | {"label": "other"}}, "written are: kind, other"),
    ],
)
def test_a_label_that_nothing_writes_is_refused(rewards: dict[str, Any], there: str) -> None:  # invariant 1
    (line,) = found(credit__edits=ROLES, rewards=rewards)
    assert line.startswith("credit.edits.a: reads the turn label 'role'") and there in line
    assert "rewards.NAME.label=role" in line and "tasks.environment" in line and "\n" not in line


@pytest.mark.parametrize("rewards", [{"judge": JUDGE}, {"mine": FUNCTION | {"labels": ["role"]}}])
def test_a_reward_part_writes_it(rewards: dict[str, Any]) -> None:
    assert found(credit__edits=ROLES, rewards=rewards) == []


def test_a_router_reads_labels_where_its_loss_acts() -> None:  # invariant 1
    (line,) = found(model__router=STRUCTURED)
    assert line.startswith("model.router: reads the turn label 'operation'")
    (line,) = found(model__router=STRUCTURED | {"label": "nope"}, rewards={"judge": JUDGE})
    assert line.startswith("model.router: reads the turn label 'nope'") and "written are: role" in line
    assert found(model__router=STRUCTURED | {"mutual_information": 0.0}) == []
    assert found(model__router={"_target_": "megatron_ext.moe.policies.FrozenRouter"}) == []


def test_an_environment_that_may_give_labels_is_not_refused_before_it_is_built() -> None:  # invariant 2
    assert needs.labels_of(ERRANDS) is None and needs.labels_of(RELAY) == frozenset()
    assert needs.labels_of(None) is None and needs.labels_of({"_target_": "no.such.Thing"}) is None
    assert needs.labels_of({"_target_": "tests.helpers.configs.config"}) is None, "a function may make anything"
    for edits, router in ((ROLES, {}), ({}, STRUCTURED)):
        assert found(ERRANDS, credit__edits=edits, model__router=router) == []
        assert len(found(RELAY, credit__edits=edits, model__router=router)) == 1


def test_what_cannot_be_built_is_one_line_and_not_two() -> None:  # invariant 2
    broken = {"judge": {"_target_": f"{HERE}.Breaks"}}
    assert len(found(credit__edits=ROLES, rewards=broken)) == 1
    assert len(found(credit__edits=ANSWERS, harness={"_target_": f"{HERE}.RefusingHarness"})) == 1


def test_an_environment_without_the_label_is_refused_once_it_is_built() -> None:  # invariant 2
    environment = Errands()
    given, tools, tasks = environment.label_words(), environment.tools(), environment.tasks("train", 2)
    good = config(environments={"game": ERRANDS}, model__router=STRUCTURED)
    needs.check_started(good, given, tools, tasks)
    bad = config(environments={"game": ERRANDS}, model__router=STRUCTURED, credit__edits=ROLES)
    with pytest.raises(ConfigError, match=r"^credit.edits.a: reads the turn label 'role'.*written are: operation") as e:
        needs.check_started(bad, given, tools, tasks)
    assert "\n" not in str(e.value)
    needs.check_started(config(credit__edits=ROLES, rewards={"judge": JUDGE}), {}, (), ())
    misspelt = config(environments={"game": ERRANDS}, model__router=STRUCTURED | {"label": "nope"})
    with pytest.raises(ConfigError, match=r"^model.router: reads the turn label 'nope'.*written are: operation"):
        needs.check_started(misspelt, given, tools, tasks)


def test_more_operations_than_there_is_room_for_are_refused_once_it_is_built() -> None:  # invariant 2
    words, tools = Errands().label_words(), Errands().tools()
    for operations in (3, 8):
        needs.check_started(config(model__router=STRUCTURED | {"operations": operations}), words, tools, ())
    narrow = config(model__router=STRUCTURED | {"operations": 2})
    with pytest.raises(ConfigError) as e:
        needs.check_started(narrow, words, tools, ())
    assert str(e.value) == (
        "model.router.operations=2: the environment gives 3 values of the turn label 'operation' "
        "(read, create, update); set model.router.operations=3 or more"
    )
    needs.check_started(narrow, {"other": ["a", "b", "c"], "operation": ["a"]}, tools, ())
    needs.check_started(config(model__router={"_target_": "megatron_ext.moe.policies.FrozenRouter"}), words, tools, ())


def test_environments_are_asked_only_where_something_reads_what_they_alone_know() -> None:  # invariant 2
    for environment, overrides, asked in (
        (ERRANDS, {}, (False, False)),
        (ERRANDS, {"model__router": {"_target_": "megatron_ext.moe.policies.FrozenRouter"}}, (False, False)),
        (ERRANDS, {"model__router": STRUCTURED}, (True, False)),
        (ERRANDS, {"model__router": STRUCTURED | {"mutual_information": 0.0}}, (True, False)),  # it may have no room
        (RELAY, {"model__router": STRUCTURED}, (False, False)),
        (ERRANDS, {"credit__edits": ROLES}, (True, False)),
        (RELAY, {"credit__edits": ANSWERS}, (False, True)),
    ):
        assert needs.asks_environment(config(environments={"game": environment}, **overrides)) == asked, overrides


# -- prepared ids --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "harness", [{"_target_": "megatron_ext.harness.text.TextHarness"}, TOOLS | {"answer_tool": None}]
)
def test_ids_that_the_harness_does_not_prepare_are_refused(harness: dict[str, Any]) -> None:  # invariant 1
    (line,) = found(credit__edits=ANSWERS, harness=harness)
    assert line.startswith("credit.edits.a: reads the prepared ids answer, answer_prefix")
    assert "harness.answer_tool" in line and "\n" not in line
    assert found(credit__edits=ANSWERS, harness=TOOLS) == []


def test_tasks_without_an_answer_are_refused_once_they_are_listed() -> None:  # invariant 2
    cfg = config(credit__edits=ANSWERS, harness=TOOLS)
    errands, relay = Errands(), Relay()
    with_answer, without = errands.tasks("train", 2), relay.tasks("train", 3)
    needs.check_started(cfg, {}, errands.tools(), [*without, *with_answer])
    with pytest.raises(ConfigError, match=r"^credit.edits.a: .* none of the 3 training tasks of environment 'game'"):
        needs.check_started(cfg, {}, errands.tools(), without)
    with pytest.raises(HarnessError, match="harness.answer_tool 'finish': no such tool"):
        needs.check_started(cfg, {}, (), with_answer)
    needs.check_started(config(harness=TOOLS), {}, (), without)  # nothing reads them
