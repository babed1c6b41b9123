"""The invariants of ``megatron_ext/report/samples.py`` and ``tokens.py``."""

from __future__ import annotations

import dataclasses

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ext.report.samples import Limits, choose, parts, shading, show_step, spread, trained_mask
from megatron_ext.report.tokens import json_lines
from megatron_ext.trajectory.joining import select_groups
from megatron_ext.trajectory.record import Role, SessionKind, Status, TrajectoryBatch
from tests.helpers.records import Traj, Turn, build, described_batches, model, random_batch, single, split, user
from tests.helpers.run_folders import kept_step

EVERYTHING = Limits(trajectories=10**6, turns=10**6, tokens=10**6)


@settings(max_examples=50)
@given(described_batches(), st.integers(0, 99))
def test_parts_hold_every_token_once_and_in_order(described: list, seed: int) -> None:
    batch = build(split(described, seed))
    for j in range(batch.num_trajectories):
        found, view = list(parts(batch, j)), batch.trajectory(j)
        at = view.tokens.start
        for part in found:
            assert part.start == at <= part.end
            at = part.end
        assert at == view.tokens.stop
        assert [part.turn for part in found if part.turn >= 0] == list(view.turns)


@settings(max_examples=30)
@given(described_batches(), st.integers(1, 5), st.integers(1, 5))
def test_what_is_folded_is_counted(described: list, turns: int, tokens: int) -> None:
    kept = kept_step(3, build(described))
    limits = Limits(trajectories=3, turns=turns, tokens=tokens)
    shown = show_step(kept, None, limits)
    assert len(shown.trajectories) + shown.left_out == kept.batch.num_trajectories
    whole = {t.name: t for t in show_step(kept, None, EVERYTHING).trajectories}
    for t in shown.trajectories:
        full = whole[t.name]
        assert len(t.turns) + t.folded_turns == len(full.turns) and len(t.turns) <= max(turns, 1)
        for turn in t.turns:
            assert len(turn.tokens) <= tokens
            match = next(
                f for f in full.turns if (f.number, f.session, f.role) == (turn.number, turn.session, turn.role)
            )
            assert len(turn.tokens) + turn.folded == len(match.tokens)
            assert turn.tokens[: turn.before] == match.tokens[: turn.before]


@settings(max_examples=30)
@given(described_batches())
def test_marks_follow_mask_and_advantage(described: list) -> None:
    kept = kept_step(3, build(described))
    batch, scores = kept.batch, kept.scores
    assert scores is not None
    trained = trained_mask(batch)
    shades, top = shading(kept, trained)
    np.testing.assert_array_equal(np.sign(shades), np.where(trained, np.sign(scores.advantage), 0))
    assert np.abs(shades).max(initial=0) == (9 if top else 0)
    for t in show_step(kept, None, EVERYTHING).trajectories:
        span = batch.trajectory(batch.trajectory_id.index(t.name)).tokens
        tokens = [token for turn in t.turns for token in turn.tokens]
        assert [token.trained for token in tokens] == trained[span].tolist()
        assert [token.shade for token in tokens] == shades[span].tolist()
        assert t.num_trained == trained[span].sum()


def degenerate() -> TrajectoryBatch:
    nothing = single([user([1, 2]), Turn(Role.MODEL, ()), user([3]), model([4, 5], mask=False)], status=Status.DONE)
    lost = single([user([1]), model([6, 7])], reward=0.5, status=Status.ENV_ERROR)
    return build([(nothing, lost)])


def test_turns_without_tokens_and_trajectories_that_were_lost() -> None:
    kept = kept_step(1, degenerate())
    first, second = show_step(kept, None, EVERYTHING).trajectories
    assert [turn.note for turn in first.turns] == ["", "no token", "", "not trained"]
    assert first.num_trained == 0 and first.advantage is None
    assert second.status == "env error" and second.num_trained == 0 and second.turns[1].note == "not trained"
    shades, top = shading(kept, trained_mask(kept.batch))
    assert top == 0.0 and not shades.any()


