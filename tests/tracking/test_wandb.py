"""Invariants 1-4 of ``tracking/wandb.py``, on real wandb runs read back from their files."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron_ext.tracking.jsonl import JsonlTracker
from megatron_ext.tracking.wandb import WandbTracker

ROOT = Path(__file__).parents[2]
PROGRAM = """
import sys
from pathlib import Path
from megatron_ext.tracking.wandb import WandbTracker
tracker = WandbTracker(project="tests", base_url="http://127.0.0.1:9", init_timeout_s=float(sys.argv[2]))
tracker.start(Path(sys.argv[1]), {"run": {"steps": 2}}, None)
tracker.log(1, {"reward/mean": 0.5})
tracker.finish({"success_after": 1.0})
"""


def recorded(run_dir: Path) -> tuple[str, dict[str, Any], list[dict[str, Any]]]:
    """Run id, configuration and history of the folder's one current offline run."""
    (file,) = run_dir.glob("wandb/offline-run-*/*.wandb")
    shown = subprocess.run(
        [sys.executable, "-m", "wandb", "leet", "inspect", "--json", file], capture_output=True, check=True
    )
    run_id, config, history = "", {}, []
    for line in shown.stdout.splitlines():
        record = json.loads(line)
        if record["type"] == "run":
            run_id, config = record["run"]["run_id"], record["run"]["config"]["update"]
        elif record["type"] == "history":
            history.append(record["history"]["item"])
    return run_id, config, history


@pytest.fixture(autouse=True)
def no_settings_of_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)


def run_alone(run_dir: Path, init_timeout_s: float, **environment: str) -> subprocess.CompletedProcess[str]:
    """The program above in its own process, whose login state is ``environment`` alone."""
    env = {**os.environ, "HOME": str(run_dir), "NETRC": str(run_dir / "netrc"), "PYTHONPATH": str(ROOT), **environment}
    run = [sys.executable, "-c", PROGRAM, str(run_dir), str(init_timeout_s)]
    return subprocess.run(run, env=env, capture_output=True, text=True, timeout=600, check=False)


def test_resume_keeps_the_id_and_drops_undone_steps(tmp_path: Path) -> None:  # invariant 3
    ids = []
    for resumed_from, steps in ((None, range(1, 6)), (3, range(4, 6))):
        trackers = (JsonlTracker(), WandbTracker(project="tests", mode="offline"))
        for tracker in trackers:
            tracker.start(tmp_path, {"run": {"steps": 5}, "provenance": {"commit": "abc"}}, resumed_from)
        for step in steps:
            for tracker in trackers:
                tracker.log(step, {"reward/mean": step + 10.0 * (resumed_from or 0)})
        for tracker in trackers:
            tracker.finish({"success_after": 0.5})
        run_id, config, history = recorded(tmp_path)
        ids.append(run_id)
    assert (tmp_path / "wandb_id").read_text().split() == [ids[0], "logged"] and ids[0] == ids[1]
    assert config["provenance"] == {"commit": "abc"} and config["run"] == {"steps": 5}
    assert [(row["_step"], row["reward/mean"]) for row in history] == [(1, 1), (2, 2), (3, 3), (4, 34), (5, 35)]
    assert len(list(tmp_path.glob("wandb/superseded/*/*.wandb"))) == 1


@pytest.mark.slow
def test_a_run_that_was_killed_before_its_first_checkpoint_starts_its_curve_again(tmp_path: Path) -> None:
    """Invariant 3: nothing of what it had logged survives, and what was cut off by the kill is not uploaded."""
    killed = PROGRAM.replace(
        "tracker.finish", "import os, signal; os.kill(os.getpid(), signal.SIGKILL); tracker.finish"
    )
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", killed, str(tmp_path), "60"], env=env, timeout=600, check=False)
    assert done.returncode < 0
    run_id = (tmp_path / "wandb_id").read_text().split()[0]
    tracker = WandbTracker(project="tests", mode="offline")
    tracker.start(tmp_path, {"run": {"steps": 2}}, None)
    tracker.log(1, {"reward/mean": 0.25})
    tracker.finish({})
    again, _, history = recorded(tmp_path)
    assert again == run_id and [(row["_step"], row["reward/mean"]) for row in history] == [(1, 0.25)]


def test_offline_without_a_login_and_silent(tmp_path: Path) -> None:  # invariants 1 and 4
    done = run_alone(tmp_path, 120.0)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert [row["reward/mean"] for row in recorded(tmp_path)[2]] == [0.5]


@pytest.mark.slow
def test_an_unreachable_server_costs_one_line(tmp_path: Path) -> None:  # invariants 1 and 2
    # Also what going on offline after it may take: not too short.
    done = run_alone(tmp_path, 5.0, WANDB_API_KEY="a" * 40)
    assert done.returncode == 0 and done.stdout == ""
    (line,) = done.stderr.strip().splitlines()
    assert line.startswith("warning: wandb goes on offline")
    assert [row["reward/mean"] for row in recorded(tmp_path)[2]] == [0.5]


def test_an_unknown_mode_is_named() -> None:
    with pytest.raises(ValueError, match="mode 'live': must be one of auto, online, offline"):
        WandbTracker(project="tests", mode="live")
