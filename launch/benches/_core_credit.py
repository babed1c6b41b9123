"""Credit primitives at the size of a large step: group statistics, turns, edits, and the weights of the loss.

One figure is for everything from rewards to edited advantages over 4,096 trajectories of 50 turns and 8k tokens: group
statistics by task, by (task, state) and by (task, state, action), ranks, a turn reduction of a per-token score and its
way back, returns to go, and a pipeline of a reward-side edit, a turn-level edit and whitening, with its run-time
checks. The same at half the number of trajectories says whether time grows with size. The weights of the loss and the
parts by themselves are informative.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from launch.measurement import Measurement, Report
from megatron_ext.credit.edits.length_penalty import LengthPenalty
from megatron_ext.credit.edits.whiten import Whiten
from megatron_ext.credit.groups import centred_rank, group_normalize
from megatron_ext.credit.pipeline import Pipeline, open_view
from megatron_ext.credit.protocol import CreditEdit, CreditView, EditTraits, ScoreRequest, Stat
from megatron_ext.credit.spans import Op
from megatron_ext.credit.turns import Turns, model_turns, returns_to_go, turn_broadcast, turn_reduce
from megatron_ext.credit.variance import variance_shares
from megatron_ext.losses.aggregation import token_weights
from megatron_ext.trajectory.record import Role, TrajectoryBatch

TRAJECTORIES, GROUP, TURNS, TOKENS = 4096, 16, 50, 8192
BAR = 0.5
ROUNDS = 7
PART_ROUNDS = 3


def make_batch(trajectories: int, *, group: int = GROUP, turns: int = TURNS, tokens: int = TOKENS) -> TrajectoryBatch:
    """Trajectories of ``turns`` exchanges (observation, then model turn) and ``tokens`` tokens of random split."""
    rng = np.random.default_rng(0)
    share = rng.dirichlet(np.full(2 * turns, 4.0), trajectories)
    ends = np.rint(np.cumsum(share, axis=1) * tokens).astype(np.int64)
    ends[:, -1] = tokens
    start = np.concatenate([np.zeros((trajectories, 1), dtype=np.int64), ends[:, :-1]], axis=1)
    base = np.arange(trajectories, dtype=np.int64)[:, None] * tokens
    lengths = (ends - start).reshape(-1)
    entries, size = 2 * turns * trajectories, trajectories * tokens
    role = np.tile(np.array([Role.TOOL, Role.MODEL], dtype=np.int8), entries // 2)
    model = np.repeat(role == Role.MODEL, lengths)
    offsets = np.arange(trajectories + 1, dtype=np.int64)
    return TrajectoryBatch(
        ids=np.ones(size, dtype=np.int32),
        loss_mask=model,
        turn=np.repeat(np.arange(entries, dtype=np.int32), lengths),
        field=np.zeros(size, dtype=np.int8),
        rollout_logp=np.where(model, np.float32(-0.5), np.float32(0.0)),
        version=np.where(model, np.int64(3), np.int64(-1)),
        weight=np.ones(size, dtype=np.float32),
        turn_role=role,
        turn_start=(start + base).reshape(-1),
        turn_end=(ends + base).reshape(-1),
        turn_number=np.tile(np.arange(2 * turns, dtype=np.int32), trajectories),
        turn_state_key=rng.integers(1, 40, entries),
        turn_action_key=rng.integers(1, 5, entries),
        turn_reward=rng.random(entries, dtype=np.float32),
        segment_tokens=offsets * tokens,
        segment_turns=offsets * 2 * turns,
        session_segments=offsets,
        trajectory_sessions=offsets,
        group_trajectories=np.arange(0, trajectories + 1, group, dtype=np.int64),
        session_kind=np.zeros(trajectories, dtype=np.int8),
        session_parent=np.full(trajectories, -1, dtype=np.int32),
        session_return=np.full((trajectories, 2), -1, dtype=np.int64),
        trajectory_id=tuple(f"t{j}" for j in range(trajectories)),
        sample=np.arange(trajectories, dtype=np.int32) % group,
        reward=rng.integers(0, 2, trajectories).astype(np.float32),
        success=np.zeros(trajectories, dtype=bool),
        status=np.zeros(trajectories, dtype=np.int8),
        harness=("bench",) * trajectories,
        group_id=tuple(f"g{g}" for g in range(trajectories // group)),
        task_id=tuple(f"k{g}" for g in range(trajectories // group)),
    )


@dataclass(frozen=True)
class TurnWeights:
    """An advantage-side edit of the usual kind: ``A <- w_turn A``, w from the turn's mean score and step groups."""

    score: NDArray[np.float32]
    traits: EditTraits = EditTraits()

    def requests(self, view: CreditView) -> Sequence[ScoreRequest]:
        return ()

    def local_stats(self, view: CreditView) -> Mapping[str, Stat]:
        return {}

    def apply(self, view: CreditView, reduced: Mapping[str, NDArray[Any]]) -> CreditView:
        turns = view.turns
        weight = turn_reduce(self.score, turns, Op.MEAN)
        weight = 1.0 + 0.1 * np.tanh(weight) + 0.1 * step_credit(turns)
        edited = turn_broadcast(weight, turns)
        edited *= view.advantage
        return replace(view, advantage=edited)

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """No state."""


