"""A comparison as a picture: success while training and held-out, and below a small panel for each metric that the
comparison names.

Invariants (``tests/launch/test_compare_figure.py``):

1. Every metric of ``over_steps`` and ``counters`` that some arm logged has one panel, in that order; one that is the
   same in every arm and step, or a share that is next to nothing everywhere, is told in a line instead.
2. A panel's title is what the comparison says of the metric; its axis says the unit and which direction is better.
3. An arm has the same colour and dashes everywhere, and one entry in the one legend.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from launch.compare_report import ArmRuns, Compared
from launch.comparison import Comparison
from megatron_ext.report.numbers import number
from megatron_ext.report.series import Series, over_seeds, smooth
from megatron_ext.tracking.names import NEITHER, SHARE, lookup

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = ("#1f77b4", "#d95f02", "#2ca02c", "#9467bd", "#8c564b", "#17becf")
SOLID: tuple[float, tuple[float, ...]] = (0, ())
DASHES = (SOLID, (0, (5, 1.2)), (0, (1.5, 1.2)), (0, (6, 1.2, 1.5, 1.2)))  # on and off, in widths of the line
BASELINE = "#7f8790"
SMOOTH = 5  # steps of the curves' running mean
CURVE = "reward/success"
WIDTH, TOP = 15.5, 4.4  # inches of the figure, and of the height of its first row
COLUMNS, PANEL = 4, 2.75  # panels in a row, and inches of the height of each
LINE = 0.26  # inches of the height of a line of text
SMALL = 1e-3  # a share that stays below it everywhere is told, not drawn


@dataclass(frozen=True)
class Look:
    """How an arm is drawn, everywhere."""

    colour: str
    dashes: tuple[float, tuple[float, ...]]
    label: str


def looks(comparison: Comparison, arms: Sequence[ArmRuns]) -> dict[str, Look]:
    """Of each arm, in the arms' order: the baseline grey and solid, the others coloured, dashed from the second on so
    that curves that coincide are both seen."""
    found, others = {}, 0
    for arm in arms:
        name = arm.arm.name
        label = name if arm.arm.title == name else f"{name}: {arm.arm.title}"
        if name == comparison.baseline:
            found[name] = Look(BASELINE, SOLID, label)
        else:
            found[name] = Look(COLOURS[others % len(COLOURS)], DASHES[others % len(DASHES)], label)
            others += 1
    return found


def curves(arm: ArmRuns, metric: str) -> list[Series]:
    """The metric of each of an arm's runs that logged a finite value of it, smoothed."""
    logged = [run.series[metric] for run in arm.runs if metric in run.series]
    return [smooth(series, SMOOTH) for series in logged if np.isfinite(series.values).any()]


def metrics(comparison: Comparison, arms: Sequence[ArmRuns]) -> tuple[dict[str, str], list[str]]:
    """Metric -> words of those that get a panel, and a line for each of those that never differ."""
    shown: dict[str, str] = {}
    same: list[str] = []
    for name, words in {**comparison.over_steps, **comparison.counters}.items():
        found = [series.values for arm in arms for series in curves(arm, name)]
        values = np.concatenate([np.zeros(0), *found])
        values = values[np.isfinite(values)]
        if not len(values):
            continue
        most = float(np.abs(values).max())
        if np.ptp(values) <= 1e-9 * most:
            same.append(f"Not drawn: {words}: {number(float(values[0]))} in every arm and step")
        elif lookup(name).unit == SHARE and most < SMALL:
            same.append(f"Not drawn: {words}: at most {number(most, 2)} in any arm and step")
        else:
            shown[name] = words
    return shown, same


def axis_title(metric: str) -> str:
    """The metric's unit, and which direction is better where one is."""
    entry = lookup(metric)
    unit = "" if entry.unit == "of the counter" else entry.unit
    better = "" if entry.better == NEITHER else f"{entry.better} is better"
    return ", ".join(part for part in (unit, better) if part)