def test_without_scores_nothing_is_coloured() -> None:
    kept = dataclasses.replace(kept_step(1), scores=None)
    step = show_step(kept, None, EVERYTHING)
    assert step.top == 0 and all(t.advantage is None for t in step.trajectories)
    assert "entropy" not in step.trajectories[0].turns[-1].tokens[-1].title
    assert show_step(dataclasses.replace(kept, batch=select_groups(kept.batch, [])), None, Limits()).trajectories == ()


def test_the_best_and_the_worst_of_each_group_are_chosen() -> None:
    groups = [
        tuple(single([user([1]), model([2])], reward=r) for r in rewards) for rewards in ((0, 1, 0.5), (0.2, 0.1))
    ]
    kept = kept_step(1, build(groups))
    assert choose(kept, 4) == [0, 1, 3, 4] and choose(kept, 1) == [1] and choose(kept, 9) == [0, 1, 2, 3, 4]


def test_steps_are_spread() -> None:
    assert spread([1, 2, 3], 4) == [1, 2, 3] and spread(list(range(100)), 4) == [0, 33, 66, 99] and spread([], 4) == []


@settings(max_examples=30)
@given(described_batches(), st.booleans())
def test_json_lines_hold_every_token(described: list, reference: bool) -> None:
    kept = kept_step(3, build(described), reference=reference)
    batch = kept.batch
    lines = list(json_lines(kept, range(batch.num_trajectories), None))
    assert lines[0]["kind"] == "step" and lines[0]["metrics"] == {"reward/mean": 0.25, "train/loss": None}
    tokens = [line for line in lines if line["kind"] == "token"]
    assert [t["id"] for t in tokens] == batch.ids.tolist() and [t["mask"] for t in tokens] == batch.loss_mask.tolist()
    sampled = batch.version >= 0
    for name in ("version", "rollout_logp", "advantage", "weight", "entropy", "logp"):
        assert [t[name] is not None for t in tokens] == sampled.tolist(), name
    assert any(t["reference_logp"] is not None for t in tokens) == (reference and bool(sampled.any()))
    assert [line["trajectory"] for line in lines if line["kind"] == "trajectory"] == list(batch.trajectory_id)


def test_one_trajectory_of_many() -> None:
    kept = kept_step(3, random_batch(2, groups=4))
    lines = list(json_lines(kept, [1], None))
    assert {line["trajectory"] for line in lines[1:]} == {kept.batch.trajectory_id[1]}


def test_what_a_session_repeats_is_shown_apart() -> None:
    """The dialogue that is compressed, and the summary that stands between two messages of the session after it."""
    system, told = Turn(Role.SYSTEM, (9,)), Turn(None, (10, 11))
    first = (Turn(None, (1,)), user((2, 3)), model((4, 5)))
    summed = (Turn(None, (1, 2, 3, 4, 5)), user((6,)), model((7, 8)))
    goes_on = (Turn(None, (1,)), system, user((2, 3)), told, user((6,)), Turn(None, (12,)), model((13,)))
    batch = build([(Traj(sessions=((first,), (summed,), (goes_on,))),)])
    kinds = [SessionKind.NORMAL, SessionKind.COMPRESS, SessionKind.NORMAL]
    batch = dataclasses.replace(batch, session_kind=np.array(kinds), session_parent=np.array([-1, 0, -1]))
    shown = [(part.turn, batch.ids[part.start : part.end].tolist()) for part in parts(batch, 0)]
    assert shown == [
        *[(0, [1, 2, 3]), (1, [4, 5])],
        *[(-1, [1, 2, 3, 4, 5]), (2, [6]), (3, [7, 8])],
        *[(4, [1, 9]), (5, [2, 3]), (-1, [10, 11]), (6, [6]), (7, [12, 13])],
    ]
    (trajectory,) = show_step(kept_step(3, batch), None, EVERYTHING).trajectories
    sessions = ["session 0 (normal)", "session 1 (compress of 0)", "session 2 (normal)"]
    assert list(dict.fromkeys(turn.session for turn in trajectory.turns)) == sessions
