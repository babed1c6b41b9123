"""Core attention of the local layer spec: causal SDPA over [s, b, h, d] batches and over packed sequences, with RoPE.

Megatron's own local attention refuses packed sequences and its rotary embedding loops over them in Python; here RoPE is
applied by position, once for the whole pack, and sequences of similar length are attended to in one call.

Invariants (``tests/models/test_attention.py``, ``tests/models/test_forward.py``):

1. Packed output and gradients equal those of the sequences run one by one.
2. RoPE positions restart at 0 with every packed sequence (https://arxiv.org/abs/2104.09864, half-split layout of HF).
3. Padding inside a bucket never reaches a valid token, forward or backward.
4. Under context parallelism a rank holds Megatron's zigzag share of every sequence (chunks ``r`` and ``2 cp - 1 - r``);
   keys and values are gathered over the group and the result equals that of one rank.
5. Tokens that sequences share (``SharedTokens``) enter once, and output and gradients are those of whole sequences:
   ``models.tree_attention`` on a CPU, ``models.flex_attention`` on a GPU.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from megatron_ext.models import causal_cpu, cpu_platform
from megatron_ext.models.packing import AttentionPlan, PackedBatch, SharedTokens
from megatron_ext.models.tree_attention import tree_attention

cpu_platform.install()
with cpu_platform.quiet_import():
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.module import MegatronModule

Context = Any  # torch.autograd's ctx has no public type


class _Rotate(torch.autograd.Function):
    """RoPE of ``x`` [..., d] by ``cos``, ``sin`` broadcastable to [..., r/2]: of its first r values, the others stay.
    Its transpose is the reverse."""

    @staticmethod
    def forward(ctx: Context, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotated(x, cos, sin)

    @staticmethod
    def backward(ctx: Context, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _rotated(grads[0], cos, -sin), None, None


def _rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    half = cos.size(-1)
    a, b = x[..., :half], x[..., half : 2 * half]
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    torch.mul(a, cos, out=out[..., :half]).addcmul_(b, sin, value=-1)
    torch.mul(b, cos, out=out[..., half : 2 * half]).addcmul_(a, sin)
    out[..., 2 * half :] = x[..., 2 * half :]
    return out


class _Stack(torch.autograd.Function):
    """Tokens [T, ...] -> padded places [P, ...]. Padding repeats a token and receives no gradient, so the transpose is
    a plain gather by ``flat`` instead of a scatter-add."""

    @staticmethod
    def forward(ctx: Context, x: torch.Tensor, gather: torch.Tensor, flat: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(flat)
        return x.index_select(0, gather)

    @staticmethod
    def backward(ctx: Context, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (flat,) = ctx.saved_tensors
        return grads[0].index_select(0, flat), None, None


class _Unstack(torch.autograd.Function):
    """Padded places [P, ...] -> tokens [T, ...]. The transpose writes a token's gradient to its place, 0 elsewhere."""

    @staticmethod
    def forward(ctx: Context, x: torch.Tensor, flat: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(flat)
        ctx.places = x.size(0)
        return x.index_select(0, flat)

    @staticmethod
    def backward(ctx: Context, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        (flat,) = ctx.saved_tensors
        out = grads[0].new_zeros(ctx.places, *grads[0].shape[1:])
        return out.index_copy_(0, flat, grads[0]), None


def zigzag(length: int, size: int, rank: int, device: torch.device) -> torch.Tensor:
    """Global positions int64 [length / size] of rank ``rank``'s rows of one sequence (load-balanced causal layout)."""
    chunk = length // (2 * size)
    rows = torch.arange(chunk, device=device)
    return torch.cat([rank * chunk + rows, (2 * size - 1 - rank) * chunk + rows])


class PackedAttention(MegatronModule):
    """Causal scaled dot-product attention with RoPE. Holds no parameters.

    ``rope_theta`` is the rotary base, ``rotary_dim`` how many of a head's first values turn (0: all of them). The layer
    is built by Megatron's ``SelfAttention`` with the remaining arguments.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: object,
        attention_type: str,
        *,
        rope_theta: float,
        rotary_dim: int = 0,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: ProcessGroupCollection,
    ) -> None:
        super().__init__(config=config)
        if config.softmax_type != "vanilla" or config.window_size is not None or config.attention_dropout:
            raise ValueError(
                f"local attention has no attention sink, window or dropout; got softmax_type={config.softmax_type}, "
                f"window_size={config.window_size}, attention_dropout={config.attention_dropout}"
            )
        self.rope_theta = rope_theta
        self.rotary_dim = rotary_dim or int(config.kv_channels)
        self.scale = config.kv_channels**-0.5 if softmax_scale is None else softmax_scale
        self.group = pg_collection.cp

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        attn_mask_type: object = None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> torch.Tensor:
        """``query`` [s, b, h, d] (packed: [t, h, d]), ``key`` and ``value`` with the KV heads -> [s, b, h*d], [t, h*d].

        The mask is always causal; ``attention_mask`` must be None. Packed calls pass a ``PackedBatch``.
        """
        if attention_mask is not None or attention_bias is not None:
            raise ValueError("local attention is causal by construction: pass attention_mask=None and no bias")
        if packed_seq_params is None:
            return self._batch(query, key, value)
        batch = packed_seq_params
        if not isinstance(batch, PackedBatch) or (batch.plan is None and batch.shared is None):
            raise TypeError("packed calls of the local attention need megatron_ext.models.packing.pack(cu_seqlens)")
        if self.group.size() > 1 and batch.shared is not None:
            raise ValueError("context parallelism cuts sequences over ranks: shared tokens are not supported with it")
        if self.group.size() > 1:
            return self._packed_over_ranks(query, key, value, batch)
        if batch.shared is not None:
            return self._tree(query, key, value, batch, batch.shared)
        assert batch.plan is not None, "a pack without shared tokens has a plan"
        return self._packed(query, key, value, batch, batch.plan)

    def _tables(self, positions: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin [n, 1, r / 2] of the angles position * theta^(-2i/r), in fp32 before the cast."""
        dim = self.rotary_dim
        exponent = torch.arange(0, dim, 2, dtype=torch.float32, device=positions.device) / dim
        angle = torch.outer(positions.float(), 1.0 / self.rope_theta**exponent).unsqueeze(1)
        return angle.cos().to(dtype), angle.sin().to(dtype)

    def _sdpa(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None = None
    ) -> torch.Tensor:
        """[b, h, s, d] -> [b, h, s, d]; causal unless a boolean ``mask`` (True = attend) is given."""
        if mask is None and q.device.type == "cpu" and q.dtype == torch.float32 and q.size(2) <= causal_cpu.MAX_LENGTH:
            return causal_cpu.causal_attention(q, k, v, self.scale)
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, scale=self.scale, enable_gqa=q.size(1) != k.size(1)
        )

    def _batch(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        n, size, rank = query.size(0), self.group.size(), self.group.rank()
        length = n * size
        mine = torch.arange(n, device=query.device) if size == 1 else zigzag(length, size, rank, query.device)
        cos, sin = (t.unsqueeze(1) for t in self._tables(mine, query.dtype))
        query, key = _Rotate.apply(query, cos, sin), _Rotate.apply(key, cos, sin)
        mask = None
        if size > 1:
            key, value = self._gathered(key), self._gathered(value)
            theirs = torch.cat([zigzag(length, size, r, query.device) for r in range(size)])
            mask = mine[:, None] >= theirs[None, :]
        q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        return self._sdpa(q, k, v, mask).permute(2, 0, 1, 3).reshape(n, query.size(1), -1)

    def _rotary(
        self, query: torch.Tensor, key: torch.Tensor, batch: PackedBatch, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Both with RoPE by ``positions`` [t]; the tables stay with the batch."""
        if len(query) != len(positions):
            raise ValueError(f"the pack (cu_seqlens) has {len(positions)} tokens, the forward {len(query)}")
        at = (self.rope_theta, self.rotary_dim, query.dtype)
        if at not in batch.rotary:
            batch.rotary[at] = self._tables(positions, query.dtype)
        cos, sin = batch.rotary[at]
        return _Rotate.apply(query, cos, sin), _Rotate.apply(key, cos, sin)

    def _packed(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, batch: PackedBatch, plan: AttentionPlan
    ) -> torch.Tensor:
        """[t, h, d] each, every sequence whole on this rank."""
        stacked = [*self._rotary(query, key, batch, plan.positions), value]
        if not plan.is_view:
            stacked = [_Stack.apply(x, plan.gather, plan.flat) for x in stacked]
        outs = []
        for bucket in plan.buckets:
            rows = slice(bucket.start, bucket.start + bucket.rows * bucket.width)
            q, k, v = (x[rows].unflatten(0, (bucket.rows, bucket.width)).transpose(1, 2) for x in stacked)
            outs.append(self._sdpa(q, k, v).transpose(1, 2).reshape(bucket.rows * bucket.width, -1))
        out = outs[0] if len(outs) == 1 else torch.cat(outs)
        return out if plan.is_view else _Unstack.apply(out, plan.flat)

    def _tree(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, batch: PackedBatch, shared: SharedTokens
    ) -> torch.Tensor:
        """[u, h, d] each: the distinct tokens of all sequences."""
        query, key = self._rotary(query, key, batch, shared.positions)
        if query.device.type == "cpu":
            return tree_attention(query, key, value, shared.plan, self.scale).flatten(1)
        from megatron_ext.models import flex_attention

        if batch.block_mask is None:
            batch.block_mask = flex_attention.block_mask(shared.until, query.device)
        return flex_attention.tree_attention(query, key, value, batch.block_mask, self.scale).flatten(1)

    def _gathered(self, x: torch.Tensor) -> torch.Tensor:
        """[n_local, ...] -> [n_local * cp, ...] in rank order; the gradient is reduced back to the ranks."""
        return gather_from_sequence_parallel_region(x, tensor_parallel_output_grad=True, group=self.group)

    def _packed_over_ranks(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, batch: PackedBatch
    ) -> torch.Tensor:
        """[t / cp, h, d] each: this rank's zigzag share of every sequence, in pack order."""
        size, rank, n, device = self.group.size(), self.group.rank(), query.size(0), query.device
        if any(length % (2 * size) for length in batch.lengths) or sum(batch.lengths) != n * size:
            raise ValueError(f"under context parallelism {size} every packed length must be a multiple of {2 * size}")
        shares = [zigzag(length, size, rank, device) for length in batch.lengths]
        cos, sin = self._tables(torch.cat(shares), query.dtype)
        query, key = _Rotate.apply(query, cos, sin), _Rotate.apply(key, cos, sin)
        key, value = self._gathered(key), self._gathered(value)
        outs, at = [], 0
        for length, mine in zip(batch.lengths, shares, strict=True):
            local = length // size
            rows = torch.cat([torch.arange(r * n + at, r * n + at + local, device=device) for r in range(size)])
            theirs = torch.cat([zigzag(length, size, r, device) for r in range(size)])
            q, k, v = (x.transpose(0, 1)[None] for x in (query[at : at + local], key[rows], value[rows]))
            outs.append(self._sdpa(q, k, v, mine[:, None] >= theirs[None, :])[0].transpose(0, 1).reshape(local, -1))
            at += local
        return torch.cat(outs)
