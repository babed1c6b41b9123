"""From runs to what the page shows: texts, tables, charts, samples. The template only lays them out.

Invariants (``tests/report/test_report.py`` asserts each):

1. Any run folder gives a page: one that has not begun, goes on, was interrupted or undone, with or without samples.
2. One run shows every series in its chart; several show one metric a chart, a line a group of seeds with its band.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from megatron_ext.config.instantiate import ordered
from megatron_ext.models.hf_config import from_dict
from megatron_ext.moe.describe import routers_line
from megatron_ext.moe.structured import StructuredRouter
from megatron_ext.report import compare
from megatron_ext.report.charts import HOLE, ONCE, PARTS, PHASES, SECTIONS, Section, Spec, hint, members, others
from megatron_ext.report.experts import ExpertMap, expert_map
from megatron_ext.report.plot import POINTS, Line, Plot, heat_plot, line_plot, number, stack_plot
from megatron_ext.report.run_data import RunData
from megatron_ext.report.samples import Limits, Step, show_step, spread
from megatron_ext.report.series import Curve, Series, band, smooth, thin
from megatron_ext.report.text import run_tokenizer
from megatron_ext.tracking.jsonl import FILE_NAME
from megatron_ext.tracking.names import lookup
from megatron_ext.training.evaluation import EvalResult, Interval
from megatron_ext.training.step_replay.kept_step import read_step, sampled_steps

STEP_TIME = "time/step"
SMOOTH = 5  # values of the running mean under several runs, as in the learning table
SMOOTH_FROM = 2 * SMOOTH  # a curve of no more values than these is drawn as it is


@dataclass(frozen=True)
class Success:
    """Held-out success of one evaluation, each an interval over tasks."""

    label: str
    greedy: Interval
    sampled: Interval | None
    tasks: int
    samples: int
    lost: int


@dataclass(frozen=True)
class RunPage:
    """Everything that is said of one run outside the charts."""

    name: str
    path: str
    status: str
    state: str  # done, going or stopped: how the status is coloured
    facts: tuple[tuple[str, str], ...]
    success: tuple[Success, ...]
    gain: Interval | None
    base: str
    changes: tuple[compare.Change, ...]
    versions: tuple[tuple[str, str], ...]
    command: str
    samples: tuple[Step, ...]
    samples_note: str
    experts: ExpertMap | None


@dataclass(frozen=True)
class ChartSection:
    title: str
    plots: tuple[Plot, ...]
    folded: bool = False


@dataclass(frozen=True)
class Page:
    """The report. ``groups``, ``rows`` and ``differences`` are empty for a single run."""

    title: str
    written: str
    runs: tuple[RunPage, ...]
    sections: tuple[ChartSection, ...]
    groups: tuple[compare.Group, ...]
    rows: tuple[compare.Row, ...]
    differences: tuple[compare.Difference, ...]
    note: str


def build_page(runs: Sequence[RunData], recipes: Path | None, limits: Limits, now: datetime | None = None) -> Page:
    """The page of one or more runs. ``recipes`` holds the presets that configurations are compared with."""
    several = len(runs) > 1
    groups = compare.group_runs(runs) if several else []
    note = _compared_note(groups) if several else _single_note(runs[0])
    sections = _compared(groups) if several else _single(runs[0])
    return Page(
        title=f"{len(runs)} runs" if several else runs[0].name,
        written=(now or datetime.now(UTC)).strftime("%Y-%m-%d %H:%M UTC"),
        runs=tuple(_run_page(run, recipes, limits) for run in runs),
        sections=tuple(sections),
        groups=tuple(groups),
        rows=tuple(compare.rows(groups)),
        differences=tuple(compare.differences(groups)) if several else (),
        note=note,
    )


def _compared_note(groups: Sequence[compare.Group]) -> str:
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


def _single_note(run: RunData) -> str:
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


# -- one run's texts ------------------------------------------------------------------------------------------------
def _run_page(run: RunData, recipes: Path | None, limits: Limits) -> RunPage:
    status, state = _status(run)
    base, changed = compare.changes(run.config, recipes)
    success = [_success(label, result) for label, result in (("before", run.before), ("after", run.after)) if result]
    tokenizer = run_tokenizer(run.path)
    kept = spread(sampled_steps(run.path), limits.steps)
    provenance = run.provenance
    versions = [(name, v or "not installed") for name, v in provenance.get("versions", {}).items()]
    if "python" in provenance:
        versions += [("Python", provenance["python"]), ("platform", provenance["platform"])]
    return RunPage(
        name=run.name,
        path=str(run.path),
        status=status,
        state=state,
        facts=tuple(_facts(run)),
        success=tuple(success),
        gain=run.gain,
        base=base,
        changes=changed,
        versions=tuple(versions),
        command=shlex.join(provenance.get("command", [])),
        samples=tuple(show_step(read_step(run.path, step), tokenizer, limits) for step in kept),
        samples_note=_samples_note(run),
        experts=None if run.routing is None else expert_map(run.routing),
    )


def _samples_note(run: RunData) -> str:
    every = run.config.samples.every
    if not every:
        return "This run keeps no samples. samples.every=N keeps the trajectories of every Nth step with their scores."
    return f"The first step, every {every}. and the last are kept; none was finished yet."


def _success(label: str, result: EvalResult) -> Success:
    samples = int(result.sampled.shape[1])
    sampled = result.sampled_interval() if samples else None
    return Success(label, result.greedy_interval(), sampled, len(result.tasks), samples, result.lost)


def _status(run: RunData) -> tuple[str, str]:
    total = run.config.run.steps
    if run.finished:
        return f"finished: {run.steps} steps" if run.steps else "finished without a step", "done"
    written = run.path / FILE_NAME
    at = f"step {run.steps} of {total}" if run.steps else f"no step of {total} yet"
    if run.result and run.result["interrupted"] and int(run.result["steps"]) >= run.steps:
        return f"interrupted after {at}", "stopped"
    if not written.is_file():
        return f"not finished: {at}", "going"
    seen = datetime.fromtimestamp(written.stat().st_mtime, UTC).strftime("%Y-%m-%d %H:%M UTC")
    return f"not finished: {at}, metrics last written {seen}", "going"


def _facts(run: RunData) -> list[tuple[str, str]]:
    config, batch = run.config, run.config.batch
    environment = config.tasks.environment
    facts = [
        ("Recipe", config.recipe),
        ("Seed", str(config.run.seed)),
        ("Steps", f"{run.steps} of {config.run.steps}"),
    ]
    if idle := _idle(run):
        facts.append(("Steps that trained nothing", idle))
    if run.minutes is not None:
        facts.append(("Training time", f"{run.minutes:.1f} min"))
    if run.hf:
        facts.append(("Model", _model(run.hf)))
        if any(from_dict(run.hf, str(run.path / "model_config.json")).moe_pattern):
            facts.append(("Routers", _routers(run)))
    facts += [
        ("Parallelism", _parallelism(run)),
        (
            "Batch",
            f"{batch.tasks_per_step} tasks × {batch.trajectories_per_task} trajectories a step, "
            f"{batch.optimizer_steps_per_batch} optimizer step{'s' * (batch.optimizer_steps_per_batch > 1)}",
        ),
        ("Environment", _class_of(config.environments.get(environment, {}), environment)),
        ("Harness", _class_of(config.harness, "")),
        ("Loss", ", ".join(f"{n} ({_class_of(term, '')})" for n, term in config.loss.terms.items() if term)),
    ]
    if config.credit.edits:
        in_order = " → ".join(name for name, _ in ordered(config.credit.edits, "credit.edits"))
        facts.append(("Credit edits", in_order))
    if config.control.permute_rewards:
        facts.append(("Control", "rewards permuted over the step: what it gains is not learned from them"))
    if warm := run.warm_start:
        facts.append(
            (
                "Warm start",
                f"{warm['steps']} steps, {warm['epochs']:.2g} passes, loss {number(warm['loss'])}, "
                f"dev success {percent(warm['dev_success'])}",
            )
        )
    spent = [(name, float(np.nansum(run.series[name].values))) for name in ONCE if name in run.series]
    if spent:
        said = ", ".join(f"{name.removeprefix('time/').replace('_', ' ')} {seconds:.0f} s" for name, seconds in spent)
        facts.append(("Before the first step", said))
    for resume in run.resumes:
        undone = resume.undone_to
        said = f"from step {resume.step}"
        if undone is not None:
            said += f"; undone and trained again: {resume.step + 1}" + (
                f" to {undone}" if undone > resume.step + 1 else ""
            )
        facts.append(("Resumed", said))
    skipped = run.series.get("train/nan_steps")
    if skipped is not None and (count := int(np.nansum(skipped.values))):
        facts.append(("Skipped updates", f"{count}, loss or gradient was not finite"))
    if git := run.provenance.get("git"):
        facts.append(("Commit", git["commit"][:12] + (" with local changes" if git["dirty"] else "")))
    return facts


def _idle(run: RunData) -> str:
    """How many steps kept no group, with what the run's result says of it; empty for none."""
    kept = run.series.get("filter/groups_kept")
    count = 0 if kept is None else int(np.count_nonzero(kept.values == 0))
    if not count:
        return ""
    return str(run.result.get("hint") or f"{count}: no group was kept")


