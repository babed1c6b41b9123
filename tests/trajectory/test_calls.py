"""Invariants of ``trajectory/calls.py``: what is no call is refused, and a repeated one is no second."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from megatron_ext.rollout.engine import FinishReason
from megatron_ext.trajectory.calls import FINISHES, Dedup, MessageSpan
from megatron_ext.trajectory.merge import MergeOptions
from megatron_ext.trajectory.record import RecordError, Role, equal
from tests.helpers.recorded_calls import call, merge


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
