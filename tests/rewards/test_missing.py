"""Missing reward parts are neutral within their group (``megatron_ext/rewards/missing.py``)."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_ext.rewards.missing import neutral_rewards
from megatron_ext.trajectory.fields import Array


def sums(parts: dict[str, Array]) -> Array:
    return np.nansum(np.stack(list(parts.values())), axis=0)


def test_by_hand() -> None:
    parts = {"a": np.array([1.0, 0.0, 1.0, 5.0]), "b": np.array([0.5, math.nan, 0.1, math.nan])}
    counted = np.array([True, True, True, False])
    reward = np.array([1.5, 0.0, 1.1, 5.0])
    assert neutral_rewards(reward, parts, counted).tolist() == pytest.approx([1.5, 0.3, 1.1, 5.0])
    nobody = {"b": np.full(4, math.nan)}
    assert neutral_rewards(reward, nobody, counted).tolist() == reward.tolist()
    assert neutral_rewards(reward, {}, counted).tolist() == reward.tolist()


floats = st.floats(-100, 100)
groups = st.integers(1, 8).flatmap(
    lambda n: st.tuples(
        st.dictionaries(st.sampled_from("abc"), st.lists(floats, min_size=n, max_size=n), min_size=1),
        st.dictionaries(st.sampled_from("abc"), st.lists(st.booleans(), min_size=n, max_size=n)),
        st.lists(st.booleans(), min_size=n, max_size=n),
    )
)


@given(groups)
def test_a_missing_part_adds_nothing_to_the_centred_reward(
    drawn: tuple[dict[str, list[float]], dict[str, list[bool]], list[bool]],
) -> None:  # invariants 1 and 2
    values, gone, flags = drawn
    counted = np.array(flags)
    parts = {name: np.array(column) for name, column in values.items()}
    for name in parts.keys() & gone.keys():
        parts[name][np.array(gone[name])] = math.nan
    reward = sums(parts)
    filled = neutral_rewards(reward, parts, counted)
    assert np.isfinite(filled).all()
    assert np.array_equal(filled[~counted], reward[~counted])
    if not counted.any():
        return
    centred = filled[counted] - filled[counted].mean()
    assert centred.sum() == pytest.approx(0.0, abs=1e-9)
    alone = np.zeros(int(counted.sum()))
    for part in parts.values():
        here = part[counted]
        have = ~np.isnan(here)
        if have.any():
            alone[have] += here[have] - here[have].mean()
    assert centred == pytest.approx(alone, abs=1e-9)


@given(st.lists(floats, min_size=2, max_size=8), st.data())
def test_who_is_missing_does_not_shift_the_others(column: list[float], data: st.DataObject) -> None:
    """Two members with equal parts keep equal rewards, whoever else has none; order does not matter."""
    part = np.array([*column, column[0]])
    part[data.draw(st.integers(1, len(column) - 1))] = math.nan
    counted = np.ones(len(part), dtype=bool)
    filled = neutral_rewards(np.nan_to_num(part), {"p": part}, counted)
    assert filled[0] == filled[-1]
    order = np.array(data.draw(st.permutations(range(len(part)))))
    again = neutral_rewards(np.nan_to_num(part)[order], {"p": part[order]}, counted)
    assert again == pytest.approx(filled[order], abs=1e-9)
