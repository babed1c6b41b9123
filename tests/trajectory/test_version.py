"""Invariants 1-3 of ``trajectory/version.py``."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_ext.trajectory.version import UNSAMPLED, lag, pack, unpack

SMALL = st.tuples(st.integers(0, 5), st.integers(0, 1000))


@given(SMALL, SMALL)
def test_later_is_larger(a: tuple[int, int], b: tuple[int, int]) -> None:  # invariant 1
    assert (pack(*a) < pack(*b)) == (a < b) and unpack(pack(*a)) == a


def test_what_no_policy_sampled_is_below_every_version() -> None:  # invariant 2
    assert pack(0, 0) > UNSAMPLED
    with pytest.raises(ValueError, match="not a policy version: -1"):
        unpack(UNSAMPLED)
    for incarnation, step in ((0, -1), (-1, 0), (0, 1 << 40), (1 << 23, 0)):
        with pytest.raises(ValueError, match="out of range"):
            pack(incarnation, step)


def test_lag_by_hand() -> None:
    assert lag(pack(0, 9), pack(0, 7)) == 2
    resumed = {0: 0, 1: 4, 2: 3}
    assert lag(pack(1, 6), pack(0, 5), resumed) == 3  # one step ahead of the checkpoint of step 4, and two steps since
    assert lag(pack(1, 6), pack(0, 4), resumed) == 2  # not undone
    assert lag(pack(2, 3), pack(0, 5), resumed) == 2  # a later resume went back further than the first
    assert lag(pack(1, 0), pack(0, 5), {0: 0, 1: 0}) == 5  # killed before the first checkpoint


@given(st.data())
def test_lag_is_the_distance_between_weights(data: st.DataObject) -> None:  # invariant 3
    """Weights are named by the whole history that made them: what two histories do not share lies between them."""
    history: list[int] = []
    made = {pack(0, 0): tuple(history)}
    resumed = {0: 0}
    for incarnation in range(data.draw(st.integers(1, 4))):
        if incarnation:
            resumed[incarnation] = data.draw(st.integers(0, len(history)))
            history = history[: resumed[incarnation]]
            made[pack(incarnation, len(history))] = tuple(history)
        for _ in range(data.draw(st.integers(0, 4))):
            history.append(incarnation)
            made[pack(incarnation, len(history))] = tuple(history)
    now = pack(incarnation, len(history))
    for then, weights in made.items():
        shared = 0
        while shared < min(len(weights), len(history)) and weights[shared] == history[shared]:
            shared += 1
        assert lag(now, then, resumed) == len(weights) + len(history) - 2 * shared
