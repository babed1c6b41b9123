"""What is said of one run outside the charts: state, facts, held-out success, configuration, samples.

Invariants (``tests/report/test_run_page.py`` asserts each):

1. Any run folder gives a page: one that has not begun, goes on, was interrupted or undone, with or without samples.
2. What went another way than planned is a fact: resumes, skipped updates, steps that trained nothing, a control.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from megatron_ext.config.instantiate import ordered
from megatron_ext.models.hf_config import from_dict
from megatron_ext.moe.describe import routers_line
from megatron_ext.report.charts import ONCE
from megatron_ext.report.compare import Change, changes
from megatron_ext.report.experts import ExpertMap, expert_map
from megatron_ext.report.numbers import counted, number, points
from megatron_ext.report.places import command_line, place
from megatron_ext.report.run_data import RunData
from megatron_ext.report.samples import Limits, Step, show_step, spread
from megatron_ext.report.text import run_tokenizer
from megatron_ext.tracking.jsonl import FILE_NAME
from megatron_ext.training.evaluation import EvalResult, Interval
from megatron_ext.training.step_replay.kept_step import read_step, sampled_steps


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
    changes: tuple[Change, ...]
    versions: tuple[tuple[str, str], ...]
    command: str
    samples: tuple[Step, ...]
    samples_note: str
    experts: ExpertMap | None


def run_page(run: RunData, recipes: Path | None, limits: Limits, reach: float) -> RunPage:
    """The texts and tables of a run. ``recipes`` holds the presets that its configuration is compared with; ``reach``
    is the scale of its map of experts (``experts.common_reach``)."""
    status, state = _status(run)
    base, changed = changes(run.config, recipes)
    success = [_success(label, result) for label, result in (("before", run.before), ("after", run.after)) if result]
    tokenizer = run_tokenizer(run.path)
    kept = spread(sampled_steps(run.path), limits.steps)
    provenance = run.provenance
    versions = [(name, v or "not installed") for name, v in provenance.get("versions", {}).items()]
    if "python" in provenance:
        versions += [("Python", provenance["python"]), ("platform", provenance["platform"])]
    return RunPage(
        name=run.name,
        path=place(run.path),
        status=status,
        state=state,
        facts=tuple(_facts(run)),
        success=tuple(success),
        gain=run.gain,
        base=base,
        changes=changed,
        versions=tuple(versions),
        command=command_line(provenance.get("command", [])),
        samples=tuple(show_step(read_step(run.path, step), tokenizer, limits) for step in kept),
        samples_note=_samples_note(run),
        experts=None if run.routing is None else expert_map(run.routing, reach),
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
        return f"finished: {counted(run.steps, 'step')}" if run.steps else "finished without a step", "done"
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
            f"{counted(batch.tasks_per_step, 'task')} × "
            f"{counted(batch.trajectories_per_task, 'trajectory', 'trajectories')} a step, "
            f"{counted(batch.optimizer_steps_per_batch, 'optimizer step')}",
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
        passes = counted(f"{warm['epochs']:.2g}", "pass", "passes")
        facts.append(
            (
                "Warm start",
                f"{counted(warm['steps'], 'step')}, {passes}, loss {number(warm['loss'])}, "
                f"dev success {points(warm['dev_success'])} %",
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
