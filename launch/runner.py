"""Runs of a table or a comparison: so many at a time, each with a log, watched, stopped and timed.

Where a run is trained is said by ``start``: in a process of its own (``process_run``) or in a warm one
(``launch.warm``). What ended how, and after how long, is kept in ``times.jsonl`` beside the runs.

Invariants (``tests/launch/test_table.py``, ``test_warm.py``):

1. A run that waits for another's warm start begins when that stands, and not before.
2. A finished run of the same configuration is kept; one of another configuration is refused, with the keys named.
3. Interrupted, every running run is asked once to save, and waited for.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from megatron_ext.config.compose import ConfigError
from megatron_ext.config.saved import load_resolved
from megatron_ext.config.schema import Config
from megatron_ext.tracking.jsonl import FILE_NAME, read_metrics
from megatron_ext.training.folder import MAY_CHANGE, differing
from megatron_ext.training.interrupt import InterruptFlag

TIMES = "times.jsonl"
LOOK_EVERY_S = 0.5
STOP_WITHIN_S = 120.0
INTERRUPTED = 130  # exit status of a run that saved and stopped


@dataclass(frozen=True)
class Job:
    """One run. ``argv`` composes its ``config``; ``after`` is the run whose warm start it shares."""

    name: str
    argv: tuple[str, ...]
    config: Config
    after: str | None

    @property
    def run(self) -> Path:
        return Path(self.config.run.root) / self.config.run.name


class Running(Protocol):
    """A run under way."""

    def poll(self) -> int | None:
        """Exit status once it has ended, as ``launch.train`` has it."""
        ...

    def stop(self) -> None:
        """Asks it to save and stop; called once."""
        ...

    def kill(self) -> None: ...


Start = Callable[[Job, Path], Running]  # the run and the file that takes its output


class ProcessRun:
    """A run in a process of its own, out of the terminal's process group: Ctrl-C reaches this process, which tells
    each run once."""

    def __init__(self, argv: Sequence[str], log: Path) -> None:
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "launch.train", *argv],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                process_group=0,
            )

    def poll(self) -> int | None:
        return self._process.poll()

    def stop(self) -> None:
        self._process.terminate()

    def kill(self) -> None:
        self._process.kill()


def process_run(job: Job, log: Path) -> Running:
    """``Start`` of a run in a process of its own."""
    return ProcessRun(job.argv, log)


def finished(job: Job) -> bool:
    """Whether the run has its result, under the configuration that is asked for. Raises ``ConfigError`` for a folder
    that another configuration left."""
    if not (job.run / "config.yaml").is_file():
        return False
    old, new = load_resolved(job.run / "config.yaml"), job.config
    if other := differing(old, new, MAY_CHANGE):
        raise ConfigError(
            [f"{job.run} holds a run of another configuration: {'; '.join(other)}; remove it, or use another --root"]
        )
    result = job.run / "result.json"
    if not result.is_file():
        return False
    value = json.loads(result.read_text())
    same = (old.run.steps, old.run.max_minutes) == (new.run.steps, new.run.max_minutes)
    return same and not value["interrupted"] and value["success_after"] is not None


def progress_bars() -> Progress:
    """Bars on stderr, one a running run."""
    return Progress(
        TextColumn("{task.description:<16}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[note]}"),
        console=Console(stderr=True),
    )


def say(progress: Progress, text: str) -> None:
    progress.console.print(text, highlight=False, soft_wrap=True, markup=False)


def minutes(folder: Path, name: str) -> float | None:
    """Minutes of everything that the run took, set-up and evaluations included; None when it was not run here."""
    times = folder / TIMES
    spent = [json.loads(line) for line in times.read_text().splitlines()] if times.exists() else []
    seconds = [float(line["seconds"]) for line in spent if line["run"] == name]
    return sum(seconds) / 60 if seconds else None


@dataclass
class _Active:
    running: Running
    job: Job
    began: float
    task: TaskID


class Runner:
    """Runs jobs, ``at_once`` at a time, each with a log in ``folder/logs``; what did not end well is in ``failed``."""

    def __init__(
        self,
        folder: Path,
        jobs: Sequence[Job],
        at_once: int,
        progress: Progress,
        flag: InterruptFlag,
        start: Start = process_run,
    ) -> None:
        self._folder, self._at_once, self._progress, self._flag = folder, at_once, progress, flag
        self._start_run = start
        self._waiting = list(jobs)
        self._active: list[_Active] = []
        self.failed: list[str] = []
        (folder / "logs").mkdir(parents=True, exist_ok=True)

    def log_of(self, job: Job) -> Path:
        return self._folder / "logs" / f"{job.name}.log"

    def run(self) -> None:
        """Returns when every job has ended. Raises ``Interrupted``, after the running ones have saved and stopped."""
        try:
            while self._waiting or self._active:
                self._flag.check()
                while len(self._active) < self._at_once and (job := self._next()):
                    self._start(job)
                self._collect()
                time.sleep(LOOK_EVERY_S if self._active else 0.0)
        finally:
            self._stop()

    def _next(self) -> Job | None:
        """The first job that can start."""
        names = {job.name for job in self._waiting} | {active.job.name for active in self._active}
        for job in self._waiting:
            started = (
                job.after is None or job.after not in names or (job.run.parent / job.after / "warm_start.json").exists()
            )
            if started:
                self._waiting.remove(job)
                return job
        return None

    def _start(self, job: Job) -> None:
        log = self.log_of(job)
        running = self._start_run(job, log)
        say(self._progress, f"{job.name}: started, log {log}")
        task = self._progress.add_task(job.name, total=job.config.run.steps, note="starting")
        self._active.append(_Active(running, job, time.monotonic(), task))

    def _collect(self) -> None:
        for active in list(self._active):
            code = active.running.poll()
            if code is None:
                self._show(active)
            else:
                self._active.remove(active)
                self._end(active, code)

    def _end(self, active: _Active, code: int) -> None:
        job, seconds = active.job, time.monotonic() - active.began
        with (self._folder / TIMES).open("a") as times:
            times.write(json.dumps({"run": job.name, "seconds": round(seconds, 1), "exit": code}) + "\n")
        self._progress.remove_task(active.task)
        if code == 0:
            said = "finished"
        else:
            how = "was interrupted" if code == INTERRUPTED else f"failed with exit status {code}"
            said = f"{how}, see {self.log_of(job)}"
            self.failed.append(f"{job.name} {said}")
        say(self._progress, f"{job.name}: {said} ({seconds / 60:.1f} min)")

    def _show(self, active: _Active) -> None:
        path = active.job.run / FILE_NAME
        rows = read_metrics(path) if path.exists() else []
        if rows:
            last = rows[-1]
            note = f"success {last['reward/success']:.2f}" if "reward/success" in last else ""
            self._progress.update(active.task, completed=last["step"], note=note)

    def _stop(self) -> None:
        for active in self._active:
            active.running.stop()
        until = time.monotonic() + STOP_WITHIN_S
        while self._active and time.monotonic() < until:
            self._collect()
            time.sleep(0.1 if self._active else 0.0)
        for active in self._active:
            active.running.kill()
            say(self._progress, f"{active.job.name}: did not stop in {STOP_WITHIN_S:.0f} s, killed")
        self._active.clear()
