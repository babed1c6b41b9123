"""Credit methods of the recipes at the size of a large step: everything from rewards to edited advantages.

Each recipe that edits credit is timed with its own edits and constants (``recipe.yaml``) on 4,096 trajectories of 50
turns and 8k tokens, in one session or several (compressions, sub-agents), with judged turns and prepared answers. Timed
are its scoring requests and the pipeline with its run-time checks; replies to requests are canned, since forwards are
the model's time. The same at half the trajectories says whether time grows with size.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from launch.benches._core_credit import GROUP, TOKENS, TRAJECTORIES, TURNS, make_batch
from launch.measurement import About, Measurement, Report
from launch.paths import RECIPES
from megatron_ext.config.compose import compose, recipes
from megatron_ext.config.instantiate import instantiate, ordered
from megatron_ext.credit.pipeline import Pipeline, by_edit, flat, open_view
from megatron_ext.credit.scoring import ScoreReply
from megatron_ext.trajectory.record import Ragged, SessionKind, TrajectoryBatch

ABOUT = About(
    line="seconds of each recipe's credit method on 4,096 trajectories x 50 turns, and how they grow",
    takes="a quarter of a minute on one core, and 4 GB of memory",
    keys={
        "credit_seconds_<recipe>": "seconds of the method, best of five",
        "credit_growth_<recipe>": "its time over that of half the trajectories; 2 is linear",
        "credit_requests_<recipe>": "sequences that it asks to be scored, where it asks",
    },
)

BAR = 1.0
GROWTH_BAR = 2.4  # times the time of half the trajectories
ROUNDS = 5
ROLES = 4
ANSWER = 6  # ids of an answer, and of what stands before it

N, C, S = SessionKind.NORMAL, SessionKind.COMPRESS, SessionKind.SUBAGENT


@dataclass(frozen=True)
class Shape:
    """How a trajectory's exchanges are cut into sessions: the share of them that each begins at, its kind, its parent
    (within the trajectory), and the share of the exchange whose observation brings its result (None: brings none)."""

    starts: tuple[float, ...]
    kinds: tuple[SessionKind, ...]
    parents: tuple[int, ...]
    returns: tuple[float | None, ...]


SHAPES = (
    Shape((0.0,), (N,), (-1,), (None,)),
    Shape((0.0, 0.48, 0.5), (N, C, N), (-1, 0, -1), (None, None, None)),
    Shape((0.0, 0.4, 0.6, 0.62, 0.8), (N, S, C, N, S), (-1, 0, 0, -1, 3), (None, 0.2, None, None, 0.7)),
)


def agent_batch(trajectories: int, *, group: int = GROUP, turns: int = TURNS, tokens: int = TOKENS) -> TrajectoryBatch:
    """``make_batch`` cut into sessions, with roles on its turns, successes, and answers prepared for scoring."""
    flat_batch = make_batch(trajectories, group=group, turns=turns, tokens=tokens)
    rng = np.random.default_rng(1)
    segment_turns: list[int] = []
    kinds: list[int] = []
    parents: list[int] = []
    results: list[tuple[int, int]] = []
    sessions = [0]
    for j in range(trajectories):
        shape, first, base = SHAPES[int(rng.integers(len(SHAPES)))], 2 * turns * j, len(kinds)
        segment_turns += [first + 2 * int(share * turns) for share in shape.starts]
        kinds += [int(kind) for kind in shape.kinds]
        parents += [base + parent if parent >= 0 else -1 for parent in shape.parents]
        for share in shape.returns:
            turn = first + 2 * int((share or 0.0) * turns)
            span = (int(flat_batch.turn_start[turn]), int(flat_batch.turn_end[turn]))
            results.append((-1, -1) if share is None else span)
        sessions.append(len(kinds))
    starts = np.array([*segment_turns, flat_batch.num_turns])
    row = np.arange(trajectories + 1) * ANSWER
    words = rng.integers(0, 1000, trajectories * ANSWER)
    success = rng.random(trajectories) < 0.5
    return replace(
        flat_batch,
        segment_turns=starts,
        segment_tokens=np.append(flat_batch.turn_start[starts[:-1]], flat_batch.num_tokens),
        session_segments=np.arange(len(kinds) + 1),
        trajectory_sessions=np.array(sessions),
        session_kind=np.array(kinds),
        session_parent=np.array(parents),
        session_return=np.array(results),
        success=success,
        reward=success.astype(np.float32),
        turn_labels={"role": rng.integers(-1, ROLES, flat_batch.num_turns)},
        prepared={"answer_prefix": Ragged(row, words), "answer": Ragged(row, words)},
    )


def methods() -> dict[str, Pipeline]:
    """The credit edits of every recipe that has any, by slug."""
    found = {}
    for slug in recipes(RECIPES):
        edits = compose([f"recipe={slug}"], RECIPES).credit.edits
        if edits:
            nodes: Sequence[tuple[str, Mapping[str, Any]]] = ordered(edits, "credit.edits")
            found[slug] = Pipeline([(name, instantiate(node, skip=("order",))) for name, node in nodes])
    return found


def canned(pipeline: Pipeline, batch: TrajectoryBatch) -> list[ScoreReply]:
    """A reply to each request that the pipeline makes of the batch: log-probs drawn at random."""
    rng = np.random.default_rng(2)

    def logp(count: int) -> NDArray[np.float32]:
        return -rng.random(count, dtype=np.float32)

    return [ScoreReply(logp=logp(len(r.positions))) for r in flat(pipeline.requests(open_view(batch)))]


def seconds(pipeline: Pipeline, batch: TrajectoryBatch, replies: Sequence[ScoreReply]) -> float:
    start = time.perf_counter()
    view = open_view(batch)
    pipeline.run(view, replies=by_edit(pipeline.requests(view), replies))
    return time.perf_counter() - start


def run(report: Report) -> None:
    full, half = agent_batch(TRAJECTORIES), agent_batch(TRAJECTORIES // 2)
    size = f"{TRAJECTORIES} trajectories x {TURNS} turns, {full.num_tokens / 1e6:.1f}M tokens"
    for slug, pipeline in methods().items():
        answers = {id(batch): canned(pipeline, batch) for batch in (full, half)}
        seconds(pipeline, full, answers[id(full)])  # first use of the pages
        times: dict[int, list[float]] = {id(full): [], id(half): []}
        for _ in range(ROUNDS):
            for batch in (half, full):
                times[id(batch)].append(seconds(pipeline, batch, answers[id(batch)]))
        whole, part = min(times[id(full)]), min(times[id(half)])
        report(Measurement(f"credit_seconds_{slug}", whole, "s", BAR, "lower", size))
        report(Measurement(f"credit_growth_{slug}", whole / part, "x", GROWTH_BAR, "lower", f"of half, and {size}"))
        if answers[id(full)]:
            asked = float(len(answers[id(full)]))
            report(Measurement(f"credit_requests_{slug}", asked, "requests", None, "lower", size))
