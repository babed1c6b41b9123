"""What a comparison found: success, differences over paired seeds, what the mechanism did. Reads the runs; no training.

Invariants (``tests/launch/test_compare_report.py``):

1. A difference is paired: the same seeds on the same held-out tasks. It is called one only where the 95 % t interval of
   the seeds' differences leaves 0 out.
2. Intervals of success after training are over seeds, those before it over tasks: all seeds start from one policy.
3. The share of changed tokens is a metric that the recipe names, or is found by running the baseline's credit over
   the tokens that the run kept. Where neither can be had, why is said.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from launch.comparison import Arm, Comparison
from megatron_ext.config.compose import ConfigError
from megatron_ext.config.schema import Config
from megatron_ext.credit.pipeline import open_view
from megatron_ext.credit.protocol import CreditError
from megatron_ext.report.compare import Figure, figure, share
from megatron_ext.report.run_data import RunData, read_run
from megatron_ext.report.series import t_interval
from megatron_ext.training.evaluation import EvalResult, Interval, mean_interval
from megatron_ext.training.session import credit_pipeline
from megatron_ext.training.step_replay.kept_step import read_step, sampled_steps

CHANGED_STD = 0.01  # tokens whose advantage moved by more than this share of the advantages' standard deviation


@dataclass(frozen=True, eq=False)
class ArmRuns:
    """An arm's finished runs, in the order of the seeds; ``minutes`` of each, None where it is not known."""

    arm: Arm
    runs: tuple[RunData, ...]
    minutes: tuple[float | None, ...]


@dataclass(frozen=True)
class Row:
    """An arm's line. Success is pass@1 on held-out tasks; ``counters`` are means over steps,
    ``over_steps`` those of the three thirds of a run, means over seeds."""

    name: str
    title: str
    steps: int
    greedy_before: Figure
    greedy_after: Figure
    sampled_before: Figure | None
    sampled_after: Figure | None
    changed: Figure | None
    changed_why: str
    counters: Mapping[str, Figure | None]
    over_steps: Mapping[str, tuple[float, ...] | None]
    minutes: float | None


@dataclass(frozen=True)
class Difference:
    """An arm against the baseline in success after training. ``over_seeds`` is the t interval of the paired seed
    differences (None: one seed), ``over_tasks`` the bootstrap over tasks of their mean; ``seeds`` each seed's."""

    name: str
    what: str
    mean: float
    over_seeds: Interval | None
    over_tasks: Interval
    seeds: Mapping[int, float]

    @property
    def verdict(self) -> str:
        if self.over_seeds is None:
            return "one seed is no comparison"
        if self.over_seeds.low <= 0 <= self.over_seeds.high:
            return "no difference at this scale (the interval contains 0)"
        return "higher" if self.mean > 0 else "lower"


@dataclass(frozen=True)
class Compared:
    """The whole table."""

    comparison: Comparison
    overrides: tuple[str, ...]
    tasks: int
    samples: int
    warm_starts: int
    rows: tuple[Row, ...]
    differences: tuple[Difference, ...]
    commands: tuple[str, ...]

    def as_json(self) -> dict[str, Any]:
        made = asdict(self)
        for node, difference in zip(made["differences"], self.differences, strict=True):
            node["verdict"] = difference.verdict
        own = {"counters": dict(self.comparison.counters), "over_steps": dict(self.comparison.over_steps)}
        return {**made, "comparison": {**made["comparison"], **own}}


# -- from runs to numbers --------------------------------------------------------------------------------------------
def read_arms(comparison: Comparison, runs: Mapping[str, Sequence[tuple[Path, float | None]]]) -> list[ArmRuns]:
    """``runs``: arm -> (folder, minutes) of each seed."""
    return [
        ArmRuns(arm, tuple(read_run(path) for path, _ in runs[arm.name]), tuple(spent for _, spent in runs[arm.name]))
        for arm in comparison.arms
    ]


def compare(
    comparison: Comparison,
    arms: Sequence[ArmRuns],
    *,
    overrides: Sequence[str] = (),
    warm_starts: int = 1,
    commands: Sequence[str] = (),
) -> Compared:
    """Rows and differences. Raises ``ConfigError`` when the runs were evaluated on different tasks."""
    results = [_evaluated(run) for arm in arms for run in arm.runs]
    first = results[0][0]
    if any(result.tasks != first.tasks for pair in results for result in pair):
        raise ConfigError(["the runs were evaluated on different tasks: give the arms the same tasks.*"])
    baseline = next((arm for arm in arms if arm.arm.name == comparison.baseline), None)
    config = None if baseline is None else baseline.runs[0].config
    return Compared(
        comparison=comparison,
        overrides=tuple(overrides),
        tasks=len(first.tasks),
        samples=first.sampled.shape[1],
        warm_starts=warm_starts,
        rows=tuple(_row(arm, comparison, config) for arm in arms),
        differences=tuple(
            found
            for arm in arms
            if baseline is not None and arm is not baseline
            for what in ("greedy", "sampled")
            if (found := _difference(baseline, arm, what)) is not None
        ),
        commands=tuple(commands),
    )


def _evaluated(run: RunData) -> tuple[EvalResult, EvalResult]:
    if run.before is None or run.after is None:
        raise ConfigError([f"{run.path}: was not evaluated before and after training"])
    return run.before, run.after


