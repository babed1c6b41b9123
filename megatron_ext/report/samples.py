"""Trajectories of a kept step as they are shown: turn by turn, each token with what trained it.

Invariants (``tests/report/test_samples.py`` asserts each):

1. Every token of a trajectory is shown once and in order, or counted in a fold that says how many it stands for.
2. A token is marked as trained where its loss mask is set and its trajectory is trainable; ``shade`` has the sign of
   its advantage, and is 0 exactly where that is 0 or not kept.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from megatron_ext.report.numbers import number, signed
from megatron_ext.report.text import pieces
from megatron_ext.training.step_replay.kept_step import KeptStep
from megatron_ext.trajectory.record import Role, SessionKind, Status, TrajectoryBatch
from megatron_ext.trajectory.version import UNSAMPLED, unpack

SHADES = 9


@dataclass(frozen=True)
class Limits:
    """What fits into a report: kept ``steps`` of a run, ``trajectories`` of a step, ``turns`` of a trajectory and
    ``tokens`` of a turn; the middle of what is longer is folded away."""

    steps: int = 4
    trajectories: int = 6
    turns: int = 40
    tokens: int = 400


@dataclass(frozen=True)
class Token:
    """``shade`` -9 to 9: the advantage over the step's largest. ``title`` is shown when the pointer rests on it."""

    text: str
    trained: bool
    shade: int
    title: str


@dataclass(frozen=True)
class Turn:
    """One message with its frame, or (``role`` empty) a prefix that a segment repeats. ``folded`` tokens were left out
    after the first ``before``."""

    role: str
    number: int
    session: str
    reward: float
    labels: tuple[tuple[str, int], ...]
    tokens: tuple[Token, ...]
    before: int
    folded: int
    note: str = ""


@dataclass(frozen=True)
class Trajectory:
    """``parts`` are those of the reward, None where one has no value; ``advantage`` the range over its trained tokens,
    None without one."""

    name: str
    group: str
    task: str
    sample: int
    reward: float
    parts: tuple[tuple[str, float | None], ...]
    success: bool
    status: str
    harness: str
    versions: str
    num_tokens: int
    num_trained: int
    model_turns: int
    advantage: tuple[float, float] | None
    turns: tuple[Turn, ...]
    folded_turns: int
    fold_at: int


@dataclass(frozen=True)
class Step:
    step: int
    version: str
    groups_kept: int
    groups_trained: int
    top: float
    trajectories: tuple[Trajectory, ...]
    left_out: int


def version_text(version: int) -> str:
    """``incarnation.step`` of a packed version."""
    return "–" if version == UNSAMPLED else ".".join(map(str, unpack(version)))


def spread(steps: Sequence[int], count: int) -> list[int]:
    """At most ``count`` of the steps: the first, the last, and some between them."""
    if len(steps) <= count:
        return list(steps)
    return [steps[round(i)] for i in np.linspace(0, len(steps) - 1, count)]


def choose(kept: KeptStep, count: int) -> list[int]:
    """Trajectories to show: of each group in turn the best, then the worst, then the rest."""
    batch = kept.batch
    queues: list[list[int]] = []
    for g in range(batch.num_groups):
        first, last = int(batch.group_trajectories[g]), int(batch.group_trajectories[g + 1])
        order = sorted(range(first, last), key=lambda j: (-float(batch.reward[j]), j))
        queues.append([*order[:1], *order[:0:-1]])
    chosen: list[int] = []
    while len(chosen) < count and any(queues):
        for queue in queues:
            if queue and len(chosen) < count:
                chosen.append(queue.pop(0))
    return sorted(chosen)


def show_step(kept: KeptStep, tokenizer: Tokenizer | None, limits: Limits) -> Step:
    """The step as the report shows it."""
    batch = kept.batch
    chosen = choose(kept, limits.trajectories)
    trained = trained_mask(batch)
    shades, top = shading(kept, trained)
    return Step(
        step=kept.step,
        version="–" if kept.opened is None else version_text(kept.opened),
        groups_kept=batch.num_groups,
        groups_trained=len(kept.trained),
        top=top,
        trajectories=tuple(_trajectory(kept, j, tokenizer, shades, trained, limits) for j in chosen),
        left_out=batch.num_trajectories - len(chosen),
    )


