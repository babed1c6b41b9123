"""``recipes/SLUG/comparison.yaml``: which runs show what a recipe's mechanism does, and what to count in them.

    title: one line that says what is asked            # optional
    baseline: off                                      # the arm that the others are measured against (default: off)
    seeds: [1, 2, 3]                                   # default
    arms:                                              # in the order of table and figure; every one is a set of runs
      on: {preset: micro, title: what the arm is}      # recipes/SLUG/micro.yaml
      off: {preset: micro_off, title: ...}
      high: {preset: micro, title: ..., overrides: [credit.edits.NAME.coefficient=2.0]}
    changed: credit/NAME/changed_fraction              # metric: share of trained tokens that the mechanism changed.
                                                       # Left out, it is found from the credit of the baseline arm
    counters:                                          # metric -> what it shows, in words; means over a run's steps
      credit/NAME/weight_mean: weight of the step's advantage
    over_steps:                                        # the same, told for the first, middle and last third of a run
      moe/load_cv: spread of the load

Metrics are names of ``megatron_ext/tracking/names.py``. An arm that does not log a counter has none.

Invariants (``tests/launch/test_comparison.py``):

1. Every problem of the file is found before anything runs, one line each; each arm's configuration is checked.
2. The runs of all arms and seeds start from one warm start, unless an arm's own keys decide otherwise; which arms share
   one is known before anything runs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import yaml

from launch.prepare import prepare
from launch.runner import Job
from megatron_ext.config.compose import COMPARISON, ConfigError
from megatron_ext.config.ranges import MAX_SEED
from megatron_ext.config.schema import Config
from megatron_ext.tracking.names import MetricNameError, lookup
from megatron_ext.training.warm_start.key import warm_start_parts

SEEDS = (1, 2, 3)
WARM_START_SEED = 1
SAVES = 5  # steps between two checkpoints: what a kill costs at most
KEEPS = 5  # of so many steps one is kept whole: what the share of changed tokens is found from
_KEYS = ("title", "baseline", "seeds", "arms", "changed", "counters", "over_steps")
_ARM_KEYS = ("preset", "title", "overrides")
_OWNED = ("recipe", "run.seed", "run.root", "run.name", "warm_start.seed")


@dataclass(frozen=True)
class Arm:
    """Runs of one preset with ``overrides``, a seed each."""

    name: str
    preset: str
    title: str
    overrides: tuple[str, ...] = ()

    def recipe(self, slug: str) -> str:
        return slug if self.preset == "recipe" else f"{slug}/{self.preset}"


@dataclass(frozen=True)
class Comparison:
    """What the file says. ``changed`` is a metric, or None; ``counters`` and ``over_steps``: metric -> words."""

    slug: str
    title: str
    baseline: str
    seeds: tuple[int, ...]
    arms: tuple[Arm, ...]
    changed: str | None
    counters: Mapping[str, str]
    over_steps: Mapping[str, str]

    def only(self, names: Sequence[str], seeds: Sequence[int]) -> Comparison:
        """With the arms ``names`` and other ``seeds`` (empty: as it is). Raises ``ConfigError``."""
        known = [arm.name for arm in self.arms]
        wrong = [name for name in names if name not in known]
        if wrong:
            raise ConfigError([f"--arms {name}: no such arm; there are {', '.join(known)}" for name in wrong])
        arms = tuple(arm for arm in self.arms if not names or arm.name in names)
        return dataclasses.replace(self, arms=arms, seeds=tuple(seeds) or self.seeds)


def read_comparison(slug: str, recipes: Path) -> Comparison:
    """The recipe's ``comparison.yaml``. Raises ``ConfigError`` with every problem."""
    file = recipes / slug / COMPARISON
    where = f"{slug}/{COMPARISON}"
    if not file.is_file():
        raise ConfigError([f"{where} is not there: it names the arms to compare (see launch/comparison.py)"])
    try:
        tree = yaml.safe_load(file.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise ConfigError([f"{where}: {' '.join(str(error).split())}"]) from error
    if not isinstance(tree, dict):
        raise ConfigError([f"{where}: needs a map with the key arms"])
    found: list[str] = []
    _unknown(tree, _KEYS, where, found)
    arms = _arms(tree.get("arms"), f"{where}: arms", found)
    baseline = str(_plain(tree.get("baseline", "off")))
    names = [arm.name for arm in arms]
    if arms and baseline not in names:
        found.append(f"{where}: baseline: {baseline} is none of the arms {', '.join(names)}")
    seeds = tree.get("seeds", list(SEEDS))
    if not isinstance(seeds, list) or not seeds or not all(type(s) is int for s in seeds):
        found.append(f"{where}: seeds: needs a list of numbers, got {seeds!r}")
        seeds = []
    changed = tree.get("changed")
    counters, over_steps = (tree.get(key) or {} for key in ("counters", "over_steps"))
    for key, value in (("counters", counters), ("over_steps", over_steps)):
        if not isinstance(value, dict):
            found.append(f"{where}: {key}: needs a map of metrics to what they show, got {value!r}")
    counters, over_steps = (value if isinstance(value, dict) else {} for value in (counters, over_steps))
    for metric in [*counters, *over_steps, *([] if changed is None else [changed])]:
        try:
            lookup(str(metric))
        except MetricNameError as error:
            found.append(f"{where}: {error}")
    if found:
        raise ConfigError(found)
    return Comparison(
        slug=slug,
        title=str(tree.get("title", "")),
        baseline=baseline,
        seeds=tuple(seeds),
        arms=tuple(arms),
        changed=changed,
        counters={str(metric): str(words) for metric, words in counters.items()},
        over_steps={str(metric): str(words) for metric, words in over_steps.items()},
    )


def _plain(name: object) -> str:
    """YAML 1.1 reads the words on and off as truth values."""
    return {True: "on", False: "off"}.get(name, str(name)) if isinstance(name, bool) else str(name)


def _unknown(tree: Mapping[Any, Any], known: Sequence[str], where: str, found: list[str]) -> None:
    for key in tree:
        if key not in known:
            near = get_close_matches(str(key), known, 2) or known
            found.append(f"{where}: {key}: no such key; nearest: {', '.join(near)}")


def _arms(tree: object, where: str, found: list[str]) -> list[Arm]:
    if not isinstance(tree, dict) or len(tree) < 2:
        found.append(f"{where}: needs two or more, name: {{preset: ..., title: ...}}")
        return []
    arms = []
    for key, node in tree.items():
        name = _plain(key)
        if not isinstance(node, dict):
            found.append(f"{where}.{name}: needs {{preset: ..., title: ...}}, got {node!r}")
            continue
        _unknown(node, _ARM_KEYS, f"{where}.{name}", found)
        overrides = node.get("overrides", [])
        if not isinstance(overrides, list):
            found.append(f"{where}.{name}.overrides: needs a list of KEY=VALUE")
            overrides = []
        arms.append(
            Arm(name, str(node.get("preset", "micro")), str(node.get("title", name)), tuple(map(str, overrides)))
        )
    return arms


# -- runs ------------------------------------------------------------------------------------------------------------
def run_name(arm: str, seed: int) -> str:
    return f"{arm}_seed_{seed}"


def plan(
    comparison: Comparison, overrides: Sequence[str], folder: Path, recipes: Path, threads: int | None
) -> list[Job]:
    """A run an arm and seed, all arms of one seed before the next, each configuration checked. ``overrides`` go to all
    arms; ``threads`` is ``run.threads`` where they do not say it. Raises ``ConfigError`` with every problem."""
    taken = [a for a in overrides if a.split("=")[0] in _OWNED]
    found = [f"{a}: the comparison sets this key" for a in taken]
    bad = [seed for seed in comparison.seeds if not 0 <= seed <= MAX_SEED]
    found += [f"seed {seed}: must be within 0 and {MAX_SEED}" for seed in bad]
    configs: dict[str, Config] = {}  # arm -> its configuration, which the seeds have in common
    for arm in comparison.arms:
        try:
            configs[arm.name] = prepare(_argv(comparison.slug, arm, overrides, folder, threads), recipes)
        except ConfigError as error:
            found += [f"arm {arm.name}: {problem}" for problem in error.problems]
            continue
        evaluation = configs[arm.name].evaluation
        if not (evaluation.before and evaluation.after and configs[arm.name].tasks.test_tasks):
            found.append(
                f"arm {arm.name}: arms are compared on held-out tasks: evaluation.before, evaluation.after and "
                "tasks.test_tasks"
            )
    if found:
        raise ConfigError(found)
    jobs: list[Job] = []
    first: list[tuple[object, str]] = []  # warm start -> the run that makes it
    for seed in comparison.seeds:
        for arm in comparison.arms:
            name, config = run_name(arm.name, seed), configs[arm.name]
            config = dataclasses.replace(config, run=dataclasses.replace(config.run, seed=seed, name=name))
            argv = [*_argv(comparison.slug, arm, overrides, folder, threads), f"run.seed={seed}", f"run.name={name}"]
            jobs.append(Job(name, tuple(argv), config, _shared(config, name, first)))
    return jobs


def _argv(slug: str, arm: Arm, overrides: Sequence[str], folder: Path, threads: int | None) -> list[str]:
    def unless(key: str, value: object) -> list[str]:
        return [] if any(a.split("=")[0] == key for a in overrides) else [f"{key}={value}"]

    return [
        f"recipe={arm.recipe(slug)}",
        *arm.overrides,
        *unless("tracking.wandb", "null"),
        *unless("checkpoint.every", SAVES),
        *unless("checkpoint.keep", 1),
        *unless("checkpoint.best", "''"),
        *unless("samples.every", KEEPS),
        *unless("samples.groups", 0),
        *unless("warm_start.cache", folder / "warm_starts"),
        *([] if threads is None else unless("run.threads", threads)),
        *overrides,
        f"warm_start.seed={WARM_START_SEED}",
        f"run.root={folder}",
    ]


def _shared(config: Config, name: str, first: list[tuple[object, str]]) -> str | None:
    """The run whose warm start this one takes; None for the first of its kind, or without a warm start."""
    if not config.warm_start.enabled:
        return None
    key = (warm_start_parts(config), dataclasses.asdict(config.tokenizer))
    for known, owner in first:
        if known == key:
            return owner
    first.append((key, name))
    return None


def warm_starts(jobs: Sequence[Job]) -> int:
    """How many warm starts the runs have between them."""
    return sum(job.after is None and job.config.warm_start.enabled for job in jobs)
