"""Warm processes: a run after others is the run alone, failures end a process and no more, kills cost little."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from launch.runner import INTERRUPTED, Job, Running
from launch.warm import WarmPool
from megatron_ext.config.compose import compose
from megatron_ext.tracking.jsonl import read_metrics
from megatron_ext.training.deterministic import comparable

pytestmark = [pytest.mark.slow, pytest.mark.integration]

WITHIN_S = 900.0
EXACT = ("run.deterministic=true", "batch.optimizer_steps_per_batch=2", "run.steps=3")


def until(found: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + WITHIN_S
    while not found():
        assert time.monotonic() < deadline, f"no {what} in {WITHIN_S:.0f} s"
        time.sleep(0.05)


def job(recipes: Path, root: Path, name: str, *overrides: str) -> Job:
    argv = ("recipe=walk", *overrides, f"run.root={root}", f"run.name={name}", f"warm_start.cache={root / 'cache'}")
    return Job(name, argv, compose(argv, recipes), None)


def end(running: Running) -> int:
    until(lambda: running.poll() is not None, "end of the run")
    code = running.poll()
    assert code is not None
    return code


def metrics(run: Path) -> list[dict[str, object]]:
    return [comparable(row) for row in read_metrics(run / "metrics.jsonl")]


@pytest.fixture(autouse=True)
def _at_the_root(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(root)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(sys, "path", [str(root), *sys.path])


def test_a_run_after_others_is_the_run_alone(walk_recipes: Path, tmp_path: Path) -> None:
    """Also from the one warm start that runs of other seeds share."""
    shared = ("warm_start.seed=1", *EXACT)
    with WarmPool(walk_recipes) as pool:
        for name, seed in (("first", 1), ("second", 2), ("third", 1)):
            made = job(walk_recipes, tmp_path, name, *shared, f"run.seed={seed}")
            assert end(pool.start(made, tmp_path / f"{name}.log")) == 0, (tmp_path / f"{name}.log").read_text()[-2000:]
            assert len(pool.processes) == 1, "one process made them all"
    with WarmPool(walk_recipes) as pool:
        made = job(walk_recipes, tmp_path, "alone", *shared, "run.seed=2")
        assert end(pool.start(made, tmp_path / "alone.log")) == 0
    assert metrics(tmp_path / "first") == metrics(tmp_path / "third")
    assert metrics(tmp_path / "second") == metrics(tmp_path / "alone")
    assert metrics(tmp_path / "first") != metrics(tmp_path / "second")
    assert len(list((tmp_path / "cache").iterdir())) == 1, "one warm start"
    reports = [json.loads((tmp_path / name / "warm_start.json").read_text()) for name in ("first", "second")]
    assert reports[0] == reports[1]
    said = json.loads((tmp_path / "second" / "provenance.json").read_text())["command"]
    assert said[1:4] == ["-m", "launch.train", "recipe=walk"]
    assert "step" in (tmp_path / "second.log").read_text() and "run.seed" not in (tmp_path / "first.log").read_text()


def test_a_failed_run_takes_its_process_with_it(walk_recipes: Path, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "note.txt").write_text("somebody's own file")
    with WarmPool(walk_recipes) as pool:
        assert end(pool.start(job(walk_recipes, tmp_path, "mine"), tmp_path / "mine.log")) == 2
        assert "no config.yaml" in (tmp_path / "mine.log").read_text() and not pool.processes
        running = pool.start(job(walk_recipes, tmp_path, "other", "run.steps=400"), tmp_path / "other.log")
        until(lambda: (tmp_path / "other" / "metrics.jsonl").exists(), "step")
        running.stop()
        assert end(running) == INTERRUPTED and len(pool.processes) == 1, "one that was interrupted goes on"
        pid = pool.processes[0]
        running = pool.start(job(walk_recipes, tmp_path, "other", "run.steps=400"), tmp_path / "other.log")
        os.kill(pid, signal.SIGKILL)
        assert end(running) == -signal.SIGKILL and not pool.processes
    assert json.loads((tmp_path / "other" / "result.json").read_text())["interrupted"]


COMPARISON = """
arms:
  on: {preset: recipe, title: as it is}
  off: {preset: recipe, title: permuted, overrides: [control.permute_rewards=true]}
