"""``python -m launch.recipes compare SLUG``: trains the arms of a recipe's comparison and tells what came out."""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from launch.comparison import Comparison, plan, read_comparison, run_name, warm_starts
from launch.errors import show
from launch.output import json_lines
from launch.prepare import missing_packages
from launch.runner import Job, Runner, finished, minutes, progress_bars, say
from launch.warm import WarmPool
from megatron_ext.config.compose import ConfigError
from megatron_ext.training.interrupt import Interrupted, InterruptFlag

ROOT = Path("runs/compare")


@dataclass(frozen=True)
class Options:
    """The command line. ``seeds`` and ``arms`` empty: those of the file."""

    slug: str
    seeds: tuple[int, ...] = ()
    arms: tuple[str, ...] = ()
    jobs: int = 1
    root: Path = ROOT
    overrides: tuple[str, ...] = ()
    json: bool = False


def run(options: Options, recipes: Path) -> int:
    """Exit status: 0 told, 1 a run failed, 2 bad input, 130 interrupted."""
    folder = options.root / options.slug
    threads = None if options.jobs == 1 else max(1, (os.cpu_count() or 1) // options.jobs)
    try:
        if missing := missing_packages():
            raise ConfigError(missing)
        comparison = read_comparison(options.slug, recipes).only(options.arms, options.seeds)
        jobs = plan(comparison, options.overrides, folder, recipes, threads)
        todo = [job for job in jobs if not finished(job)]
    except ConfigError as error:
        return show(error)
    with ExitStack() as stack:
        write = stack.enter_context(json_lines()) if options.json else None
        code = _train(jobs, todo, folder, options.jobs, recipes)
        if code:
            return code
        try:
            tree, text = _tell(options, comparison, jobs, folder)
        except ConfigError as error:
            return show(error)
        if write is not None:
            write(tree)
        else:
            print(text, end="")
            print(f"\nkept in {folder}: table.md, table.json, figure.png")
    return 0


def _train(jobs: Sequence[Job], todo: Sequence[Job], folder: Path, at_once: int, recipes: Path) -> int:
    progress = progress_bars()
    for job in jobs:
        if job not in todo:
            say(progress, f"{job.name}: finished before, kept")
    if not todo:
        return 0
    with InterruptFlag() as flag, progress, WarmPool(recipes) as pool:
        runner = Runner(folder, todo, at_once, progress, flag, pool.start)
        try:
            runner.run()
        except Interrupted:
            print("interrupted; the same command goes on from the runs' last checkpoints", file=sys.stderr)
            return 130
    for line in runner.failed:
        print(f"error: {line}", file=sys.stderr)
    return 1 if runner.failed else 0


def _tell(options: Options, comparison: Comparison, jobs: Sequence[Job], folder: Path) -> tuple[dict[str, object], str]:
    """Writes table and figure of finished runs; the table as JSON and as text."""
    # Imported late: what reads runs loads more than what plans them.
    from launch.compare_figure import draw
    from launch.compare_report import compare, read_arms
    from launch.compare_text import markdown

    by_name = {job.name: job for job in jobs}
    found = {
        arm.name: [
            (by_name[name].run, minutes(folder, name))
            for name in (run_name(arm.name, seed) for seed in comparison.seeds)
        ]
        for arm in comparison.arms
    }
    arms = read_arms(comparison, found)
    made = compare(
        comparison,
        arms,
        overrides=options.overrides,
        warm_starts=warm_starts(jobs),
        commands=[command(options, comparison)],
    )
    tree, text = made.as_json(), markdown(made)
    (folder / "table.json").write_text(json.dumps(tree, indent=1) + "\n")
    (folder / "table.md").write_text(text)
    draw(made, arms, folder / "figure.png")
    return tree, text


def command(options: Options, comparison: Comparison) -> str:
    """The command line that makes the table again."""
    words = ["python", "-m", "launch.recipes", "compare", options.slug, "--seeds", *map(str, comparison.seeds)]
    words += ["--arms", *options.arms] if options.arms else []
    words += ["--jobs", str(options.jobs)] if options.jobs != 1 else []
    words += ["--root", str(options.root)] if options.root != ROOT else []
    return shlex.join([*words, *options.overrides])
