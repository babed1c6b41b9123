from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf

from launch import cli, quickstart, train
from launch.paths import RECIPES
from launch.prepare import prepare
from megatron_ext.config.compose import ConfigError
from megatron_ext.harness.template import COMPACT
from megatron_ext.harness.tokenizer import learn_tokenizer, save_tokenizer
from megatron_ext.models.hf_config import load_hf_config
from megatron_ext.models.hf_io import save_hf
from megatron_ext.models.hf_tensors import hf_shapes
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


def test_ranks_are_what_a_launcher_says(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert train.main(["recipe=quickstart"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "WORLD_SIZE=2 in the environment without RANK" in line and "torchrun" in line
    monkeypatch.setenv("RANK", "1")
    assert train.main(["recipe=quickstart"]) == 2 and capsys.readouterr().err == "", "rank 0 alone speaks"
    monkeypatch.setenv("WORLD_SIZE", "two")
    with pytest.raises(ConfigError, match="WORLD_SIZE='two' in the environment"):
        prepare(["recipe=quickstart"])
    assert not list(tmp_path.iterdir())


def test_weights_and_tokenizer_are_looked_at_before_anything_starts(tmp_path: Path) -> None:
    hf = load_hf_config(RECIPES / "base/models/tiny_qwen3_moe").with_vocab(300)
    weights = save_hf(tmp_path / "weights", hf, ((n, torch.zeros(shape)) for n, shape in hf_shapes(hf).items()))
    for vocab in (280, 320):
        text = " ".join(chr(97 + i % 26) * (i % 7 + 1) for i in range(200))
        save_tokenizer(tmp_path / f"{vocab}", learn_tokenizer([text], vocab_size=vocab, phrases=[]), COMPACT)

    def found(**model: object) -> list[str]:
        with pytest.raises(ConfigError) as error:
            prepare(["recipe=quickstart", *(f"model.{key}={value}" for key, value in model.items())])
        return list(error.value.problems)

    right = {"weights": weights, "hf_config": weights}
    assert prepare(
        ["recipe=quickstart", *(f"model.{k}={v}" for k, v in right.items()), f"model.tokenizer={tmp_path}/280"]
    )
    (line,) = found(weights=weights, tokenizer=tmp_path / "280")
    assert "does not fit the HF config" in line and "vocab: 1024 and 300" in line
    assert f"set model.hf_config={weights}/config.json" in line
    assert found(**right)[0].endswith("needs model.tokenizer, the folder of the tokenizer they know")
    (line,) = found(**right, tokenizer=tmp_path / "320")
    assert "more than the vocabulary of 300" in line
    (line,) = found(tokenizer=tmp_path / "nowhere")
    assert "nowhere/tokenizer.json: no such file" in line
    (weights / "model.safetensors").write_bytes((weights / "model.safetensors").read_bytes()[:1000])
    (line,) = found(**right, tokenizer=tmp_path / "280")
    assert "not a readable safetensors file" in line


RUN = Path("runs/quickstart")
RESULT = RunResult(0.25, 0.75, 40, 123.44, RUN, interrupted=False, report=RUN / "report.html")


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
    assert "25.0 % before" in out and "75.0 % after" in out
    assert out.splitlines()[-2:] == ["kept in runs/quickstart", "report: runs/quickstart/report.html"]
    assert seen == [["recipe=quickstart", "run.steps=3"]]

    assert quickstart.main(["--json"]) == 0
    captured = capfd.readouterr()
    assert json.loads(captured.out) == {
        "success_before": 0.25,
        "success_after": 0.75,
        "steps": 40,
        "idle_steps": 0,
        "hint": "",
        "seconds": 123.4,
        "run_dir": str(RUN.resolve()),
        "report": str((RUN / "report.html").resolve()),
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
    stopped = RunResult(0.25, None, 4, 9.0, Path("runs/mine"), interrupted=True, kept="saved at step 4")
    monkeypatch.setattr(train, "run", lambda argv: stopped)
    assert train.main(["recipe=quickstart", "run.name=a b"]) == 130
    captured = capfd.readouterr()
    assert captured.out == "" and "python -m launch.train recipe=quickstart 'run.name=a b'" in captured.err
    assert captured.err.startswith("interrupted; runs/mine: saved at step 4. To go on: ")


def test_a_run_that_trained_nothing_says_what_helps(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    idle = dataclasses.replace(RESULT, idle_steps=3, hint="3 of 3 steps trained nothing. Easier tasks help.")
    for module, argv in ((train, ["recipe=quickstart"]), (quickstart, ["run.steps=3"])):
        monkeypatch.setattr(module, "run", lambda argv: idle)
        assert module.main(argv) == 0
        assert idle.hint in capfd.readouterr().out.splitlines()
    assert quickstart.main(["--json"]) == 0
    said = json.loads(capfd.readouterr().out)
    assert (said["idle_steps"], said["hint"]) == (3, idle.hint)


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
