from __future__ import annotations

import json
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from launch import cli, quickstart, train
from launch.prepare import prepare
from megatron_ext.config.compose import ConfigError
from megatron_ext.training.run import RunResult


def test_all_problems_one_line_each_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    argv = ["recipe=quickstart", "run.stepss=3", "optimizer.lr=abc", "loss.terms.policy.clip_hgh=1", "run.steps=-1"]
    argv += ["rollout.temperature=0", "backend.dtype=float8", "model.hf_config=nowhere", "parallel.tensor=2"]
    assert train.main(argv) == 2
    captured = capsys.readouterr()
    lines = captured.err.splitlines()
    assert captured.out == "" and all(line.startswith("error: ") for line in lines) and len(lines) == 8
    for words in (
        "run.stepss: no such key; nearest: run.steps",
        "optimizer.lr: needs float, got 'abc'",
        "nearest: clip_high",
        "run.steps=-1",
        "rollout.temperature=0.0",
        "backend.dtype",
        "nowhere",
        "does not divide the 1 training ranks",
    ):
        assert words in captured.err
    assert list(tmp_path.iterdir()) == []


def test_print_config_is_the_whole_configuration(capsys: pytest.CaptureFixture[str]) -> None:
    assert train.main(["recipe=quickstart", "run.steps=7", "--print-config"]) == 0
    tree = OmegaConf.create(capsys.readouterr().out)
    assert tree.run.steps == 7 and tree.recipe == "quickstart" and tree.checkpoint.keep >= 1


def test_help_and_unknown_options(capsys: pytest.CaptureFixture[str]) -> None:
    assert train.main(["--help"]) == 0
    assert "optimizer.lr: float" in capsys.readouterr().out
    assert train.main(["recipe=quickstart", "run.steps=7", "--help"]) == 0
    assert "run.steps: int = 7" in capsys.readouterr().out
    assert train.main(["--hlep"]) == 2
    assert "--hlep" in capsys.readouterr().err


def test_world_size_is_the_launchers(monkeypatch: pytest.MonkeyPatch) -> None:
    argv = ["recipe=quickstart", "parallel.tensor=2", "parallel.sequence=true"]
    with pytest.raises(ConfigError):
        prepare(argv)
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert prepare(argv).parallel.tensor == 2


RESULT = RunResult(0.25, 0.75, 40, 123.44, Path("runs/quickstart"), interrupted=False)


def test_quickstart_prints_before_and_after(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    seen: list[list[str]] = []

    def run(argv: list[str]) -> RunResult:
        print("progress")
        seen.append(list(argv))
        return RESULT

    monkeypatch.setattr(quickstart, "run", run)
    assert quickstart.main(["run.steps=3"]) == 0
    out = capfd.readouterr().out
    assert "25.0 % before" in out and "75.0 % after" in out and "runs/quickstart" in out
    assert seen == [["recipe=quickstart", "run.steps=3"]]

    assert quickstart.main(["--json"]) == 0
    captured = capfd.readouterr()
    assert json.loads(captured.out) == {
        "success_before": 0.25,
        "success_after": 0.75,
        "steps": 40,
        "seconds": 123.4,
        "run_dir": str(Path("runs/quickstart").resolve()),
    }
    assert "progress" in captured.err


def test_quickstart_goes_on_with_an_unfinished_run_and_starts_anew_after_a_finished_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    overrides = ["recipe=quickstart"]
    run = tmp_path / "runs" / "quickstart"
    run.mkdir(parents=True)
    (run / "result.json").write_text(json.dumps({"success_after": None}))
    assert quickstart.next_run(overrides) == overrides
    (run / "result.json").write_text(json.dumps({"success_after": 0.75}))
    assert quickstart.next_run(overrides) == [*overrides, "run.name=quickstart-2"]
    assert quickstart.next_run([*overrides, "run.name=mine"]) == [*overrides, "run.name=mine"]


def test_an_interrupted_run_says_how_to_go_on(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    stopped = RunResult(0.25, None, 4, 9.0, Path("runs/mine"), interrupted=True)
    monkeypatch.setattr(train, "run", lambda argv: stopped)
    assert train.main(["recipe=quickstart", "run.name=a b"]) == 130
    captured = capfd.readouterr()
    assert captured.out == "" and "python -m launch.train recipe=quickstart 'run.name=a b'" in captured.err


def test_quickstart_refuses_bad_input(capfd: pytest.CaptureFixture[str]) -> None:
    assert quickstart.main(["--json", "run.stepss=3"]) == 2
    captured = capfd.readouterr()
    assert captured.out == "" and "run.steps" in captured.err
    assert quickstart.main(["--jsno"]) == 2


def test_the_console_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--help"]) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in cli.COMMANDS)
    assert cli.main(["trian"]) == 2
    assert "nearest: train" in capsys.readouterr().err
    assert cli.main(["train", "--help"]) == 0
    assert "recipe=" in capsys.readouterr().out


@pytest.mark.parametrize("name", sorted(cli.COMMANDS))
def test_every_command_is_a_module(name: str, root: Path) -> None:
    assert (root / "launch" / f"{name}.py").is_file()
