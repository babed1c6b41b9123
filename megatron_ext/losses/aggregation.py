"""Loss aggregation: one float64 weight a token, with denominators counted over the whole optimizer-step batch.

The loss of a step is ``sum(weight_t * l_t)``, whatever the micro-batches, packing, row order or ranks.

Invariants (``tests/losses/test_aggregation.py`` asserts each):

1. Over a batch with anything to train the weights sum to 1; over one with nothing they are all 0.
2. Mask 0, token weight 0 or an untrainable trajectory give exactly 0, and such units are not counted.
3. Cutting a session into segments or sessions changes nothing in ``token_mean``, ``trajectory_mean``, ``prompt_mean``.
4. Weights of parts of a batch (whole groups), given the total of their denominators, are those of the whole batch.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_ext.trajectory.record import TrajectoryBatch

MODES = ("token_mean", "row_mean", "trajectory_mean", "prompt_mean")


def counted(batch: TrajectoryBatch) -> NDArray[np.float64]:
    """What each token counts, float64 [T]: its weight where it is trained, 0 elsewhere."""
    trained = batch.loss_mask & batch.trainable()[batch.token_trajectory()]
    return np.where(trained, batch.weight, 0.0).astype(np.float64)


def _units(batch: TrajectoryBatch, mode: str) -> tuple[NDArray[Any], int]:
    """The unit of each token (int64 [T]) whose tokens are averaged first, and how many units there are."""
    if mode == "row_mean":
        return batch.token_segment(), batch.num_segments
    if mode == "trajectory_mean":
        return batch.token_trajectory(), batch.num_trajectories
    if mode == "prompt_mean":
        return batch.trajectory_group()[batch.token_trajectory()], batch.num_groups
    raise ValueError(f"aggregation {mode!r}: must be one of {', '.join(MODES)}")


def denominators(batch: TrajectoryBatch, mode: str) -> float:
    """This part's share of the global denominator; add it over the ranks (each holds whole groups), then ``weights``.

    ``token_mean``: the sum of the token weights. Otherwise the number of units (rows, trajectories, prompts) that have
    something to train.
    """
    count = counted(batch)
    if mode == "token_mean":
        return float(count.sum())
    unit, size = _units(batch, mode)
    return float(np.count_nonzero(np.bincount(unit, weights=count, minlength=size)))


def weights(batch: TrajectoryBatch, mode: str, total: float) -> NDArray[np.float64]:
    """Weight of each token, float64 [T], given the denominator of the whole optimizer-step batch.

    ``token_mean`` ``w_t / sum w``; ``row_mean`` (segments), ``trajectory_mean`` and ``prompt_mean`` (specs, section 5)
    ``w_t / (units * sum of w over the token's unit)``.
    """
    count = counted(batch)
    if mode == "token_mean":
        return count / total if total > 0 else count
    unit, size = _units(batch, mode)
    sums = np.bincount(unit, weights=count, minlength=size)
    share = np.divide(1.0, sums * total, out=np.zeros(size), where=(sums > 0) & (total > 0))
    result: NDArray[np.float64] = count * share[unit]
    return result


def token_weights(batch: TrajectoryBatch, mode: str) -> NDArray[np.float64]:
    """``weights`` when ``batch`` is the whole optimizer-step batch; float64 [T]."""
    return weights(batch, mode, denominators(batch, mode))
