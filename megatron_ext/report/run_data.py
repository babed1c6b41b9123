"""What a run's folder says: configuration, metrics as series, evaluations, resumes. Read only.

Invariants (``tests/report/test_run_data.py`` asserts each):

1. A folder is read at any time: before its first step, while it trains, after a kill. A line torn by a write that is
   under way is left out.
2. A value that was written as not finite is NaN in its series, at its step; a step without the metric has no entry.
3. A resume says which steps it undid, from the journal.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megatron_ext.config.compose import ConfigError
from megatron_ext.config.saved import load_resolved
from megatron_ext.config.schema import Config
from megatron_ext.report.series import Series
from megatron_ext.tracking.jsonl import FILE_NAME, read_metrics
from megatron_ext.training.evaluate import load_result
from megatron_ext.training.evaluation import EvalResult, Interval, paired_interval
from megatron_ext.training.measures.routing_metrics import RoutingHistory, read_routing


class ReportError(ValueError):
    """A folder that is no run, or runs that cannot be shown together; one line."""


@dataclass(frozen=True)
class Resume:
    """The run went on from the checkpoint of ``step``; steps ``step + 1`` to ``undone_to`` were undone (None: none)."""

    step: int
    undone_to: int | None


@dataclass(frozen=True, eq=False)
class RunData:
    """One run. ``hf``, ``provenance``, ``result`` and ``warm_start`` are the JSON files of those names, empty where
    there is none yet; ``before`` and ``after`` the held-out evaluations."""

    path: Path
    config: Config
    hf: Mapping[str, Any]
    provenance: Mapping[str, Any]
    result: Mapping[str, Any]
    warm_start: Mapping[str, Any]
    before: EvalResult | None
    after: EvalResult | None
    series: Mapping[str, Series]
    steps: int
    resumes: tuple[Resume, ...]
    routing: RoutingHistory | None = None

    @property
    def name(self) -> str:
        return self.config.run.name

    @property
    def finished(self) -> bool:
        """Whether the run reached its end: it has a result that was not overtaken since."""
        return bool(self.result) and not self.result["interrupted"] and int(self.result["steps"]) >= self.steps

    @property
    def gain(self) -> Interval | None:
        """Greedy success on held-out tasks, after minus before, paired over tasks."""
        if self.before is None or self.after is None or self.before.tasks != self.after.tasks:
            return None
        return paired_interval(self.before.greedy, self.after.greedy)

    @property
    def minutes(self) -> float | None:
        """Minutes of training, those before a resume included."""
        spent = self.series.get("progress/minutes")
        return None if spent is None else float(spent.values[-1])


def read_run(path: Path) -> RunData:
    """The run in ``path``. Raises ``ReportError``, or ``ConfigError`` and ``MetricsFileError`` for damaged files."""
    if not path.is_dir():
        raise ReportError(f"{path}: no such run folder; a run is kept in <run.root>/<run.name>")
    if not (path / "config.yaml").is_file():
        raise ReportError(f"{path} is no run folder: it holds no config.yaml")
    metrics = path / FILE_NAME
    rows = read_metrics(metrics) if metrics.is_file() else []
    evaluations = {name: path / "evaluations" / f"{name}.json" for name in ("before", "after")}
    before, after = (load_result(file) if file.is_file() else None for file in evaluations.values())
    return RunData(
        path=path,
        config=load_resolved(path / "config.yaml"),
        hf=_json(path / "model_config.json"),
        provenance=_json(path / "provenance.json"),
        result=_json(path / "result.json"),
        warm_start=_json(path / "warm_start.json"),
        before=before,
        after=after,
        series=_series(rows),
        steps=max((row["step"] for row in rows), default=0),
        resumes=_resumes(path / "journal.jsonl"),
        routing=read_routing(path),
    )


def _json(path: Path) -> Mapping[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ConfigError([f"{path}: not JSON ({error.msg})"]) from error
    if not isinstance(value, dict):
        raise ConfigError([f"{path}: needs a map, got {type(value).__name__}"])
    return value


def _series(rows: list[dict[str, Any]]) -> dict[str, Series]:
    columns: dict[str, tuple[list[int], list[float]]] = {}
    for row in rows:
        for name, value in row.items():
            if name == "step":
                continue
            steps, values = columns.setdefault(name, ([], []))
            steps.append(row["step"])
            values.append(math.nan if value is None else float(value))
    return {
        name: Series(np.array(steps, dtype=np.int64), np.array(values, dtype=np.float64))
        for name, (steps, values) in columns.items()
    }


def _resumes(path: Path) -> tuple[Resume, ...]:
    """Of the journal only the few lines that open a run or consume a step are parsed: it may hold a million others."""
    if not path.is_file():
        return ()
    found: list[Resume] = []
    last, opened = 0, False
    with path.open("rb") as file:
        for line in file:
            head = line[:64]
            if not line.endswith(b"\n") or not (b'"event":"open"' in head or b'"event":"consume"' in head):
                continue
            event = json.loads(line)
            step = int(event["step"])
            if event["event"] == "consume":
                last = step
                continue
            if opened:
                found.append(Resume(step, last if last > step else None))
            last, opened = step, True
    return tuple(found)
