"""KV cache in slots, and the two ways to attend to it: one new token a row (decode), many new tokens a row (prefill).

Invariants (``tests/rollout/test_embedded_model.py``):

1. Slot s holds keys and values of the tokens 0 .. cached - 1 of its occupant; what lies beyond is never attended to.
2. Decoding reads the slots [0, n) and a prefill a contiguous run of slots: slices of the cache, never gathers.
3. Growing and moving change no key or value that is in use.
4. ``Alone`` gives every token the attention it would have by itself, bit for bit, in a prefill as in a decode step.

The memory is zeroed when it is allocated: a masked position contributes 0 * value, which must not be NaN.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F

from megatron_ext.models.hf_config import HFConfig

FIRST_LENGTH = 128


class KvCache:
    """Keys and values [slots * kv_heads, length, D] per layer, fp32; ``length`` doubles on demand up to ``limit``."""

    def __init__(self, config: HFConfig, slots: int, limit: int, device: torch.device) -> None:
        self.config, self.slots, self.limit, self.device = config, slots, limit, device
        self.length = 0
        self.keys: list[torch.Tensor] = []
        self.values: list[torch.Tensor] = []

    def ensure(self, length: int) -> None:
        """Makes room for ``length`` tokens in every slot."""
        if length <= self.length:
            return
        assert length <= self.limit, f"{length} tokens in a cache limited to {self.limit}"
        grown = min(max(length, 2 * self.length, FIRST_LENGTH), self.limit)
        g, old = self.config, self.length
        shape = (self.slots * g.kv_heads, grown, g.head_dim)
        for kept in (self.keys, self.values):
            for layer in range(g.layers):
                new = torch.zeros(shape, dtype=torch.float32, device=self.device)
                if old:
                    new[:, :old] = kept[layer]
                    kept[layer] = new
                else:
                    kept.append(new)
        self.length = grown

    @torch.inference_mode()  # as in the steps that made these tensors: a request may also leave between two of them
    def move(self, source: torch.Tensor, target: torch.Tensor, length: int) -> None:
        """Slot ``target[i]`` takes the first ``length`` tokens of slot ``source[i]``, all at once."""
        heads = self.config.kv_heads
        span = torch.arange(heads, device=self.device)
        src = (source.to(self.device)[:, None] * heads + span).reshape(-1)
        dst = (target.to(self.device)[:, None] * heads + span).reshape(-1)
        for tensor in (*self.keys, *self.values):
            part = tensor[:, :length]
            part[dst] = part[src]

    def release(self) -> None:
        self.length, self.keys, self.values = 0, [], []


class Attention(Protocol):
    """What a forward needs of the cache. ``positions`` int64 [N] are the absolute positions of the N packed tokens."""

    positions: torch.Tensor

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Stores ``k``, ``v`` [N, kv_heads, D] and returns the attention of ``q`` [N, heads, D], [N, heads * D].
        ``q`` is already scaled."""


