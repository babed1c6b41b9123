"""Pages of documentation that write files: the files as they stand there, installed beside the recipes."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

import recipes as installed

# A run of a text game that is over in seconds.
TINY_RUN = (
    "run.steps=2",
    "run.threads=1",
    "tasks.train_tasks=24",
    "tasks.dev_tasks=4",
    "tasks.test_tasks=4",
    "batch.tasks_per_step=2",
    "batch.trajectories_per_task=4",
    "rollout.concurrency=8",
    "warm_start.demonstrations=16",
    "warm_start.min_epochs=0",
    "warm_start.max_epochs=0.5",
    "warm_start.target_success=0",
    "warm_start.gate_tasks=4",
    "evaluation.samples=1",
    "credit.filter.constant_groups=false",
    "tracking.wandb=null",
)


def written_files(page: Path, named: str) -> dict[str, str]:
    """Path -> content of every file that a page writes: what ``named`` matches (its group 1), then a block of code."""
    found = re.findall(named + r"\n```(?:python|yaml)\n(.*?)```", page.read_text(), re.DOTALL | re.MULTILINE)
    return dict(found)


def code_lines(texts: Sequence[str]) -> int:
    """Lines of code, without comments, blank lines and imports."""
    lines = [line for text in texts for line in text.splitlines()]
    return sum(1 for line in lines if line.strip() and not line.startswith(("from ", "import ", "#", '"""')))


@contextmanager
def installed_recipe(
    slug: str, files: Mapping[str, str], root: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Path]:
    """A recipes folder in ``folder`` with ``files``, importable as ``recipes.SLUG`` while the context is open."""
    recipes = folder / "recipes"
    recipes.mkdir()
    (recipes / "base").symlink_to(root / "recipes" / "base")
    for name, content in files.items():
        place = folder / name
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(content)
    monkeypatch.setattr(installed, "__path__", [*installed.__path__, str(recipes)])
    importlib.invalidate_caches()
    yield recipes
    for name in [name for name in sys.modules if name.startswith(f"recipes.{slug}")]:
        del sys.modules[name]
