"""Token-exact merge: the invariants of ``trajectory/merge.py``, and what users of other stacks ran into."""

from __future__ import annotations

import tracemalloc
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ext.losses.aggregation import token_weights
from megatron_ext.trajectory.builder import build_group
from megatron_ext.trajectory.calls import Call, MessageSpan
from megatron_ext.trajectory.joining import concat
from megatron_ext.trajectory.merge import MergeOptions, Merging, Outcome, SessionInfo, merge_calls
from megatron_ext.trajectory.merge_report import Start
from megatron_ext.trajectory.record import RecordError, Role, SessionKind, Status, TrajectoryBatch, equal
from megatron_ext.trajectory.routed_rows import Rerun, RerunCounts
from megatron_ext.trajectory.rows import make_rows
from megatron_ext.trajectory.version import pack
from tests.helpers.recorded_calls import call, check_exact, merge, rollouts, segments, starts

UNMERGED = MergeOptions(merging=Merging.NONE)


def changed(original: Call, **values: Any) -> Call:
    return replace(original, **values)


# -- what the specification works out --------------------------------------------------------------------------------
def test_the_worked_example() -> None:
    """Agent Lightning: ([1,2,3]->[4,5]), ([1..7]->[8]), ([1,2,9]->[10])."""
    merged = merge([call(0, [1, 2, 3], [4, 5]), call(1, [1, 2, 3, 4, 5, 6, 7], [8]), call(2, [1, 2, 9], [10])])
    assert segments(merged.finished.batch) == [
        ([1, 2, 3, 4, 5, 6, 7, 8], [0, 0, 0, 1, 1, 0, 0, 1]),
        ([1, 2, 9, 10], [0, 0, 0, 1]),
    ]
    assert starts(merged) == [Start.OPENS, Start.CONTINUES, Start.REWRITE]
    stats = merged.stats
    assert (stats.calls, stats.merged, stats.rewrites, stats.sampled_tokens) == (3, 1, 1, 4)
    assert (stats.prompt_tokens, stats.row_tokens) == (13, 12)


# -- forks, rewrites, sessions ---------------------------------------------------------------------------------------
def test_forks_repeat_the_prefix_without_training_it() -> None:
    calls = [
        call(0, [1, 2], [3]),
        call(1, [1, 2], [4]),  # another sample of the same prompt
        call(2, [1, 2, 3, 7], [5]),
        call(3, [1, 2, 3, 8], [6]),  # another observation after the same answer
        call(4, [1, 2, 4, 7], [9]),  # the second sample goes on
    ]
    merged = merge(calls)
    assert starts(merged) == [Start.OPENS, Start.FORK, Start.CONTINUES, Start.FORK, Start.CONTINUES]
    assert segments(merged.finished.batch) == [
        ([1, 2, 3, 7, 5], [0, 0, 1, 0, 1]),
        ([1, 2, 4, 7, 9], [0, 0, 1, 0, 1]),
        ([1, 2, 3, 8, 6], [0, 0, 0, 0, 1]),
    ]
    assert merged.finished.batch.num_sessions == 1 and merged.stats.forks == 2
    check_exact(calls, merged)


def test_equal_samples_are_two_turns_and_each_can_be_continued() -> None:
    calls = [call(0, [1], [2]), call(1, [1], [2]), call(2, [1, 2, 5], [6]), call(3, [1, 2, 7], [8])]
    merged = merge(calls)
    assert starts(merged) == [Start.OPENS, Start.FORK, Start.CONTINUES, Start.CONTINUES]
    assert merged.finished.batch.num_segments == 2
    check_exact(calls, merged)


def test_a_compression_is_a_session_and_the_history_told_anew_a_segment() -> None:
    calls = [
        call(0, [1, 2], [3], session="main"),
        call(1, [1, 2, 3, 4], [5], session="main"),
        call(2, [1, 2, 3, 4, 5, 99], [40, 41], session="summary"),
        call(3, [1, 40, 41, 6], [7], session="main"),
        call(4, [1, 40, 41, 6, 7, 8], [9], session="main"),
    ]
    merged = merge(calls, sessions={"summary": SessionInfo(SessionKind.COMPRESS, "main")})
    batch = merged.finished.batch
    assert starts(merged) == [Start.OPENS, Start.CONTINUES, Start.OPENS, Start.REWRITE, Start.CONTINUES]
    assert batch.session_kind.tolist() == [SessionKind.NORMAL, SessionKind.COMPRESS]
    assert batch.session_parent.tolist() == [-1, 0] and batch.session_segments.tolist() == [0, 2, 3]
    assert merged.stats.rewrites == 1
    check_exact(calls, merged)