def step_credit(turns: Turns) -> NDArray[np.float64]:
    """Step-level advantages by anchor state, weighed by how much of a state's spread its actions explain; [M]."""
    batch = turns.batch
    reward = turns.pick(batch.turn_reward)
    value = returns_to_go(turns, reward, 0.95, terminal=batch.reward)
    task = batch.trajectory_group()[turns.trajectory]
    state, action = turns.pick(batch.turn_state_key), turns.pick(batch.turn_action_key)
    step = group_normalize(value, (task, state), std=False)
    return step * variance_shares(value, (task, state), action).explained(1.0)


def credit(batch: TrajectoryBatch, score: NDArray[np.float32]) -> None:
    """Everything that the figure times."""
    group = batch.trajectory_group()
    group_normalize(batch.reward, group)
    centred_rank(np.diff(batch.trajectory_tokens()), (group, batch.reward))
    edits: list[tuple[str, CreditEdit]] = [
        ("length", LengthPenalty(coefficient=0.2, free=TOKENS // 4, limit=TOKENS)),
        ("turns", TurnWeights(score)),
        ("whiten", Whiten()),
    ]
    Pipeline(edits).run(open_view(batch))


def seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def run(report: Report) -> None:
    full, half = make_batch(TRAJECTORIES), make_batch(TRAJECTORIES // 2)
    scores = {id(b): np.where(b.loss_mask, np.float32(0.25), np.float32(0.0)) for b in (full, half)}
    size = f"{TRAJECTORIES} trajectories x {TURNS} turns, {full.num_tokens / 1e6:.1f}M tokens"
    turns = model_turns(full)
    parts: dict[str, Callable[[], object]] = {
        "credit_group_statistics_seconds": lambda: step_credit(turns),
        "credit_turn_reduce_seconds": lambda: turn_reduce(scores[id(full)], turns, Op.MEAN),
        "credit_turn_broadcast_seconds": lambda: turn_broadcast(np.ones(len(turns)), turns),
        "credit_whiten_pipeline_seconds": lambda: Pipeline([("whiten", Whiten())]).run(open_view(full)),
        "credit_loss_weights_seconds": lambda: token_weights(full, "trajectory_mean"),
    }
    credit(full, scores[id(full)])  # first use of the pages
    whole: list[float] = []
    halves: list[float] = []
    each: dict[str, list[float]] = {name: [] for name in parts}
    for number in range(ROUNDS):
        halves.append(seconds(lambda: credit(half, scores[id(half)])))
        whole.append(seconds(lambda: credit(full, scores[id(full)])))
        for name, work in parts.items() if number < PART_ROUNDS else ():
            each[name].append(seconds(work))
    report(Measurement("credit_primitives_seconds", min(whole), "s", BAR, "lower", size))
    linear = min(whole) / (2 * min(halves))
    report(Measurement("credit_primitives_growth", linear, "x of linear", None, "lower", f"half of it, and {size}"))
    for name, times in each.items():
        report(Measurement(name, min(times), "s", None, "lower", size))


if __name__ == "__main__":
    from launch.bench import table

    rows: list[Measurement] = []
    run(rows.append)
    print(table(rows))
