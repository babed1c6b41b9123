"""Token-exact merge: invariants of merge, calls and prefix_index, and what users of other stacks ran into."""

from __future__ import annotations

import tracemalloc
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import ArrayLike

from megatron_ext.losses.aggregation import token_weights
from megatron_ext.rollout.engine import FinishReason
from megatron_ext.trajectory.builder import build_group
from megatron_ext.trajectory.calls import FINISHES, Call, Dedup, MessageSpan
from megatron_ext.trajectory.merge import (
    Merged,
    MergeOptions,
    Merging,
    Outcome,
    SessionInfo,
    Start,
    merge_calls,
)
from megatron_ext.trajectory.prefix_index import PrefixIndex
from megatron_ext.trajectory.record import RecordError, Role, SessionKind, Status, TrajectoryBatch, concat, equal
from megatron_ext.trajectory.rows import make_rows
from megatron_ext.trajectory.version import pack

UNMERGED = MergeOptions(merging=Merging.NONE)


def call(order: int, prompt: ArrayLike, ids: ArrayLike, **values: Any) -> Call:
    """A call whose log-probs are told apart by order and position."""
    sampled = np.array(ids, np.int32)
    logp = values.pop("logp", -(order + 1) / 8 - np.arange(len(sampled)) / 1024)
    versions = values.pop("versions", [pack(0, 1)] * len(sampled))
    return Call(order, np.array(prompt, np.int32), sampled, np.array(logp), np.array(versions), **values)


def changed(original: Call, **values: Any) -> Call:
    return replace(original, **values)


def merge(calls: Sequence[Call], outcome: Outcome | None = None, **values: Any) -> Merged:
    return merge_calls(calls, trajectory_id="t", sample=0, harness_id="h", outcome=outcome or Outcome(), **values)


def segments(batch: TrajectoryBatch) -> list[tuple[list[int], list[int]]]:
    """(ids, mask) of each segment."""
    cuts = batch.segment_tokens[1:-1]
    masks = np.split(batch.loss_mask.astype(int), cuts)
    return [(a.tolist(), b.tolist()) for a, b in zip(np.split(batch.ids, cuts), masks, strict=True)]


def starts(merged: Merged) -> list[Start]:
    return [placement.start for placement in merged.placements]


def spelled(ids: Sequence[int]) -> str:
    """A toy tokenizer's text: 45 is what 4 and 5 spell one by one."""
    return "".join(str(i) + ("." if i not in (4,) else "") for i in ids)


def check_exact(calls: Sequence[Call], merged: Merged) -> None:
    """Invariants 1 and 2, from the calls alone."""
    batch = merged.finished.batch
    by_order = {c.order: c for c in calls}
    where = {int(number): n for n, number in enumerate(batch.turn_number)}
    done: dict[int, int] = {}
    for placement in merged.placements:
        c = by_order[placement.order]
        turn = where[placement.turn]
        begin = int(batch.turn_start[turn]) + done.get(turn, 0)
        span = slice(begin, begin + len(c.ids))
        done[turn] = done.get(turn, 0) + len(c.ids)
        segment = int(batch.session_segments[placement.session]) + placement.segment
        first = int(batch.segment_tokens[segment])
        assert batch.turn_segment()[turn] == segment
        assert batch.ids[first:begin].tolist() == c.prompt_ids.tolist()
        assert batch.ids[span].tolist() == c.ids.tolist()
        assert batch.rollout_logp[span].tolist() == c.logp.tolist()
        assert batch.version[span].tolist() == c.versions.tolist()
        assert batch.loss_mask[span].all()
    models = np.flatnonzero(batch.turn_role == Role.MODEL)
    assert sorted(done) == models.tolist()
    assert all(done[int(n)] == batch.turn_end[n] - batch.turn_start[n] for n in models)
    assert (
        batch.loss_mask.sum()
        == merged.stats.sampled_tokens
        == sum(len(by_order[p.order].ids) for p in merged.placements)
    )


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