def test_parallel_subagents_are_kept_apart_by_tag_and_return_to_their_parent() -> None:
    calls = [
        call(0, [1], [2]),
        call(1, [1, 5], [6], session="a"),  # both begin with the same prompt
        call(2, [1, 5], [7], session="b"),
        call(3, [1, 5, 7, 8], [9], session="b"),
        call(4, [1, 5, 6, 8], [10], session="a"),
        call(5, [1, 2, 20, 21, 22], [3], messages=(MessageSpan(Role.TOOL, 2, 4, returns="a"),)),
    ]
    sub = SessionInfo(SessionKind.SUBAGENT, "")
    merged = merge(calls, sessions={"a": sub, "b": sub})
    batch = merged.finished.batch
    assert segments(batch) == [
        ([1, 2, 20, 21, 22, 3], [0, 1, 0, 0, 0, 1]),
        ([1, 5, 6, 8, 10], [0, 0, 1, 0, 1]),
        ([1, 5, 7, 8, 9], [0, 0, 1, 0, 1]),
    ]
    assert batch.session_parent.tolist() == [-1, 0, 0]
    assert batch.session_return.tolist() == [[-1, -1], [2, 4], [-1, -1]]
    # Numbers follow time, across sessions and segments.
    assert sorted(batch.turn_number.tolist()) == list(range(7))
    assert batch.turn_number[batch.turn_role == Role.MODEL].tolist() == [0, 6, 1, 4, 2, 3]
    check_exact(calls, merged)


def test_untagged_agents_are_kept_apart_by_their_prompts() -> None:
    calls = [
        call(0, [1, 1, 2], [3]),
        call(1, [1, 9, 2], [4]),
        call(2, [1, 1, 2, 3, 5], [6]),
        call(3, [1, 9, 2, 4, 5], [7]),
        call(4, [8, 8], [7]),
    ]
    for below, sessions in ((0, 1), (1, 2), (2, 3)):
        merged = merge(calls, options=MergeOptions(new_session_below=below))
        batch = merged.finished.batch
        assert batch.num_sessions == sessions and batch.num_segments == 3
        assert [ids for ids, _ in segments(batch)] == [[1, 1, 2, 3, 5, 6], [1, 9, 2, 4, 5, 7], [8, 8, 7]]
        check_exact(calls, merged)


def test_a_parent_session_that_never_spoke_comes_first_and_circles_are_refused() -> None:
    merged = merge([call(0, [1], [2], session="kid")], sessions={"kid": SessionInfo(SessionKind.SUBAGENT, "main")})
    assert merged.finished.batch.session_parent.tolist() == [-1, 0]
    assert merged.finished.batch.session_segments.tolist() == [0, 1, 2]
    circle = {"a": SessionInfo(parent="b"), "b": SessionInfo(parent="a")}
    with pytest.raises(RecordError, match="'t'.*a < b < a"):
        merge([call(0, [1], [2], session="a")], sessions=circle)


# -- answers that come in pieces -------------------------------------------------------------------------------------
@pytest.mark.parametrize("merging", list(Merging))
@pytest.mark.parametrize("finish", ["abort", "length"])
def test_a_resumed_answer_is_one_turn_and_trained_to_its_end(finish: str, merging: Merging) -> None:
    """slime 1440 and 2207: the loss mask must cover what was sampled after a partial rollout resumed."""
    rows = np.arange(7, dtype=np.uint8).reshape(7, 1, 1)
    whole = call(0, [1, 2], [3, 4, 5], versions=[1, 1, 2], routed=rows[:4], reward=3.0, action_key=7)
    pieces = [
        changed(whole, ids=[3], logp=whole.logp[:1], versions=[1], finish=finish, routed=rows[:2], reward=1.0),
        call(1, [1, 2, 3], [], finish="abort", routed=rows[:0], routed_from=2),
        call(2, [1, 2, 3], [4, 5], logp=whole.logp[1:], versions=[1, 2], routed=rows[2:4], routed_from=2, reward=2.0),
    ]
    after = call(3, [1, 2, 3, 4, 5, 6], [8], versions=[3], routed=rows[4:6], routed_from=4)
    options = MergeOptions(merging=merging)
    cut, uncut = merge([*pieces, after], options=options), merge([whole, after], options=options)
    assert equal(cut.finished.batch, uncut.finished.batch)
    assert starts(cut) == [Start.OPENS, Start.RESUMES, Start.RESUMES, Start.CONTINUES] and cut.stats.resumed == 2
    assert cut.finished.batch.loss_mask.sum() == 4
    check_exact([*pieces, after], cut)


