"""Several runs beside each other: grouped by how their configurations differ, with intervals and paired differences.

Invariants (``tests/report/test_compare.py`` asserts each):

1. Runs that differ in nothing but seed, name, place and how they are shown are seeds of one group; the groups stand in
   the order in which their first runs were given, and the first is what the others are compared with. No two have the
   same label.
2. A difference is paired: same seeds, same tasks, and its interval is over the tasks. Where runs have no seed or no
   tasks in common the difference is not given, and why is said.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np

from megatron_ext.config.compose import ConfigError, compose
from megatron_ext.config.saved import as_tree
from megatron_ext.config.schema import Config
from megatron_ext.report.places import ends, without_machine
from megatron_ext.report.run_data import RunData
from megatron_ext.report.series import t_interval
from megatron_ext.training.evaluation import Interval, mean_interval

# Keys that say which repetition a run is, or where and how it is shown: they make no group of their own.
REPETITION = (
    "run.name",
    "run.root",
    "run.seed",
    "run.threads",
    "warm_start.cache",
    "tracking",
    "checkpoint",
    "samples",
    "evaluation.every",
)
FEW = 2  # differing keys, or runs, that a label names
LAST_SHARE = 0.1  # "at the end": the mean of this share of the steps


def flat(config: Config) -> dict[str, str]:
    """Every key of a configuration with its value as text."""
    found: dict[str, str] = {}

    def walk(tree: Any, prefix: str) -> None:
        if isinstance(tree, Mapping) and tree:
            for key, value in tree.items():
                walk(value, f"{prefix}.{key}" if prefix else str(key))
        else:
            found[prefix] = "null" if tree is None else str(tree).lower() if isinstance(tree, bool) else str(tree)

    walk(as_tree(config), "")
    return found


def _under(key: str, keys: Sequence[str]) -> bool:
    return any(key == k or key.startswith(f"{k}.") for k in keys)


# -- against the preset ---------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Change:
    key: str
    base: str
    value: str


def changes(config: Config, recipes: Path | None) -> tuple[str, tuple[Change, ...]]:
    """What a run's configuration is compared with, and each key that differs from it: the recipe's preset where
    ``recipes`` still holds it, else the schema's defaults."""
    base, said = Config(), "the defaults of the schema"
    if recipes is not None:
        try:
            base, said = compose([f"recipe={config.recipe}"], recipes), f"recipe={config.recipe}"
        except ConfigError:
            said = f"the defaults of the schema (recipe={config.recipe} is no longer there)"
    before, now = flat(base), flat(config)
    keys = [k for k in sorted(before.keys() | now.keys()) if before.get(k) != now.get(k) and not k.startswith("recipe")]
    return said, tuple(_change(k, before.get(k, "–"), now.get(k, "–")) for k in keys)


def _change(key: str, base: str, value: str) -> Change:
    there, here = without_machine(base), without_machine(value)
    return Change(key, there, here if here != there else f"{here} in another folder")


# -- groups ---------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, eq=False)
class Group:
    """Runs of one configuration. ``keys`` are those in which the groups differ, with this group's values."""

    label: str
    keys: Mapping[str, str]
    runs: tuple[RunData, ...]

    @property
    def seeds(self) -> tuple[int, ...]:
        return tuple(run.config.run.seed for run in self.runs)


def group_runs(runs: Sequence[RunData]) -> list[Group]:
    """The runs by configuration."""
    configs = [{k: v for k, v in flat(run.config).items() if not _under(k, REPETITION)} for run in runs]
    everywhere = sorted({key for config in configs for key in config})
    differing = [key for key in everywhere if len({config.get(key) for config in configs}) > 1]
    members: dict[tuple[str, ...], list[RunData]] = {}
    for run, config in zip(runs, configs, strict=True):
        members.setdefault(tuple(config.get(key, "–") for key in differing), []).append(run)
    labels = _distinct([_label(differing, values, found) for values, found in members.items()], list(members.values()))
    return [
        Group(label, dict(zip(differing, map(without_machine, values), strict=True)), tuple(found))
        for label, (values, found) in zip(labels, members.items(), strict=True)
    ]


def _label(keys: Sequence[str], values: Sequence[str], runs: Sequence[RunData]) -> str:
    """What tells a group from the others: the values that do where they are few, else its recipe, or the names of its
    runs."""
    pairs = [(key, value) for key, value in zip(keys, values, strict=True) if key != "recipe"]
    recipe = dict(zip(keys, values, strict=True)).get("recipe")
    said = [f"recipe={recipe}"] if recipe else []
    if len(pairs) <= FEW:
        said += [f"{key}={without_machine(value)}" for key, value in pairs]
    elif not recipe:
        said.append(_names(runs))
    return ", ".join(said) or "all runs"


