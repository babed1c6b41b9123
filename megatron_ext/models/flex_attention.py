"""Attention over a prefix tree on a GPU: FlexAttention with a block mask that is read off the tree.

The mask is ``k <= q < until[k]`` (``PrefixTree.until``). Which blocks a kernel visits comes from
``trajectory.tree_mask.block_ranges``, so that no mask of tokens x tokens is ever evaluated. Import this only where
FlexAttention is used. Not compiled, FlexAttention writes out all scores: that is for tests.

Invariants (``tests/models/test_flex_attention.py``; those marked ``gpu`` need a CUDA device):

1. The mask function allows exactly the pairs of ``PrefixTree.allowed``; a visited block is called full only where all
   of its pairs are allowed, and no other block holds an allowed pair.
2. Outputs and gradients are those of ``models.tree_attention``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from megatron_ext.trajectory.tree_mask import block_ranges

BLOCK = 128  # tokens of a side of a mask block; what the kernels are tuned for

MaskMod = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
compiled: Callable[..., Any] = torch.compile(flex_attention)


def mask_mod(until: torch.Tensor) -> MaskMod:
    """FlexAttention's mask function of the tree with ``until`` int [F]."""

    def allowed(batch: torch.Tensor, head: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        return (key <= query) & (query < until[key])

    return allowed


def block_mask(until: NDArray[np.int64], device: torch.device) -> BlockMask:
    """The mask of one tree, for any number of heads. int32 blocks x blocks entries of indices are all it holds."""
    kinds = block_ranges(until, BLOCK).kinds()

    def listed(kind: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Of each block of queries, how many key blocks are of ``kind``, and which (rising; then the others)."""
        order = np.argsort(kinds != kind, axis=1, kind="stable")
        count = np.count_nonzero(kinds == kind, axis=1)
        both = (torch.from_numpy(x.astype(np.int32))[None, None].to(device) for x in (count, order))
        return next(both), next(both)

    # Kernels look at whole blocks, so the last one's missing tokens need an entry too.
    padded = np.full(len(kinds) * BLOCK, len(until), dtype=np.int32)
    padded[: len(until)] = until
    mask: BlockMask = BlockMask.from_kv_blocks(
        *listed(1),
        *listed(2),
        BLOCK_SIZE=BLOCK,
        mask_mod=mask_mod(torch.from_numpy(padded).to(device)),
        seq_lengths=(len(until), len(until)),
    )
    return mask


def tree_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: BlockMask,
    scale: float,
    kernel: Callable[..., Any] = compiled,
) -> torch.Tensor:
    """``q`` [U, h, d], ``k`` and ``v`` [U, h_kv, d] (h a multiple of h_kv) of the tree's tokens -> [U, h, d]."""
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    out: torch.Tensor = kernel(q, k, v, block_mask=mask, scale=scale, enable_gqa=q.size(1) != k.size(1))
    return out[0].transpose(0, 1)
