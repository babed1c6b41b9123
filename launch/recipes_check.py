"""``python -m launch.recipes check SLUG``: its worked numbers, every preset, and two steps of training.

A recipe with code of its own owes worked numbers: ``tests/recipes/SLUG``.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from launch.prepare import prepare, prepare_elsewhere
from megatron_ext.config.compose import ConfigError, recipes
from megatron_ext.process import log_tail
from megatron_ext.tracking.jsonl import FILE_NAME, read_metrics

STEPS = 2
WITHIN_S = 600.0
# What a smoke run takes less of than the preset.
AT_MOST = {
    "tasks.train_tasks": 64,
    "tasks.dev_tasks": 8,
    "tasks.test_tasks": 4,
    "tokenizer.corpus_tasks": 64,
    "batch.tasks_per_step": 4,
    "warm_start.demonstrations": 64,
    "warm_start.gate_tasks": 4,
    "run.threads": 1,
}
SET = (
    *(f"run.steps={STEPS}", "run.name=smoke", "run.deterministic=false", "tracking.wandb=null"),
    *("warm_start.min_epochs=0", "warm_start.max_epochs=1", "warm_start.target_success=0", "warm_start.cache=''"),
    *("evaluation.before=false", "evaluation.samples=0", "evaluation.every=0", "checkpoint.every=0"),
    # A policy that was hardly warmed up fails everywhere: its groups must be trained all the same.
    *("credit.filter.constant_groups=false", "profile.peak=false"),
)


@dataclass(frozen=True)
class Check:
    """One line: what was checked, whether it holds, and what came out. ``lines``: more, where it does not."""

    name: str
    holds: bool
    said: str
    lines: tuple[str, ...] = ()


def checks(slug: str, root: Path, tests: Path, say: Callable[[str], None]) -> Iterator[Check]:
    """Every check of the recipe, each as soon as it is done; ``say`` tells what takes a while."""
    say(f"worked numbers: {tests / slug}")
    yield worked_numbers(slug, root, tests)
    valid = True
    for preset in recipes(root)[slug]:
        found = check_preset(slug, preset, root)
        valid = valid and found.holds
        yield found
    name = smallest(slug, root)
    if valid:
        say(f"two steps of recipe={name}")
        yield smoke(name, root)
    else:
        yield Check("training", False, "not tried: a preset is not valid")


def smallest(slug: str, root: Path) -> str:
    """The preset that trains fastest: ``micro`` where there is one."""
    return f"{slug}/micro" if "micro" in recipes(root)[slug] else slug


def worked_numbers(slug: str, root: Path, tests: Path) -> Check:
    name = "worked numbers"
    folder = tests / slug
    if not folder.is_dir():
        owes = any(file.name != "__init__.py" for file in (root / slug).glob("*.py"))
        return Check(name, not owes, f"{folder} is not there" if owes else "no code of its own, so none are owed")
    command = [sys.executable, "-m", "pytest", "-q", "--no-header", "-p", "no:cacheprovider", str(folder)]
    done = subprocess.run(command, cwd=tests.parents[1], capture_output=True, text=True, check=False)
    lines = (done.stdout + done.stderr).strip().splitlines()
    last = lines[-1].strip("= ") if lines else "pytest said nothing"
    return Check(name, done.returncode == 0, last, () if done.returncode == 0 else tuple(lines[-15:]))


def check_preset(slug: str, preset: str, root: Path) -> Check:
    """Composes and judges a preset as for the machine it is meant for."""
    name = slug if preset == "recipe" else f"{slug}/{preset}"
    try:
        config, world = prepare_elsewhere([f"recipe={name}"], root)
    except ConfigError as error:
        return Check(f"preset {preset}", False, f"{len(error.problems)} problems", error.problems)
    ranks = f"{world} rank{'s' * (world > 1)}"
    return Check(f"preset {preset}", True, f"valid: {config.run.steps} steps, {ranks} or a multiple")


def smoke(name: str, root: Path) -> Check:
    """Two steps of the preset with fewer tasks and hardly a warm start, in a folder that is not kept."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="megatron_ext_check_") as folder:
        try:
            argv = [f"recipe={name}", *smaller(name, root), *SET, f"run.root={folder}"]
            prepare(argv, root)
        except ConfigError as error:
            return Check("training", False, "cannot be made small", error.problems)
        log = Path(folder) / "smoke.log"
        with log.open("wb") as output:
            # The recipes' folder is given: a test has one of its own.
            program = "import sys; from launch.recipes_check import train; sys.exit(train(sys.argv[1], sys.argv[2:]))"
            command = [sys.executable, "-c", program, str(root), *argv]
            try:
                code = subprocess.run(
                    command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, timeout=WITHIN_S, check=False
                ).returncode
            except subprocess.TimeoutExpired:
                code = -1
        if code:
            how = f"not done in {WITHIN_S:.0f} s" if code == -1 else f"exit status {code}"
            return Check("training", False, f"recipe={name}: {how}", tuple(log_tail(log).splitlines()))
        rows = [row for row in read_metrics(Path(folder) / "smoke" / FILE_NAME) if row["step"] > 0]
        trained = sum(row.get("train/trained_tokens") or 0.0 for row in rows)
    if len(rows) < STEPS or not trained:
        return Check("training", False, f"recipe={name}: {len(rows)} steps, {trained:.0f} tokens were trained")
    spent = time.monotonic() - began
    return Check("training", True, f"recipe={name}: {len(rows)} steps, {trained:.0f} tokens trained, {spent:.0f} s")


def smaller(name: str, root: Path) -> list[str]:
    """Overrides that make the preset small, and none larger than it is."""
    config = prepare([f"recipe={name}"], root)
    found = []
    for key, limit in AT_MOST.items():
        section, field = key.split(".")
        value = int(getattr(getattr(config, section), field))
        if value > limit:
            found.append(f"{key}={limit}")
    return found


def train(recipes_root: str, argv: list[str]) -> int:
    """The smoke run itself, in its own process."""
    from launch.errors import status
    from megatron_ext.training.run import train as run

    try:
        run(prepare(argv, Path(recipes_root)))
    except (Exception, KeyboardInterrupt) as error:
        return status(error)
    return 0
