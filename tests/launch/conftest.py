"""A finished run, small enough to make in seconds, that the commands on runs are tried on."""

from __future__ import annotations

from pathlib import Path

import pytest

from launch.prepare import prepare
from megatron_ext.training.run import RunResult, train
from tests.helpers.walk_recipe import write_recipes


@pytest.fixture(scope="session")
def walk_recipes(tmp_path_factory: pytest.TempPathFactory, root: Path) -> Path:
    """A recipes folder that holds the recipe ``walk``: an environment of two steps, learned in seconds."""
    return write_recipes(tmp_path_factory.mktemp("recipes"), root)


@pytest.fixture(scope="session")
def walk_run(walk_recipes: Path, tmp_path_factory: pytest.TempPathFactory) -> RunResult:
    """Two steps of ``walk`` after its warm start, with checkpoints of both and all that they trained on."""
    root = tmp_path_factory.mktemp("runs")
    argv = ["recipe=walk", f"run.root={root}", "samples.every=1", "samples.groups=0"]
    return train(prepare(argv, walk_recipes), walk_recipes)
