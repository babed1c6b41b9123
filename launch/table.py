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
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from launch.errors import show
from launch.prepare import missing_packages, prepare
from launch.table_report import arm_name, markdown, plot, read_arm, table
from megatron_ext.config.compose import ConfigError
from megatron_ext.config.saved import load_resolved
from megatron_ext.config.schema import Config
from megatron_ext.tracking.jsonl import FILE_NAME, read_metrics
from megatron_ext.training.interrupt import Interrupted, InterruptFlag

TIMES = "times.jsonl"
LOOK_EVERY_S = 0.5
STOP_WITHIN_S = 120.0
INTERRUPTED = 130  # exit status of a run that saved and stopped


@dataclass(frozen=True)
class Job:
    """One run of the table. ``after`` is the run whose warm start it shares."""

    name: str
    argv: tuple[str, ...]
    config: Config
    after: str | None

    @property
    def run(self) -> Path:
        return Path(self.config.run.root) / self.config.run.name


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


def finished(job: Job) -> bool:
    """Whether the run has its result, under the configuration that is asked for."""
    result = job.run / "result.json"
    if not result.is_file():
        return False
    value = json.loads(result.read_text())
    old, new = load_resolved(job.run / "config.yaml"), job.config
    same = (old.run.steps, old.run.max_minutes) == (new.run.steps, new.run.max_minutes)
    return same and not value["interrupted"] and value["success_after"] is not None


class Runner:
    """Runs jobs, so many at a time, each with a log in ``folder/logs``; what ended how is in ``failed``."""

    def __init__(
        self, folder: Path, jobs: Sequence[Job], at_once: int, progress: Progress, flag: InterruptFlag
    ) -> None:
        self._folder, self._at_once, self._progress, self._flag = folder, at_once, progress, flag
        self._waiting = list(jobs)
        self._running: dict[subprocess.Popen[bytes], tuple[Job, float, IO[bytes], TaskID]] = {}
        self.failed: list[str] = []
        (folder / "logs").mkdir(parents=True, exist_ok=True)

    def log_of(self, job: Job) -> Path:
        return self._folder / "logs" / f"{job.name}.log"

    def run(self) -> None:
        """Returns when every job has ended. Raises ``Interrupted``, after the running ones have saved and stopped."""
        try:
            while self._waiting or self._running:
                self._flag.check()
                while len(self._running) < self._at_once and (job := self._next()):
                    self._start(job)
                self._collect()
                time.sleep(LOOK_EVERY_S if self._running else 0.0)
        finally:
            self._stop()

    def _next(self) -> Job | None:
        """The first job that can start: a control waits for its seed's warm start."""
        names = {job.name for job in self._waiting} | {job.name for job, *_ in self._running.values()}
        for job in self._waiting:
            started = (
                job.after is None or job.after not in names or (job.run.parent / job.after / "warm_start.json").exists()
            )
            if started:
                self._waiting.remove(job)
                return job
        return None

    def _start(self, job: Job) -> None:
        log = self.log_of(job).open("ab")
        # Out of the terminal's process group: Ctrl-C reaches this process, which tells each run once.
        process = subprocess.Popen(
            [sys.executable, "-m", "launch.train", *job.argv],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            process_group=0,
        )
        self._progress.console.print(f"{job.name}: started, log {self.log_of(job)}", highlight=False, soft_wrap=True)
        task = self._progress.add_task(job.name, total=job.config.run.steps, note="warm start")
        self._running[process] = (job, time.monotonic(), log, task)

    def _collect(self) -> None:
        for process, (job, began, log, task) in list(self._running.items()):
            code = process.poll()
            if code is None:
                self._show(job, task)
                continue
            log.close()
            del self._running[process]
            seconds = time.monotonic() - began
            with (self._folder / TIMES).open("a") as times:
                times.write(json.dumps({"run": job.name, "seconds": round(seconds, 1), "exit": code}) + "\n")
            self._progress.remove_task(task)
            if code == 0:
                said = "finished"
            else:
                how = "was interrupted" if code == INTERRUPTED else f"failed with exit status {code}"
                said = f"{how}, see {self.log_of(job)}"
                self.failed.append(f"{job.name} {said}")
            self._progress.console.print(
                f"{job.name}: {said} ({seconds / 60:.1f} min)", highlight=False, soft_wrap=True
            )

    def _show(self, job: Job, task: TaskID) -> None:
        path = job.run / FILE_NAME
        rows = read_metrics(path) if path.exists() else []
        if rows:
            last = rows[-1]
            note = f"success {last['reward/success']:.2f}" if "reward/success" in last else ""
            self._progress.update(task, completed=last["step"], note=note)

    def _stop(self) -> None:
        for process in self._running:
            process.terminate()
        for process, (job, *_) in self._running.items():
            try:
                process.wait(STOP_WITHIN_S)
            except subprocess.TimeoutExpired:
                process.kill()
                self._progress.console.print(f"{job.name}: did not stop in {STOP_WITHIN_S:.0f} s, killed")
        if self._running:
            self._collect()


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
    except ConfigError as error:
        return show(error)

    progress = Progress(
        TextColumn("{task.description:<16}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[note]}"),
        console=Console(stderr=True),
    )
    todo = [job for job in jobs if not finished(job)]
    for job in jobs:
        if job not in todo:
            progress.console.print(f"{job.name}: finished before, kept", highlight=False)
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

    times = folder / TIMES
    spent = [json.loads(line) for line in times.read_text().splitlines()] if times.exists() else []
    try:
        arms = [
            read_arm(job.run, job.config.run.seed, job.config.control.permute_rewards, _minutes(spent, job.name))
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


def _minutes(spent: Sequence[dict[str, float | str]], name: str) -> float | None:
    """Minutes of all processes of the run; None when the table did not run it."""
    seconds = [float(line["seconds"]) for line in spent if line["run"] == name]
    return sum(seconds) / 60 if seconds else None


if __name__ == "__main__":
    sys.exit(main())