def _routers(run: RunData) -> str:
    """What was configured, and what was measured."""
    moved = run.series.get("moe/router_change")
    said = routers_line(run.config)
    if moved is None:
        return said
    change = float(moved.values[-1])
    how_far = "have not moved" if change == 0 else f"moved by {number(change, 3)} of their norm"
    return f"{said}; {how_far} since RL started"


def _model(hf: Mapping[str, Any]) -> str:
    said = [str(hf.get("model_type", "model")).replace("_", " ")]
    for key, text in (("num_hidden_layers", "layers"), ("hidden_size", "wide"), ("num_experts", "experts")):
        if hf.get(key):
            said.append(f"{hf[key]} {text}")
    if hf.get("num_experts_per_tok"):
        said[-1] += f" ({hf['num_experts_per_tok']} a token)"
    return ", ".join([*said, f"vocabulary {hf['vocab_size']}"])


def _parallelism(run: RunData) -> str:
    p = run.config.parallel
    sizes = {"TP": p.tensor, "PP": p.pipeline, "VPP": p.virtual_pipeline, "EP": p.expert, "ETP": p.expert_tensor}
    said = [f"{name}{size}" for name, size in {**sizes, "CP": p.context}.items() if size > 1]
    return " · ".join(said) or "one rank a replica"


