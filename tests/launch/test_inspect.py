"""``launch.inspect``: a kept step on the terminal and as JSON lines."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from launch import cli
from launch.inspect import colour, main, printable
from megatron_ext.training.run import RunResult
from megatron_ext.training.step_replay.kept_step import read_step, write_step
from tests.helpers.records import build, model, single, user
from tests.helpers.run_folders import kept_step, make_run
from tests.helpers.scripted import small_codec


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = make_run(tmp_path / "run")
    codec = small_codec(folder / "tokenizer")
    trajectories = [
        single([user(codec._text("walk 0 at 0")), model(codec.encode_turn(said), reward=0.5)], name=name, reward=reward)
        for said, name, reward in (("go", "g0/0", 1.0), ("stop \x1b[31m[bold]", "g0/1", 0.0))
    ]
    write_step(folder, kept_step(10, build([tuple(trajectories)])))
    return folder


def test_a_step_is_told_turn_by_turn(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["inspect", str(run), "--step", "10"]) == 0
    out = capsys.readouterr().out
    assert "run step 10: 1 of 1 trained groups kept, trained from version 0.7; filtered groups: 1" in out
    assert "model 1" in out and "walk 0 at 0" in out and "+0.5" in out
    # What was generated neither steers the terminal nor is taken for markup.
    assert "\x1b[31m" not in out and "stop \\x1b[31m[bold]" in out


def test_one_trajectory_has_a_row_a_token(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(run), "--step", "10", "--trajectory", "g0/0"]) == 0
    out = capsys.readouterr().out
    kept = read_step(run, 10)
    tokens = kept.batch.trajectory(0).tokens
    assert kept.scores is not None
    for t in range(tokens.start, tokens.stop):
        assert f" {kept.batch.ids[t]} " in out
        if kept.batch.loss_mask[t]:
            assert f"{kept.scores.advantage[t]:+.3f}" in out
    assert "g0/1" not in out and "entropy" in out and "reference" not in out


@pytest.mark.slow
def test_json_lines(run: Path, walk_run: RunResult, root: Path) -> None:
    def lines(*argv: str) -> list[dict[str, object]]:
        command = [sys.executable, "-m", "launch.inspect", *argv, "--json"]
        done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=300, check=True)
        return [json.loads(line) for line in done.stdout.splitlines()]

    found = lines(str(run), "--step", "10", "--trajectory", "g0/1")
    assert [line["kind"] for line in found[:3]] == ["step", "trajectory", "turn"]
    batch = read_step(run, 10).batch
    assert [line["id"] for line in found if line["kind"] == "token"] == batch.ids[batch.trajectory(1).tokens].tolist()
    real = lines(str(walk_run.run_dir), "--step", "1")
    trained = [line for line in real if line["kind"] == "token" and line["trained"]]
    assert trained and all(isinstance(line["advantage"], float) for line in trained)


def test_what_is_not_there_is_one_line(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(run), "--step", "9"]) == 2
    assert main([str(run), "--step", "10", "--trajectory", "g0/7"]) == 2
    assert main([str(run / "nowhere"), "--step", "10"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 3 and all(line.startswith("error: ") for line in lines)
    assert "step 9 was not kept; in samples/: 10; still in the store: none" in lines[0]
    assert "keeps no trajectory 'g0/7'; nearest of its 2: g0/1, g0/0" in lines[1] or "g0/0, g0/1" in lines[1]
    assert "no such run folder" in lines[2]


def test_colours_tell_the_sign_and_the_size() -> None:
    assert colour(0.0, 1.0) == colour(None, 1.0) == colour(1.0, 0.0) == ""
    assert colour(2.0, 2.0) == "#001ec8" and colour(-2.0, 2.0) == "#c81400"
    assert colour(0.1, 2.0) != colour(2.0, 2.0) and colour(9.0, 2.0) == colour(2.0, 2.0)


def test_what_is_not_printable_is_spelt_out() -> None:
    assert printable("a\x1b\x07é\n") == "a\\x1b\\x07é\n" and printable("") == "▫"
