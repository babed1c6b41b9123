"""Invariants of ``trajectory/growing.py``."""

from __future__ import annotations

import numpy as np

from megatron_ext.trajectory.fields import Field, Role, SessionKind
from megatron_ext.trajectory.growing import Segment, Session, Turn, flat


def test_views_stay_valid_while_the_segment_grows() -> None:  # invariant 1
    segment, views = Segment(), []
    for number in range(12):
        segment.append(np.full(100, number, dtype=np.int32))
        views.append(segment.ids())
    for count, view in enumerate(views, start=1):
        assert view.tolist() == np.repeat(np.arange(count), 100).tolist() and not view.flags.writeable


def test_what_was_given_may_be_used_again() -> None:  # invariant 2
    segment, turn = Segment(), Turn(0, Role.MODEL, 1, 1, trained=True)
    segment.append(np.array([7], dtype=np.int32))
    ids, logp = np.array([1, 2], dtype=np.int32), np.array([-0.5, -0.25], dtype=np.float32)
    versions, kinds = np.array([3, 4]), np.full(2, Field.TEXT, dtype=np.int8)
    rows = np.array([[[5]], [[6]]], dtype=np.uint8)
    segment.add_sampled("here", turn, ids, logp, versions, kinds, rows, 0)
    segment.turns.append(turn)
    for array in (ids, logp, versions, kinds, rows):
        array[:] = 0
    made = flat([Session(SessionKind.NORMAL, -1, [segment])], {}, trainable=True)
    assert made["ids"].tolist() == [7, 1, 2] and made["loss_mask"].tolist() == [False, True, True]
    assert made["rollout_logp"].tolist() == [0, -0.5, -0.25] and made["version"].tolist() == [-1, 3, 4]
    assert made["field"].tolist() == [Field.OTHER, Field.TEXT, Field.TEXT]
    assert made["routed"][:2].ravel().tolist() == [5, 6] and made["routed_valid"].tolist() == [True, True, False]


def test_turns_lie_segment_by_segment_and_keep_their_numbers() -> None:  # invariant 3
    first, second = Segment(), Segment()
    for number, (segment, value) in enumerate([(first, 1), (second, 2), (first, 3)]):
        start = segment.append(np.array([value], dtype=np.int32))
        segment.turns.append(Turn(number, Role.USER, start, start + 1))
    session = Session(SessionKind.NORMAL, -1, [first, second], returned_in=1)
    made = flat([session], {"stage": {2: 9}}, trainable=True)
    assert made["ids"].tolist() == [1, 3, 2] and made["turn_number"].tolist() == [0, 2, 1]
    assert made["turn"].tolist() == [0, 1, 2] and made["turn_labels"]["stage"].tolist() == [-1, 9, -1]
    assert made["segment_tokens"].tolist() == [0, 2, 3] and made["segment_turns"].tolist() == [0, 2, 3]
    assert made["session_return"].tolist() == [[2, 3]] and made["routed"] is None


def sampled(segment: Segment, turn: Turn, token: int, rows: list[int], start: int, rerun: int = 0) -> None:
    routed = np.array(rows, dtype=np.uint8)[:, None, None]
    segment.add_sampled("here", turn, np.array([token], np.int32), [-1], [0], Field.TEXT, routed, start, rerun)


def test_rows_that_no_token_was_sampled_on_give_way() -> None:  # invariants 4 and 5
    segment, turn = Segment(), Turn(0, Role.MODEL, 2, 2, trained=True)
    segment.append(np.arange(2, dtype=np.int32))
    segment.add_routed("here", np.array([[[1]], [[2]]], dtype=np.uint8), 0)
    segment.turns.append(turn)
    sampled(segment, turn, 7, [1, 3], 0, rerun=1)
    assert (segment.reruns, segment.displaced) == (0, 1)  # the engine itself says so of its id
    sampled(segment, turn, 8, [4, 3, 5], 0)
    assert (segment.reruns, segment.displaced) == (1, 2)
    made = flat([Session(SessionKind.NORMAL, -1, [segment])], {}, trainable=True)
    assert made["routed"].ravel().tolist() == [1, 3, 5, 0]


def test_the_first_row_of_a_position_stands() -> None:  # invariant 4
    segment = Segment()
    segment.append(np.arange(4, dtype=np.int32))
    segment.add_routed("here", np.array([[[1]], [[2]]], dtype=np.uint8), 1)
    segment.add_routed("here", np.array([[[8]], [[9]]], dtype=np.uint16), 0)
    made = flat([Session(SessionKind.NORMAL, -1, [segment])], {}, trainable=True)
    assert made["routed"].ravel().tolist() == [8, 1, 2, 0] and made["routed"].dtype == np.uint16
    assert made["routed_valid"].tolist() == [True, True, True, False]