@pytest.mark.parametrize("decode", [None, spelled])
def test_retokenised_history_is_found_and_never_trained(decode: Any) -> None:
    """slime 242, sglang 26555, TRL 6250: the prompt spells the same text with other tokens."""
    sampled, drifted = call(0, [1, 2, 3], [4, 5]), call(1, [1, 2, 3, 45, 6], [8], request_id="b")
    merged = merge([sampled, drifted], decode=decode)
    assert segments(merged.finished.batch) == [
        ([1, 2, 3, 4, 5], [0, 0, 0, 1, 1]),
        ([1, 2, 3, 45, 6, 8], [0, 0, 0, 0, 0, 1]),
    ]
    (found,) = merged.departures
    assert found.start is Start.DRIFT and merged.stats.drifted == 1
    assert (found.request_id, found.position, found.offset) == ("b", 3, 0)
    assert (found.recorded_id, found.given_id, found.against) == (4, 45, 0)
    check_exact([sampled, drifted], merged)


def test_drift_inside_a_long_dialogue_points_at_the_turn_it_damaged() -> None:
    a = call(0, [1], [4, 5, 6])
    b = call(1, [1, 4, 5, 6, 9], [4, 5, 7])
    c = call(2, [1, 4, 5, 6, 9, 45, 7, 9], [8])
    d = call(3, [1, 4, 5, 6, 9, 45, 7, 9, 8, 9], [3])
    merged = merge([a, b, c, d], decode=spelled)
    assert starts(merged) == [Start.OPENS, Start.CONTINUES, Start.DRIFT, Start.CONTINUES]
    assert [(x.position, x.against, x.offset) for x in merged.departures] == [(5, 1, 0)]
    check_exact([a, b, c, d], merged)


@pytest.mark.parametrize(
    ("shown", "with_text", "without"),
    [
        ([4, 5, 9], Start.CUT, Start.DRIFT),  # the stop string 6 was taken off, another message follows
        ([7, 9], Start.REWRITE, Start.DRIFT),  # the answer was replaced (thinking left out)
        ([45, 6, 9], Start.DRIFT, Start.DRIFT),
        ([4, 5], Start.FORK, Start.FORK),  # nothing is contradicted: a branch inside the answer
    ],
)
def test_an_answer_used_in_part(shown: list[int], with_text: Start, without: Start) -> None:
    calls = [call(0, [1, 2], [4, 5, 6]), call(1, [1, 2, *shown], [8])]
    for decode, expected in ((spelled, with_text), (None, without)):
        merged = merge(calls, decode=decode)
        assert starts(merged) == [Start.OPENS, expected]
        assert segments(merged.finished.batch) == [
            ([1, 2, 4, 5, 6], [0, 0, 1, 1, 1]),
            ([1, 2, *shown, 8], [0, 0, *[0] * len(shown), 1]),
        ]
        check_exact(calls, merged)


@pytest.mark.parametrize(
    "first",
    [
        call(0, [1], [4, 5]),  # sampled the same
        call(0, [1, 4, 5], [7]),  # was shown the same
    ],
)
def test_drift_is_told_against_the_call_that_sampled_last(first: Call) -> None:
    merged = merge([first, call(1, [1], [4, 5]), call(2, [1, 4, 9], [8])])
    assert [(x.start, x.against, x.offset) for x in merged.departures] == [(Start.DRIFT, 1, 1)]
    assert starts(merged)[:2] == [Start.OPENS, Start.FORK]


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


# -- retries ---------------------------------------------------------------------------------------------------------
def test_killing_and_retrying_a_call_adds_no_row() -> None:
    once = [call(0, [1], [2], request_id="a"), call(2, [1, 2, 3], [4], request_id="b")]
    merged = merge([*once, replace(once[0], order=1), replace(once[1], order=5)])
    assert equal(merged.finished.batch, merge(once).finished.batch)
    assert merged.stats.retries_dropped == 2 and merged.stats.dropped_tokens == 2 and merged.stats.calls == 2


@pytest.mark.parametrize(
    "other",
    [
        {"ids": [3]},
        {"prompt_ids": [5]},
        {"logp": [-0.5]},
        {"versions": [7]},
        {"finish": "length"},
        {"routed": np.ones((1, 1, 1), np.uint8)},
        {"reward": 1.0},
        {"labels": {"x": 1}},
    ],
)
def test_one_request_id_with_two_contents_is_an_error(other: dict[str, Any]) -> None:
    first = call(0, [1], [2], request_id="a", routed=np.zeros((1, 1, 1), np.uint8))
    with pytest.raises(RecordError, match="trajectory 't'.*request id 'a'.*orders 0 and 4.*id of its own"):
        merge([first, replace(first, order=4, **other)])


