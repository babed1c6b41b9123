"""Invariants 1-3 of ``credit/conservation.py``."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ext.credit.conservation import CONSERVED, Masses, token_masses, violations
from megatron_ext.credit.exact import exact_parts
from megatron_ext.credit.levels import trained_tokens
from megatron_ext.credit.protocol import CreditError
from megatron_ext.credit.turns import Layout
from megatron_ext.trajectory.joining import select_groups
from tests.helpers.records import Group, build, described_batches, random_batch


@settings(max_examples=40, deadline=None)
@given(described_batches(), st.integers(0, 99))
def test_masses_by_hand_and_over_ranks(groups: list[Group], seed: int) -> None:  # invariant 1
    batch = build(groups)
    trained, rng = trained_tokens(batch), np.random.default_rng(seed)
    before = np.where(trained, rng.normal(size=batch.num_tokens), 0.0)
    after = np.where(rng.random(batch.num_tokens) < 0.5, before, before * 1.5)
    masses, changed = token_masses(batch, after, trained, "x", before)
    owner = batch.token_trajectory()
    for mass, part in ((masses.positive, np.maximum(after, 0)), (masses.negative, np.minimum(after, 0))):
        np.testing.assert_allclose(mass, np.bincount(owner, weights=part, minlength=batch.num_trajectories), atol=1e-12)
    assert changed == np.count_nonzero(after != before)
    limbs = sum(
        exact_parts(token_masses(part, after[owner_of_group(batch) == g], trained_tokens(part), "x")[0].positive)
        for g in rng.permutation(batch.num_groups)
        for part in [select_groups(batch, [int(g)])]
    )
    assert np.array_equal(limbs, exact_parts(masses.positive))


def owner_of_group(batch: object) -> np.ndarray:
    return batch.trajectory_group()[batch.token_trajectory()]  # type: ignore[attr-defined]


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_is_named(value: float) -> None:  # invariant 2
    batch = random_batch(3)
    trained = trained_tokens(batch)
    at = int(np.flatnonzero(trained)[-1])
    after = np.zeros(batch.num_tokens)
    after[at] = value
    name = batch.trajectory_id[int(batch.token_trajectory()[at])]
    with pytest.raises(CreditError, match=f"'edit': token {at} of trajectory '{name}' is not finite"):
        token_masses(batch, after, trained, "edit")
    after[:] = 0.0
    untrained = int(np.flatnonzero(~trained)[-1])
    after[untrained] = 1e-300
    with pytest.raises(CreditError, match=f"token {untrained} of .* is not trained"):
        token_masses(batch, after, trained, "edit")


def test_rounding_is_no_change() -> None:
    batch = random_batch(3)
    trained = trained_tokens(batch)
    before = np.where(trained, 0.1, 0.0)
    assert token_masses(batch, before * (1 + 1e-12), trained, "x", before)[1] == 0
    assert token_masses(batch, before * (1 + 1e-6), trained, "x", before)[1] == trained.sum()
    assert token_masses(batch, before * 0.0, trained, "x", before)[1] == trained.sum()


LOCAL = frozenset(CONSERVED) - {"sum", "positive_mass", "negative_mass"}


def moved(by: Callable[[Layout, np.ndarray], np.ndarray]) -> dict[str, float]:
    """How much each local sum of a random batch changes, relative to its mass."""
    layout = Layout(random_batch(11, groups=4, samples=(2, 3), untrainable=0.0, turns=(2, 3)))
    batch = layout.batch
    before = np.where(layout.trained, np.random.default_rng(0).normal(size=batch.num_tokens), 0.0)
    after = by(layout, before)
    masses = [token_masses(batch, x, layout.trained, "x")[0] for x in (before, after)]
    found = violations(layout, LOCAL, (masses[0], masses[1]), lambda: (before, after))
    return {name: error for name, (error, _) in found.items()}


def swapped(layout: Layout, values: np.ndarray, owner: np.ndarray) -> np.ndarray:
    """Each owner's sum spread over its trained tokens alike."""
    sums = np.bincount(owner, weights=values)
    counts = np.bincount(owner, weights=layout.trained)
    return np.where(layout.trained, (sums / np.maximum(counts, 1))[owner], 0.0)


def test_what_moves_within_a_scope_is_conserved_in_it_and_above() -> None:  # invariant 3
    within_turns = moved(lambda layout, a: swapped(layout, a, layout.batch.turn + 1))
    assert max(within_turns.values()) < 1e-12 and set(within_turns) == LOCAL
    within_trajectories = moved(lambda layout, a: swapped(layout, a, layout.batch.token_trajectory()))
    assert within_trajectories.pop("turn_sum") > 0.1 and max(within_trajectories.values()) < 1e-12
    within_groups = moved(lambda layout, a: swapped(layout, a, owner_of_group(layout.batch)))
    assert within_groups.pop("group_sum") < 1e-12 and min(within_groups.values()) > 0.01
    assert min(moved(lambda layout, a: 2 * a).values()) > 0.01


def test_the_sum_of_trajectory_means_is_its_own_law() -> None:  # invariant 3
    def by_length(layout: Layout, a: np.ndarray) -> np.ndarray:
        """Trades mean advantage, not token mass, between the first two trajectories of the first group."""
        owner, counts = layout.batch.token_trajectory(), layout.counts
        assert counts[0] != counts[1] and min(counts[:2]) > 0
        shift = np.where(owner == 0, 1.0, np.where(owner == 1, -1.0, 0.0))
        return np.where(layout.trained, a + shift, 0.0)

    got = moved(by_length)
    assert got["group_balance"] < 1e-12 and got["group_sum"] > 0.01


def test_masses_of_constant_trajectories() -> None:
    got = Masses.constant(np.array([2.0, -1.0, 0.0]), np.array([3, 4, 5]))
    assert got.positive.tolist() == [6.0, 0.0, 0.0] and got.negative.tolist() == [0.0, -4.0, 0.0]
    assert got.total.tolist() == [6.0, -4.0, 0.0] and got.size.tolist() == [6.0, 4.0, 0.0]
