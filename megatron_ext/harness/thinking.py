"""Separates a model's leading thinking from what it says."""

from __future__ import annotations

OPEN = "<think>"
CLOSE = "</think>"


def after_thinking(text: str) -> str | None:
    """``text`` without its leading ``<think>...</think>`` blocks, stripped; None when a block is never closed.

    A template may open the block in its generation prompt, so that the turn begins inside it: a ``</think>`` that no
    ``<think>`` precedes ends such a block.
    """
    rest = text.strip()
    opened, closed = rest.find(OPEN), rest.find(CLOSE)
    if closed >= 0 and not 0 <= opened < closed:
        rest = rest[closed + len(CLOSE) :].strip()
    while rest.startswith(OPEN):
        end = rest.find(CLOSE)
        if end < 0:
            return None
        rest = rest[end + len(CLOSE) :].strip()
    return rest