def test_what_cannot_be_resumed() -> None:
    begun = call(0, [1], [2], versions=[pack(0, 5)], finish="abort", request_id="a")
    with pytest.raises(RecordError, match="'t', request 'b'.*resumes request 'a'.*older weights"):
        merge([begun, call(1, [1, 2], [3], versions=[pack(0, 4)], request_id="b")])
    with pytest.raises(RecordError, match="trained is False"):
        merge([begun, call(1, [1, 2], [3], versions=[pack(0, 5)], trained=False)])
    # A second continuation is a branch inside the answer, an answer that had ended is followed by another turn.
    branches = [begun, call(1, [1, 2], [3], versions=[pack(0, 5)]), call(2, [1, 2], [4], versions=[pack(0, 5)])]
    assert starts(merge(branches)) == [Start.OPENS, Start.RESUMES, Start.FORK]
    ended = [replace(begun, finish="stop"), call(1, [1, 2], [3])]
    assert starts(merge(ended)) == [Start.OPENS, Start.CONTINUES]
    assert merge(ended).finished.batch.num_turns == 2


# -- weights, routing ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("mode", ["token_mean", "trajectory_mean", "prompt_mean"])
def test_loss_weights_do_not_depend_on_how_the_rollout_was_cut(mode: str) -> None:
    """slime 365, Agent Lightning 594: a rollout in more rows weighs no more."""
    chain = [call(0, [1], [2]), call(1, [1, 2, 3], [4, 5]), call(2, [1, 2, 3, 4, 5, 6], [7])]
    other = [call(0, [1], [2, 3, 4, 5, 6, 7])]

    def weights(options: MergeOptions) -> dict[tuple[str, int], list[float]]:
        parts = [
            build_group(
                name,
                "task",
                [
                    merge_calls(
                        c, trajectory_id=name, sample=0, harness_id="h", outcome=Outcome(), options=options
                    ).finished
                ],
            )
            for name, c in (("x", chain), ("y", other))
        ]
        batch = concat(parts)
        w, owner = token_weights(batch, mode), batch.turn_trajectory()
        return {
            (batch.trajectory_id[owner[n]], int(batch.turn_number[n])): w[
                batch.turn_start[n] : batch.turn_end[n]
            ].tolist()
            for n in range(batch.num_turns)
        }

    assert weights(MergeOptions()) == weights(UNMERGED)


def test_routing_rows_stay_with_their_tokens() -> None:
    """verl 5037 (routing shifted against the tokens): each row names the token it belongs to."""

    def rows(first: int, last: int, run: int) -> np.ndarray:
        return np.array([[[position, run]] for position in range(first, last)], dtype=np.uint16)

    calls = [
        call(0, [1, 2], [3, 4], routed=rows(0, 3, 0)),
        call(1, [1, 2, 3, 4, 5], [6], routed=rows(3, 5, 1), routed_from=3),  # cache reused
        call(2, [1, 2, 3, 4, 5, 6, 7], [8], routed=rows(0, 7, 2)),  # cache lost: everything ran again
        call(3, [1, 2, 3, 4, 9, 9], [8], routed=rows(4, 6, 3), routed_from=4),  # fork on a reused cache
    ]
    batch = merge(calls).finished.batch
    assert batch.routed is not None and batch.routed_valid is not None
    assert batch.segment_tokens.tolist() == [0, 8, 15]
    assert batch.routed[:, 0, 0].tolist() == [0, 1, 2, 3, 4, 5, 6, 0, 0, 1, 2, 3, 4, 5, 0]
    assert batch.routed[:, 0, 1].tolist() == [0, 0, 0, 1, 1, 2, 2, 0, 2, 2, 2, 2, 3, 3, 0]
    assert batch.routed_valid.tolist() == [True] * 7 + [False] + [True] * 6 + [False]
    assert merge(calls).stats.unrouted == 0
    assert merge(calls).finished.reruns == RerunCounts(positions=5, displaced=1)
    # Where each token has to replay its own forward, the call that ran everything again stands in a segment of its own.
    apart = merge(calls, options=MergeOptions(rerun=Rerun.SEGMENT))
    split = apart.finished.batch
    assert [p.segment for p in apart.placements] == [0, 0, 1, 2] and split.segment_tokens.tolist() == [0, 7, 15, 22]
    assert split.routed is not None and split.routed_valid is not None
    assert split.routed[:7, 0, 1].tolist() == [0, 0, 0, 1, 1, 0, 0]
    assert split.routed[7:, 0, 1].tolist() == [2] * 7 + [0] + [2] * 4 + [3, 3, 0]
    assert split.routed_valid.tolist() == [True] * 5 + [False] * 2 + ([True] * 7 + [False]) + ([True] * 6 + [False])
    assert apart.finished.reruns == RerunCounts(positions=5, displaced=0)
    assert turn_table(split) == turn_table(batch) and starts(apart) == starts(merge(calls))
    check_exact(calls, apart)
    assert merge([calls[0], replace(calls[1], routed=None)]).stats.unrouted == 2
    # The engine reused more than any recorded call ran: what nobody recorded stays invalid and is counted.
    gap = merge([calls[0], call(1, [1, 2, 9, 9, 9], [8], routed=rows(4, 5, 1), routed_from=4)])
    assert gap.finished.batch.routed_valid is not None and gap.stats.unrouted == 2
    assert gap.finished.batch.routed_valid[4:].tolist() == [True, True, False, False, True, False]
    with pytest.raises(RecordError, match="order 0.*routed covers tokens 1..4.*rows up to 3"):
        replace(calls[0], routed_from=1)
    with pytest.raises(RecordError, match="routed covers tokens 0..2"):
        replace(calls[0], routed=rows(0, 2, 0))


