"""What each token of a model turn is part of: thinking, a tool call, or text.

A token belongs to the run of text that its last character stands in. The token that ends the turn is ``Field.OTHER``.

Invariant (``tests/harness/test_fields.py``): the fields are as many as the ids, whatever was sampled.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from megatron_ext.harness.thinking import thinking_end
from megatron_ext.trajectory.record import Field

Run = tuple[int, Field]
"""Where a run of text begins, in characters, and what it is; it goes on to the next one."""


def thinking_and_text(text: str) -> list[Run]:
    """Runs of a turn that says something after its thinking."""
    end = thinking_end(text)
    if end is None:
        return [(0, Field.THINKING)]
    return [(0, Field.THINKING), (end, Field.TEXT)] if end else [(0, Field.TEXT)]


def token_fields(pieces: Sequence[str], runs: Sequence[Run]) -> NDArray[np.int8]:
    """int8 [n] for the texts of n tokens. ``runs`` rise and begin at 0."""
    lengths = np.array([len(piece) for piece in pieces], dtype=np.int64)
    ends = np.cumsum(lengths)
    last = np.maximum(ends - 1, ends - lengths)  # an empty piece is the beginning of the character behind it
    begins = np.array([begin for begin, _ in runs])
    values = np.array([int(field) for _, field in runs], dtype=np.int8)
    fields: NDArray[np.int8] = values[np.searchsorted(begins, last, side="right") - 1]
    return fields
