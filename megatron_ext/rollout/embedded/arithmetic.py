"""The arithmetic of a forward, twice: as fast as it goes, and independent of what else is in the batch.

Invariants (``tests/rollout/test_embedded_invariant.py``):

1. ``INVARIANT`` gives a row the same bits whatever rows stand beside it, however many there are, and wherever the row
   stands among them.
2. Both give the same values up to float rounding.

A matrix product of n rows is blocked differently for every n, and so rounds differently. ``INVARIANT`` multiplies each
row as a product of its own, of one shape, from memory aligned alike; element-wise functions that have another code path
for the end of an array are written out in operations that IEEE 754 rounds in one way.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F

_LINE = 16  # fp32 numbers in a cache line


class Arithmetic(Protocol):
    """What differs between the two. ``invariant`` says which it is."""

    @property
    def invariant(self) -> bool: ...

    def product(self, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        """x @ w, [n, H] and [H, O] -> [n, O]."""

    def product_into(self, out: torch.Tensor, x: torch.Tensor, w: torch.Tensor) -> None:
        """The same, written to ``out`` [n, O]."""

    def add_product(self, base: torch.Tensor, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        """base + x @ w, ``base`` [n, O]."""

    def gated(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        """silu(gate) * up, a new tensor."""

    def rotated(self, x: torch.Tensor, rotation: torch.Tensor) -> torch.Tensor:
        """Rotary embedding of x [n, heads, D], whose pairs lie side by side, by complex ``rotation`` [n, 1, D/2]."""


@dataclass(frozen=True)
class Fast:
    """One operation for all rows."""

    invariant: bool = False

    def product(self, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return torch.mm(x, w)

    def product_into(self, out: torch.Tensor, x: torch.Tensor, w: torch.Tensor) -> None:
        torch.mm(x, w, out=out)

    def add_product(self, base: torch.Tensor, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return torch.addmm(base, x, w)

    def gated(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        return F.silu(gate).mul_(up)

    def rotated(self, x: torch.Tensor, rotation: torch.Tensor) -> torch.Tensor:
        pairs = torch.view_as_complex(x.view(*x.shape[:2], -1, 2)).mul_(rotation)
        return torch.view_as_real(pairs).view(x.shape)


@dataclass(frozen=True)
class Invariant:
    """Each row on its own."""

    invariant: bool = True

    def product(self, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        wide = F.pad(w, (0, -w.shape[1] % _LINE)) if w.shape[1] % _LINE else w
        out = torch.bmm(_aligned(x).unsqueeze(1), wide.expand(len(x), *wide.shape))
        return out[:, 0, : w.shape[1]].contiguous()

    def product_into(self, out: torch.Tensor, x: torch.Tensor, w: torch.Tensor) -> None:
        out.copy_(self.product(x, w))

    def add_product(self, base: torch.Tensor, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return base + self.product(x, w)

    def gated(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        return gate / ((-gate).exp() + 1.0) * up

    def rotated(self, x: torch.Tensor, rotation: torch.Tensor) -> torch.Tensor:
        even, odd = x[..., 0::2], x[..., 1::2]
        cos, sin = rotation.real, rotation.imag
        return torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).view(x.shape)


def _aligned(x: torch.Tensor) -> torch.Tensor:
    """x [n, H] with every row at a multiple of the cache line: kernels treat the head of an array by its address."""
    n, width = x.shape
    padded = -(-width // _LINE) * _LINE
    if padded == width and x.is_contiguous() and x.data_ptr() % (4 * _LINE) == 0:
        return x
    rows = x.new_empty(n, padded)[:, :width]
    return rows.copy_(x)


FAST, INVARIANT = Fast(), Invariant()
