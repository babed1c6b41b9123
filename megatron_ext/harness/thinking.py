"""Separates a model's leading thinking from what it says."""

from __future__ import annotations

OPEN = "<think>"
CLOSE = "</think>"


def thinking_end(text: str) -> int | None:
    """Where the leading ``<think>...</think>`` blocks of ``text`` end, in characters (0: there are none); None when a
    block is never closed.

    A template may open the block in its generation prompt, so that the turn begins inside it: a ``</think>`` that no
    ``<think>`` precedes ends such a block.
    """
    opened, closed = text.find(OPEN), text.find(CLOSE)
    end = closed + len(CLOSE) if closed >= 0 and not 0 <= opened < closed else 0
    while text[end:].lstrip().startswith(OPEN):
        closed = text.find(CLOSE, end)
        if closed < 0:
            return None
        end = closed + len(CLOSE)
    return end


def after_thinking(text: str) -> str | None:
    """``text`` without its leading thinking, stripped; None when that is never closed."""
    end = thinking_end(text)
    return None if end is None else text[end:].strip()
