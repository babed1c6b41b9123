"""``python -m launch.table recipe=SLUG[/PRESET] --seeds 1 2 3 [--control] [--jobs N] [--root FOLDER] [KEY=VALUE ...]``:
trains a recipe once a seed, each in a process of its own, and tables what it learned.

``--control`` trains each seed again from the same warm start with its rewards permuted over the step: what such a run
gains is not learned from the reward. Everything is kept in ``FOLDER/SLUG-PRESET``: a run folder and a log a run, and
``table.md``, ``table.json`` and ``table.png``. The same command again skips finished runs and continues the others.

Exit status: 0 tabled, 1 a run failed (its log is named), 2 the configuration is wrong, 130 interrupted.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from launch.errors import show
from launch.prepare import missing_packages, prepare
from launch.runner import Job, Runner, finished, minutes, progress_bars, say
from launch.table_report import arm_name, markdown, plot, read_arm, table
from megatron_ext.config.compose import ConfigError
from megatron_ext.training.interrupt import Interrupted, InterruptFlag


def plan(overrides: Sequence[str], seeds: Sequence[int], control: bool, folder: Path) -> list[Job]:
    """The runs, seeds first, each configuration checked. Raises ``ConfigError``."""
    owned = ("run.seed", "run.root", "run.name", "control.permute_rewards")
    taken = [a for a in overrides if a.split("=")[0] in owned]
    if taken:
        raise ConfigError([f"{a}: the table sets this key" for a in taken])
    jobs = []
    for permuted in (False, True) if control else (False,):
        for seed in seeds:
            name = arm_name(seed, permuted)
            argv = [*overrides, f"run.seed={seed}", f"run.root={folder}", f"run.name={name}"]
            if permuted:
                argv.append("control.permute_rewards=true")
            if not any(a.startswith("warm_start.cache=") for a in overrides):
                argv.append(f"warm_start.cache={folder / 'warm_starts'}")
            config = prepare(argv)
            shared = permuted and config.warm_start.enabled
            jobs.append(Job(name, tuple(argv), config, arm_name(seed, False) if shared else None))
    for job in jobs[:1]:  # the others differ in seed and control only
        evaluation = job.config.evaluation
        if not (evaluation.before and evaluation.after and job.config.tasks.test_tasks):
            raise ConfigError(
                ["a table compares evaluations: evaluation.before, evaluation.after and tasks.test_tasks"]
            )
    return jobs


def main(argv: Sequence[str] | None = None) -> int:
    arguments = list(sys.argv[1:] if argv is None else argv)
    overrides = [a for a in arguments if "=" in a and not a.startswith("-") or a.startswith("~")]
    parser = argparse.ArgumentParser(
        prog="python -m launch.table",
        usage="%(prog)s recipe=SLUG[/PRESET] --seeds N [N ...] [--control] [--jobs N] [--root FOLDER] [KEY=VALUE ...]",
        description="Trains a recipe once a seed and tables what it learned. Run again, it goes on where it stopped.",
    )
    parser.add_argument("--seeds", type=int, nargs="+", required=True, metavar="N", help="values of run.seed")
    parser.add_argument("--control", action="store_true", help="train each seed again with permuted rewards")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="runs at a time (default: 1)")
    parser.add_argument("--root", type=Path, default=Path("runs/table"), metavar="FOLDER", help="default: runs/table")
    options = parser.parse_args([a for a in arguments if a not in overrides])
    recipe = next((a.removeprefix("recipe=") for a in overrides if a.startswith("recipe=")), None)
    if recipe is None:
        parser.error("say which recipe: recipe=SLUG or recipe=SLUG/PRESET")
    if options.jobs < 1 or len(set(options.seeds)) != len(options.seeds):
        parser.error("--jobs must be at least 1, and --seeds differ")
    folder = options.root / recipe.replace("/", "-")
    try:
        if missing := missing_packages():
            raise ConfigError(missing)
        jobs = plan(overrides, options.seeds, options.control, folder)
        todo = [job for job in jobs if not finished(job)]
    except ConfigError as error:
        return show(error)

    progress = progress_bars()
    for job in jobs:
        if job not in todo:
            say(progress, f"{job.name}: finished before, kept")
    with InterruptFlag() as flag, progress:
        runner = Runner(folder, todo, options.jobs, progress, flag)
        try:
            runner.run()
        except Interrupted:
            print("interrupted; the same command goes on from the runs' last checkpoints", file=sys.stderr)
            return 130
    if runner.failed:
        for line in runner.failed:
            print(f"error: {line}", file=sys.stderr)
        return 1

    try:
        arms = [
            read_arm(job.run, job.config.run.seed, job.config.control.permute_rewards, minutes(folder, job.name))
            for job in jobs
        ]
        made = table(recipe, list(overrides), arms)
    except ConfigError as error:
        return show(error)
    (folder / "table.json").write_text(json.dumps(made.as_json(), indent=1) + "\n")
    text = markdown(made)
    (folder / "table.md").write_text(text)
    plot(made, arms, folder / "table.png")
    print(text, end="")
    print(f"\nkept in {folder}: table.md, table.json, table.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
