"""The charts of a report: which series each shows, drawn, and how they are read.

Invariants (``tests/report/test_chart_sections.py`` asserts each):

1. One run shows what it logged in its charts, and what no chart names folded away at the end. The only part of a
   reward is that reward and has no chart.
2. Several runs show one metric a chart, a line a group of seeds with its band; each chart once.
3. The note says what was done to the values: thinned, smoothed, joined over seeds, undone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np

from megatron_ext.moe.structured import StructuredRouter
from megatron_ext.report.charts import HOLE, PARTS, PHASES, SECTIONS, Section, Spec, hint, members, others
from megatron_ext.report.compare import Group
from megatron_ext.report.heat import heat_plot
from megatron_ext.report.numbers import counted, number
from megatron_ext.report.plot import POINTS, Line, Plot, line_plot, stack_plot
from megatron_ext.report.run_data import RunData
from megatron_ext.report.series import Curve, Series, band, smooth, thin
from megatron_ext.tracking.names import lookup

STEP_TIME = "time/step"
SMOOTH = 5  # values of the running mean under several runs, as in the learning table
SMOOTH_FROM = 2 * SMOOTH  # a curve of no more values than these is drawn as it is
REST = "Everything else that was logged"


@dataclass(frozen=True)
class ChartSection:
    title: str
    plots: tuple[Plot, ...]
    folded: bool = False


# -- one run --------------------------------------------------------------------------------------------------------
def single(run: RunData) -> list[ChartSection]:
    """The charts of one run; those of nothing that it logged are left out."""
    made = []
    for section in _sections(list(run.series)):
        plots = [plot for spec in section.charts if (plot := _chart(run, spec)) is not None]
        if plots:
            made.append(ChartSection(section.title, tuple(plots), folded=section.title == REST))
    return made


def single_note(run: RunData) -> str:
    """How to read the charts, where that is not plain."""
    said = []
    longest = max((len(series.steps) for series in run.series.values()), default=0)
    if longest > POINTS:
        said.append(
            f"Each point is the mean of about {longest / POINTS:.0f} steps, shaded from the lowest to the highest."
        )
    if run.resumes:
        said.append("A dotted line is where the run was resumed.")
    if any(resume.undone_to is not None for resume in run.resumes):
        said.append("Shaded behind it: steps of the earlier history that were undone and trained again.")
    return " ".join(said)


def _chart(run: RunData, spec: Spec) -> Plot | None:
    named = _named(run, spec)
    if not named or (len(named) == 1 and PARTS in spec.metrics):  # the only part is the reward
        return None
    lines = []
    for colour, (name, label) in enumerate(named):
        curve = thin(run.series[name], POINTS)
        ends = (spec.intervals or {}).get(name)
        if ends and all(end in run.series for end in ends):
            low, high = (thin(run.series[end], POINTS).mid for end in ends)
            curve = Curve(curve.steps, curve.mid, low, high, curve.bad)
        lines.append(Line(label, curve, colour, hint(name)))
    note = _unit(named[0][0])
    if PHASES in spec.metrics:
        lines.sort(key=lambda line: -float(line.curve.mid.sum()))
        return stack_plot(spec.title, lines, note=note, resumes=run.resumes)
    if spec.rows and len(lines) > 1:
        better = lookup(named[0][0]).better
        return heat_plot(spec.title, lines, note=f"{spec.rows}, a row a layer", better=better, ends=spec.ends)
    levels = _levels(run, spec)
    return line_plot(spec.title, lines, note=note, log=spec.log, share=spec.share, levels=levels, resumes=run.resumes)


def _named(run: RunData, spec: Spec) -> list[tuple[str, str]]:
    """The logged metrics of a chart, each with its label."""
    return [
        (name, _label(name, metric, label))
        for metric, label in spec.metrics.items()
        for name in members(metric, list(run.series))
    ]


# -- several runs ---------------------------------------------------------------------------------------------------
def compared(groups: Sequence[Group]) -> list[ChartSection]:
    """The charts of several runs, one a metric that any of them logged."""
    logged = sorted({name for group in groups for run in group.runs for name in run.series})
    made = []
    for section in _sections(logged):
        plots = []
        for spec in section.charts:
            if spec.rows:
                continue
            if PHASES in spec.metrics:
                plots.append(_overlay(groups, STEP_TIME, "Time of a step", spec))
                continue
            for metric, label in spec.metrics.items():
                for name in members(metric, logged):
                    said = _label(name, metric, label)
                    title = spec.title if len(spec.metrics) == 1 and label else f"{spec.title}: {said}"
                    plots.append(_overlay(groups, name, name if section.title == REST else title, spec))
        if plots:
            made.append(ChartSection(section.title, tuple(plots), folded=section.title == REST))
    return made


def compared_note(groups: Sequence[Group]) -> str:
    """How to read the charts of several runs."""
    most = max(len(group.runs) for group in groups)
    said = {
        1: "Each line is a run.",
        2: "Each line is the mean over the runs of a group; the band reaches from one to the other.",
    }.get(most, "Each line is the mean over the runs of a group; the band is the 95 % t interval of that mean.")
    lengths = [len(series.steps) for group in groups for run in group.runs for series in run.series.values()]
    if max(lengths, default=0) > SMOOTH_FROM:
        said += (
            f" Where a run logged a metric more than {SMOOTH_FROM} times, each value is the mean of its last {SMOOTH} "
            "(fewer at the start)."
        )
    return said


def _overlay(groups: Sequence[Group], name: str, title: str, spec: Spec) -> Plot:
    lines = []
    for number_, group in enumerate(groups):
        logged = [_step_time(run) if name == STEP_TIME else run.series.get(name) for run in group.runs]
        series = [_smoothed(s) for s in logged if s is not None]
        series = [s for s in series if np.isfinite(s.values).any()]
        if not series:
            continue
        faint = [thin(s, POINTS) for s in series]
        curve, faint = (band(series, POINTS), faint) if len(series) > 1 else (faint[0], [])
        said = f"{hint(name)}; {counted(len(series), 'run')}"
        lines.append(Line(group.label, curve, number_, said, faint, key=f"g{number_}"))
    everywhere = [_levels(run, spec) for group in groups for run in group.runs if name in run.series]
    levels = everywhere[0] if everywhere and all(found == everywhere[0] for found in everywhere) else ()
    return line_plot(title, lines, note=_unit(name), log=spec.log, share=spec.share, levels=levels)


def _step_time(run: RunData) -> Series | None:
    """All phases of a step together, as it was logged or else as their sum."""
    if STEP_TIME in run.series:
        return run.series[STEP_TIME]
    phases = [run.series[name] for name in members(PHASES, list(run.series))]
    if not phases:
        return None
    steps = np.unique(np.concatenate([phase.steps for phase in phases]))
    total = np.zeros(len(steps))
    for phase in phases:
        total[np.searchsorted(steps, phase.steps)] += phase.values
    return Series(steps, total)


def _smoothed(series: Series) -> Series:
    return smooth(series, SMOOTH) if len(series.steps) > SMOOTH_FROM else series


# -- what there is to show and to say -------------------------------------------------------------------------------
def _sections(logged: Sequence[str]) -> tuple[Section, ...]:
    """All sections, the last with the logged metrics that no chart names."""
    return (*SECTIONS, Section(REST, tuple(Spec(name, {name: ""}) for name in others(logged))))


def _label(name: str, metric: str, label: str) -> str:
    """What a line of a family is called: what the family leaves open, in the place of the label's hole."""
    return HOLE.sub(_short(name, metric), label) or _short(name, metric)


def _short(name: str, metric: str) -> str:
    """The parts of a name that its family leaves open; the whole name of one that is no family."""
    left_open = [part for part, hole in zip(name.split("/"), metric.split("/"), strict=True) if "<" in hole]
    return " ".join(left_open) or name


def _levels(run: RunData, spec: Spec) -> list[tuple[float, str]]:
    """Values of the router policy that a chart shows, with what they say."""
    node = run.config.model.router
    plain = str(node.get("_target_", "")).endswith(f".{StructuredRouter.__name__}")
    known = {f.name: f.default for f in fields(StructuredRouter)} if plain else {}
    given = {name: (known | dict(node)).get(name) for name in spec.levels or {}}
    return [
        (float(value), f"{(spec.levels or {})[name]} {number(float(value))}")
        for name, value in given.items()
        if isinstance(value, int | float)
    ]


def _unit(name: str) -> str:
    unit = lookup(name).unit
    return {"s": "seconds", **dict.fromkeys(("reward", "loss", "count", "norm", "ratio", "advantage"), "")}.get(
        unit, unit
    )