def trained_mask(batch: TrajectoryBatch) -> NDArray[np.bool_]:
    """bool [T]: tokens that are trained; those of a trajectory lost to its environment are not."""
    trained: NDArray[np.bool_] = batch.loss_mask & batch.trainable()[batch.token_trajectory()]
    return trained


def shading(kept: KeptStep, trained: NDArray[np.bool_]) -> tuple[NDArray[np.int64], float]:
    """-9 to 9 for each token (0 where it is not ``trained``), and the advantage that 9 stands for."""
    if kept.scores is None:
        return np.zeros(kept.batch.num_tokens, dtype=np.int64), 0.0
    advantage = np.where(trained, kept.scores.advantage, 0.0)
    top = float(np.abs(advantage).max(initial=0.0))
    if top == 0.0:
        return np.zeros(len(advantage), dtype=np.int64), 0.0
    size = np.clip(np.ceil(np.abs(advantage) / top * SHADES), 0, SHADES).astype(np.int64)
    return np.sign(advantage).astype(np.int64) * size, top


@dataclass(frozen=True)
class Part:
    """Tokens [start, end) of a trajectory that belong together: those of one ``turn`` of the batch with what the
    template puts before them, or (``turn`` -1) what is repeated there: the prefix of a segment, the dialogue that is
    compressed, a summary."""

    turn: int
    segment: int
    start: int
    end: int


def parts(batch: TrajectoryBatch, index: int) -> Iterator[Part]:
    """The tokens of a trajectory in order, cut where a turn ends. A turn without tokens is a part where it stands."""
    sessions = set(batch.session_segments.tolist())
    for segment in batch.trajectory(index).segments:
        first, end = int(batch.segment_tokens[segment]), int(batch.segment_tokens[segment + 1])
        turns = range(int(batch.segment_turns[segment]), int(batch.segment_turns[segment + 1]))
        at = first
        session = int(np.searchsorted(batch.session_segments, segment, side="right")) - 1
        repeats = segment not in sessions or batch.session_kind[session] == SessionKind.COMPRESS
        for turn in turns:
            start = int(batch.turn_start[turn])
            # Nothing but what is repeated stands between two messages that the model did not write.
            between = turn > turns[0] and Role.MODEL not in batch.turn_role[turn - 1 : turn + 1]
            if at < start and (between or (at == first and repeats)):
                yield Part(-1, segment, at, start)
                at = start
            stop = end if turn == turns[-1] else int(batch.turn_end[turn])
            yield Part(turn, segment, at, stop)
            at = stop
        if not turns and at < end:
            yield Part(-1, segment, at, end)


def reward_parts(batch: TrajectoryBatch, index: int) -> tuple[tuple[str, float | None], ...]:
    """Name and value of the parts of one trajectory's reward; None for one that has no value."""
    values = ((name, float(part[index])) for name, part in batch.reward_parts.items())
    return tuple((name, None if math.isnan(value) else value) for name, value in values)


def session_text(batch: TrajectoryBatch, segment: int, index: int) -> str:
    """Which session and segment of trajectory ``index`` this is; empty for the only one."""
    first = int(batch.trajectory_sessions[index])
    sessions = int(batch.trajectory_sessions[index + 1]) - first
    session = int(np.searchsorted(batch.session_segments, segment, side="right")) - 1
    segments = int(batch.session_segments[session + 1] - batch.session_segments[session])
    said = []
    if sessions > 1:
        kind = SessionKind(int(batch.session_kind[session])).name.lower()
        parent = int(batch.session_parent[session])
        said.append(f"session {session - first} ({kind}" + (f" of {parent - first})" if parent >= 0 else ")"))
    if segments > 1:
        said.append(f"segment {segment - int(batch.session_segments[session])}")
    return ", ".join(said)


