"""Ids of uneven length, one row a trajectory: what a harness prepared for scoring, as flat array with offsets.

Invariants (``tests/trajectory/test_ragged.py`` asserts each):

1. The rows partition the ids: offsets start at 0, never fall and end at their number.
2. A frozen ``Ragged`` never changes, and rows keep their ids through joining, slicing, the store and pickling.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from megatron_ext.trajectory.fields import Array, RecordError, frozen


@dataclass(frozen=True, eq=False)
class Ragged:
    """J rows of token ids. ``offsets`` int64 [J+1]; ``ids`` int32 [offsets[-1]], each >= 0.

    Raises ``RecordError`` when the offsets are no partition or an id is negative.
    """

    offsets: Array
    ids: Array

    def __post_init__(self) -> None:
        object.__setattr__(self, "offsets", frozen("offsets", self.offsets, np.int64))
        object.__setattr__(self, "ids", frozen("ids", self.ids, np.int32))
        offsets = self.offsets
        if offsets.ndim != 1 or self.ids.ndim != 1 or len(offsets) < 1 or offsets[0] != 0:
            raise RecordError(f"ragged ids: offsets must be one-dimensional and start at 0, got {offsets[:3]!r}")
        if np.any(np.diff(offsets) < 0) or offsets[-1] != len(self.ids):
            raise RecordError(
                f"ragged ids: offsets must rise to {len(self.ids)}, the number of ids; they end at {offsets[-1]}"
            )
        if np.any(self.ids < 0):
            raise RecordError("ragged ids: negative token id")

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Unpickling gives writeable arrays: freeze them again."""
        for name, array in state.items():
            array.flags.writeable = False
            object.__setattr__(self, name, array)

    @classmethod
    def of(cls, rows: Sequence[ArrayLike]) -> Ragged:
        """From the rows one by one."""
        arrays = [np.asarray(row, dtype=np.int32).reshape(-1) for row in rows]
        offsets = np.cumsum([0, *(len(array) for array in arrays)], dtype=np.int64)
        return cls(offsets, np.concatenate([np.empty(0, dtype=np.int32), *arrays]))

    @classmethod
    def empty(cls, rows: int) -> Ragged:
        """``rows`` rows without ids."""
        return cls(np.zeros(rows + 1, dtype=np.int64), np.empty(0, dtype=np.int32))

    @classmethod
    def concat(cls, parts: Sequence[Ragged]) -> Ragged:
        """The rows of all parts in order."""
        lengths = [np.diff(part.offsets) for part in parts]
        offsets = np.cumsum(np.concatenate([np.zeros(1, dtype=np.int64), *lengths]), dtype=np.int64)
        return cls(offsets, np.concatenate([np.empty(0, dtype=np.int32), *(part.ids for part in parts)]))

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __iter__(self) -> Iterator[Array]:
        return (self.row(index) for index in range(len(self)))

    @property
    def lengths(self) -> Array:
        """int64 [J]."""
        return np.diff(self.offsets)

    def row(self, index: int) -> Array:
        """int32 [n]: a view of one row."""
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        return self.ids[self.offsets[index] : self.offsets[index + 1]]

    def between(self, first: int, last: int) -> Ragged:
        """Rows [first, last)."""
        low, high = self.offsets[first], self.offsets[last]
        return Ragged(self.offsets[first : last + 1] - low, self.ids[low:high])

    def same(self, other: Ragged) -> bool:
        """Whether both hold the same rows."""
        return np.array_equal(self.offsets, other.offsets) and np.array_equal(self.ids, other.ids)
