"""Builds small trajectory batches for tests: from explicit turns, at random, and as a hypothesis strategy.

A batch is described as plain values (``Turn`` < segment < session < ``Traj`` < group), so that a test can cut, permute
or change the description and build again: what the arrays look like is decided in one place, ``build``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from megatron_ext.trajectory.record import Ragged, Role, SessionKind, Status, TrajectoryBatch


@dataclass(frozen=True)
class Turn:
    """A message of ``ids``. ``role`` None stands for tokens off turn (a repeated prefix).

    For a model turn ``mask``, ``logp``, ``version`` and ``weight`` hold one value a token, or one for all.
    """

    role: Role | None
    ids: tuple[int, ...]
    mask: tuple[bool, ...] | bool = True
    logp: tuple[float, ...] | float = -1.0
    version: tuple[int, ...] | int = 0
    weight: tuple[float, ...] | float = 1.0
    reward: float = 0.0
    state_key: int = 0
    action_key: int = 0
    label: int = -1
    returns: int = -1  # the session of its trajectory whose result this message brings


Segment = tuple[Turn, ...]
Session = tuple[Segment, ...]


@dataclass(frozen=True)
class Traj:
    sessions: tuple[Session, ...]
    reward: float = 0.0
    success: bool = False
    status: Status = Status.DONE
    name: str = ""
    kinds: tuple[SessionKind, ...] = ()  # of its sessions; none given: a normal one, then sub-agents
    answer: tuple[int, ...] = ()  # ids of the right answer, prepared for scoring


Group = tuple[Traj, ...]


@dataclass
class _Columns:
    values: dict[str, list[Any]] = field(default_factory=dict)

    def add(self, **items: Any) -> None:
        for name, value in items.items():
            self.values.setdefault(name, []).append(value)

    def extend(self, **items: Sequence[Any]) -> None:
        for name, value in items.items():
            self.values.setdefault(name, []).extend(value)

    def size(self, name: str) -> int:
        return len(self.values.get(name, ()))


def _each(value: Any, size: int) -> list[Any]:
    return list(value) if isinstance(value, tuple) else [value] * size


def _add_turn(columns: _Columns, turn: Turn, number: int) -> None:
    size, start = len(turn.ids), columns.size("ids")
    sampled = turn.role is Role.MODEL
    columns.extend(
        ids=turn.ids,
        turn=[-1 if turn.role is None else columns.size("turn_role")] * size,
        field=[0] * size,
        loss_mask=_each(turn.mask, size) if sampled else [False] * size,
        rollout_logp=_each(turn.logp, size) if sampled else [0.0] * size,
        version=_each(turn.version, size) if sampled else [-1] * size,
        weight=_each(turn.weight, size),
    )
    if turn.role is not None:
        columns.add(
            turn_role=int(turn.role),
            turn_start=start,
            turn_end=start + size,
            turn_number=number,
            turn_state_key=turn.state_key,
            turn_action_key=turn.action_key,
            turn_reward=turn.reward,
            label=turn.label,
        )


def build(groups: Sequence[Group], *, routed: tuple[int, int] | None = None) -> TrajectoryBatch:
    """The batch of these groups. Trajectories without a name are called ``g<group>/s<sample>``.

    ``routed`` (layers, k) adds expert ids derived from the token ids, valid on every token but those off turn.
    """
    columns = _Columns()
    offsets: dict[str, list[int]] = {
        name: [0]
        for name in ("segment_tokens", "segment_turns", "session_segments", "trajectory_sessions", "group_trajectories")
    }
    names: list[str] = []
    for g, group in enumerate(groups):
        for s, trajectory in enumerate(group):
            number, first_session = 0, columns.size("session_kind")
            returned: dict[int, tuple[int, int]] = {}
            for index, session in enumerate(trajectory.sessions):
                for segment in session:
                    for turn in segment:
                        if turn.returns >= 0:
                            returned[turn.returns] = (columns.size("ids"), columns.size("ids") + len(turn.ids))
                        _add_turn(columns, turn, number)
                        number += turn.role is not None
                    offsets["segment_tokens"].append(columns.size("ids"))
                    offsets["segment_turns"].append(columns.size("turn_role"))
                offsets["session_segments"].append(len(offsets["segment_tokens"]) - 1)
                kind = SessionKind.NORMAL if index == 0 else SessionKind.SUBAGENT
                kind = trajectory.kinds[index] if trajectory.kinds else kind
                parent = _parent(trajectory.kinds, kind, index)
                columns.add(session_kind=int(kind), session_parent=parent if parent < 0 else first_session + parent)
            for index in range(len(trajectory.sessions)):
                columns.add(session_return=returned.get(index, (-1, -1)))
            offsets["trajectory_sessions"].append(len(offsets["session_segments"]) - 1)
            names.append(trajectory.name or f"g{g}/s{s}")
            columns.add(sample=s, reward=trajectory.reward, success=trajectory.success, status=int(trajectory.status))
        offsets["group_trajectories"].append(len(names))
    arrays = {name: np.array(columns.values.get(name, []), dtype=_dtype(name)) for name in COLUMNS}
    ids = arrays["ids"]
    if routed is not None:
        spread = ids[:, None, None] + np.arange(routed[0])[None, :, None] * 3 + np.arange(routed[1])[None, None, :]
        arrays |= {"routed": (spread % 8).astype(np.uint8), "routed_valid": arrays["turn"] >= 0}
    label = arrays.pop("label")
    return TrajectoryBatch(
        **arrays,
        **{name: np.array(value) for name, value in offsets.items()},
        session_return=np.array(columns.values.get("session_return", []), dtype=np.int64).reshape(-1, 2),
        trajectory_id=tuple(names),
        harness=("text",) * len(names),
        group_id=tuple(f"group{g}" for g in range(len(groups))),
        task_id=tuple(f"task{g}" for g in range(len(groups))),
        reward_parts={"half": arrays["reward"] / 2},
        turn_labels={"stage": label, "role": label},
        prepared={"ready": Ragged.of([np.arange(j % 3) + j for j in range(len(names))]), **_answers(groups)},
    )


def _parent(kinds: Sequence[SessionKind], kind: SessionKind, index: int) -> int:
    """A sub-agent is of the first session, a compression of the normal one before it."""
    if index == 0 or kind is SessionKind.NORMAL:
        return -1
    return max(i for i in range(index) if i == 0 or (kind is SessionKind.COMPRESS and kinds[i] is SessionKind.NORMAL))


def _answers(groups: Sequence[Group]) -> dict[str, Ragged]:
    """What a harness prepares of the right answers, when a trajectory has one."""
    answers = [trajectory.answer for group in groups for trajectory in group]
    if not any(answers):
        return {}
    return {"answer_prefix": Ragged.of([(90, 91) if a else () for a in answers]), "answer": Ragged.of(answers)}


COLUMNS = (
    *("ids", "loss_mask", "turn", "field", "rollout_logp", "version", "weight"),
    *("turn_role", "turn_start", "turn_end", "turn_number", "turn_reward", "turn_state_key", "turn_action_key"),
    "label",
    *("session_kind", "session_parent", "sample", "reward", "success", "status"),
)


def _dtype(name: str) -> type[Any]:
    if name in ("loss_mask", "success"):
        return np.bool_
    return np.float32 if name in ("rollout_logp", "weight", "turn_reward", "reward") else np.int64


def model(ids: Sequence[int], **values: Any) -> Turn:
    return Turn(Role.MODEL, tuple(ids), **values)


def user(ids: Sequence[int]) -> Turn:
    return Turn(Role.USER, tuple(ids))


def single(turns: Sequence[Turn], **values: Any) -> Traj:
    """A trajectory of one session with one segment."""
    return Traj(sessions=((tuple(turns),),), **values)


def random_groups(
    seed: int,
    *,
    groups: int = 3,
    samples: tuple[int, int] = (1, 4),
    sessions: tuple[int, int] = (1, 2),
    segments: tuple[int, int] = (1, 2),
    turns: tuple[int, int] = (1, 3),
    tokens: tuple[int, int] = (1, 5),
    untrainable: float = 0.15,
    weighted: bool = True,
) -> list[Group]:
    """Random groups; ranges are inclusive. ``turns`` counts the user-model exchanges of a segment."""
    rng = np.random.default_rng(seed)

    def pick(span: tuple[int, int]) -> int:
        return int(rng.integers(span[0], span[1] + 1))

    def words(size: int) -> tuple[int, ...]:
        return tuple(int(x) for x in rng.integers(0, 100, size))

    def model_turn() -> Turn:
        size = pick(tokens)
        switch, version = int(rng.integers(0, size + 1)), int(rng.integers(0, 5))
        return Turn(
            Role.MODEL,
            words(size),
            mask=tuple(bool(x) for x in rng.random(size) < 0.85),
            logp=tuple(float(np.float32(x)) for x in -rng.random(size) * 3),
            version=tuple(version + (i >= switch) for i in range(size)),
            weight=tuple(float(x) for x in rng.choice([0.0, 0.5, 1.0, 2.0], size)) if weighted else 1.0,
            reward=float(np.float32(rng.random())),
            state_key=int(rng.integers(1, 4)),
            action_key=int(rng.integers(1, 4)),
            label=int(rng.integers(-1, 3)),
        )

    def segment(first: bool) -> Segment:
        prefix = () if first else (Turn(None, words(pick(tokens))),)
        exchanges = [(Turn(Role.USER, words(pick(tokens))), model_turn()) for _ in range(pick(turns))]
        return prefix + tuple(turn for exchange in exchanges for turn in exchange)

    def trajectory(name: str) -> Traj:
        made = tuple(tuple(segment(i == 0) for i in range(pick(segments))) for _ in range(pick(sessions)))
        bad = rng.random() < untrainable
        status = Status(int(rng.integers(Status.ENV_ERROR, len(Status)))) if bad else Status(int(rng.integers(0, 3)))
        reward = float(np.float32(rng.choice([0.0, 0.25, 0.5, 1.0])))
        return Traj(made, reward=reward, success=reward == 1.0, status=status, name=name)

    return [tuple(trajectory(f"r{seed}/g{g}/s{s}") for s in range(pick(samples))) for g in range(groups)]


def with_answers(groups: Sequence[Group], seed: int) -> list[Group]:
    """The groups as a search agent's: sessions of all kinds, results of sub-agents, right answers for most."""
    rng = np.random.default_rng(seed)
    later = (SessionKind.NORMAL, SessionKind.COMPRESS, SessionKind.SUBAGENT)

    def one(trajectory: Traj) -> Traj:
        kinds = (SessionKind.NORMAL, *(later[int(rng.integers(3))] for _ in trajectory.sessions[1:]))
        first, *others = trajectory.sessions
        results = [i for i, kind in enumerate(kinds) if kind is SessionKind.SUBAGENT and rng.random() < 0.8]
        segment: list[Turn] = []
        for turn in first[-1]:
            brings = turn.role is Role.USER and bool(segment) and bool(results)
            segment.append(replace(turn, returns=results.pop()) if brings else turn)
        answer = tuple(int(x) for x in rng.integers(0, 100, int(rng.integers(0, 4))))
        return replace(trajectory, sessions=((*first[:-1], tuple(segment)), *others), kinds=kinds, answer=answer)

    return [tuple(one(trajectory) for trajectory in group) for group in groups]