def test_deduplication_of_calls_without_a_request_id() -> None:
    """Agent Lightning keeps the last call of a prompt, which also drops deliberate samples: ids tell them apart."""
    lost, again, other = call(0, [1], [2]), call(1, [1], [3]), call(2, [1], [4], session="b")
    named = call(3, [1], [5], request_id="x"), call(4, [1], [6], request_id="y")
    calls = [lost, again, other, *named]
    for dedup, kept in ((Dedup.REQUEST, 5), (Dedup.OFF, 5), (Dedup.PROMPT, 4)):
        merged = merge(calls, options=MergeOptions(dedup=dedup))
        assert merged.stats.calls == kept and merged.stats.retries_dropped == 5 - kept
        assert (2 in merged.finished.batch.ids) == (dedup is not Dedup.PROMPT)
    twice = [named[0], replace(named[0], order=9)]
    assert merge(twice, options=MergeOptions(dedup=Dedup.OFF)).stats.calls == 2
    with pytest.raises(RecordError, match="'t'.*order 0.*carry one order"):
        merge([call(0, [1], [2]), call(0, [1], [3])])


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
    assert batch.routed[:, 0, 1].tolist() == [0, 0, 0, 1, 1, 2, 2, 0, 0, 0, 0, 1, 3, 3, 0]
    assert batch.routed_valid.tolist() == [True] * 7 + [False] + [True] * 6 + [False]
    assert merge(calls).stats.unrouted == 0
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
SAMPLED, OBSERVED, CLOSED = 3, 3, 4  # ids 0..2 are sampled; an observation is 3, any of 0..2, 4


def next_prompt(rng: np.random.Generator, base: Call) -> tuple[np.ndarray, tuple[MessageSpan, ...]]:
    """What a harness may send after ``base``: its history whole, cut short or altered, and then an observation; or the
    history alone (an answer to resume, a branch inside it)."""
    whole = np.concatenate([base.prompt_ids, base.ids])
    observed = rng.random() < 0.7
    if rng.random() < 0.3:
        shortest = 1 if observed else len(base.prompt_ids)
        whole = whole[: int(rng.integers(shortest, len(whole) + 1))].copy()
        if whole[-1] < SAMPLED:
            whole[-1] = rng.integers(0, SAMPLED)
    if not observed:
        return whole, ()
    said = rng.integers(0, SAMPLED, rng.integers(0, 3))
    message = MessageSpan(Role.TOOL, len(whole), len(whole) + 1 + len(said))
    return np.concatenate([whole, [OBSERVED], said, [CLOSED]]), (message,)


@st.composite
def rollouts(draw: st.DrawFn) -> list[Call]:
    """Random trees of calls over few ids, so that forks, drifts, resumed and equal answers come by themselves."""
    size = draw(st.integers(0, 12))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    with_routing = bool(rng.random() < 0.5)
    calls: list[Call] = []
    for order in range(size):
        prompt = np.append(rng.integers(0, SAMPLED, rng.integers(1, 3)), CLOSED)
        messages: tuple[MessageSpan, ...] = ()
        tag = str(rng.choice(["", "", "a"]))
        if calls and rng.random() < 0.85:
            base = calls[int(rng.integers(len(calls)))]
            prompt, messages = next_prompt(rng, base)
            tag = base.session if rng.random() < 0.9 else tag
        ids = rng.integers(0, SAMPLED, rng.integers(0, 4))
        routed, routed_from = None, 0
        if with_routing and len(ids):
            routed_from = int(rng.choice([0, len(prompt) - 1]))
            routed = np.arange(routed_from, len(prompt) + len(ids) - 1, dtype=np.uint8)[:, None, None]
        calls.append(
            call(
                order,
                prompt,
                ids,
                versions=4 * order + np.sort(rng.integers(0, 3, len(ids))),  # a call may see a weight update
                finish=str(rng.choice(["stop", "stop", "abort", "length"])),
                request_id=f"r{order}",
                session=tag,
                messages=messages,
                routed=routed,
                routed_from=routed_from,
                reward=float(rng.integers(0, 3)),
                labels={"stage": int(rng.integers(0, 3))},
            )
        )
    return calls


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
@given(rollouts())
def test_routing_rows_name_their_token_in_every_layout(calls: list[Call]) -> None:
    for options in (MergeOptions(), UNMERGED):
        batch = merge(calls, options=options).finished.batch
        if batch.routed is None or batch.routed_valid is None:
            continue
        position = np.arange(batch.num_tokens) - batch.segment_tokens[batch.token_segment()]
        assert np.array_equal(batch.routed[batch.routed_valid, 0, 0], position[batch.routed_valid])


