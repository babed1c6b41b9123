"""Steps kept with their tokens' scores, for the report, for inspection and for a replay: ``samples/step_N.arrow``.

A step's groups leave the store with the checkpoint that covers them; what ``samples.every`` and ``samples.groups`` ask
for is written here first. One file a step, an Arrow IPC file that stock tools open: the store's columns (a row a
trajectory) and, as lists over tokens, ``score/NAME``; all else is JSON in the schema's metadata.

Invariants (``tests/training/step_replay/test_kept_step.py`` asserts each):

1. ``read_step(run, write_step(run, kept).step)`` is ``kept``, bit for bit; a metric that is not finite reads as NaN.
2. A file appears whole or not at all; writing a step again replaces it, and ``drop_after`` removes undone steps.
3. Steps that were not kept but whose groups are still in the store are read from there, without scores.
4. What cannot be read is one line that names the run and the steps that can be.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from megatron_ext.config.schema import SamplesConfig
from megatron_ext.rollout.events import Consumed, Event, Finished, GroupMeta, Opened
from megatron_ext.rollout.journal import read as read_journal
from megatron_ext.trajectory.columns import Groups, from_arrow, to_arrow
from megatron_ext.trajectory.joining import concat, select_groups
from megatron_ext.trajectory.record import RecordError, TrajectoryBatch
from megatron_ext.trajectory.store import Ref, TrajectoryStore

FOLDER = "samples"
FORMAT = 1
_META = b"megatron_ext.kept_step"
_NAME = re.compile(r"step_(\d+)\.arrow")
_SCORES: Mapping[str, Any] = {
    "advantage": np.float64,
    "weight": np.float64,
    "logp": np.float32,
    "entropy": np.float32,
    "reference": np.float32,
}


class KeptStepError(ValueError):
    """A step that was not kept, or a file of one that cannot be read; the message names it and what there is."""


@dataclass(frozen=True, eq=False)
class StepScores:
    """Per token of the kept batch, [T]; 0 where nothing was scored.

    ``advantage`` float64, what the loss saw. ``weight`` float64, the share of the token in its optimizer step's loss:
    those of one optimizer step sum to 1 over the whole step, so over a part of its groups to less. ``logp`` float32,
    nats: log-prob under the weights that opened the batch (the "old" one); ``entropy`` float32, nats, under the same;
    ``reference`` float32 under the reference policy, None without one. ``before_update`` says whether these came from a
    scoring forward before the update (its losses take ratios to ``logp``), or from the update's own.
    """

    advantage: NDArray[np.float64]
    weight: NDArray[np.float64]
    logp: NDArray[np.float32]
    entropy: NDArray[np.float32]
    reference: NDArray[np.float32] | None = None
    before_update: bool = True


@dataclass(frozen=True, eq=False)
class KeptStep:
    """A step, or some of its groups.

    ``step`` as in ``metrics.jsonl`` (the first is 1); ``batch`` the kept groups in the order of the step; ``trained``
    the ids of all groups that the step trained on, in order, ``filtered`` the (id, reason) of those it dropped;
    ``opened`` the packed policy version of the weights that opened the batch, None where it is not known; ``resumed``
    incarnation -> optimizer step it went on from (lag counts with it); ``metrics`` of the step. ``scores`` is None for
    a step that was read from the store.
    """

    step: int
    batch: TrajectoryBatch
    trained: tuple[str, ...]
    filtered: tuple[tuple[str, str], ...] = ()
    scores: StepScores | None = None
    opened: int | None = None
    resumed: Mapping[int, int] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)

    @property
    def whole(self) -> bool:
        """Whether every group that the step trained on is there: only then it can be trained again."""
        return self.batch.group_id == self.trained

    def first(self, groups: int) -> KeptStep:
        """The step with its first ``groups`` groups (0: all)."""
        if groups == 0 or groups >= self.batch.num_groups:
            return self
        batch = select_groups(self.batch, range(groups))
        scores = None
        if self.scores is not None:
            kept = {name: value[: batch.num_tokens] for name, value in _arrays(self.scores).items()}
            scores = StepScores(**kept, before_update=self.scores.before_update)
        return KeptStep(self.step, batch, self.trained, self.filtered, scores, self.opened, self.resumed, self.metrics)


def due(samples: SamplesConfig, step: int, last: int) -> bool:
    """Whether ``step`` (counted from 1) of ``last`` is kept: the first, every ``samples.every``-th, and the last."""
    return samples.every > 0 and (step in (1, last) or step % samples.every == 0)


# -- writing --------------------------------------------------------------------------------------------------------
def _arrays(scores: StepScores) -> dict[str, NDArray[Any]]:
    return {name: value for name in _SCORES if (value := getattr(scores, name)) is not None}


def path_of(run: Path, step: int) -> Path:
    return run / FOLDER / f"step_{step}.arrow"


def write_step(run: Path, kept: KeptStep) -> Path:
    """Writes ``samples/step_N.arrow`` of a run folder, durably and at once. Raises ``KeptStepError``, on a full disk
    too."""
    path = path_of(run, kept.step)
    rows, groups = to_arrow(kept.batch)
    columns = dict(zip(rows.schema.names, rows.columns, strict=True))
    about: dict[str, Any] = {
        "format": FORMAT,
        "groups": groups.to_json(),
        "step": kept.step,
        "trained": list(kept.trained),
        "filtered": [list(pair) for pair in kept.filtered],
        "opened": kept.opened,
        "resumed": {str(incarnation): at for incarnation, at in kept.resumed.items()},
        "metrics": {name: float(v) if math.isfinite(v) else None for name, v in kept.metrics.items()},
        "before_update": None if kept.scores is None else kept.scores.before_update,
    }
    if kept.scores is not None:
        offsets = pa.array(kept.batch.trajectory_tokens())
        for name, value in _arrays(kept.scores).items():
            if value.shape != (kept.batch.num_tokens,):
                raise KeptStepError(f"{path}: {name} has shape {value.shape} for {kept.batch.num_tokens} tokens")
            flat = pa.array(np.ascontiguousarray(value, dtype=_SCORES[name]))
            columns[f"score/{name}"] = pa.LargeListArray.from_arrays(offsets, flat)
    fields = [pa.field(name, column.type, nullable=False) for name, column in columns.items()]
    schema = pa.schema(fields, metadata={_META: json.dumps(about, allow_nan=False).encode()})
    temporary = path.with_suffix(".tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("wb") as file:
            with pa.ipc.new_file(file, schema) as writer:
                writer.write_batch(pa.RecordBatch.from_arrays(list(columns.values()), schema=schema))
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise KeptStepError(f"{path}: not written: {error.strerror}; free space or set samples.every=0") from error
    return path


def drop_after(run: Path, step: int) -> list[int]:
    """Removes the kept steps after ``step``, which a resume undid, and files half written. Returns their numbers."""
    gone = [number for number in sampled_steps(run) if number > step]
    for number in gone:
        path_of(run, number).unlink(missing_ok=True)
    for torn in (run / FOLDER).glob("step_*.tmp"):
        torn.unlink(missing_ok=True)
    return gone


# -- reading --------------------------------------------------------------------------------------------------------
def sampled_steps(run: Path) -> list[int]:
    """Steps in ``samples/``, in order."""
    found = (_NAME.fullmatch(path.name) for path in (run / FOLDER).glob("step_*.arrow"))
    return sorted(int(match[1]) for match in found if match)


def stored_steps(run: Path) -> list[int]:
    """Steps whose groups are all still in the store, in order."""
    return sorted(_stored(run))


def read_step(run: Path, step: int) -> KeptStep:
    """A kept step, from ``samples/`` or else from the store. Nothing is written. Raises ``KeptStepError``."""
    path = path_of(run, step)
    if path.is_file():
        return _read(path)
    stored = _stored(run)
    if step not in stored:
        kept = f"in samples/: {_said(sampled_steps(run))}; still in the store: {_said(sorted(stored))}"
        raise KeptStepError(f"{run}: step {step} was not kept; {kept}. samples.every=N keeps every Nth step")
    consumed, metas = stored[step]
    store = TrajectoryStore(run / "store")
    batch = concat([store.read(Ref(metas[group].ref)) for group in consumed.groups])
    return KeptStep(step, batch, consumed.groups, consumed.filtered)


def _said(steps: list[int]) -> str:
    """``1, 5-8, 20``, or ``none``."""
    runs: list[list[int]] = []
    for step in steps:
        if runs and step == runs[-1][-1] + 1:
            runs[-1][1:] = [step]
        else:
            runs.append([step])
    return ", ".join("-".join(map(str, run)) for run in runs) or "none"


def _read(path: Path) -> KeptStep:
    try:
        with pa.memory_map(str(path)) as source, pa.ipc.open_file(source) as reader:
            about = json.loads((reader.schema.metadata or {})[_META])
            if about["format"] != FORMAT:
                raise KeptStepError(f"{path}: format {about['format']}, this version reads {FORMAT}")
            rows = reader.get_batch(0)
            batch = from_arrow(rows, Groups.from_json(about["groups"]))
    except (OSError, pa.ArrowException, RecordError, KeyError, json.JSONDecodeError) as error:
        raise KeptStepError(f"{path}: cannot be read ({type(error).__name__}: {error}); delete it") from error
    names = set(rows.schema.names)
    values = {name: rows.column(f"score/{name}").values.to_numpy() for name in _SCORES if f"score/{name}" in names}
    return KeptStep(
        step=about["step"],
        batch=batch,
        trained=tuple(about["trained"]),
        filtered=tuple((group, reason) for group, reason in about["filtered"]),
        scores=StepScores(**values, before_update=about["before_update"]) if values else None,
        opened=about["opened"],
        resumed={int(incarnation): at for incarnation, at in about["resumed"].items()},
        metrics={name: math.nan if v is None else v for name, v in about["metrics"].items()},
    )


def _stored(run: Path) -> dict[int, tuple[Consumed, dict[str, GroupMeta]]]:
    """Steps on the surviving history whose groups are all in the store, with the groups' metadata."""
    journal, folder = run / "journal.jsonl", run / "store"
    if not journal.is_file() or not folder.is_dir():
        return {}
    events: list[Event] = read_journal(journal)[0]
    metas: dict[str, GroupMeta] = {}
    consumed: dict[int, Consumed] = {}
    for event in events:
        if isinstance(event, Finished):
            metas[event.group] = event.meta
        elif isinstance(event, Opened):
            consumed = {step: taken for step, taken in consumed.items() if step <= event.step}
        elif isinstance(event, Consumed):
            consumed[event.step] = event
    there = set(TrajectoryStore(folder).list())
    return {
        step: (taken, metas)
        for step, taken in consumed.items()
        if taken.groups and all(group in metas and metas[group].ref in there for group in taken.groups)
    }
