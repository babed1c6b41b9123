"""Invariants 1-3 of ``training/evaluation.py``."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ext.tracking.names import lookup
from megatron_ext.training.evaluation import EvalResult, gain, mean_interval, paired_interval, pass_at_k


@settings(max_examples=30, deadline=None)
@given(st.lists(st.booleans(), min_size=1, max_size=6))
def test_pass_at_k_is_the_mean_over_all_subsets(samples: list[bool]) -> None:  # invariant 2
    last = 0.0
    for k in range(1, len(samples) + 1):
        want = np.mean([any(chosen) for chosen in combinations(samples, k)])
        got = pass_at_k(np.array([samples]), k)[0]
        assert got == pytest.approx(want) and got >= last
        last = got


def test_pass_at_k_numbers_and_errors() -> None:
    got = pass_at_k(np.array([[True, False, False], [False, False, False], [True, True, True]]), 2)
    np.testing.assert_allclose(got, [2 / 3, 0.0, 1.0])
    for k in (0, 4):
        with pytest.raises(ValueError, match="1 <= k <= n_samples"):
            pass_at_k(np.ones((2, 3)), k)


def test_wilson_numbers() -> None:
    interval = mean_interval(np.array([1] * 8 + [0] * 2))  # Wilson 1927: 8 of 10
    assert (interval.mean, interval.low, interval.high) == pytest.approx((0.8, 0.4902, 0.9433), abs=1e-4)
    none = mean_interval(np.zeros(10))
    assert (none.low, none.high) == pytest.approx((0.0, 0.2775), abs=1e-4)


@pytest.mark.parametrize("method", ["wilson", "bootstrap"])
def test_intervals_cover_and_narrow(method: str) -> None:  # invariant 3
    rng = np.random.default_rng(0)
    hits, widths = 0, []
    for n in (50, 800):
        for trial in range(100):
            interval = mean_interval(rng.random(n) < 0.4, method=method, seed=trial)
            assert interval.low <= interval.mean <= interval.high and interval.n == n
            hits += interval.low <= 0.4 <= interval.high
        widths.append(interval.high - interval.low)
    assert 180 <= hits <= 198 and widths[1] < widths[0] / 3


def test_the_seed_decides_the_bootstrap() -> None:  # invariant 3
    values = np.random.default_rng(1).random(40)
    assert mean_interval(values, seed=3) == mean_interval(values, seed=3) != mean_interval(values, seed=4)


def test_the_task_is_the_unit() -> None:  # invariant 1
    # 40 tasks whose 8 samples agree are 40 tries, not 320.
    outcome = np.random.default_rng(2).random(40) < 0.5
    sampled = np.repeat(outcome[:, None], 8, axis=1)
    result = evaluation(sampled=sampled)
    tasks, tries = mean_interval(outcome, method="bootstrap"), mean_interval(sampled.reshape(-1), method="bootstrap")
    assert result.sampled_interval().high - result.sampled_interval().low == pytest.approx(tasks.high - tasks.low)
    assert tasks.high - tasks.low > 2 * (tries.high - tries.low)


def test_pairing_removes_what_tasks_share() -> None:
    rng = np.random.default_rng(3)
    before = rng.random(400) < 0.3
    after = before | (rng.random(400) < 0.1)
    change = paired_interval(before, after)
    assert 0 < change.low <= change.mean <= change.high
    assert change.high - change.low < mean_interval(after).high - mean_interval(after).low
    with pytest.raises(ValueError, match="the same tasks"):
        paired_interval(before, after[:-1])


def test_bad_values_are_named() -> None:
    for values in (np.array([]), np.array([np.nan]), np.ones((2, 2))):
        with pytest.raises(ValueError, match="one or more tasks"):
            mean_interval(values)
    with pytest.raises(ValueError, match="use bootstrap"):
        mean_interval(np.array([0.5]), method="wilson")
    with pytest.raises(ValueError, match="method 'normal'"):
        mean_interval(np.array([0.5]), method="normal")


def evaluation(**changes: object) -> EvalResult:
    values: dict[str, object] = {
        "name": "test",
        "greedy": np.arange(40) % 4 == 0,
        "sampled": np.zeros((40, 0), dtype=bool),
        "turns": np.full(40, 5.0),
        "reward": np.full(40, 0.5),
        **changes,
    }
    return EvalResult(tasks=tuple(f"t{i}" for i in range(40)), **values)  # type: ignore[arg-type]


def test_summary_holds_metric_names() -> None:
    summary = evaluation(sampled=np.ones((40, 3), dtype=bool), lost=2).summary()
    assert all(lookup(name) for name in summary)
    assert summary["eval/test/greedy_pass1"] == 0.25 and summary["eval/test/pass_at_3"] == 1.0
    assert summary["eval/test/turns_median"] == 5.0 and summary["eval/test/untrainable"] == 2
    assert not any("sampled" in name or "pass_at" in name for name in evaluation().summary())


def test_gain_compares_the_same_tasks() -> None:
    change = gain(evaluation(), evaluation(greedy=np.arange(40) % 2 == 0))
    assert change["eval/test/gain"] == 0.25 and change["eval/test/gain_ci_low"] > 0
    assert all(lookup(name) for name in change)
    other = EvalResult("test", ("a",), np.ones(1, bool), np.ones((1, 0), bool), np.ones(1), np.ones(1))
    with pytest.raises(ValueError, match="different tasks"):
        gain(evaluation(), other)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"greedy": np.ones(3, bool)}, "greedy has shape"),
        ({"sampled": np.ones(40, bool)}, "sampled has shape"),
        ({"turns": np.ones(3)}, "turns has shape"),
    ],
)
def test_sizes_are_checked(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        evaluation(**changes)
    with pytest.raises(ValueError, match="has no tasks"):
        EvalResult("test", (), np.ones(0, bool), np.ones((0, 0), bool), np.ones(0), np.ones(0))
