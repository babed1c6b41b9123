from __future__ import annotations

import dataclasses
import json
import os
import subprocess
from pathlib import Path

import pytest

from megatron_ext.config.compose import ConfigError
from megatron_ext.config.provenance import collect_provenance
from megatron_ext.config.saved import load_resolved, save_resolved
from megatron_ext.config.schema import Config, ModelConfig, RunConfig, TasksConfig
from tests.helpers.plug_points import Constants, Inner

HERE = "tests.helpers.plug_points"


def config() -> Config:
    cfg = Config(
        recipe="alpha",
        run=RunConfig(name="a b", max_minutes=0.5),
        model=ModelConfig(hf_config="x/config.json"),
        tasks=TasksConfig(environment="game"),
        environments={"game": {"_target_": f"{HERE}.Game", "level": 1, "rate": None}},
        harness={"_target_": f"{HERE}.Anything"},
        tracking={},
        rewards={"r": {"_target_": f"{HERE}.Anything", "weight": 2.0, "phrases": ["a", "b: c"]}},
        method=Constants(alpha=0.125, limit=None, inner=Inner(depth=9)),
    )
    cfg.rollout.engine = {"_target_": f"{HERE}.Anything"}
    return cfg


def test_round_trip(tmp_path: Path) -> None:
    save_resolved(config(), tmp_path / "config.yaml")
    assert load_resolved(tmp_path / "config.yaml") == config()
    plain = dataclasses.replace(config(), method=None)
    save_resolved(plain, tmp_path / "config.yaml")
    assert load_resolved(tmp_path / "config.yaml") == plain


def test_a_file_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    with pytest.raises(ConfigError, match=r"config.yaml: no such file"):
        load_resolved(file)
    file.write_text("run: [")
    with pytest.raises(ConfigError, match=r"config.yaml"):
        load_resolved(file)
    file.write_text("- 1\n")
    with pytest.raises(ConfigError, match=r"needs a map"):
        load_resolved(file)
    save_resolved(config(), file)
    file.write_text(file.read_text().replace("max_minutes", "max_minuets"))
    with pytest.raises(ConfigError, match=r"config.yaml: run.max_minuets: no such key; nearest: run.max_minutes"):
        load_resolved(file)


@pytest.fixture
def no_git_of_the_caller(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hook of git sets where its repository is, users configure signing, and the folder may lie inside a clone."""
    for name in [name for name in os.environ if name.startswith("GIT_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", os.devnull)
    monkeypatch.setenv("GIT_CONFIG_NOSYSTEM", "1")
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))


@pytest.mark.usefixtures("no_git_of_the_caller")
def test_provenance(tmp_path: Path) -> None:
    found = collect_provenance(tmp_path)
    json.dumps(found)
    assert found["git"] is None
    assert found["versions"]["torch"].startswith("2.13.0") and found["versions"]["megatron-core"] == "0.19.2"
    assert found["command"] and found["python"] and found["platform"]


@pytest.mark.usefixtures("no_git_of_the_caller")
def test_provenance_of_a_repository(tmp_path: Path) -> None:
    def git(*args: str) -> None:
        identity = ["-c", "user.name=t", "-c", "user.email=t@example.org"]
        subprocess.run(["git", "-C", str(tmp_path), *identity, *args], check=True, capture_output=True)

    git("init")
    (tmp_path / "file").write_text("1")
    git("add", "file")
    git("commit", "-m", "one")
    clean = collect_provenance(tmp_path)["git"]
    assert len(clean["commit"]) == 40 and clean["dirty"] is False
    (tmp_path / "file").write_text("2")
    assert collect_provenance(tmp_path)["git"] == {"commit": clean["commit"], "dirty": True}
