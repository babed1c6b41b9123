"""Invariants of ``trajectory/merge_report.py``: history tokenised again, cut or replaced is found and named."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ext.trajectory.calls import Call
from megatron_ext.trajectory.merge_report import Start
from tests.helpers.recorded_calls import call, check_exact, merge, rollouts, segments, spelled, starts


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


@settings(max_examples=80, deadline=None)
@given(rollouts(), st.data())
def test_every_call_is_placed_and_counted(calls: list[Call], data: st.DataObject) -> None:  # invariants 1, 2 and 3
    repeats = [replace(c, order=c.order + 100) for c in calls if data.draw(st.booleans())]
    merged = merge([*calls, *repeats])
    stats, by_order = merged.stats, {c.order: c for c in calls}
    assert [p.order for p in merged.placements] == [c.order for c in calls] and stats.calls == len(calls)
    assert stats.sampled_tokens + stats.dropped_tokens == sum(len(c.ids) for c in [*calls, *repeats])
    found = Counter(starts(merged))
    shown = (stats.merged, stats.resumed, stats.forks, stats.rewrites, stats.cut, stats.drifted)
    assert shown == tuple(
        found[s] for s in (Start.CONTINUES, Start.RESUMES, Start.FORK, Start.REWRITE, Start.CUT, Start.DRIFT)
    )
    for departure in merged.departures:
        prompt = next(c for c in calls if c.request_id == departure.request_id).prompt_ids
        other = by_order[departure.against]
        whole = [*other.prompt_ids.tolist(), *other.ids.tolist()]
        assert whole[: departure.position] == prompt[: departure.position].tolist()
        assert whole[departure.position] == departure.recorded_id
        assert departure.recorded_id != departure.given_id == prompt[departure.position]
        assert departure.offset == max(departure.position - len(other.prompt_ids), -1)
