"""Sampling: temperature, top-k, top-p, greedy; random numbers keyed by (seed, position).

Invariants (``tests/rollout/test_embedded_sampler.py``):

1. ``uniforms`` depends on (seed, position) alone, so a request draws the same whatever runs beside it, and a request
   that is resumed from its own tokens goes on with the numbers it would have had.
2. Reported log-probs are log softmax(logits / temperature) in fp32, untruncated; greedy rows report temperature 1.
3. Top-k keeps the k likeliest ids; top-p then keeps the smallest set of likeliest ids whose share of what top-k kept
   reaches p (the id that crosses p is kept). Ids outside are never drawn.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX2 = np.uint64(0x94D049BB133111EB)
_S27, _S30, _S31 = np.uint64(27), np.uint64(30), np.uint64(31)
_DROP = np.uint64(24)
_UNIT = 2.0**-40


def _mix(z: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Finaliser of SplitMix64 (Steele, Lea, Flood 2014): a bijection of 64-bit words that scatters every bit."""
    z = (z ^ (z >> _S30)) * _MIX1
    z = (z ^ (z >> _S27)) * _MIX2
    return z ^ (z >> _S31)


def uniforms(seeds: NDArray[np.uint64], positions: NDArray[np.int64]) -> NDArray[np.float64]:
    """Uniform numbers in [0, 1), float64 [n], multiples of 2^-40 (so that u * total < total holds in fp64)."""
    stream = _mix(seeds + _GOLDEN)
    word = _mix(stream + (positions.astype(np.uint64) + np.uint64(1)) * _GOLDEN)
    return (word >> _DROP).astype(np.float64) * _UNIT


@dataclass(frozen=True)
class SamplingRows:
    """Settings of n rows, made once per composition of the batch.

    ``temperature`` float32 [n, 1] with 1 where greedy, or None when all are 1; ``greedy`` bool [n] or None when no row
    is; ``truncated`` int64 [m], rows with top-k or top-p, or None; ``top_k`` int64 [m, 1] (the vocabulary when off);
    ``top_p`` float64 [m, 1]; ``candidates``: how many likeliest ids the truncated rows need sorted.
    """

    temperature: torch.Tensor | None
    greedy: torch.Tensor | None
    all_greedy: bool
    truncated: torch.Tensor | None
    top_k: torch.Tensor
    top_p: torch.Tensor
    candidates: int

    @staticmethod
    def make(
        temperature: NDArray[np.float32],
        top_k: NDArray[np.int64],
        top_p: NDArray[np.float64],
        vocab: int,
        device: torch.device,
    ) -> SamplingRows:
        """From per-row arrays [n]; temperature 0 is greedy, top_k 0 and top_p 1 are off."""
        greedy = temperature == 0
        scale = np.where(greedy, np.float32(1), temperature)
        width = np.where(top_k == 0, vocab, np.minimum(top_k, vocab))
        rows = np.flatnonzero(~greedy & ((width < vocab) | (top_p < 1)))
        return SamplingRows(
            temperature=None if np.all(scale == 1) else torch.from_numpy(scale).to(device)[:, None],
            greedy=torch.from_numpy(greedy).to(device) if greedy.any() else None,
            all_greedy=bool(greedy.all()),
            truncated=torch.from_numpy(rows).to(device) if len(rows) else None,
            top_k=torch.from_numpy(width[rows]).to(device)[:, None],
            top_p=torch.from_numpy(top_p[rows]).to(device)[:, None],
            candidates=int(width[rows].max()) if len(rows) else 0,
        )


def sample(
    logits: torch.Tensor, rows: SamplingRows, seeds: NDArray[np.uint64], positions: NDArray[np.int64]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draws one id a row by inverting the cumulative distribution in id order.

    Args:
        logits: float32 [n, V].
        rows: settings of the n rows.
        seeds, positions: uint64 and int64 [n], key of each row's random number.

    Returns:
        ids int64 [n] and their log-probs float32 [n].
    """
    if rows.temperature is not None:
        logits = logits / rows.temperature
    logp = logits.log_softmax(-1)
    if rows.all_greedy:
        ids = logits.argmax(-1, keepdim=True)
        return ids[:, 0], logp.gather(1, ids)[:, 0]
    p = logp.exp()
    if rows.truncated is not None:
        p[rows.truncated] = _truncate(p[rows.truncated], rows)
    cumulative = p.cumsum(-1, dtype=torch.float64)
    u = torch.from_numpy(uniforms(seeds, positions)).to(logits.device)
    ids = torch.searchsorted(cumulative, (u * cumulative[:, -1])[:, None], right=True)
    if rows.greedy is not None:
        ids = torch.where(rows.greedy[:, None], logits.argmax(-1, keepdim=True), ids)
    return ids[:, 0], logp.gather(1, ids)[:, 0]


def _truncate(p: torch.Tensor, rows: SamplingRows) -> torch.Tensor:
    """Probabilities [m, V] with everything outside top-k and then top-p set to 0 (not renormalised)."""
    value, index = p.topk(rows.candidates, dim=-1)
    value = value.double()
    rank = torch.arange(rows.candidates, device=p.device)
    value = value.masked_fill(rank >= rows.top_k, 0.0)
    cumulative = value.cumsum(-1)
    # Keep an id when the likelier ones together stay below p, so the one that crosses p is kept, and always the first.
    keep = (cumulative - value < rows.top_p * cumulative[:, -1:]) & (rank < rows.top_k)
    return torch.zeros_like(p).scatter_(1, index, value.mul_(keep).to(p.dtype))