# -- anything an agent may do ----------------------------------------------------------------------------------------
def turn_table(batch: TrajectoryBatch) -> dict[int, tuple[Any, ...]]:
    """What each turn is, by its number, layout aside."""
    out: dict[int, tuple[Any, ...]] = {}
    for n, number in enumerate(batch.turn_number.tolist()):
        span = slice(int(batch.turn_start[n]), int(batch.turn_end[n]))
        names = ("ids", "loss_mask", "rollout_logp", "version", "field", "weight")
        out[number] = (
            int(batch.turn_role[n]),
            float(batch.turn_reward[n]),
            {name: values[n] for name, values in batch.turn_labels.items()},
            *(getattr(batch, name)[span].tolist() for name in names),
        )
    return out


@settings(max_examples=150, deadline=None)
@given(rollouts(), st.integers(0, 2**32), st.integers(0, 5))
def test_every_sampled_token_is_trained_exactly_once(calls: list[Call], seed: int, below: int) -> None:
    """Conservation, exact contexts, independence of arrival and of retries, and equal turns without merging."""
    options = MergeOptions(new_session_below=below)
    merged = merge(calls, options=options)
    check_exact(calls, merged)
    rows = make_rows(merged.finished.batch)
    assert rows.mask.sum() == merged.stats.sampled_tokens

    rng = np.random.default_rng(seed)
    repeats = [replace(c, order=c.order + 100) for c in calls if rng.random() < 0.3]
    arrived = [*calls, *repeats]
    shuffled = [arrived[i] for i in rng.permutation(len(arrived))]
    again = merge(shuffled, options=options)
    assert equal(again.finished.batch, merged.finished.batch)
    assert again.placements == merged.placements and again.departures == merged.departures
    assert again.stats.retries_dropped == len(repeats)

    apart = merge(calls, options=replace(options, merging=Merging.NONE))
    check_exact(calls, apart)
    assert turn_table(apart.finished.batch) == turn_table(merged.finished.batch)
    assert starts(apart) == starts(merged) and apart.stats.row_tokens >= merged.stats.row_tokens
    assert apart.stats.merged == 0


@settings(max_examples=150, deadline=None)
@given(rollouts(), st.integers(0, 2**32))
def test_a_history_that_ran_again_moves_turns_and_changes_none(calls: list[Call], seed: int) -> None:
    """Each call's rows name the call, so that whatever it ran again it ran on other experts."""
    rng = np.random.default_rng(seed)
    told = [
        c if c.routed is None else replace(c, routed=np.full_like(c.routed, c.order if rng.random() < 0.5 else 99))
        for c in calls
    ]
    merged = merge(told)
    apart = merge(told, options=MergeOptions(rerun=Rerun.SEGMENT))
    check_exact(told, apart)
    assert turn_table(apart.finished.batch) == turn_table(merged.finished.batch)
    assert make_rows(apart.finished.batch).mask.sum() == apart.stats.sampled_tokens
    assert starts(apart) == starts(merged) and apart.stats.unrouted >= 0
    batch = apart.finished.batch
    if batch.routed is None or batch.routed_valid is None:
        return
    resumed = {p.turn for p in apart.placements if p.start is Start.RESUMES}
    by_order, where = {c.order: c for c in told}, {int(n): t for t, n in enumerate(batch.turn_number)}
    for placement in apart.placements:
        c, turn = by_order[placement.order], where[placement.turn]
        if c.routed is None or placement.turn in resumed:
            continue  # a turn of several pieces may stand on several forwards
        first = int(batch.segment_tokens[batch.turn_segment()[turn]])
        span = slice(first + c.routed_from, first + c.length - 1)
        assert batch.routed_valid[span].all() and np.array_equal(batch.routed[span], c.routed)


