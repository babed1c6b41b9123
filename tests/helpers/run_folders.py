"""Folders of runs that never ran, for what reads them: metrics, evaluations, journals, kept steps as a test wants."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from megatron_ext.config.saved import save_resolved
from megatron_ext.config.schema import Config, ModelConfig, RunConfig, SamplesConfig, TasksConfig
from megatron_ext.training.evaluate import save_result
from megatron_ext.training.evaluation import EvalResult
from megatron_ext.training.step_replay.kept_step import KeptStep, StepScores, write_step
from megatron_ext.trajectory.record import TrajectoryBatch
from tests.helpers.records import random_batch

WALK = {"_target_": "tests.helpers.worlds.Walk"}


def config(root: Path, name: str = "run", seed: int = 1, steps: int = 40) -> Config:
    """A configuration that nothing but a reader needs."""
    return Config(
        recipe="walk",
        run=RunConfig(name=name, root=str(root), seed=seed, steps=steps),
        model=ModelConfig(hf_config="nowhere"),
        environments={"walk": dict(WALK)},
        tasks=TasksConfig(environment="walk"),
        samples=SamplesConfig(every=10),
    )


def rows(steps: int, *, seed: int = 0, rate: float = 1.0) -> list[dict[str, Any]]:
    """Metrics of a run that learns at ``rate``: everything that has a chart."""
    rng = np.random.default_rng(seed)
    made: list[dict[str, Any]] = [{"step": 0, "eval/before/tasks": 100.0}]
    for step in range(1, steps + 1):
        success = float(np.clip(0.2 + 0.7 * rate * step / steps + rng.normal(0, 0.03), 0, 1))
        row = {
            "reward/mean": success,
            "reward/success": success,
            "reward/part/success": success,
            "reward/part/form": 0.1,
            "policy/entropy": 1.0 - 0.6 * step / steps,
            "rollout/entropy": 1.0 - 0.6 * step / steps,
            "policy/kl_old": abs(float(rng.normal(0, 1e-4))),
            "policy/clip_fraction_low": abs(float(rng.normal(0, 0.01))),
            "policy/clip_fraction_high": abs(float(rng.normal(0, 0.01))),
            "train/grad_norm": float(np.exp(rng.normal(0, 0.3))),
            "train/loss": float(rng.normal(0, 0.1)),
            "offpolicy/logp_diff_mean": 1e-6,
            "offpolicy/logp_diff_max": 1e-4,
            "moe/load_cv": 0.3,
            "moe/layer/0/load_cv": 0.2,
            "moe/layer/1/load_cv": 0.4 * step / steps,
            "time/rollout": 2.0,
            "time/update": 1.0,
            "train/tokens_per_s": 1e4,
            "memory/rss_gib": 1.0,
            "progress/minutes": step / 10,
            "filter/groups_drawn": 20.0,
        }
        if step % 10 == 0:
            row |= {"eval/dev/greedy_pass1": success, "eval/dev/greedy_ci_low": success - 0.1}
            row |= {"eval/dev/greedy_ci_high": success + 0.1}
        made.append({"step": step, **row})
    return made


def evaluation(name: str, solved: Sequence[bool] | np.ndarray, *, first: int = 0) -> EvalResult:
    """An evaluation of as many tasks as ``solved`` has, numbered from ``first``."""
    outcome = np.asarray(solved, dtype=bool)
    return EvalResult(
        name=name,
        tasks=tuple(f"walk/test/{first + i}" for i in range(len(outcome))),
        greedy=outcome,
        sampled=np.stack([outcome, np.zeros_like(outcome)], axis=1),
        turns=np.full(len(outcome), 3.0),
        reward=outcome.astype(np.float64),
    )


def make_run(
    folder: Path,
    *,
    made: Config | None = None,
    metrics: Sequence[Mapping[str, Any]] | None = None,
    before: EvalResult | None = None,
    after: EvalResult | None = None,
    result: Mapping[str, Any] | None = None,
    journal: Sequence[Mapping[str, Any]] = (),
    kept: Sequence[KeptStep] = (),
) -> Path:
    """Writes a run's folder; what is left out is not there."""
    folder.mkdir(parents=True)
    save_resolved(made or config(folder.parent, folder.name), folder / "config.yaml")
    if metrics is not None:
        lines = "".join(json.dumps(dict(row)) + "\n" for row in metrics)
        (folder / "metrics.jsonl").write_text(lines)
    for name, value in (("before", before), ("after", after)):
        if value is not None:
            save_result(folder / "evaluations" / f"{name}.json", value)
    if result is not None:
        (folder / "result.json").write_text(json.dumps(dict(result)))
    if journal:
        numbered = ({"seq": number, **event} for number, event in enumerate(journal))
        lines = "".join(json.dumps(event, separators=(",", ":")) + "\n" for event in numbered)
        (folder / "journal.jsonl").write_text(lines)
    for step in kept:
        write_step(folder, step)
    return folder


def kept_step(
    step: int, batch: TrajectoryBatch | None = None, *, seed: int = 0, reference: bool = False, top: float = 2.0
) -> KeptStep:
    """A kept step of a random batch, or of ``batch``, with random scores."""
    batch = random_batch(seed) if batch is None else batch
    rng = np.random.default_rng(seed)
    sampled = batch.version >= 0
    size = batch.num_tokens

    def scores(low: float, high: float, where: np.ndarray) -> np.ndarray:
        return np.where(where, rng.uniform(low, high, size), 0.0)

    return KeptStep(
        step=step,
        batch=batch,
        trained=batch.group_id,
        filtered=(("g-gone", "constant reward"),),
        scores=StepScores(
            advantage=scores(-top, top, batch.loss_mask),
            weight=scores(0, 1, batch.loss_mask),
            logp=scores(-3, 0, sampled).astype(np.float32),
            entropy=scores(0, 1, sampled).astype(np.float32),
            reference=scores(-3, 0, sampled).astype(np.float32) if reference else None,
        ),
        opened=7,
        resumed={0: 0, 1: 4},
        metrics={"reward/mean": 0.25, "train/loss": float("nan")},
    )
