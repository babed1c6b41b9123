"""Policy version: (run incarnation, optimizer step) packed in one int64.

Invariants:
1. ``pack`` is monotone: a later incarnation, or a later step of the same one, is a larger integer.
2. ``UNSAMPLED`` (-1) marks tokens that no policy sampled; every real version is >= 0.
"""

from __future__ import annotations

from collections.abc import Mapping

UNSAMPLED = -1
STEP_BITS = 40
_STEP_MASK = (1 << STEP_BITS) - 1


def pack(incarnation: int, step: int) -> int:
    """Version of the weights after ``step`` optimizer steps of run incarnation ``incarnation``."""
    if not 0 <= step <= _STEP_MASK or not 0 <= incarnation < 1 << (63 - STEP_BITS):
        raise ValueError(f"policy version out of range: incarnation {incarnation}, step {step}")
    return (incarnation << STEP_BITS) | step


def unpack(version: int) -> tuple[int, int]:
    """``(incarnation, optimizer step)`` of a packed version."""
    if version < 0:
        raise ValueError(f"not a policy version: {version}")
    return version >> STEP_BITS, version & _STEP_MASK


def lag(now: int, then: int, undone: Mapping[int, int] | None = None) -> int:
    """Optimizer steps between the weights that sampled a token and the current ones.

    A token of an earlier incarnation may come from a step that a resume undid. ``undone`` maps each incarnation to the
    step it resumed from; the token then counts the steps it was ahead of that checkpoint plus the steps since.
    """
    now_inc, now_step = unpack(now)
    then_inc, then_step = unpack(then)
    if then_inc == now_inc:
        return now_step - then_step
    resumed = (undone or {}).get(then_inc + 1)
    if resumed is None:
        return now_step - then_step
    return abs(then_step - resumed) + (now_step - resumed) if then_step > resumed else now_step - then_step
