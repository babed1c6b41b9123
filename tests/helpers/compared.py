"""A comparison of two arms whose runs never ran, for what reads and draws it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from launch.compare_report import ArmRuns, read_arms
from launch.comparison import Arm, Comparison
from tests.helpers.run_folders import config, evaluation, make_run, rows

TASKS = 100
SHARE = "credit/half/changed_fraction"


def comparison(changed: str | None = SHARE, seeds: Sequence[int] = (1, 2, 3)) -> Comparison:
    arms = (Arm("on", "recipe", "with it"), Arm("off", "recipe", "without it", ("a.b=1",)))
    counters = {"policy/entropy": "entropy", "moe/load_peak": "peak"}
    return Comparison("walk", "does it?", "off", tuple(seeds), arms, changed, counters, counters)


def solved(share: float, seed: int) -> np.ndarray:
    """So many of the tasks, others for other seeds."""
    return np.random.default_rng(seed).permutation(TASKS) < round(share * TASKS)


def arms(folder: Path, after: dict[str, Sequence[float]], made: Comparison, first: int = 0) -> list[ArmRuns]:
    found: dict[str, list[tuple[Path, float | None]]] = {}
    for name, shares in after.items():
        found[name] = []
        for seed, share in zip(made.seeds, shares, strict=True):
            metrics = [row | ({SHARE: 0.3} if row["step"] and name == "on" else {}) for row in rows(20, seed=seed)]
            path = make_run(
                folder / f"{name}_{seed}",
                made=config(folder, f"{name}_{seed}", seed, 20),
                metrics=metrics,
                before=evaluation("before", solved(0.2, 0)),
                after=evaluation("after", solved(share, seed), first=first if name == "off" else 0),
            )
            found[name].append((path, 2.0 + seed))
    return read_arms(made, found)