@settings(max_examples=150, deadline=None)
@given(rollouts())
def test_routing_rows_name_their_token_in_every_layout(calls: list[Call]) -> None:
    for options in (MergeOptions(), UNMERGED):
        batch = merge(calls, options=options).finished.batch
        if batch.routed is None or batch.routed_valid is None:
            continue
        position = np.arange(batch.num_tokens) - batch.segment_tokens[batch.token_segment()]
        assert np.array_equal(batch.routed[batch.routed_valid, 0, 0], position[batch.routed_valid])


def test_time_and_memory_are_linear_in_tokens() -> None:
    """Comparing each prompt with each earlier sequence, or copying the history for each turn, would be quadratic."""

    def peak(turns: int) -> float:
        history = np.arange(8 * turns, dtype=np.int32)
        rows = np.zeros((8 * turns, 1, 1), np.uint8)
        calls = [
            call(i, history[: 8 * i + 4], history[8 * i + 4 : 8 * i + 8], routed=rows[: 8 * i + 7])
            for i in range(turns)
        ]
        tracemalloc.start()
        merged = merge(calls)
        used = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert merged.stats.row_tokens == 8 * turns and merged.stats.merged == turns - 1
        return used

    assert peak(1600) < 2.5 * peak(800)


# -- bad and degenerate input ----------------------------------------------------------------------------------------
def test_rollouts_with_nothing_in_them() -> None:
    empty = merge([], Outcome(status=Status.ENV_ERROR))
    assert empty.finished.num_tokens == 0 and empty.stats.calls == 0 and empty.placements == ()
    silent = merge([call(0, [1, 2], []), call(1, [1, 2, 3], []), call(2, [1, 2, 3], [])])
    assert silent.finished.batch.num_turns == 3 and silent.finished.batch.loss_mask.sum() == 0
    assert silent.finished.batch.num_segments == 1 and make_rows(silent.finished.batch).num_rows == 0


def test_outcome_and_what_the_harness_knows_arrive_in_the_record() -> None:
    known = call(0, [1], [2], trained=False, state_key=5, action_key=6, reward=0.5, labels={"stage": 2})
    batch = merge([known], Outcome(0.75, {"success": 1.0}, True)).finished.batch
    assert batch.reward[0] == 0.75 and batch.success[0] and batch.reward_parts["success"][0] == 1
    assert (batch.turn_state_key[0], batch.turn_action_key[0], batch.turn_reward[0]) == (5, 6, 0.5)
    assert batch.turn_labels["stage"][0] == 2 and not batch.loss_mask.any() and batch.version[1] >= 0
    failed = merge([call(0, [1], [2])], Outcome(status=Status.ENV_DEADLINE)).finished.batch
    assert not failed.loss_mask.any() and failed.rollout_logp[1] < 0


def test_messages_become_turns_once() -> None:
    system, user = MessageSpan(Role.SYSTEM, 1, 3), MessageSpan(Role.USER, 4, 5)
    said, tool = MessageSpan(Role.MODEL, 6, 7), MessageSpan(Role.TOOL, 8, 9)
    first = call(0, [0, 1, 1, 0, 2, 0], [3], messages=(system, user), state_key=4)
    second = call(1, [0, 1, 1, 0, 2, 0, 3, 0, 4, 0], [5], messages=(system, user, said, tool))
    for options in (MergeOptions(), UNMERGED):
        batch = merge([first, second], options=options).finished.batch
        assert batch.turn_role.tolist() == [Role.SYSTEM, Role.USER, Role.MODEL, Role.TOOL, Role.MODEL]
        assert batch.turn_number.tolist() == [0, 1, 2, 3, 4] and batch.turn_state_key.tolist() == [4, 4, 4, 0, 0]
    with pytest.raises(RecordError, match=r"'t', call of order 1: its message \[5, 9\) begins inside the 7 tokens"):
        merge([first, replace(second, messages=(MessageSpan(Role.TOOL, 5, 9),))])