@settings(max_examples=200, deadline=None)
@given(rollouts())
def test_the_index_finds_what_comparing_everything_finds(calls: list[Call]) -> None:
    index = PrefixIndex()
    whole: list[list[int]] = []
    continued: set[int] = set()
    for number, c in enumerate(calls):
        found = index.add(number, c.prompt_ids, c.ids)
        prompt = c.prompt_ids.tolist()
        common = [
            next((i for i, (a, b) in enumerate(zip(w, prompt, strict=False)) if a != b), min(len(w), len(prompt)))
            for w in whole
        ]
        ends = [n for n, w in enumerate(whole) if len(w) <= len(prompt) and common[n] == len(w)]
        assert found.shared == max(common, default=0)
        assert (found.holder in [n for n, k in enumerate(common) if k == found.shared]) or found.shared == 0
        longest = max((len(whole[n]) for n in ends), default=0)
        equal_ends = [n for n in ends if len(whole[n]) == longest]
        free = [n for n in equal_ends if n not in continued]
        assert found.parent_end == longest and found.free == bool(free)
        assert found.parent == max(free or equal_ends, default=-1)
        if free:
            continued.add(found.parent)
        others = [n for n, k in enumerate(common) if k == found.shared and k < min(len(prompt), len(whole[n]))]
        assert (found.against >= 0) == bool(others)
        if others:
            assert found.against in others and whole[found.against][found.shared] == found.other_id
            sampled = [n for n in others if len(calls[n].prompt_ids) <= found.shared]
            assert found.against == max(sampled) if sampled else True
        whole.append([*prompt, *c.ids.tolist()])


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


def test_a_sequence_is_split_without_copying_it() -> None:
    """Short prompts that leave one long sequence early, each at another place, must not cost its length each."""
    index = PrefixIndex()
    long = np.arange(100_000, dtype=np.int32)
    index.add(0, long, np.array([7], np.int32))
    edge = index._root.children[0]
    buffer = edge.ids
    for i in range(1, 100):
        found = index.add(i, np.append(long[:i], [-1]).astype(np.int32), np.array([3], np.int32))
        assert (found.shared, found.other_id, found.parent) == (i, i, -1)
        edge = edge.children[i]
        assert np.shares_memory(edge.ids, buffer) and edge.size == len(long) + 1 - i
    extended = np.concatenate([long, [7, 8]]).astype(np.int32)
    assert index.add(100, extended, np.array([9], np.int32)).parent == 0


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


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"prompt_ids": []}, "request 'q'.*prompt has no tokens"),
        ({"prompt_ids": [-1]}, "prompt_ids holds token ids outside"),
        ({"ids": [2**31]}, "ids holds token ids outside"),
        ({"ids": [0.5]}, "must be one-dimensional integers"),
        ({"prompt_ids": [[1]]}, "must be one-dimensional integers"),
        ({"logp": [-1.0]}, "logp has 1 entries, 2 tokens were sampled"),
        ({"logp": [-1.0, np.nan]}, "log-prob nan of sampled token 1"),
        ({"logp": [0.5, -1.0]}, "log-prob 0.5 of sampled token 0"),
        ({"logp": [-np.inf, -1.0]}, "log-prob -inf"),
        ({"versions": [2, 1]}, "policy versions are negative or fall"),
        ({"versions": [-1, 1]}, "policy versions are negative or fall"),
        ({"finish": "tool_calls"}, "finish 'tool_calls'; give one of stop"),
        ({"routed": np.zeros((2, 1), np.uint8)}, r"expected unsigned \[m, L, k\]"),
        ({"messages": (MessageSpan(Role.USER, 0, 3),)}, r"message \[0, 3\)"),
    ],
)
def test_bad_calls_name_the_request(values: dict[str, Any], message: str) -> None:
    good = call(3, [1, 2], [3, 4], request_id="q")
    with pytest.raises(RecordError, match=message):
        replace(good, **values)


def test_finishes_are_those_of_the_engines() -> None:
    assert set(FINISHES) == {str(reason) for reason in FinishReason}
