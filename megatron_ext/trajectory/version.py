"""Policy version: (run incarnation, optimizer step) packed in one int64.

Invariants (``tests/trajectory/test_version.py`` asserts each):

1. ``pack`` is monotone: a later incarnation, or a later step of the same one, is a larger integer.
2. ``UNSAMPLED`` (-1) marks tokens that no policy sampled; every real version is >= 0.
3. ``lag`` is the number of optimizer steps between two weights along the histories that resumes branched.
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
    optimizer step it resumed from; the token then counts the steps it was ahead of the last weights that both histories
    share (any later resume may have gone back further), plus the steps since. An incarnation that is not in the map
    undid nothing.
    """
    now_inc, now_step = unpack(now)
    then_inc, then_step = unpack(then)
    known = undone or {}
    shared = min([then_step, *(known[i] for i in range(then_inc + 1, now_inc + 1) if i in known)])
    return (then_step - shared) + (now_step - shared)