def random_batch(seed: int, *, routed: tuple[int, int] | None = None, **values: Any) -> TrajectoryBatch:
    return build(random_groups(seed, **values), routed=routed)


def described_batches(max_groups: int = 4) -> SearchStrategy[list[Group]]:
    """Hypothesis strategy over random groups, small first; ``build`` makes the batch."""
    return st.builds(
        lambda seed, count: random_groups(seed, groups=count), st.integers(0, 2**31), st.integers(1, max_groups)
    )


def split(groups: Sequence[Group], seed: int, *, into: str = "segments") -> list[Group]:
    """The same turns with every segment cut in two at a random turn. The parts become ``segments`` of the session (the
    second repeating the first at mask 0, as the record does), ``pieces`` (without the repetition) or ``sessions``."""
    rng = np.random.default_rng(seed)

    def cut(segment: Segment) -> tuple[Segment, Segment] | tuple[Segment]:
        if len(segment) < 2:
            return (segment,)
        at = int(rng.integers(1, len(segment)))
        seen = tuple(x for turn in segment[:at] for x in turn.ids)
        prefix = (Turn(None, seen),) if into == "segments" else ()
        return segment[:at], prefix + segment[at:]

    def cut_trajectory(trajectory: Traj) -> Traj:
        parts = tuple(tuple(part for segment in session for part in cut(segment)) for session in trajectory.sessions)
        if into == "sessions":  # what was said of the sessions that there were is not true of the parts
            parts = tuple((tuple(replace(turn, returns=-1) for turn in s),) for session in parts for s in session)
            return replace(trajectory, sessions=parts, kinds=())
        return replace(trajectory, sessions=parts)

    return [tuple(cut_trajectory(t) for t in group) for group in groups]


def named(groups: Sequence[Group]) -> list[Group]:
    """The groups with every trajectory's name written out, so that it survives a permutation."""
    return [
        tuple(replace(t, name=t.name or f"g{g}/s{s}") for s, t in enumerate(group)) for g, group in enumerate(groups)
    ]


def shuffled(groups: Sequence[Group], seed: int) -> list[Group]:
    """The same groups in another order, the trajectories of each in another order."""
    rng = np.random.default_rng(seed)
    groups = named(groups)
    return [tuple(groups[g][i] for i in rng.permutation(len(groups[g]))) for g in rng.permutation(len(groups))]


def on_trained(batch: TrajectoryBatch, values: np.ndarray) -> dict[str, np.ndarray]:
    """Per-token ``values`` [T] on the tokens of turns, by trajectory: comparable across cuts and permutations."""
    starts = batch.trajectory_tokens()
    out = {}
    for j, name in enumerate(batch.trajectory_id):
        span = slice(int(starts[j]), int(starts[j + 1]))
        out[name] = values[span][batch.turn[span] >= 0]
    return out
