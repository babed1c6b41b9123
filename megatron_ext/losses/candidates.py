"""The ids each token was drawn from, where a sampler cut its distribution (top-p, top-k), as the engine recorded them.

A token drawn from a truncated distribution has the log-prob of that distribution; a trainer that scores it under the
whole vocabulary reads a policy ratio that is off by the mass cut away. The cut is replayed, never recomputed: the
trainer's own logits would keep slightly different ids (top-p replay, MiMo-V2.6).

Invariants (``tests/losses/test_candidates.py``):

1. One set has one form: its ids ascend. A row that was drawn from the whole vocabulary says so; no set is empty.
2. What is wrong is named with its row: ids out of order or outside the vocabulary, a sampled token outside its set.
3. ``take`` commutes with everything that is per row.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class CandidateSets:
    """Candidate ids of ``n`` rows.

    Args:
        ids: int32 or int64 ``[C]``, ids of the whole vocabulary, row after row, ascending within a row.
        offsets: int64 ``[n + 1]``: row ``i`` owns ``ids[offsets[i]:offsets[i + 1]]``.
        whole: bool ``[n]``, rows drawn from the whole vocabulary, which own no ids. None: no row was.

    Raises:
        ValueError: what the invariants exclude, naming the first row at fault.
    """

    ids: torch.Tensor
    offsets: torch.Tensor
    whole: torch.Tensor | None = None

    def __post_init__(self) -> None:
        ids, offsets = self.ids, self.offsets
        if ids.ndim != 1 or ids.dtype not in (torch.int32, torch.int64):
            raise ValueError(f"candidate ids {ids.dtype} {tuple(ids.shape)}: expected int32 or int64 [C]")
        if offsets.ndim != 1 or offsets.dtype != torch.int64 or not len(offsets):
            raise ValueError(f"candidate offsets {offsets.dtype} {tuple(offsets.shape)}: expected int64 [n + 1]")
        counts = offsets.diff()
        if int(offsets[0]) != 0 or int(offsets[-1]) != len(ids) or bool((counts < 0).any()):
            raise ValueError(f"candidate offsets must ascend from 0 to {len(ids)}, the number of ids")
        whole = torch.zeros_like(counts, dtype=torch.bool) if self.whole is None else self.whole
        if whole.dtype != torch.bool or whole.shape != counts.shape:
            raise ValueError(f"whole {whole.dtype} {tuple(whole.shape)}: expected bool [{len(counts)}], one per row")
        if (row := _first(~whole & (counts == 0))) is not None:
            raise ValueError(f"row {row}: empty candidate set; a row drawn from the whole vocabulary is marked whole")
        if (row := _first(whole & (counts > 0))) is not None:
            raise ValueError(f"row {row}: marked whole, yet it owns {int(counts[row])} candidate ids")
        if len(ids):
            rows = self.rows()
            if (at := _first((ids[1:] <= ids[:-1]) & (rows[1:] == rows[:-1]))) is not None:
                raise ValueError(
                    f"row {int(rows[at])}: candidate ids must ascend, {int(ids[at])} is followed by {int(ids[at + 1])}"
                )

    @classmethod
    def from_mask(cls, mask: torch.Tensor) -> CandidateSets:
        """From bool ``[n, V]``, True where an id could be drawn. Rows that are True throughout become whole."""
        whole = mask.all(1)
        kept = mask & ~whole.unsqueeze(1)
        counts = kept.sum(1)
        ids = kept.nonzero()[:, 1].to(torch.int32)
        return cls(ids, torch.cat([counts.new_zeros(1), counts.cumsum(0)]), whole)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def rows(self) -> torch.Tensor:
        """int64 ``[C]``, the row of each id."""
        return torch.repeat_interleave(self.offsets.diff(), output_size=len(self.ids))

    def whole_rows(self) -> torch.Tensor:
        """int64, the rows drawn from the whole vocabulary."""
        none = torch.zeros(0, dtype=torch.int64, device=self.ids.device)
        return none if self.whole is None else self.whole.nonzero().squeeze(1)

    def take(self, index: torch.Tensor) -> CandidateSets:
        """The sets of rows ``index`` (int64), in that order: what a micro-batch needs of a step."""
        counts = self.offsets.diff()[index]
        offsets = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
        row = torch.repeat_interleave(counts, output_size=int(offsets[-1]))
        within = torch.arange(len(row), device=row.device) - offsets[row]
        ids = self.ids[self.offsets[:-1][index][row] + within]
        return CandidateSets(ids, offsets, None if self.whole is None else self.whole[index])

    def check(self, targets: torch.Tensor, vocab_size: int) -> None:
        """Raises ``ValueError`` unless each target (int64 ``[n]``) is in its set and all ids in the vocabulary."""
        if targets.shape != (len(self),):
            raise ValueError(f"targets {tuple(targets.shape)} and the candidate sets of {len(self)} rows disagree")
        rows = self.rows()
        if (at := _first((self.ids < 0) | (self.ids >= vocab_size))) is not None:
            raise ValueError(f"row {int(rows[at])}: candidate id {int(self.ids[at])}: the vocabulary has {vocab_size}")
        hits = torch.zeros_like(targets).index_add_(0, rows, (self.ids == targets[rows]).to(targets.dtype))
        drawn = hits > 0 if self.whole is None else (hits > 0) | self.whole
        if (row := _first(~drawn)) is not None:
            count = int(self.offsets[row + 1] - self.offsets[row])
            raise ValueError(
                f"row {row}: token {int(targets[row])} was sampled, but is not among its {count} recorded candidates; "
                "tokens and candidate sets must come from the same positions"
            )


def _first(fault: torch.Tensor) -> int | None:
    """Index of the first True."""
    return int(fault.to(torch.uint8).argmax()) if bool(fault.any()) else None
