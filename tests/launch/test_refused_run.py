"""What its environment, once it is there, says against a run: one line, before the run has made its folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from launch import train as command
from launch.prepare import prepare
from megatron_ext.config.compose import ConfigError, compose
from megatron_ext.training.run import train

pytestmark = pytest.mark.integration

ERRANDS = [
    "environments.walk={_target_: tests.helpers.errands.Errands}",
    "harness={_target_: megatron_ext.harness.tools.ToolHarness}",
]
ROLES = "credit.edits.roles={_target_: tests.helpers.plug_points.ReadsRoles}"
ANSWERS = "credit.edits.answers={_target_: tests.helpers.plug_points.ReadsAnswers}"
STRUCTURED = "model.router={_target_: megatron_ext.moe.structured.StructuredRouter, label: operation, operations: 2}"


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        ([ROLES], "credit.edits.roles: reads the turn label 'role', .*written are: operation"),
        ([STRUCTURED], "model.router.operations=2: the environment gives 3 values of the turn label 'operation'"),
        ([ANSWERS, "harness.answer_tool=finsh"], "harness.answer_tool 'finsh': no such tool.*finish"),
        (
            [STRUCTURED, "environments.walk.words=two", "model.router.operations=3"],
            "^environments.walk.words: needs int, got 'two'$",
        ),
        (
            [STRUCTURED, "environments.walk._target_=tests.helpers.errands.Unbuildable"],
            "^environments.walk: environment 'walk', labels: RuntimeError: no errands today$",
        ),
    ],
)
def test_nothing_is_left_behind(
    argv: list[str], says: str, walk_recipes: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=says) as error:
        prepare(["recipe=walk", *ERRANDS, *argv], walk_recipes)
    assert len(error.value.problems) == 1 and not list(tmp_path.iterdir())


def test_print_config_tells_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["recipe=moe_expert_structuring", "model.router.operations=3", "--print-config"]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.startswith("error: model.router.operations=3: ")
    assert captured.err.count("\n") == 1 and "set model.router.operations=5 or more" in captured.err


@pytest.mark.slow
def test_a_run_that_nobody_prepared_is_refused_all_the_same(walk_recipes: Path, tmp_path: Path) -> None:
    config = compose(["recipe=walk", f"run.root={tmp_path}", *ERRANDS, ROLES], walk_recipes)
    with pytest.raises(ConfigError, match="credit.edits.roles: reads the turn label 'role'") as error:
        train(config)
    assert len(error.value.problems) == 1
    folder = tmp_path / "walk"
    assert not (folder / "logs" / "engine.log").exists() and not (folder / "tokenizer").exists()