counters: {rollout/turns_mean: turns}
"""
PROGRAM = """
import sys
from pathlib import Path
from launch.recipes import main
sys.exit(main(sys.argv[2:], Path(sys.argv[1])))
"""


def compare(recipes: Path, root: Path, *more: str) -> subprocess.Popen[str]:
    argv = ["compare", "walk", "--seeds", "1", "2", "--root", str(root), "--json", "run.steps=8", *more]
    command = [sys.executable, "-c", PROGRAM, str(recipes), *argv]
    pipe = subprocess.PIPE
    return subprocess.Popen(
        command, stdout=pipe, stderr=pipe, text=True, env=os.environ | {"PYTHONPATH": str(Path.cwd())}
    )


def test_a_comparison_goes_on_after_kill_and_interrupt(walk_recipes: Path, tmp_path: Path) -> None:
    (walk_recipes / "walk" / "comparison.yaml").write_text(COMPARISON)
    folder = tmp_path / "walk"
    hold = tmp_path / "hold"
    hold.touch()
    held = f"phase: rollout, step: 3, run: off_seed_1, while_there: '{hold}'"
    holding = f"tracking.hold={{_target_: tests.helpers.stopping.HoldAt, {held}}}"
    exact = ("run.deterministic=true", "checkpoint.every=1", holding)

    def steps(name: str) -> int:
        path = folder / name / "metrics.jsonl"
        return read_metrics(path)[-1]["step"] if path.exists() and path.read_text() else 0

    killed = compare(walk_recipes, tmp_path, *exact)
    until(lambda: steps("off_seed_1") >= 3 or killed.poll() is not None, "third step of the second run")
    killed.kill()
    killed.communicate()
    hold.unlink()
    assert (folder / "on_seed_1" / "result.json").exists() and not (folder / "off_seed_1" / "result.json").exists()
    kept = (folder / "on_seed_1" / "result.json").stat().st_mtime_ns

    stopped = compare(walk_recipes, tmp_path, *exact)
    until(lambda: steps("on_seed_2") >= 1 or stopped.poll() is not None, "first step of the third run")
    stopped.send_signal(signal.SIGINT)
    out, err = stopped.communicate(timeout=WITHIN_S)
    assert stopped.returncode == 130 and out == "" and "the same command goes on" in err, err
    assert "resumed from step" in (folder / "logs" / "off_seed_1.log").read_text()

    last = compare(walk_recipes, tmp_path, *exact)
    out, err = last.communicate(timeout=WITHIN_S)
    assert last.returncode == 0, err
    assert "on_seed_1: finished before, kept" in err
    assert (folder / "on_seed_1" / "result.json").stat().st_mtime_ns == kept
    tree = json.loads(out)
    assert [row["name"] for row in tree["rows"]] == ["on", "off"] and tree["warm_starts"] == 1
    assert all(row["steps"] == 8 and row["minutes"] > 0 for row in tree["rows"])
    assert {d["what"] for d in tree["differences"]} == {"greedy", "sampled"} and tree["rows"][0]["changed"] is not None
    assert len(list((folder / "warm_starts").iterdir())) == 1
    assert (folder / "figure.png").exists() and "**walk**" in (folder / "table.md").read_text()

    # Another configuration in the same place is refused, not mixed in.
    other = compare(walk_recipes, tmp_path, *exact, "optimizer.lr=0.5")
    out, err = other.communicate(timeout=WITHIN_S)
    assert other.returncode == 2 and out == "" and "optimizer.lr" in err and "another --root" in err