class Decode:
    """One new token for each of the slots 0 .. n-1, at ``positions`` int64 [n]."""

    def __init__(self, cache: KvCache, positions: torch.Tensor, longest: int) -> None:
        g, n = cache.config, len(positions)
        self.positions, self._cache, self._rows, self._span = positions, cache, n * g.kv_heads, longest
        row = positions if g.kv_heads == 1 else positions.repeat_interleave(g.kv_heads)
        self._write = torch.arange(0, self._rows * cache.length, cache.length, device=row.device) + row
        ahead = torch.arange(longest, device=row.device) > row[:, None]
        self._mask = torch.zeros(ahead.shape, device=row.device).masked_fill_(ahead, -torch.inf)[:, None]
        self._mask = self._mask.expand(-1, g.heads // g.kv_heads, -1)

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        keys, values = self._cache.keys[layer], self._cache.values[layer]
        width = keys.shape[-1]
        keys.view(-1, width).index_copy_(0, self._write, k.reshape(-1, width))
        values.view(-1, width).index_copy_(0, self._write, v.reshape(-1, width))
        keys, values = keys[: self._rows, : self._span], values[: self._rows, : self._span]
        q = q.reshape(self._rows, -1, width)
        scores = torch.baddbmm(self._mask, q, keys.transpose(1, 2))
        return torch.bmm(scores.softmax(-1), values).view(len(self.positions), -1)


class Prefill:
    """``counts[i]`` new tokens for slot ``first + i``, packed one row after another, from position ``starts[i]``."""

    def __init__(self, cache: KvCache, first: int, starts: list[int], counts: list[int]) -> None:
        g, device, rows = cache.config, cache.device, len(counts)
        self._cache, self._first, self._batch = cache, first, rows
        count, start = torch.tensor(counts, device=device), torch.tensor(starts, device=device)
        self._steps, self._span = max(counts), max(s + c for s, c in zip(starts, counts, strict=True))
        row = torch.repeat_interleave(torch.arange(rows, device=device), count)
        within = torch.arange(len(row), device=device) - (count.cumsum(0) - count)[row]
        self.positions = within + start[row]
        heads = torch.arange(g.kv_heads, device=device)
        slot = (first + row)[:, None] * g.kv_heads + heads
        self._write = (slot * cache.length + self.positions[:, None]).reshape(-1)
        # Rows of equal length need no padding; others are spread over [rows, steps] around the attention alone.
        self._spread = None if min(counts) == self._steps else row * self._steps + within
        # Without cached tokens the mask is plain causal, also for padded rows: padding stands at their end.
        self._causal = max(starts) == 0
        self._mask: torch.Tensor | None = None
        if not self._causal:
            query = start[:, None] + torch.arange(self._steps, device=device)
            ahead = torch.arange(self._span, device=device) > query[:, :, None]
            self._mask = torch.zeros(ahead.shape, device=device).masked_fill_(ahead, -torch.inf)[:, None]

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        g, keys, values = self._cache.config, self._cache.keys[layer], self._cache.values[layer]
        width = g.head_dim
        keys.view(-1, width).index_copy_(0, self._write, k.reshape(-1, width))
        values.view(-1, width).index_copy_(0, self._write, v.reshape(-1, width))
        part = slice(self._first * g.kv_heads, (self._first + self._batch) * g.kv_heads)
        shape = (self._batch, g.kv_heads, self._span, width)
        keys, values = (
            keys[part, : self._span].unflatten(0, shape[:2]),
            values[part, : self._span].unflatten(0, shape[:2]),
        )
        tokens = len(q)
        if self._spread is not None:
            spread = q.new_zeros(self._batch * self._steps, g.heads, width)
            q = spread.index_copy_(0, self._spread, q)
        q = q.view(self._batch, self._steps, g.heads, width).transpose(1, 2)
        out = F.scaled_dot_product_attention(
            q, keys, values, attn_mask=self._mask, is_causal=self._causal, scale=1.0, enable_gqa=g.heads > g.kv_heads
        )
        out = out.transpose(1, 2).reshape(self._batch * self._steps, -1)
        if self._spread is not None:
            out = out.index_select(0, self._spread)
        return out.view(tokens, -1)


# Elements of keys that one chunk of ``Alone`` gathers; bounds its memory.
GATHERED = 1 << 22


class Alone:
    """New tokens at ``positions`` int64 [N] of ``slots`` int64 [N], each attended to as a row of its own over the whole
    length of the cache (which must have its full length): no shape depends on the batch or on what was cached before.
    """

    def __init__(self, cache: KvCache, slots: torch.Tensor, positions: torch.Tensor) -> None:
        g = cache.config
        assert cache.length == cache.limit, "the shape of the products must not change as the cache grows"
        self.positions, self._cache = positions, cache
        heads = torch.arange(g.kv_heads, device=positions.device)
        self._rows = (slots[:, None] * g.kv_heads + heads).reshape(-1)
        self._write = self._rows * cache.length + positions.repeat_interleave(g.kv_heads)
        ahead = torch.arange(cache.length, device=positions.device) > positions.repeat_interleave(g.kv_heads)[:, None]
        self._mask = torch.zeros(ahead.shape, device=positions.device).masked_fill_(ahead, -torch.inf)[:, None]
        self._mask = self._mask.expand(-1, g.heads // g.kv_heads, -1)

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        keys, values = self._cache.keys[layer], self._cache.values[layer]
        width = keys.shape[-1]
        keys.view(-1, width).index_copy_(0, self._write, k.reshape(-1, width))
        values.view(-1, width).index_copy_(0, self._write, v.reshape(-1, width))
        q = q.reshape(len(self._rows), -1, width)
        out = torch.empty_like(q)
        step = max(1, GATHERED // (keys.shape[1] * width))
        for first in range(0, len(q), step):
            part = slice(first, first + step)
            rows = self._rows[part]
            scores = torch.baddbmm(self._mask[part], q[part], keys[rows].transpose(1, 2))
            out[part] = torch.bmm(scores.softmax(-1), values[rows])
        return out.view(len(self.positions), -1)
