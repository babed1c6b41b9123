"""A run that reads what its environment, once it is there, turns out not to give: one line, and nothing generated."""

from __future__ import annotations

from pathlib import Path

import pytest

from launch.prepare import prepare
from megatron_ext.config.compose import ConfigError
from megatron_ext.training.run import train

pytestmark = [pytest.mark.slow, pytest.mark.integration]

ERRANDS = [
    "environments.walk={_target_: tests.helpers.errands.Errands}",
    "harness={_target_: megatron_ext.harness.tools.ToolHarness}",
]


def test_a_label_that_the_environment_does_not_give(walk_recipes: Path, tmp_path: Path) -> None:
    argv = ["recipe=walk", f"run.root={tmp_path}", *ERRANDS]
    argv.append("credit.edits.roles={_target_: tests.helpers.plug_points.ReadsRoles}")
    config = prepare(argv, walk_recipes)  # it may give the label, as far as its class says
    with pytest.raises(ConfigError) as error:
        train(config)
    (line,) = error.value.problems
    assert line.startswith("credit.edits.roles: reads the turn label 'role'") and "written are: operation" in line
    folder = tmp_path / "walk"
    assert not (folder / "logs" / "engine.log").exists() and not (folder / "tokenizer").exists()
