"""The builder's numbered invariants."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from megatron_ext.trajectory.builder import FinishedTrajectory, TrajectoryBuilder, build_group
from megatron_ext.trajectory.record import Field, RecordError, Role, SessionKind, Status, TrajectoryBatch, equal
from megatron_ext.trajectory.routed_rows import Rerun, RerunCounts
from megatron_ext.trajectory.rows import make_rows
from megatron_ext.trajectory.version import pack


def versions(count: int, step: int = 1) -> list[int]:
    return [pack(0, step)] * count


def two_turns(status: Status = Status.DONE, trained: bool = True) -> TrajectoryBatch:
    b = TrajectoryBuilder("t", 3, "h")
    s = b.open_session()
    b.add_context(s, [1])
    b.add_message(s, Role.SYSTEM, [10, 11], state_key=5)
    b.add_context(s, [2, 3])
    first = b.add_model_turn(
        s, [20, 21, 22], [-1.0, -2.0, -3.0], versions(3), state_key=7, action_key=8, trained=trained
    )
    b.add_context(s, [4])
    b.add_message(s, Role.TOOL, [12])
    b.add_context(s, [2, 3])
    second = b.add_model_turn(s, [23, 24], [-0.5, -0.25], versions(2, 2), field=[Field.THINKING, Field.TEXT])
    b.set_turn_reward(first, 0.5)
    b.label_turn(second, "good", 1)
    return b.finish(1.5, {"success": 1.0}, True, status).batch


def test_layout_ids_masks_and_turns() -> None:
    batch = two_turns()
    assert batch.ids.tolist() == [1, 10, 11, 2, 3, 20, 21, 22, 4, 12, 2, 3, 23, 24]
    assert batch.turn.tolist() == [-1, 0, 0, -1, -1, 1, 1, 1, -1, 2, -1, -1, 3, 3]
    assert np.flatnonzero(batch.loss_mask).tolist() == [5, 6, 7, 12, 13]
    assert batch.rollout_logp[5:8].tolist() == [-1.0, -2.0, -3.0]
    assert batch.version[12] == pack(0, 2) and batch.version[4] == -1
    assert batch.field[12:].tolist() == [Field.THINKING, Field.TEXT]
    assert batch.turn_number.tolist() == [0, 1, 2, 3]
    assert batch.turn_state_key.tolist() == [5, 7, 0, 0] and batch.turn_action_key[1] == 8
    assert batch.turn_reward.tolist() == [0.0, 0.5, 0.0, 0.0]
    assert batch.turn_labels["good"].tolist() == [-1, -1, -1, 1]
    assert batch.sample.tolist() == [3] and batch.reward_parts["success"].tolist() == [1.0]


def test_prompt_is_the_record_so_far_and_stays_valid_while_the_buffer_grows() -> None:
    b = TrajectoryBuilder("t", 0, "h")
    s = b.open_session()
    expected: list[int] = []
    views = []
    for i in range(40):
        ids = list(range(i * 50, i * 50 + 50))
        b.add_context(s, ids)
        expected += ids
        view = b.prompt_ids(s)
        assert view.dtype == np.int32 and view.tolist() == expected
        views.append((view, len(expected)))
    assert all(view.tolist() == expected[:n] for view, n in views)
    with pytest.raises(ValueError):
        views[0][0][0] = 9
    assert b.num_tokens == 2000


def test_callers_may_reuse_their_buffers() -> None:
    b = TrajectoryBuilder("t", 0, "h")
    s = b.open_session()
    ids, logp, stamps = np.array([1], np.int32), np.array([-1.0], np.float32), np.array([pack(0, 1)])
    b.add_context(s, ids)
    b.add_model_turn(s, ids, logp, stamps)
    ids[:], logp[:], stamps[:] = 7, -7, pack(0, 7)
    batch = b.finish(0, {}, False, Status.DONE).batch
    assert batch.ids.tolist() == [1, 1] and batch.rollout_logp[1] == -1 and batch.version[1] == pack(0, 1)


@pytest.mark.parametrize("trained", [True, False])
@pytest.mark.parametrize("cuts", [(0, 4), (0, 1, 4), (0, 2, 3, 4), (0, 0, 4)])
def test_a_turn_in_pieces_is_the_turn_at_once(cuts: tuple[int, ...], trained: bool) -> None:
    """slime 1440 and 2207: the loss mask of a resumed partial rollout covers what was added after it resumed."""
    ids, logp = [5, 6, 7, 8], [-0.1, -0.2, -0.3, -0.4]
    stamps = [pack(0, 1), pack(0, 1), pack(0, 2), pack(1, 1)]
    routed = np.arange(6 * 2 * 2, dtype=np.uint8).reshape(6, 2, 2)

    def build(points: tuple[int, ...]) -> TrajectoryBatch:
        b = TrajectoryBuilder("t", 0, "h")
        s = b.open_session()
        b.add_context(s, [1, 2, 3])
        for i, (a, z) in enumerate(zip(points, points[1:], strict=False)):
            # Rows 0 .. 3+z-1: the last sampled token so far has no forward yet.
            rows, start = (routed[: max(0, 2 + z)], 0) if i == 0 else (routed[2 + a : 2 + z], 2 + a)
            if i == 0:
                b.add_model_turn(
                    s, ids[a:z], logp[a:z], stamps[a:z], trained=trained, action_key=9, routed=rows, routed_from=start
                )
            else:
                b.extend_model_turn(s, ids[a:z], logp[a:z], stamps[a:z], routed=rows, routed_from=start)
        b.add_context(s, [4])
        return b.finish(1, {}, True, Status.DONE).batch

    whole, pieces = build((0, 4)), build(cuts)
    assert equal(whole, pieces)
    assert whole.loss_mask.tolist() == [False] * 3 + [trained] * 4 + [False]
    assert pieces.routed_valid is not None and pieces.routed_valid.tolist() == [True] * 6 + [False] * 2


def test_extending_needs_an_open_model_turn() -> None:
    b = TrajectoryBuilder("t9", 0, "h")
    s = b.open_session()
    b.add_context(s, [1])
    with pytest.raises(RecordError, match="t9.*does not end in a model turn"):
        b.extend_model_turn(s, [2], [-1.0], versions(1))
    b.add_model_turn(s, [2], [-1.0], versions(1))
    b.add_context(s, [3])
    with pytest.raises(RecordError, match="does not end in a model turn"):
        b.extend_model_turn(s, [2], [-1.0], versions(1))


def test_versions_may_not_fall_when_a_turn_resumes() -> None:
    b = TrajectoryBuilder("t9", 0, "h")
    s = b.open_session()
    b.add_context(s, [1])
    b.add_model_turn(s, [2], [-1.0], versions(1, 5))
    b.extend_model_turn(s, [2], [-1.0], versions(1, 4))
    finished = b.finish(0, {}, False, Status.DONE)
    with pytest.raises(RecordError, match="t9.*position 2.*version falls"):
        build_group("g", "task", [finished])


@pytest.mark.parametrize("status", list(Status))
def test_untrainable_trajectories_keep_everything_but_the_mask(status: Status) -> None:
    good, batch = two_turns(), two_turns(status)
    assert batch.loss_mask.any() == status.trainable
    for name in ("ids", "rollout_logp", "version", "turn", "turn_reward"):
        assert np.array_equal(getattr(good, name), getattr(batch, name))


def test_rewrite_starts_a_segment_whose_repeats_are_context() -> None:
    b = TrajectoryBuilder("t", 0, "h")
    s = b.open_session()
    b.add_context(s, [1, 2])
    b.add_model_turn(s, [3], [-1.0], versions(1))
    b.rewrite(s)
    b.add_context(s, [1, 3])
    b.add_model_turn(s, [4], [-1.0], versions(1))
    assert b.prompt_ids(s).tolist() == [1, 3, 4]
    batch = b.finish(0, {}, False, Status.DONE).batch
    assert batch.segment_tokens.tolist() == [0, 3, 6] and batch.session_segments.tolist() == [0, 2]
    assert batch.loss_mask.tolist() == [False, False, True, False, False, True]
    assert batch.turn.tolist() == [-1, -1, 0, -1, -1, 1]


def test_segments_of_a_session_grow_in_turns_and_keep_their_own_routing() -> None:
    b = TrajectoryBuilder("t9", 0, "h")
    s = b.open_session()
    b.add_context(s, [1, 2])
    b.add_model_turn(s, [3], [-1.0], versions(1))  # turn 0
    assert b.rewrite(s) == 1
    b.add_context(s, [1, 4])
    rows = np.arange(2, dtype=np.uint8).reshape(2, 1, 1)
    b.add_routed(s, rows + 5, 0)
    b.add_model_turn(s, [5], [-1.0], versions(1), routed=rows, routed_from=0)  # turn 1, sampled with its own
    b.reopen(s, 0)
    assert b.prompt_ids(s).tolist() == [1, 2, 3]
    b.add_message(s, Role.TOOL, [6])  # turn 2
    b.add_context(s, [7])
    b.add_model_turn(s, [8], [-1.0], versions(1))  # turn 3
    with pytest.raises(RecordError, match="t9.*session 0: segment 2 of 2"):
        b.reopen(s, 2)
    with pytest.raises(RecordError, match="t9.*covers tokens 5..7, the segment has 6"):
        b.add_routed(s, rows, 5)
    batch = b.finish(0, {}, False, Status.DONE).batch
    assert batch.ids.tolist() == [1, 2, 3, 6, 7, 8, 1, 4, 5] and batch.segment_tokens.tolist() == [0, 6, 9]
    assert batch.turn_number.tolist() == [0, 2, 3, 1]
    assert batch.routed is not None and batch.routed_valid is not None
    assert batch.routed_valid.tolist() == [False] * 6 + [True, True, False]
    assert batch.routed[6:8, 0, 0].tolist() == [0, 1]


def test_sessions_are_laid_out_one_after_another_and_know_their_parent_and_return() -> None:
    b = TrajectoryBuilder("t", 0, "h")
    main = b.open_session()
    b.add_context(main, [1])
    b.add_model_turn(main, [2], [-1.0], versions(1))  # turn 0
    sub = b.open_session(SessionKind.SUBAGENT, main)
    b.add_context(sub, [1, 1])
    b.add_model_turn(sub, [3], [-1.0], versions(1))  # turn 1
    result = b.add_message(main, Role.TOOL, [4, 5])  # turn 2
    b.set_return(sub, result)
    batch = b.finish(0, {}, False, Status.DONE).batch
    assert batch.ids.tolist() == [1, 2, 4, 5, 1, 1, 3]
    assert batch.turn_number.tolist() == [0, 2, 1]
    assert batch.session_kind.tolist() == [SessionKind.NORMAL, SessionKind.SUBAGENT]
    assert batch.session_parent.tolist() == [-1, 0]
    assert batch.session_return.tolist() == [[-1, -1], [2, 4]]
    with pytest.raises(RecordError, match="already finished"):
        b.add_context(main, [1])


def test_routing_stands_at_its_positions_and_the_first_row_stays() -> None:
    b = TrajectoryBuilder("t", 0, "h")
    s = b.open_session()
    b.add_context(s, [1, 2])
    row = np.ones((1, 3, 2), dtype=np.uint16)
    b.add_model_turn(s, [3, 4], [-1, -1], versions(2), routed=np.repeat(row, 3, axis=0), routed_from=0)
    b.add_context(s, [5])
    # The next call ran tokens 2.. again (a cache that was dropped): only 3 and later are new.
    b.add_model_turn(s, [6], [-1], versions(1), routed=np.repeat(2 * row, 3, axis=0), routed_from=2)
    batch = b.finish(0, {}, False, Status.DONE).batch
    assert batch.routed is not None and batch.routed_valid is not None
    assert batch.routed.dtype == np.uint16
    assert batch.routed[:, 0, 0].tolist() == [1, 1, 1, 2, 2, 0]
    assert batch.routed_valid.tolist() == [True] * 5 + [False]


def experts(count: int, run: int) -> np.ndarray:
    """Rows [count, 3, 2] of a forward that is told by its number."""
    return np.tile(np.array([run, run + 100], dtype=np.uint8), (count, 3, 1))


def ran_again(rerun: Rerun, *, same: bool = False) -> FinishedTrajectory:
    """Three turns; between the first two and the last the engine lost its cache, and ran the history again."""
    b = TrajectoryBuilder("t", 0, "h", rerun)
    s = b.open_session()
    b.add_message(s, Role.USER, [1, 2])
    b.add_model_turn(s, [3, 4], [-1, -2], versions(2), routed=experts(3, 0), routed_from=0)
    b.add_message(s, Role.TOOL, [5])
    b.add_model_turn(s, [6], [-3], versions(1), routed=experts(2, 1), routed_from=3)
    b.add_message(s, Role.TOOL, [7])
    rows = np.concatenate([experts(3, 0), experts(2, 1), experts(2, 2)]) if same else experts(7, 2)
    third = b.add_model_turn(s, [8, 9], [-4, -5], versions(2, 2), routed=rows[:, :, ::-1], routed_from=0, action_key=6)
    b.set_turn_reward(third, 0.25)
    assert b.prompt_ids(s).tolist() == list(range(1, 10))
    b.add_message(s, Role.TOOL, [10])
    b.add_model_turn(s, [11], [-6], versions(1, 2), routed=experts(2, 3), routed_from=8)
    return b.finish(1, {}, True, Status.DONE)


def runs(batch: TrajectoryBatch) -> list[int]:
    """Which forward each token replays, -1 where none is recorded."""
    assert batch.routed is not None and batch.routed_valid is not None
    return np.where(batch.routed_valid, batch.routed.min(axis=(1, 2)).astype(int), -1).tolist()


def test_a_turn_whose_prompt_ran_again_stands_on_its_own_forward() -> None:
    """verl 6054: one row for each position is wrong for the tokens before new weights or for those after."""
    finished = ran_again(Rerun.SEGMENT)
    batch = finished.batch
    validated = build_group("g", "t", [finished])
    assert batch.segment_tokens.tolist() == [0, 7, 18] and batch.session_segments.tolist() == [0, 2]
    assert batch.ids.tolist() == [1, 2, 3, 4, 5, 6, 7, *range(1, 12)]
    assert runs(batch) == [0, 0, 0, 1, 1, -1, -1, *[2] * 7, -1, 3, 3, -1]
    # Every sampled token is trained once; what is repeated belongs to no turn.
    assert batch.ids[batch.loss_mask].tolist() == [3, 4, 6, 8, 9, 11]
    assert batch.turn[7:14].tolist() == [-1] * 7 and not batch.loss_mask[7:14].any()
    assert batch.turn_number.tolist() == [0, 1, 2, 3, 4, 5, 6, 7] and batch.turn_reward[5] == 0.25
    assert finished.reruns == RerunCounts(positions=5, displaced=0)
    assert make_rows(validated).num_rows == 2 and make_rows(validated).mask.sum() == 6


def test_the_first_forward_stands_where_segments_are_not_wanted() -> None:
    finished = ran_again(Rerun.FIRST)
    assert finished.batch.segment_tokens.tolist() == [0, 11]
    assert runs(finished.batch) == [0, 0, 0, 1, 1, 2, 2, -1, 3, 3, -1]
    # The last three tokens were sampled behind rows that are not kept.
    assert finished.reruns == RerunCounts(positions=5, displaced=3)


def test_a_prompt_that_ran_again_on_the_same_experts_changes_nothing() -> None:
    first, segment = ran_again(Rerun.FIRST, same=True), ran_again(Rerun.SEGMENT, same=True)
    assert equal(first.batch, segment.batch) and first.reruns == segment.reruns == RerunCounts()
    assert first.batch.num_segments == 1


@pytest.mark.parametrize("begun", [0, 2])
def test_a_turn_is_never_cut(begun: int) -> None:
    """What resumes a turn stays in its segment, its tokens counted; the next turn goes on from the last forward."""
    b = TrajectoryBuilder("t", 0, "h", Rerun.SEGMENT)
    s = b.open_session()
    b.add_context(s, [1])
    b.add_model_turn(s, [2], [-1], versions(1), routed=experts(1, 0), routed_from=0)
    b.add_context(s, [3])
    rows = experts(begun + 1, 0)
    b.add_model_turn(s, [4] * begun, [-1] * begun, versions(begun), routed=rows, routed_from=1)
    size = 3 + begun
    b.extend_model_turn(s, [5, 6], [-1, -1], versions(2, 2), routed=experts(size + 1, 1), routed_from=0)
    b.add_context(s, [7])
    b.add_model_turn(s, [8], [-1], versions(1, 2), routed=experts(2, 2), routed_from=size + 1)
    finished = b.finish(1, {}, True, Status.DONE)
    batch = finished.batch
    build_group("g", "t", [finished])
    assert np.diff(batch.turn_end - batch.turn_start).tolist() == [begun + 1, -begun - 1] and batch.num_segments == 2
    assert batch.loss_mask.sum() == 4 + begun
    if begun:  # its first tokens stand on the first forward
        assert runs(batch) == [*[0] * (size - 1), 1, 1, -1, -1, *[1] * (size + 1), 2, 2, -1]
        assert finished.reruns == RerunCounts(size - 1, displaced=2)
    else:  # nothing of it had been sampled: it begins where it goes on
        assert runs(batch) == [0, 0, -1, *[1] * 4, 2, 2, -1]
        assert finished.reruns == RerunCounts(2, displaced=0)


def test_ids_that_were_run_again_inside_an_answer_are_counted() -> None:
    b = TrajectoryBuilder("t", 0, "h", Rerun.SEGMENT)
    s = b.open_session()
    b.add_context(s, [1])
    b.add_model_turn(s, [2, 3, 4], [-1] * 3, [1, 1, 2], routed=experts(3, 1), routed_from=0, rerun=2)
    assert b.finish(0, {}, False, Status.DONE).reruns == RerunCounts(0, displaced=2)


def test_what_is_refused_cuts_nothing() -> None:
    b = TrajectoryBuilder("t9", 0, "h", Rerun.SEGMENT)
    s = b.open_session()
    b.add_context(s, [1])
    b.add_model_turn(s, [2], [-1], versions(1), routed=experts(1, 0), routed_from=0)
    for bad, match in (
        ({"routed": experts(4, 1)}, "covers tokens 0..4, the segment has 3"),
        ({"routed": experts(2, 1)[:, 0]}, "expected unsigned"),
        ({"routed": experts(2, 1)[:, :2]}, "shape"),
        ({"routed": experts(2, 1), "logp": [-1, -1]}, "logp has shape"),
    ):
        given: dict[str, Any] = {"logp": [-1], "routed_from": 0} | bad
        with pytest.raises(RecordError, match=f"t9.*{match}"):
            b.add_model_turn(s, [3], given.pop("logp"), versions(1), **given)
    finished = b.finish(0, {}, False, Status.DONE)
    assert finished.batch.ids.tolist() == [1, 2] and finished.reruns == RerunCounts()


def test_bad_input_names_the_trajectory() -> None:
    b = TrajectoryBuilder("t9", 0, "h")
    with pytest.raises(RecordError, match="t9.*session 0 of 0"):
        b.add_context(0, [1])
    s = b.open_session()
    with pytest.raises(RecordError, match="t9.*needs a prompt"):
        b.add_model_turn(s, [1], [-1.0], versions(1))
    b.add_context(s, [1])
    with pytest.raises(RecordError, match=r"t9.*logp has shape \(2,\), ids \(1,\)"):
        b.add_model_turn(s, [1], [-1.0, -1.0], versions(1))
    with pytest.raises(RecordError, match="t9.*covers tokens 1..3, the segment has 2"):
        b.add_model_turn(s, [1], [-1.0], versions(1), routed=np.zeros((2, 1, 1), np.uint8), routed_from=1)
    with pytest.raises(RecordError, match="routed_from"):
        b.add_model_turn(s, [1], [-1.0], versions(1), routed=np.zeros((1, 1, 1), np.uint8))
    with pytest.raises(RecordError, match="integers"):
        b.add_context(s, [1.5])
    with pytest.raises(RecordError, match="add_model_turn"):
        b.add_message(s, Role.MODEL, [1])
    with pytest.raises(RecordError, match="t9.*reward=nan.*REWARD_INVALID"):
        b.finish(float("nan"), {}, False, Status.DONE)
    # Nothing above was taken.
    batch = b.finish(float("nan"), {"a": float("inf")}, False, Status.REWARD_INVALID).batch
    assert batch.ids.tolist() == [1] and batch.reward[0] == 0 and batch.reward_parts["a"][0] == 0


def test_missing_parts_are_stored_as_such() -> None:
    def finished(**changes: Any) -> TrajectoryBatch:
        b = TrajectoryBuilder("t1", 0, "h")
        b.add_context(b.open_session(), [1])
        given: dict[str, Any] = {"reward": 0.5, "parts": {"a": 0.5, "b": math.nan}, "missing": ["b"]}
        return b.finish(**(given | {"success": False, "status": Status.DONE} | changes)).batch

    batch = finished()
    assert batch.reward.tolist() == [0.5] and batch.reward_parts["a"].tolist() == [0.5]
    assert np.isnan(batch.reward_parts["b"]).all()
    with pytest.raises(RecordError, match="b=nan.*REWARD_INVALID"):
        finished(missing=())
    with pytest.raises(RecordError, match="a=inf.*REWARD_INVALID"):
        finished(parts={"a": math.inf, "b": math.nan})


def test_group_holds_its_trajectories_by_sample() -> None:
    finished = []
    for sample in (2, 0, 1):
        b = TrajectoryBuilder(f"g/{sample}", sample, "h")
        s = b.open_session()
        b.add_context(s, [sample + 1])
        if sample:
            b.add_model_turn(s, [9] * sample, [-1.0] * sample, versions(sample))
        parts = {"success": float(sample)} if sample else {}
        finished.append(b.finish(sample, parts, False, Status.DONE))
    group = build_group("g", "task/1", finished)
    assert group.trajectory_id == ("g/0", "g/1", "g/2") and group.group_id == ("g",) and group.task_id == ("task/1",)
    assert group.num_groups == 1 and group.trajectory_tokens().tolist() == [0, 1, 3, 6]
    assert group.reward.tolist() == [0, 1, 2]
    with pytest.raises(RecordError, match="no trajectories"):
        build_group("g", "task/1", [])


def test_a_trajectory_that_never_got_a_token() -> None:
    """An environment that fails on reset: masked, counted, still a trajectory of its group."""
    b = TrajectoryBuilder("g/0", 0, "h")
    b.open_session()
    group = build_group("g", "t", [b.finish(0, {}, False, Status.ENV_ERROR)])
    assert group.num_tokens == 0 and group.num_trajectories == 1 and not group.trainable()[0]
