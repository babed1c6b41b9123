"""What ``megatron_ext/training/run_state.py`` computes without a run: which trajectories an optimizer step weighs."""

from __future__ import annotations

import numpy as np
import pytest

from megatron_ext.losses.aggregation import MODES, counted, token_weights
from megatron_ext.training.run_state import only, trained_trajectories
from megatron_ext.trajectory.packing import split_optimizer_steps
from tests.helpers.records import random_batch


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("steps", [1, 2, 3])
def test_each_optimizer_step_counts_its_own_trajectories(mode: str, steps: int) -> None:
    """Weights are normalised over the step: they sum to 1 on it, whatever the other steps of the batch hold."""
    batch = random_batch(5, groups=6)
    owner = batch.token_trajectory()
    seen = np.zeros(batch.num_tokens, dtype=np.int64)
    for trajectories in split_optimizer_steps(batch, steps, seed=3):
        weight = token_weights(only(batch, trajectories), mode)
        assert weight.sum() == pytest.approx(1.0)
        assert not weight[~np.isin(owner, trajectories)].any()
        seen += weight > 0
    np.testing.assert_array_equal(seen, counted(batch) > 0)


def test_trained_trajectories_have_a_token_to_train() -> None:
    batch = random_batch(5, groups=6)
    expected = [bool(batch.loss_mask[view.tokens].any()) for view in batch.trajectories()]
    assert trained_trajectories(batch).tolist() == expected and sum(expected) > 0
