"""The entropy gate: routing losses act only while the policy's entropy is in a band. Pure.

Source: arXiv 2610.07332 as summarised by third parties, who name [0, 0.2] as an example: auxiliary losses on routers
easily make RL collapse, so that they are on while the policy is sure of what it does.

Invariants (``tests/moe/test_gate.py``): both ends of the band are inside it; an entropy that is not a number closes
the gate.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class EntropyGate:
    """Open while the mean entropy of the trained tokens, in nats over the full vocabulary, is in ``[low, high]``."""

    low: float = 0.0
    high: float = 0.2

    def __post_init__(self) -> None:
        if not 0 <= self.low <= self.high:  # written so that NaN fails
            raise ValueError(
                f"entropy_low={self.low} and entropy_high={self.high}: the gate's band needs 0 <= low <= high"
            )

    def is_open(self, entropy: float) -> bool:
        """Whether routing losses act at this entropy."""
        return self.low <= entropy <= self.high
