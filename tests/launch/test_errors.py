"""How commands tell what the user can mend (``launch/errors.py``)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from launch import train
from launch.errors import show
from megatron_ext.config.compose import ConfigError

WRONG = ["recipe=quickstart", "run.stepss=3", "optimizer.lr=abc"]


def test_torchrun_finds_the_lines_of_each_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    failures = {}
    for rank in (0, 1):
        file = tmp_path / f"{rank}.json"
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
        assert train.main(WRONG) == 2
        lines = capsys.readouterr().err.splitlines()
        assert [line.split(":")[1] for line in lines] == ([" run.stepss", " optimizer.lr"] if rank == 0 else [])
        failures[rank] = ProcessFailure(rank, 100 + rank, 2, str(file))
    summary = str(ChildFailedError("launch.train", failures))
    root = summary[summary.index("Root Cause") :]
    assert "traceback : run.stepss: no such key" in root and "\n  optimizer.lr: needs float" in root


def test_without_a_launcher_nothing_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE", raising=False)
    assert show(ConfigError(["a: is wrong", "b: too"])) == 2 == show(ValueError("c: is wrong"))
    assert capsys.readouterr().err == "error: a: is wrong\nerror: b: too\nerror: c: is wrong\n"
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.integration
def test_the_last_lines_of_torchrun_say_what_is_wrong(root: Path, tmp_path: Path) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    torchrun += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", "-m", "launch.train"]
    done = subprocess.run(
        [*torchrun, *WRONG, f"run.root={tmp_path}"],
        cwd=root,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode != 0 and not list(tmp_path.iterdir())
    *_, tail = done.stderr.split("Root Cause")
    assert "run.stepss: no such key; nearest: run.steps" in tail and "optimizer.lr: needs float" in tail