def _per_task(result: EvalResult, what: str) -> np.ndarray[Any, np.dtype[np.float64]] | None:
    """Each task's success: 0 or 1 of the greedy trajectory, the share of the sampled ones (None without samples)."""
    if what == "greedy":
        return result.greedy.astype(np.float64)
    return result.sampled.mean(axis=1) if result.sampled.size else None


def _before(arm: ArmRuns, what: str) -> Figure | None:
    found = [_per_task(_evaluated(run)[0], what) for run in arm.runs]
    values = [value for value in found if value is not None]
    if not values:
        return None
    over = mean_interval(np.mean(values, axis=0))
    return Figure(over.mean, over.low, over.high, f"{over.n} tasks")


def _after(arm: ArmRuns, what: str) -> Figure | None:
    found = [_per_task(_evaluated(run)[1], what) for run in arm.runs]
    values = [value for value in found if value is not None]
    return share([float(v.mean()) for v in values], mean_interval(values[0])) if values else None


def _row(arm: ArmRuns, comparison: Comparison, baseline: Config | None) -> Row:
    greedy_before, greedy_after = _before(arm, "greedy"), _after(arm, "greedy")
    assert greedy_before is not None and greedy_after is not None
    changed, why = _changed(arm, comparison, baseline)
    spent = [m for m in arm.minutes if m is not None]
    return Row(
        name=arm.arm.name,
        title=arm.arm.title,
        steps=max(run.steps for run in arm.runs),
        greedy_before=greedy_before,
        greedy_after=greedy_after,
        sampled_before=_before(arm, "sampled"),
        sampled_after=_after(arm, "sampled"),
        changed=changed,
        changed_why=why,
        counters={name: _counter(arm, name) for name in comparison.counters},
        over_steps={name: _course(arm, name) for name in comparison.over_steps},
        minutes=sum(spent) / len(spent) if spent else None,
    )


def step_mean(run: RunData, name: str) -> float | None:
    """Mean of a metric over the steps that have a finite value of it; None where there is none."""
    series = run.series.get(name)
    if series is None:
        return None
    finite = series.values[np.isfinite(series.values)]
    return float(finite.mean()) if len(finite) else None


def _counter(arm: ArmRuns, name: str) -> Figure | None:
    found = [step_mean(run, name) for run in arm.runs]
    values = [value for value in found if value is not None]
    return figure(values, None) if len(values) == len(found) else None


def thirds(run: RunData, name: str) -> tuple[float, ...] | None:
    """Means of a metric over the first, middle and last third of the steps that have it; None with fewer than three."""
    series = run.series.get(name)
    finite = series.values[np.isfinite(series.values)] if series is not None else np.empty(0)
    return tuple(float(part.mean()) for part in np.array_split(finite, 3)) if len(finite) >= 3 else None


def _course(arm: ArmRuns, name: str) -> tuple[float, ...] | None:
    found = [thirds(run, name) for run in arm.runs]
    values = [parts for parts in found if parts is not None]
    return tuple(np.mean(values, axis=0).tolist()) if values and len(values) == len(found) else None


def _changed(arm: ArmRuns, comparison: Comparison, baseline: Config | None) -> tuple[Figure | None, str]:
    if comparison.changed is not None:
        found = _counter(arm, comparison.changed)
        return found, "" if found is not None else f"does not log {comparison.changed}"
    if baseline is None:
        return None, f"without the arm {comparison.baseline}"
    if arm.arm.name == comparison.baseline:
        return None, "the baseline"
    values = []
    for run in arm.runs:
        try:
            value = changed_share(run.path, baseline)
        except CreditError as error:
            return None, f"the baseline's credit cannot be run over kept steps: {error}"
        if value is None:
            return None, "no step was kept whole"
        values.append(value)
    return share(values, None), ""


def changed_share(run: Path, baseline: Config) -> float | None:
    """Share of the run's trained tokens whose advantage the credit of ``baseline`` would have given differently, over
    the steps that were kept whole; None without one. A token counts when its advantage moves by more than
    ``CHANGED_STD`` of the standard deviation of the larger. Raises ``CreditError`` for credit that needs a model."""
    changed = trained = 0
    for step in sampled_steps(run):
        kept = read_step(run, step)
        if kept.scores is None or not kept.whole:
            continue
        view, _ = credit_pipeline(baseline).run(open_view(kept.batch, step=step - 1))
        ours, theirs = kept.scores.advantage[view.trained], view.advantage[view.trained]
        if not len(ours):
            continue
        limit = CHANGED_STD * max(float(ours.std()), float(theirs.std()))
        changed += int((np.abs(ours - theirs) > limit).sum())
        trained += len(ours)
    return changed / trained if trained else None


def _difference(baseline: ArmRuns, arm: ArmRuns, what: str) -> Difference | None:
    mine, theirs = (
        {run.config.run.seed: _per_task(_evaluated(run)[1], what) for run in runs.runs} for runs in (baseline, arm)
    )
    seeds = [seed for seed in mine if seed in theirs]
    pairs = [(mine[seed], theirs[seed]) for seed in seeds]
    rows = [other - own for own, other in pairs if own is not None and other is not None]
    if not rows:
        return None
    per_seed = {seed: float(row.mean()) for seed, row in zip(seeds, rows, strict=True)}
    return Difference(
        name=arm.arm.name,
        what=what,
        mean=sum(per_seed.values()) / len(per_seed),
        over_seeds=t_interval(list(per_seed.values())) if len(per_seed) > 1 else None,
        over_tasks=mean_interval(np.mean(rows, axis=0), method="bootstrap"),
        seeds=per_seed,
    )
