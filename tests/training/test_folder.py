"""Invariants of the run folder (numbers refer to ``megatron_ext/training/folder.py``)."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron_ext.config.compose import ConfigError
from megatron_ext.config.saved import load_resolved
from megatron_ext.config.schema import Config, ModelConfig, RunConfig, TasksConfig
from megatron_ext.training.folder import FolderError, RunFolder, open_folder
from tests.helpers.limits import files_at_most


def config(root: Path, recipe: str = "quickstart", **run: Any) -> Config:
    return Config(
        recipe=recipe,
        run=RunConfig(**({"name": "first", "root": str(root)} | run)),
        model=ModelConfig(hf_config="x/config.json"),
        tasks=TasksConfig(environment="game"),
        environments={"game": {"_target_": "tests.helpers.plug_points.Anything", "level": 1}},
        tracking={},
    )


def opened(cfg: Config) -> RunFolder:
    folder = open_folder(cfg)
    folder.close()
    return folder


def test_a_new_folder_says_what_it_is(tmp_path: Path) -> None:
    cfg = config(tmp_path / "runs")
    folder = open_folder(cfg)
    assert folder.path == tmp_path / "runs" / "first"
    assert load_resolved(folder.path / "config.yaml") == cfg
    provenance = json.loads((folder.path / "provenance.json").read_text())
    assert provenance["versions"]["torch"] and provenance["command"]
    assert folder.logs.is_dir() and folder.store.is_dir() and folder.evaluations.is_dir()
    assert sorted(p.name for p in folder.path.iterdir() if "tmp" in p.name) == []
    folder.write_json("result.json", {"steps": 3})
    assert json.loads((folder.path / "result.json").read_text()) == {"steps": 3}
    folder.close()


HOLD = """
import sys, time
from pathlib import Path
from tests.training.test_folder import config
from megatron_ext.training.folder import open_folder
folder = open_folder(config(Path(sys.argv[1])))
print("held", flush=True)
time.sleep(600)
"""


def test_a_second_process_is_refused_until_the_first_is_gone(tmp_path: Path, root: Path) -> None:  # invariant 1
    holder = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], cwd=root, stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout is not None and holder.stdout.readline() == "held\n"
        for _ in range(2):  # the refused one leaves the holder's name readable
            with pytest.raises(FolderError, match=rf"in use by process {holder.pid}: wait for it, or set another"):
                open_folder(config(tmp_path))
        opened(config(tmp_path, name="second"))
    finally:
        holder.send_signal(signal.SIGKILL)
        holder.wait()
    folder = open_folder(config(tmp_path))  # a kill leaves no lock behind
    assert (folder.path / ".lock").read_text() == str(os.getpid())
    folder.close()


def test_another_recipe_is_refused(tmp_path: Path) -> None:  # invariant 2
    opened(config(tmp_path))
    with pytest.raises(FolderError) as caught:
        open_folder(config(tmp_path, recipe="other"))
    assert load_resolved(tmp_path / "first" / "config.yaml").recipe == "quickstart"
    opened(config(tmp_path))  # the refusal held no lock back, though its traceback is still alive
    assert "belongs to recipe 'quickstart', this run is 'other': set another run.name" in str(caught.value)


def test_differing_keys_are_named_with_both_values(tmp_path: Path) -> None:  # invariant 2
    opened(config(tmp_path))
    other = config(tmp_path, seed=7)
    other.optimizer.lr = 0.5
    other.environments["game"] = {"_target_": "tests.helpers.plug_points.Anything", "depth": 2}
    with pytest.raises(FolderError) as caught:
        open_folder(other)
    message = str(caught.value)
    for part in (
        "environments.game.depth (absent there, 2 now)",
        "environments.game.level (1 there, absent now)",
        "optimizer.lr (0.001 there, 0.5 now)",
        "run.seed (1 there, 7 now)",
        "Use the same values to continue it, or set another run.name",
    ):
        assert part in message
    assert message.count("now)") == 4 and "\n" not in message


def test_another_plug_point_is_one_change(tmp_path: Path) -> None:  # invariant 2
    opened(config(tmp_path))
    other = config(tmp_path)
    other.environments["game"] = {"_target_": "tests.helpers.plug_points.Other", "depth": 2}
    other.model.router = {"_target_": "megatron_ext.moe.structured.StructuredRouter", "pull": "all"}
    with pytest.raises(FolderError) as caught:
        open_folder(other)
    assert (
        "configuration: environments.game._target_ (tests.helpers.plug_points.Anything there, "
        "tests.helpers.plug_points.Other now); model.router._target_ (absent there, "
        "megatron_ext.moe.structured.StructuredRouter now). Use the same values" in str(caught.value)
    )


def test_how_long_and_what_to_show_may_change(tmp_path: Path) -> None:  # invariant 2
    opened(config(tmp_path))
    later = config(tmp_path, steps=500, max_minutes=3.0, threads=7)
    later.checkpoint.every, later.evaluation.every = 1, 2
    later.tracking = {"console": {"_target_": "megatron_ext.tracking.console.ConsoleTracker"}}
    opened(later)
    assert load_resolved(tmp_path / "first" / "config.yaml") == later
    moved = dataclasses.replace(later, run=RunConfig(name="first", root=str(tmp_path / "elsewhere"), steps=500))
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "first").rename(tmp_path / "elsewhere" / "first")
    opened(moved)


def test_an_unwritable_place_is_named(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("a file where the folder should be")
    with pytest.raises(FolderError, match=r"run folder .*runs/first is not writable \(.+\): set run.root or run.name"):
        open_folder(config(tmp_path / "runs"))
    with pytest.raises(FolderError, match=r"/proc/self/first is not writable"):
        open_folder(config(Path("/proc/self")))


def test_a_full_disk_leaves_the_configuration_whole(tmp_path: Path) -> None:
    cfg = config(tmp_path)
    opened(cfg)
    later = config(tmp_path, steps=500)
    with files_at_most(100), pytest.raises(FolderError, match="first is not writable"):
        open_folder(later)
    assert load_resolved(tmp_path / "first" / "config.yaml") == cfg
    opened(later)


def test_a_folder_of_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "first").mkdir()
    (tmp_path / "first" / "thesis.txt").write_text("precious")
    with pytest.raises(FolderError, match="holds files but no config.yaml"):
        open_folder(config(tmp_path))
    assert sorted(p.name for p in (tmp_path / "first").iterdir()) == [".lock", "thesis.txt"]


def test_a_start_that_was_killed_can_be_repeated(tmp_path: Path) -> None:
    """Killed between making the folder and writing config.yaml: nothing in it belongs to anyone."""
    folder = tmp_path / "first"
    folder.mkdir()
    (folder / ".lock").write_text("1")
    (folder / ".config.yaml.tmp").write_text("recipe: qui")
    opened(config(tmp_path))


def test_a_damaged_configuration_is_named(tmp_path: Path) -> None:
    opened(config(tmp_path))
    (tmp_path / "first" / "config.yaml").write_text("run: [")
    with pytest.raises(ConfigError, match=r"first/config.yaml"):
        open_folder(config(tmp_path))
