"""A comparison as a picture: success while training, a line an arm with its band over seeds, and held-out success."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from launch.compare_report import ArmRuns, Compared
from megatron_ext.report.series import over_seeds, smooth

COLOURS = ("#1f77b4", "#d95f02", "#2ca02c", "#9467bd", "#8c564b", "#17becf")
BASELINE = "#7f8790"
SMOOTH = 5  # steps of the curves' running mean
CURVE = "reward/success"


def draw(made: Compared, arms: Sequence[ArmRuns], path: Path) -> None:
    """Writes the figure as a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.ticker import MaxNLocator

    others = [arm.arm.name for arm in arms if arm.arm.name != made.comparison.baseline]
    colours = {name: COLOURS[number % len(COLOURS)] for number, name in enumerate(others)}
    colours[made.comparison.baseline] = BASELINE
    wide = min(3.5 + 1.2 * len(arms), 9.0)
    figure, (left, right) = pyplot.subplots(
        1, 2, figsize=(6.5 + wide, 4.6 + 0.12 * len(arms)), width_ratios=(6.5, wide), layout="constrained"
    )
    for arm in sorted(arms, key=lambda arm: arm.arm.name != made.comparison.baseline):  # the baseline lies below
        series = [smooth(run.series[CURVE], SMOOTH) for run in arm.runs if CURVE in run.series]
        if not series:
            continue
        colour, name = colours[arm.arm.name], arm.arm.name
        label = name if arm.arm.title == name else f"{name}: {arm.arm.title}"
        mean, low, high = over_seeds(series) if len(series) > 1 else (series[0], series[0].values, series[0].values)
        left.fill_between(mean.steps, np.clip(low, 0, 1), np.clip(high, 0, 1), color=colour, alpha=0.15, linewidth=0)
        for one in series if len(series) > 1 else []:
            left.plot(one.steps, one.values, color=colour, alpha=0.35, linewidth=0.7)
        left.plot(mean.steps, mean.values, color=colour, linewidth=2.0, label=label)
    count = len(made.comparison.seeds)
    band = {1: "", 2: "; band: from one seed to the other"}.get(count, f"; band: 95 % over {count} seeds")
    left.set(
        xlabel="step",
        ylabel="success of sampled training episodes",
        ylim=(0, 1.1),
        title=f"While training (mean of the last {SMOOTH} steps{band})",
    )
    left.title.set_fontsize(11)
    left.xaxis.set_major_locator(MaxNLocator(integer=True))
    left.grid(alpha=0.25)

    kinds = [("greedy", 1.0)] + ([("sampled", 0.45)] if any(r.sampled_after for r in made.rows) else [])
    width = 0.8 / len(kinds)
    for position, row in enumerate(made.rows):
        for number, (kind, alpha) in enumerate(kinds):
            after = row.greedy_after if kind == "greedy" else row.sampled_after
            before = row.greedy_before if kind == "greedy" else row.sampled_before
            if after is None:
                continue
            at = position + (number - (len(kinds) - 1) / 2) * width
            error = [[after.mean - after.low], [after.high - after.mean]]
            right.bar(at, after.mean, width * 0.9, color=colours[row.name], alpha=alpha, yerr=error, capsize=3)
            if before is not None:
                ends = (at - width * 0.45, at + width * 0.45)
                right.plot(ends, (before.mean, before.mean), color="black", linewidth=1.2, linestyle=(0, (3, 2)))
            right.text(at, after.high + 0.015, f"{after.mean:.2f}", ha="center", va="bottom", fontsize=8)
    right.set_xticks(range(len(made.rows)), [row.name for row in made.rows])
    shown = " and sampled (pale)" if len(kinds) > 1 else ""
    right.set(
        ylabel="success",
        ylim=(0, 1.1),
        title=f"On {made.tasks} held-out tasks: greedy{shown}; dashed: before",
    )
    right.title.set_fontsize(11)
    right.grid(axis="y", alpha=0.25)
    right.set_axisbelow(True)
    if left.lines:
        handles = dict(zip(*reversed(left.get_legend_handles_labels()), strict=True))
        labels = sorted(handles, key=lambda label: [row.name for row in made.rows].index(label.split(":")[0]))
        columns = 1 if len(labels) > 4 and max(map(len, labels)) > 50 else 2
        figure.legend(
            [handles[label] for label in labels], labels, loc="outside lower left", ncols=columns, frameon=False
        )
    figure.suptitle(made.comparison.slug + (f": {made.comparison.title}" if made.comparison.title else ""))
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