def _class_of(node: Mapping[str, Any], name: str) -> str:
    target = str(node.get("_target_", "")).rsplit(".", 1)[-1]
    return f"{name} ({target})" if name and target else target or name


def percent(share: float) -> str:
    return f"{100 * share:.1f} %"


# -- charts of one run ----------------------------------------------------------------------------------------------
def _single(run: RunData) -> list[ChartSection]:
    made = []
    for section in SECTIONS:
        plots = [plot for spec in section.charts if (plot := _chart(run, spec)) is not None]
        if plots:
            made.append(ChartSection(section.title, tuple(plots)))
    rest = [_chart(run, Spec(name, {name: ""})) for name in others(list(run.series))]
    if rest:
        made.append(ChartSection("Everything else that was logged", tuple(p for p in rest if p), folded=True))
    return made


def _named(run: RunData, spec: Spec) -> list[tuple[str, str]]:
    """The logged metrics of a chart, each with its label."""
    found = []
    for metric, label in spec.metrics.items():
        for name in members(metric, list(run.series)):
            found.append((name, _label(name, metric, label)))
    return found


def _label(name: str, metric: str, label: str) -> str:
    """What a line of a family is called: what the family leaves open, in the place of the label's hole."""
    return HOLE.sub(_short(name, metric), label) or _short(name, metric)


def _short(name: str, metric: str) -> str:
    """The parts of a name that its family leaves open; the whole name of one that is no family."""
    left_open = [part for part, hole in zip(name.split("/"), metric.split("/"), strict=True) if "<" in hole]
    return " ".join(left_open) or name


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
        return heat_plot(spec.title, lines, note=f"{spec.rows}, a row a layer", better=lookup(named[0][0]).better)
    levels = _levels(run, spec)
    return line_plot(spec.title, lines, note=note, log=spec.log, share=spec.share, levels=levels, resumes=run.resumes)


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


# -- charts of several runs -----------------------------------------------------------------------------------------
def _compared(groups: Sequence[compare.Group]) -> list[ChartSection]:
    logged = sorted({name for group in groups for run in group.runs for name in run.series})
    made = []
    rest = Section("Everything else that was logged", tuple(Spec(name, {name: ""}) for name in others(logged)))
    for section in (*SECTIONS, rest):
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
                    plot = _overlay(groups, name, title if section is not rest else name, spec)
                    plots.append(plot)
        if plots:
            made.append(ChartSection(section.title, tuple(plots), folded=section is rest))
    return made


def _overlay(groups: Sequence[compare.Group], name: str, title: str, spec: Spec) -> Plot:
    lines = []
    for number_, group in enumerate(groups):
        logged = [_step_time(run) if name == STEP_TIME else run.series.get(name) for run in group.runs]
        series = [_smoothed(s) for s in logged if s is not None]
        series = [s for s in series if np.isfinite(s.values).any()]
        if not series:
            continue
        curve = band(series, POINTS) if len(series) > 1 else thin(series[0], POINTS)
        faint = [thin(s, POINTS) for s in series] if len(series) > 1 else []
        seeds = f"{len(series)} runs" if len(series) > 1 else "1 run"
        lines.append(Line(group.label, curve, number_, f"{hint(name)}; {seeds}", faint, key=f"g{number_}"))
    everywhere = [_levels(run, spec) for group in groups for run in group.runs]
    levels = everywhere[0] if all(found == everywhere[0] for found in everywhere) else ()
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