def draw(made: Compared, arms: Sequence[ArmRuns], path: Path) -> None:
    """Writes the figure as a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.lines import Line2D

    comparison, styles = made.comparison, looks(made.comparison, arms)
    shown, same = metrics(comparison, arms)
    columns = min(COLUMNS, max(len(shown), 1))
    rows = -(-len(shown) // columns)
    labels = [one.label for one in styles.values()]
    in_a_row = 1 if max(map(len, labels)) > 70 else 2 if max(map(len, labels)) > 45 else 3
    heights = [TOP, LINE * (1 + -(-len(labels) // in_a_row)), PANEL * rows, LINE * len(same)]
    figure = pyplot.figure(figsize=(WIDTH, sum(heights)), layout="constrained")
    outer = figure.add_gridspec(4, 1, height_ratios=[max(height, 0.01) for height in heights])
    above = outer[0].subgridspec(1, 2, width_ratios=(6.5, min(3.5 + 1.2 * len(arms), 9.0)))
    _training(figure.add_subplot(above[0]), comparison, arms, styles)
    _held_out(figure.add_subplot(above[1]), made, styles)
    handles = [Line2D([], [], color=one.colour, linestyle=one.dashes, linewidth=2.2) for one in styles.values()]
    key = figure.add_subplot(outer[1])
    key.set_axis_off()
    key.legend(handles, labels, loc="center", ncols=in_a_row, frameon=False, handlelength=3.2, borderaxespad=0)
    if rows:
        below = outer[2].subgridspec(rows, columns)
        for at, (metric, words) in enumerate(shown.items()):
            axes = figure.add_subplot(below[at // columns, at % columns])
            _panel(axes, metric, words, comparison, arms, styles)
            axes.set_xlabel("step" if at + columns >= len(shown) else "")
    if same:
        note = figure.add_subplot(outer[3])
        note.set_axis_off()
        note.text(0, 0.5, "\n".join(same), va="center", fontsize=9.5, transform=note.transAxes)
    figure.suptitle(comparison.slug + (f": {comparison.title}" if comparison.title else ""))
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def _training(axes: Axes, comparison: Comparison, arms: Sequence[ArmRuns], styles: Mapping[str, Look]) -> None:
    """Success of the sampled training episodes, each run faintly."""
    _curves(axes, CURVE, comparison.baseline, arms, styles, each=True)
    count = len(comparison.seeds)
    band = {1: "", 2: "; band: from one seed to the other"}.get(count, f"; band: 95 % over {count} seeds")
    axes.set(ylabel="success of sampled training episodes", ylim=(0, 1.1), xlabel="step")
    axes.set_title(f"While training (all curves: mean of the last {SMOOTH} steps{band})", fontsize=11)


def _panel(
    axes: Axes, metric: str, words: str, comparison: Comparison, arms: Sequence[ArmRuns], styles: Mapping[str, Look]
) -> None:
    values = _curves(axes, metric, comparison.baseline, arms, styles)
    # A band may be far wider than the runs that it is of (an interval over three seeds): it does not stretch the axis.
    low, high = float(values.min()), float(values.max())
    axes.set_ylim(low - 0.08 * (high - low), high + 0.08 * (high - low))
    axes.set_title(fill(f"{words[:1].upper()}{words[1:]}", 46), fontsize=9.5)
    axes.set_ylabel(axis_title(metric), fontsize=8.5)
    axes.tick_params(labelsize=8)


def _curves(
    axes: Axes,
    metric: str,
    baseline: str,
    arms: Sequence[ArmRuns],
    styles: Mapping[str, Look],
    each: bool = False,
) -> NDArray[np.float64]:
    """Draws each arm's mean over seeds with its band, and with ``each`` every run; the baseline lies below the others.
    Returns the values of all runs, which the axis must hold."""
    from matplotlib.ticker import MaxNLocator

    held = [np.zeros(0)]
    for arm in sorted(arms, key=lambda arm: arm.arm.name != baseline):
        series, style = curves(arm, metric), styles[arm.arm.name]
        if not series:
            continue
        mean, low, high = over_seeds(series)
        if lookup(metric).unit == SHARE:  # an interval of shares ends where they do
            low, high = np.clip(low, 0, 1), np.clip(high, 0, 1)
        if len(series) > 1:
            axes.fill_between(mean.steps, low, high, color=style.colour, alpha=0.15, linewidth=0)
        for one in series if each and len(series) > 1 else ():
            axes.plot(one.steps, one.values, color=style.colour, alpha=0.35, linewidth=0.7)
        axes.plot(mean.steps, mean.values, color=style.colour, linestyle=style.dashes, linewidth=2.0)
        held += [one.values[np.isfinite(one.values)] for one in series]
    last = max(run.steps for arm in arms for run in arm.runs)
    axes.set_xlim(1 - 0.04 * last, 1.04 * last)  # the same for every metric
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.25)
    return np.concatenate(held)


def _held_out(axes: Axes, made: Compared, styles: Mapping[str, Look]) -> None:
    """Success on held-out tasks, a bar an arm."""
    kinds = [("greedy", 1.0)] + ([("sampled", 0.45)] if any(r.sampled_after for r in made.rows) else [])
    width = 0.8 / len(kinds)
    for position, row in enumerate(made.rows):
        for number_, (kind, alpha) in enumerate(kinds):
            after = row.greedy_after if kind == "greedy" else row.sampled_after
            before = row.greedy_before if kind == "greedy" else row.sampled_before
            if after is None:
                continue
            at = position + (number_ - (len(kinds) - 1) / 2) * width
            error = [[after.mean - after.low], [after.high - after.mean]]
            axes.bar(at, after.mean, width * 0.9, color=styles[row.name].colour, alpha=alpha, yerr=error, capsize=3)
            if before is not None:
                ends = (at - width * 0.45, at + width * 0.45)
                axes.plot(ends, (before.mean, before.mean), color="black", linewidth=1.2, linestyle=(0, (3, 2)))
            axes.text(at, after.high + 0.015, f"{after.mean:.2f}", ha="center", va="bottom", fontsize=8)
    axes.set_xticks(range(len(made.rows)), [row.name for row in made.rows])
    shown = " and sampled (pale)" if len(kinds) > 1 else ""
    axes.set(ylabel="success", ylim=(0, 1.1))
    axes.set_title(f"On {made.tasks} held-out tasks: greedy{shown}; dashed: before", fontsize=11)
    axes.grid(axis="y", alpha=0.25)
    axes.set_axisbelow(True)
