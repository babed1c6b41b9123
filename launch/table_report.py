"""The learning table of several runs: rows, means, markdown and a plot, from what the runs kept. No training stack.

Invariant (``tests/launch/test_table.py``): before and after are greedy success on the same held-out tasks, and a gain's
interval is paired over them; runs that were not evaluated on the same tasks make no table.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np

from megatron_ext.config.compose import ConfigError
from megatron_ext.report.series import running_mean
from megatron_ext.tracking.jsonl import FILE_NAME, read_metrics
from megatron_ext.training.evaluation import EvalResult, Interval, paired_interval

SEED_COLOURS = ("#1f77b4", "#2ca02c", "#9467bd", "#17becf", "#8c564b", "#bcbd22")
CONTROL_COLOUR = "#d62728"
SMOOTH = 5  # steps of the curves' running mean


def arm_name(seed: int, control: bool) -> str:
    return f"seed_{seed}" + ("_control" if control else "")


@dataclass(frozen=True, eq=False)
class Arm:
    """One finished run. ``curve`` is (step, success of the step's trajectories); ``minutes`` None: not known."""

    seed: int
    control: bool
    before: EvalResult
    after: EvalResult
    curve: tuple[tuple[int, float], ...]
    steps: int
    minutes: float | None

    @property
    def gain(self) -> Interval:
        return paired_interval(self.before.greedy, self.after.greedy)


@dataclass(frozen=True)
class Row:
    """A seed's line. Success is greedy pass@1 on held-out tasks, ``sampled_*`` at the evaluation's temperature."""

    seed: int
    before: float
    after: float
    gain: float
    gain_low: float
    gain_high: float
    sampled_before: float | None
    sampled_after: float | None
    control_gain: float | None
    control_low: float | None
    control_high: float | None
    control_sampled_after: float | None
    steps: int
    minutes: float | None


@dataclass(frozen=True)
class Table:
    recipe: str
    overrides: tuple[str, ...]
    tasks: int
    rows: tuple[Row, ...]

    def mean(self, name: str) -> float | None:
        """Mean of a column over seeds; None when a seed has no value."""
        values = [getattr(row, name) for row in self.rows]
        return None if any(v is None for v in values) else mean(values)

    def as_json(self) -> dict[str, Any]:
        names = [name for name in asdict(self.rows[0]) if name not in ("seed", "gain_low", "gain_high")]
        names = [name for name in names if not name.startswith(("control_low", "control_high"))]
        return {
            "recipe": self.recipe,
            "overrides": list(self.overrides),
            "tasks": self.tasks,
            "rows": [asdict(row) for row in self.rows],
            "mean": {name: self.mean(name) for name in names},
        }


def read_arm(run: Path, seed: int, control: bool, minutes: float | None) -> Arm:
    """A finished run's evaluations and curve."""
    # Imported late: what plays evaluations loads the training stack, what reads them does not need it.
    from megatron_ext.training.evaluate import load_result

    metrics = read_metrics(run / FILE_NAME)
    curve = tuple((row["step"], row["reward/success"]) for row in metrics if row.get("reward/success") is not None)
    steps = int(json.loads((run / "result.json").read_text())["steps"])
    before, after = (load_result(run / "evaluations" / f"{name}.json") for name in ("before", "after"))
    if before.tasks != after.tasks:
        raise ConfigError([f"{run}: before and after were measured on different tasks"])
    return Arm(seed, control, before, after, curve, steps, minutes)


def table(recipe: str, overrides: Sequence[str], arms: Sequence[Arm]) -> Table:
    """A row a seed. Raises ``ConfigError`` when the runs were evaluated on different tasks."""
    if any(arm.before.tasks != arms[0].before.tasks for arm in arms):
        raise ConfigError(["the runs were evaluated on different tasks: start the table in another --root"])
    controls = {arm.seed: arm for arm in arms if arm.control}
    rows = []
    for arm in arms:
        if arm.control:
            continue
        gain, twin = arm.gain, controls.get(arm.seed)
        control = None if twin is None else twin.gain
        rows.append(
            Row(
                seed=arm.seed,
                before=float(arm.before.greedy.mean()),
                after=float(arm.after.greedy.mean()),
                gain=gain.mean,
                gain_low=gain.low,
                gain_high=gain.high,
                sampled_before=_sampled(arm.before),
                sampled_after=_sampled(arm.after),
                control_gain=None if control is None else control.mean,
                control_low=None if control is None else control.low,
                control_high=None if control is None else control.high,
                control_sampled_after=None if twin is None else _sampled(twin.after),
                steps=arm.steps,
                minutes=arm.minutes,
            )
        )
    return Table(recipe, tuple(overrides), len(arms[0].before.tasks), tuple(rows))


def _sampled(result: EvalResult) -> float | None:
    return float(result.sampled.mean()) if result.sampled.size else None


def markdown(made: Table) -> str:
    """The table as GitHub reads it."""

    def number(value: float | None, shape: str = "{:.3f}") -> str:
        return "-" if value is None else shape.format(value)

    def signed(value: float | None, low: float | None = None, high: float | None = None) -> str:
        interval = "" if low is None or high is None else f" [{low:+.3f}, {high:+.3f}]"
        return number(value, "{:+.3f}") + interval

    control = any(row.control_gain is not None for row in made.rows)
    header = ["seed", "before", "after", "gain [95 %]"]
    header += ["control gain [95 %]"] if control else []
    # Greedy success jumps when the policy is near a tie; sampled success beside it shows how far the policy moved.
    header += ["sampled before", "sampled after"] + (["control sampled after"] if control else [])
    header += ["steps", "minutes"]
    lines = []
    for row in made.rows:
        cells = [str(row.seed), number(row.before), number(row.after), signed(row.gain, row.gain_low, row.gain_high)]
        cells += [signed(row.control_gain, row.control_low, row.control_high)] if control else []
        cells += [number(row.sampled_before), number(row.sampled_after)]
        cells += [number(row.control_sampled_after)] if control else []
        cells += [str(row.steps), number(row.minutes, "{:.1f}")]
        lines.append(cells)
    if len(made.rows) > 1:
        cells = ["mean", number(made.mean("before")), number(made.mean("after")), signed(made.mean("gain"))]
        cells += [signed(made.mean("control_gain"))] if control else []
        cells += [number(made.mean("sampled_before")), number(made.mean("sampled_after"))]
        cells += [number(made.mean("control_sampled_after"))] if control else []
        lines.append([*cells, number(made.mean("steps"), "{:.0f}"), number(made.mean("minutes"), "{:.1f}")])
    said = "Greedy success on held-out tasks"
    note = f"`recipe={made.recipe}`{''.join(f' `{a}`' for a in made.overrides if not a.startswith('recipe='))}"
    return f"{said} ({made.tasks} of them), {note}:\n\n" + aligned(header, lines) + "\n"


def aligned(header: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """A table as GitHub reads it, its columns aligned to the right in the source too."""
    widths = [max(len(line[column]) for line in [header, *lines]) for column in range(len(header))]
    body = [
        "| " + " | ".join(c.rjust(w) for c, w in zip(line, widths, strict=True)) + " |" for line in [header, *lines]
    ]
    body.insert(1, "|" + "|".join("-" * (w + 1) + ":" for w in widths) + "|")
    return "\n".join(body)


def plot(made: Table, arms: Sequence[Arm], path: Path) -> None:
    """Success over steps, a line a run, and held-out success before and after, as a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(12, 4.5), width_ratios=(3, 2), layout="constrained")
    seeds = [row.seed for row in made.rows]
    colours = {seed: SEED_COLOURS[number % len(SEED_COLOURS)] for number, seed in enumerate(seeds)}
    told = False
    for arm in sorted(arms, key=lambda arm: arm.control):
        if not arm.curve:
            continue
        steps, success = np.array([s for s, _ in arm.curve]), np.array([v for _, v in arm.curve])
        colour = CONTROL_COLOUR if arm.control else colours[arm.seed]
        label = None if arm.control and told else "control (rewards permuted)" if arm.control else f"seed {arm.seed}"
        told = told or arm.control
        left.plot(steps, success, color=colour, alpha=0.2, linewidth=0.8)
        left.plot(steps, running_mean(success, SMOOTH), color=colour, linewidth=1.8, label=label)
    left.set(
        xlabel="step",
        ylabel="success of sampled training episodes",
        ylim=(0, 1),
        title=f"While training (mean of the last {SMOOTH} steps)",
    )
    left.grid(alpha=0.25)
    if left.lines:
        left.legend(loc="upper left", frameon=False)

    bars = [("before", "#b0b7c0"), ("after", "")]
    if any(arm.control for arm in arms):
        bars.append(("control after", CONTROL_COLOUR))
    width = 0.8 / len(bars)
    controls = {arm.seed: arm for arm in arms if arm.control}
    for position, arm in enumerate(arm for arm in arms if not arm.control):
        for number, (what, colour) in enumerate(bars):
            source = controls.get(arm.seed) if what == "control after" else arm
            if source is None:
                continue
            interval = (source.before if what == "before" else source.after).greedy_interval()
            at = position + (number - (len(bars) - 1) / 2) * width
            error = [[interval.mean - interval.low], [interval.high - interval.mean]]
            right.bar(at, interval.mean, width * 0.92, color=colour or colours[arm.seed], yerr=error, capsize=3)
            right.text(at, interval.high + 0.015, f"{interval.mean:.2f}", ha="center", va="bottom", fontsize=8)
    right.set_xticks(range(len(seeds)), [f"seed {seed}" for seed in seeds])
    right.set(
        ylabel="greedy success",
        ylim=(0, 1.08),
        title=f"On {made.tasks} held-out tasks: {', '.join(b for b, _ in bars)}",
    )
    right.grid(axis="y", alpha=0.25)
    right.set_axisbelow(True)
    figure.suptitle(f"recipe={made.recipe}")
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
