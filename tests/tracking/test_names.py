"""Invariants 1-3 of ``tracking/names.py``."""

from __future__ import annotations

import re

import pytest

from megatron_ext.tracking.names import HIGHER, LOWER, METRICS, NEITHER, MetricNameError, check, lookup


def test_unknown_names_offer_the_nearest() -> None:  # invariant 1
    with pytest.raises(MetricNameError, match="metric 'reward/meen' is not in the table .*nearest: reward/mean"):
        lookup("reward/meen")
    with pytest.raises(MetricNameError, match="eval/<set>/greedy_pass1"):
        lookup("eval/dev/greedy_pas")
    with pytest.raises(MetricNameError, match="'nothing alike at all'"):
        check(["reward/mean", "nothing alike at all"])


@pytest.mark.parametrize(
    ("name", "template"),
    [
        ("reward/part/success", "reward/part/<part>"),
        ("eval/test/pass_at_4", "eval/<set>/pass_at_<k>"),
        ("eval/dev-2/greedy_pass1", "eval/<set>/greedy_pass1"),
        ("time/rollout", "time/<phase>"),
        ("time/step", "time/step"),
        ("train/time_forward", "train/time_<part>"),
        ("credit/whiten/changed_fraction", "credit/<edit>/changed_fraction"),
    ],
)
def test_families_match(name: str, template: str) -> None:  # invariant 2
    assert lookup(name).name == template


@pytest.mark.parametrize(
    "name",
    [
        "reward/part/",
        "reward/part/a/b",
        "eval//greedy_pass1",
        "eval/test/pass_at_x",
        "time/roll out",
        "reward/part/<part>",
    ],
)
def test_families_match_nothing_else(name: str) -> None:  # invariant 2
    with pytest.raises(MetricNameError):
        lookup(name)


def test_the_table_is_complete() -> None:  # invariant 3
    names = [metric.name for metric in METRICS]
    assert len(set(names)) == len(names)
    for metric in METRICS:
        assert re.fullmatch(r"[a-z_]+(/[a-z0-9_<>]+)+", metric.name), metric.name
        assert metric.unit and metric.description and metric.better in (HIGHER, LOWER, NEITHER)
