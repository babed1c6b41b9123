"""Makes parts that some trajectories of a group lack neutral among its members.

Invariants (``tests/rewards/test_missing.py`` asserts each):

1. A member without a part gets the mean of the part over the members that have it (0 if none has): centred by the
   group's mean, the part then adds exactly 0 to it, and to the others what it would add were they alone.
2. Nothing changes where nothing is missing, nor for members that do not count.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from megatron_ext.trajectory.fields import Array


def neutral_rewards(reward: Array, parts: Mapping[str, Array], counted: Array) -> Array:
    """Rewards of one group, float64 [J].

    Args:
        reward: [J], the sums of the parts that are there.
        parts: name -> [J], NaN where missing.
        counted: bool [J], the members that are compared; the others keep their reward and inform no mean.
    """
    filled = np.array(reward, dtype=np.float64)
    for part in parts.values():
        gone = np.isnan(part) & counted
        have = counted & ~gone
        if gone.any() and have.any():
            filled[gone] += part[have].mean(dtype=np.float64)
    return filled
