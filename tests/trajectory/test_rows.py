"""The rows' numbered invariants."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from megatron_ext.trajectory.builder import TrajectoryBuilder, build_group
from megatron_ext.trajectory.record import RecordError, Status, TrajectoryBatch
from megatron_ext.trajectory.rows import make_rows


def conversation() -> TrajectoryBatch:
    """[1 1 | 2 2 2 | 3 3 | 4 4 | 5 | 6 6 | 7]: three model turns of 3, 2 and 2 tokens."""
    b = TrajectoryBuilder("t", 0, "h")
    s = b.open_session()
    for context, sampled in (([1, 1], [2, 2, 2]), ([3, 3], [4, 4]), ([5], [6, 6])):
        b.add_context(s, context)
        b.add_model_turn(s, sampled, [-1.0] * len(sampled), [0] * len(sampled))
    b.add_context(s, [7])
    return build_group("g", "t", [b.finish(0, {}, False, Status.DONE)])


def test_a_row_is_a_segment() -> None:
    rows = make_rows(conversation())
    assert rows.row_offsets.tolist() == [0, 13] and rows.token.tolist() == list(range(13))
    assert rows.segment.tolist() == [0] and rows.dropped_segments == 0


def test_cuts_fall_on_turns_and_repeat_the_prefix_unmasked() -> None:
    batch = conversation()
    rows = make_rows(batch, 7)
    # 5 tokens end turn 0; with turn 1 the piece would own 9. The rest after turn 1 is 4, and 4 + 4 > 7.
    assert rows.row_offsets.tolist() == [0, 5, 14, 27]
    assert rows.token.tolist() == [*range(5), *range(9), *range(13)]
    owned = [rows.token[rows.span(r)][rows.mask[rows.span(r)]].tolist() for r in range(3)]
    assert owned == [[2, 3, 4], [7, 8], [10, 11]]
    assert make_rows(batch, 9).row_offsets.tolist() == [0, 9, 22]
    assert make_rows(batch, 13).num_rows == 1
    assert make_rows(batch, 1).num_rows == 3  # a turn longer than the limit is its own piece


@pytest.mark.parametrize("limit", [0, 1, 5, 12, 30, 10_000])
@pytest.mark.parametrize("seed", range(12))
def test_every_trained_token_is_trained_in_exactly_one_row(
    random_batch: Callable[..., TrajectoryBatch], seed: int, limit: int
) -> None:
    batch = random_batch(seed, turns=12)
    rows = make_rows(batch, limit)
    times = np.bincount(rows.token[rows.mask], minlength=batch.num_tokens)
    assert np.array_equal(times, batch.loss_mask.astype(int))
    ends = set(batch.turn_end.tolist()) | set(batch.segment_tokens.tolist())
    for row in range(rows.num_rows):
        span = rows.span(row)
        token, segment = rows.token[span], int(rows.segment[row])
        assert token[0] == batch.segment_tokens[segment] and np.all(np.diff(token) == 1)
        assert token[-1] < batch.segment_tokens[segment + 1] and int(token[-1]) + 1 in ends
        assert rows.mask[span].any()
        if limit == 0:
            assert token[-1] + 1 == batch.segment_tokens[segment + 1]
    trained_segments = set(batch.token_segment()[batch.loss_mask].tolist())
    assert set(rows.segment.tolist()) == trained_segments
    assert rows.dropped_segments == batch.num_segments - len(trained_segments)
    assert rows.lengths.sum() == len(rows.token)


def test_degenerate_batches(random_batch: Callable[..., TrajectoryBatch]) -> None:
    b = TrajectoryBuilder("g/0", 0, "h")
    b.open_session()
    empty = build_group("g", "t", [b.finish(0, {}, False, Status.ENV_ERROR)])
    for limit in (0, 3):
        rows = make_rows(empty, limit)
        assert rows.num_rows == 0 and len(rows.token) == 0 and rows.dropped_segments == 1
    with pytest.raises(ValueError, match="tokens_per_row"):
        make_rows(empty, -1)


def test_a_trained_first_token_has_no_context_and_is_refused() -> None:
    batch = conversation()
    moved = TrajectoryBatch(
        **{
            **{name: getattr(batch, name) for name in batch.__dataclass_fields__},
            "ids": batch.ids[2:],
            **{name: getattr(batch, name)[2:] for name in ("loss_mask", "turn", "field", "rollout_logp", "version")},
            "weight": batch.weight[2:],
            "turn_start": batch.turn_start - 2,
            "turn_end": batch.turn_end - 2,
            "segment_tokens": np.array([0, batch.num_tokens - 2]),
        }
    )
    with pytest.raises(RecordError, match="trajectory '.+': segment 0 starts with a trained token"):
        make_rows(moved)
