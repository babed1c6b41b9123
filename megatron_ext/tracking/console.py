"""Live progress on the terminal, plain lines elsewhere. Everything goes to stderr: stdout belongs to ``--json``.

Invariants (``tests/tracking/test_contract.py`` and ``test_console.py`` assert each):

1. On a terminal one block is redrawn in place: the phase with its bar, and a line of the last step's figures. Finished
   steps stay above it as one line each.
2. Without a terminal there is one line a step and one a phase that lasts longer than a step's (warm start, evaluation),
   and no control codes. A model with experts has a second line a step, of what its routers did.
3. The remaining time is the mean duration of the steps seen since the start, times the steps that are left.
4. What went wrong in a step without ending the run is one more line, a warning.
5. A step that trained nothing says so in its line, with how its groups came out; one whose groups were all generated
   before a resume has no speed of a rollout, and says where they come from.
6. What is said of a phase that goes on (a name of several words) is a line of its own, and the phase goes on.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn

# What a line shows, in order: metric, label, format. A metric that the step did not log is left out.
FIGURES = (
    ("reward/mean", "reward", "{:.3f}"),
    ("reward/success", "success", "{:.3f}"),
    ("rollout/turns_mean", "turns", "{:.1f}"),
    ("rollout/tokens_per_s", "rollout tok/s", "{:.0f}"),
    ("train/tokens_per_s", "train tok/s", "{:.0f}"),
    ("progress/tokens_per_s", "tok/s", "{:.0f}"),
    ("policy/entropy", "entropy in the update", "{:.3f}"),
    ("train/grad_norm", "grad", "{:.2f}"),
    ("warm_start/loss", "loss", "{:.3f}"),
    ("warm_start/success", "success", "{:.3f}"),
    ("time/step", "s", "{:.1f}"),
)
# The second line of a step, of a model with experts.
EXPERTS = (
    ("moe/load_cv", "load CV", "{:.2f}"),
    ("moe/load_peak", "peak", "{:.2f}"),
    ("moe/cold_fraction", "cold", "{:.2f}"),
    ("moe/load_entropy", "load entropy", "{:.3f}"),
    ("moe/token_jaccard", "Jaccard", "{:.2f}"),
    ("moe/op_mi", "op MI", "{:.3f}"),
    ("moe/disagreement", "rerouted", "{:.3f}"),
    ("moe/replayed_share", "replayed", "{:.3f}"),
    ("moe/router_change", "routers moved", "{:.2g}"),
)
GATE, GATE_ENTROPY = "moe/gate", "moe/gate_entropy"
KEPT = "filter/groups_kept"
SAMPLED, SPEED = "rollout/tokens", "rollout/tokens_per_s"
# Why a group was not kept: metric, how to say it.
DROPPED = (
    ("filter/groups_all_failure", "always failed"),
    ("filter/groups_all_success", "always succeeded"),
    ("filter/groups_untrainable", "had fewer than two trajectories to train on"),
)
# What went wrong in a step without ending the run, as one line behind its figures: metric, or a family of them, and
# how to say it. Counts of 0 are left out.
WARNINGS = (
    ("reward/missing/", "reward {name!r} is missing in {count:.0f} trajectories"),
    ("moe/unlabelled_batch", "no turn has the label that routing losses read (model.router.label)"),
    ("judge/failed", "{count:.0f} turns have no answer of a judge"),
    ("judge/unknown", "{count:.0f} answers of a judge have an unknown label"),
)
LONG_PHASES = frozenset({"warm_start", "evaluate", "save"})


def duration(seconds: float) -> str:
    """``m:ss``, or ``h:mm:ss`` from an hour on."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def nothing_trained(metrics: Mapping[str, float]) -> list[str]:
    """What the line of a step says first that kept no group; empty for any other."""
    if metrics.get(KEPT) != 0:
        return []
    why = [f"{metrics[name]:.0f} {said}" for name, said in DROPPED if metrics.get(name)]
    return ["no group kept, nothing trained" + (f" ({', '.join(why)})" if why else "")]


def of_step(metrics: Mapping[str, float]) -> list[str]:
    """The figures of a step's first line."""
    figures = []
    for name, label, shape in FIGURES:
        if name in metrics:
            figures.append(f"{label} {shape.format(metrics[name])}")
        elif name == SPEED and metrics.get(SAMPLED):
            figures.append("rollout from the store")
    return figures


def of_experts(metrics: Mapping[str, float]) -> list[str]:
    """The figures of a step's second line; empty where nothing was routed."""
    figures = [f"{label} {shape.format(metrics[name])}" for name, label, shape in EXPERTS if name in metrics]
    if GATE in metrics:
        entropy = f" at entropy {metrics[GATE_ENTROPY]:.3f} before the update" if GATE_ENTROPY in metrics else ""
        figures.append(f"gate {'open' if metrics[GATE] else 'closed'}{entropy}")
    return figures


