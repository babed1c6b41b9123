"""The scores of a batch's tokens, as training hands them around."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class TokenScores:
    """Scores of a batch's tokens, float32 [T]; 0 where no score was asked for.

    ``experts`` int64 [T, L, k], what the routers chose in this forward, also where recorded experts ran instead (None
    unless recorded), valid where ``routed`` bool [T]. ``reference`` float32 [T]: log-probs under the reference policy
    (None without one).

    Under data parallelism a rank holds the scores of the tokens that its own micro-batches predict (experts: of every
    token that they ran), and every tensor-, context- and pipeline-parallel rank of it holds the same.
    ``replica.gather_scores`` puts the whole batch together.
    """

    logp: NDArray[np.float32]
    entropy: NDArray[np.float32]
    experts: NDArray[np.int64] | None = None
    routed: NDArray[np.bool_] | None = None
    reference: NDArray[np.float32] | None = None