def _names(runs: Sequence[RunData]) -> str:
    """The names of some runs, in short."""
    names = list(dict.fromkeys(run.name for run in runs))
    return ", ".join(names[:FEW]) + (f" and {len(names) - FEW} more" if len(names) > FEW else "")


def _distinct(labels: Sequence[str], members: Sequence[Sequence[RunData]]) -> list[str]:
    """Labels that several groups share, told apart by the names of the runs, and by their folders where those are the
    same."""
    found = list(labels)
    for more in ([_names(runs) for runs in members], ends([runs[0].path for runs in members])):
        again = {label for label in found if found.count(label) > 1}
        found = [f"{label} ({add})" if label in again else label for label, add in zip(found, more, strict=True)]
    return found


# -- tables ---------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Figure:
    """A mean with its interval, and over what that is (``3 seeds``, ``200 tasks``; empty: no interval)."""

    mean: float
    low: float
    high: float
    over: str


@dataclass(frozen=True)
class Row:
    """A group's line. Success is greedy pass@1 on held-out tasks, ``reward`` the training reward at the end."""

    label: str
    colour: int
    seeds: tuple[int, ...]
    steps: str
    before: Figure | None
    after: Figure | None
    gain: Figure | None
    reward: Figure | None
    minutes: float | None


@dataclass(frozen=True)
class Difference:
    """A group against the first one, in greedy success after training. ``why`` there is none, or empty."""

    label: str
    colour: int
    value: Interval | None
    seeds: tuple[tuple[int, float], ...]
    why: str


def share(values: Sequence[float], alone: Interval | None) -> Figure | None:
    """``figure`` of shares: the interval ends where they do."""
    found = figure(values, alone)
    return found and replace(found, low=max(found.low, 0.0), high=min(found.high, 1.0))


def figure(values: Sequence[float], alone: Interval | None) -> Figure | None:
    """Over seeds where there are several; ``alone`` is the interval over tasks of a single run."""
    if not values:
        return None
    if len(values) > 1:
        over = t_interval(values)
        return Figure(over.mean, over.low, over.high, f"{len(values)} seeds")
    if alone is None:
        return Figure(values[0], values[0], values[0], "")
    return Figure(alone.mean, alone.low, alone.high, f"{alone.n} tasks")


def end_reward(run: RunData) -> float | None:
    """Mean training reward of the last tenth of the steps; None before the first step."""
    series = run.series.get("reward/mean")
    if series is None:
        return None
    finite = series.values[np.isfinite(series.values)]
    return float(finite[-max(1, round(LAST_SHARE * len(finite))) :].mean()) if len(finite) else None


def rows(groups: Sequence[Group]) -> list[Row]:
    """A row a group."""
    made = []
    for number, group in enumerate(groups):
        runs = group.runs
        before = [run.before for run in runs if run.before is not None]
        after = [run.after for run in runs if run.after is not None]
        gains = [gain for run in runs if (gain := run.gain) is not None]
        rewards = [reward for run in runs if (reward := end_reward(run)) is not None]
        minutes = [spent for run in runs if (spent := run.minutes) is not None]
        steps = sorted({run.steps for run in runs})
        made.append(
            Row(
                label=group.label,
                colour=number,
                seeds=group.seeds,
                steps=str(steps[0]) if len(steps) == 1 else f"{steps[0]} to {steps[-1]}",
                before=share([float(r.greedy.mean()) for r in before], before[0].greedy_interval() if before else None),
                after=share([float(r.greedy.mean()) for r in after], after[0].greedy_interval() if after else None),
                gain=figure([gain.mean for gain in gains], gains[0] if gains else None),
                reward=figure(rewards, None),
                minutes=mean(minutes) if minutes else None,
            )
        )
    return made


def differences(groups: Sequence[Group]) -> list[Difference]:
    """Each further group against the first, paired over seeds and tasks."""
    return [_difference(groups[0], group, number) for number, group in enumerate(groups) if number]


def _difference(first: Group, other: Group, number: int) -> Difference:
    mine, theirs = (
        {run.config.run.seed: run.after for run in group.runs if run.after is not None} for group in (first, other)
    )
    common = sorted(mine.keys() & theirs.keys())
    if not common:
        why = "no seed of both was evaluated after training"
        return Difference(other.label, number, None, (), why)
    tasks = mine[common[0]].tasks
    if any(result[seed].tasks != tasks for result in (mine, theirs) for seed in common):
        return Difference(other.label, number, None, (), "evaluated on different tasks")
    per_task = np.stack([theirs[s].greedy.astype(float) - mine[s].greedy.astype(float) for s in common])
    seeds = tuple((seed, float(row.mean())) for seed, row in zip(common, per_task, strict=True))
    return Difference(other.label, number, mean_interval(per_task.mean(axis=0), method="bootstrap"), seeds, "")