class ConsoleTracker:
    """Shows a run as it goes. ``config["run"]["steps"]`` is the number of steps that the remaining time counts to.

    Args:
        stream: where to write; None = stderr.
        seconds_between_lines: without a terminal, how often a long phase reports its progress.
        clock: seconds; replaced in tests.
    """

    def __init__(
        self,
        stream: TextIO | None = None,
        seconds_between_lines: float = 15.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        file = sys.stderr if stream is None else stream
        # Said, not found out: rich would take FORCE_COLOR, which many CI systems set, for a terminal.
        self._console = Console(file=file, highlight=False, force_terminal=file.isatty())
        self._gap, self._clock = seconds_between_lines, clock
        self._live: Live | None = None
        self._progress: Progress | None = None
        self._task: TaskID | None = None
        self._phase, self._steps = "", 0
        self._total: int | None = None
        self._first: tuple[int, float] | None = None
        self._quiet_until = 0.0

    def start(self, run_dir: Path, config: Mapping[str, Any], resumed_from: int | None) -> None:
        self._steps = int(config["run"]["steps"])
        resumed = "" if resumed_from is None else f", resumed from step {resumed_from}"
        self._say(f"run {run_dir}{resumed}")
        if config.get("routers"):  # a model without experts has none
            self._say(f"routers: {config['routers']}")
        self._first = None if resumed_from is None else (resumed_from, self._clock())
        if self._console.is_terminal:
            self._progress = Progress(
                SpinnerColumn(),
                TextColumn("{task.description:<12}"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                TextColumn("{task.fields[note]}"),
                console=self._console,
            )
            self._live = Live(self._progress, console=self._console, refresh_per_second=8, transient=True)
            self._live.start()

    def phase(self, name: str, total: int | None = None) -> None:
        if " " in name:
            self._say(name)
            return
        self._phase, self._total = name, total
        if self._first is None and name == "rollout":
            self._first = (0, self._clock())
        if self._progress is not None:
            if self._task is not None:
                self._progress.remove_task(self._task)
            self._task = self._progress.add_task(name.replace("_", " "), total=total, note="")
        elif name in LONG_PHASES:
            self._say(name.replace("_", " ") + ("" if total is None else f": {total} to do"))
            self._quiet_until = self._clock() + self._gap

    def advance(self, done: int, note: str = "") -> None:
        if self._progress is not None and self._task is not None:
            self._progress.update(self._task, completed=done, note=note)
        elif self._phase in LONG_PHASES and self._clock() >= self._quiet_until:
            of = "" if self._total is None else f"/{self._total}"
            self._say(f"{self._phase.replace('_', ' ')} {done}{of} {note}".rstrip())
            self._quiet_until = self._clock() + self._gap

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        figures = of_step(metrics)
        figures += [
            f"{name.split('/')[1]} {name.split('/')[2]} {value:.3f}"
            for name, value in metrics.items()
            if name.startswith("eval/") and name.endswith(("greedy_pass1", "sampled_pass1"))
        ]
        at = f"step {step}/{self._steps}"
        if figures := [*nothing_trained(metrics), *figures]:
            self._say("  ".join([at, *figures, *self._remaining(step)]))
        if experts := of_experts(metrics):
            self._say("  ".join([at, "experts:", *experts]))
        troubles = [
            say.format(name=name.removeprefix(metric), count=value)
            for metric, say in WARNINGS
            for name, value in metrics.items()
            if value > 0 and (name == metric or (metric.endswith("/") and name.startswith(metric)))
        ]
        if troubles:
            self._say(f"warning: step {step}: {'; '.join(troubles)} (why: logs/driver.log)")

    def finish(self, summary: Mapping[str, Any]) -> None:
        if self._live is not None:
            self._live.stop()
        self._live = self._progress = self._task = None
        shown = [
            f"{key} {value:.3f}" if isinstance(value, float) else f"{key} {value}"
            for key, value in summary.items()
            if key != "hint" and value not in (None, "")
        ]
        if shown:  # without a result the run failed, and the error is told by whom it reaches
            self._say("finished: " + ", ".join(shown))

    def _remaining(self, step: int) -> list[str]:
        if self._first is None or not self._first[0] < step < self._steps:
            return []
        first, since = self._first
        return [f"ETA {duration((self._clock() - since) / (step - first) * (self._steps - step))}"]

    def _say(self, text: str) -> None:
        self._console.print(text, soft_wrap=True, markup=False)
