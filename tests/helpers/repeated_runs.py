"""One command that is run again and again, each time in a process of its own, and stopped where a test says."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

PROGRAM = """
import json, sys
from pathlib import Path
from launch.prepare import prepare
from launch.train import how_to_go_on
from megatron_ext.training.run import train

config = prepare(json.loads(sys.argv[2]), Path(sys.argv[1]))
if len(sys.argv) > 3:
    config.tracking["stop"] = json.loads(sys.argv[3])
result = train(config)
said = {"interrupted": result.interrupted, "steps": result.steps, "after": result.success_after, "kept": result.kept}
print(json.dumps({**said, "said": how_to_go_on([], result)}))
"""


def run_program(
    program: str, recipes: Path, argv: Sequence[str], stop: Mapping[str, object] | None, root: Path
) -> subprocess.CompletedProcess[str]:
    """Runs ``program`` in a process of its own; it finds recipes, ``argv`` and, if any, ``stop`` in ``sys.argv``."""
    return subprocess.run(
        [sys.executable, "-c", program, str(recipes), json.dumps(argv), *([json.dumps(stop)] if stop else [])],
        cwd=root,
        env=os.environ | {"PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=1800,
        check=False,
    )


class RepeatedRun:
    """``overrides`` on top of the recipe ``walk``, into ``folder``; ``stopper`` is the tracker that stops it."""

    def __init__(self, recipes: Path, folder: Path, root: Path, stopper: str, overrides: Sequence[str]) -> None:
        self.path = folder / "walk"
        self._recipes, self._root, self._stopper = recipes, root, stopper
        self._argv = ["recipe=walk", f"run.root={folder}", *overrides]

    def run(self, *argv: str, **stop: object) -> tuple[int, dict[str, Any], str]:
        """Exit status, what the run says of itself (nothing when it was killed), and what was on its console."""
        target = {"_target_": f"tests.helpers.stopping.{self._stopper}", **stop}
        done = run_program(PROGRAM, self._recipes, [*self._argv, *argv], target if stop else None, self._root)
        lines = done.stdout.splitlines()
        assert lines or done.returncode < 0, done.stderr
        return done.returncode, json.loads(lines[-1]) if lines else {}, done.stderr