def _trajectory(
    kept: KeptStep,
    index: int,
    tokenizer: Tokenizer | None,
    shades: NDArray[np.int64],
    trained: NDArray[np.bool_],
    limits: Limits,
) -> Trajectory:
    batch = kept.batch
    view, span = batch.trajectory(index), batch.trajectory(index).tokens
    mine = trained[span]
    versions = batch.version[span][batch.version[span] > UNSAMPLED]
    ends = sorted({int(versions.min()), int(versions.max())}) if len(versions) else []
    advantage = None
    if kept.scores is not None and mine.any():
        values = kept.scores.advantage[span][mine]
        advantage = (float(values.min()), float(values.max()))
    found = list(parts(batch, index))
    shown, fold_at = found, len(found)
    if len(found) > limits.turns:
        fold_at = limits.turns - limits.turns // 4
        shown = [*found[:fold_at], *found[len(found) - limits.turns // 4 :]]
    group = int(np.searchsorted(batch.group_trajectories, index, side="right")) - 1
    return Trajectory(
        name=batch.trajectory_id[index],
        group=batch.group_id[group],
        task=batch.task_id[group],
        sample=int(batch.sample[index]),
        reward=float(batch.reward[index]),
        parts=reward_parts(batch, index),
        success=bool(batch.success[index]),
        status=Status(int(batch.status[index])).name.lower().replace("_", " "),
        harness=batch.harness[index],
        versions=" to ".join(map(version_text, ends)) or "–",
        num_tokens=span.stop - span.start,
        num_trained=int(mine.sum()),
        model_turns=view.num_model_turns,
        advantage=advantage,
        turns=tuple(_turn(kept, index, part, tokenizer, shades, trained, limits.tokens) for part in shown),
        folded_turns=len(found) - len(shown),
        fold_at=fold_at,
    )


def _turn(
    kept: KeptStep,
    index: int,
    part: Part,
    tokenizer: Tokenizer | None,
    shades: NDArray[np.int64],
    trained: NDArray[np.bool_],
    limit: int,
) -> Turn:
    batch, turn = kept.batch, part.turn
    texts = pieces(tokenizer, batch.ids[part.start : part.end].tolist())
    count = part.end - part.start
    before, folded = count, 0
    if count > limit:
        before, folded = limit - limit // 4, count - limit
    shown = [*range(before), *range(before + folded, count)]
    tokens = tuple(
        Token(texts[i], bool(trained[t]), int(shades[t]), _title(kept, t)) for i in shown for t in (part.start + i,)
    )
    role = Role(int(batch.turn_role[turn])).name.lower() if turn >= 0 else ""
    note = ""
    if turn >= 0 and role == "model" and not trained[part.start : part.end].any():
        note = "not trained" if count else "no token"
    return Turn(
        role=role,
        number=int(batch.turn_number[turn]) if turn >= 0 else -1,
        session=session_text(batch, part.segment, index),
        reward=float(batch.turn_reward[turn]) if turn >= 0 else 0.0,
        labels=tuple((name, int(v[turn])) for name, v in batch.turn_labels.items() if turn >= 0 and v[turn] >= 0),
        tokens=tokens,
        before=before,
        folded=folded,
        note=note,
    )


def _title(kept: KeptStep, t: int) -> str:
    batch, scores = kept.batch, kept.scores
    said = [f"id {batch.ids[t]}"]
    if batch.version[t] > UNSAMPLED:
        said.append(f"log-prob {number(float(batch.rollout_logp[t]))}")
        if scores is not None:
            said[-1] += f" (training {number(float(scores.logp[t]))})"
            said.append(f"entropy {number(float(scores.entropy[t]))}")
            if scores.reference is not None:
                said.append(f"reference {number(float(scores.reference[t]))}")
            said.append(f"advantage {signed(float(scores.advantage[t]))}")
            said.append(f"loss weight {number(float(scores.weight[t]))}")
        said.append(f"version {version_text(int(batch.version[t]))}")
        if not batch.loss_mask[t]:
            said.append("masked")
    return ", ".join(said)
