"""A credit edit that asks for scoring forwards: the sampled tokens under the policy and under the reference."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_ext.credit.protocol import CreditView, EditTraits, ScoreRequest, Stat
from megatron_ext.credit.scoring import gap, token_scores


@dataclass(frozen=True)
class Surprise:
    """``A * (1 + weight * tanh(-log p)) + weight * gap`` to the weights named ``reference``, so that both are read."""

    weight: float = 0.5
    reference: str = "current"

    @property
    def traits(self) -> EditTraits:
        return EditTraits(breaks=frozenset("ef"), reference=self.reference == "reference")

    def requests(self, view: CreditView) -> Sequence[ScoreRequest]:
        batch, asked = view.batch, []
        for segment in range(batch.num_segments):
            first, end = batch.segment_tokens[segment], batch.segment_tokens[segment + 1]
            at = first + np.flatnonzero(view.trained[first:end])
            if len(at):
                asked += [ScoreRequest(segment, None, at, name) for name in ("current", self.reference)]
        return asked

    def local_stats(self, view: CreditView) -> Mapping[str, Stat]:
        return {}

    def apply(self, view: CreditView, reduced: Mapping[str, NDArray[Any]]) -> CreditView:
        asked = self.requests(view)
        logp = token_scores(asked[::2], view.replies[::2], view.batch.num_tokens)
        moved = view.advantage * (1 - self.weight * np.tanh(logp))
        for own, own_reply, other in zip(asked[::2], view.replies[::2], view.replies[1::2], strict=True):
            moved[own.positions] += self.weight * gap(other, own_reply)
        return replace(view, advantage=np.where(view.trained, moved, 0.0))

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """No state."""
