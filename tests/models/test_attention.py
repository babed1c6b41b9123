from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from megatron_ext.models.attention import PackedAttention, zigzag
from megatron_ext.models.hf_config import HFConfig
from megatron_ext.models.packing import SharedTokens, pack
from megatron_ext.trajectory.prefix_tree import build_prefix_tree
from tests.helpers.trees import joined

LENGTHS = [17, 5, 29, 1, 28, 16, 2]


@pytest.fixture
def attention(build: Any, moe: HFConfig) -> PackedAttention:
    return build(moe)[0].decoder.layers[0].self_attention.core_attention


def reference(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, theta: float) -> torch.Tensor:
    """Written out: rotate, then softmax over the past. [n, h, d] of one sequence."""
    n, heads, dim = q.shape
    angle = torch.arange(n)[:, None] / theta ** (torch.arange(0, dim, 2) / dim)[None]
    cos, sin = torch.cat([angle.cos()] * 2, -1)[:, None], torch.cat([angle.sin()] * 2, -1)[:, None]

    def rotate(x: torch.Tensor) -> torch.Tensor:
        a, b = x.chunk(2, -1)
        return x * cos + torch.cat([-b, a], -1) * sin

    q, k = rotate(q), rotate(k).repeat_interleave(heads // k.size(1), 1)
    v = v.repeat_interleave(heads // v.size(1), 1)
    scores = torch.einsum("ihd,jhd->hij", q, k) / dim**0.5
    scores = scores.masked_fill(torch.ones(n, n).triu(1).bool(), float("-inf"))
    return torch.einsum("hij,jhd->ihd", F.softmax(scores, -1), v).flatten(1)


def inputs(total: int, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(total, h, 16, generator=generator, requires_grad=True) for h in (4, 2, 2)]


def test_packed_equals_the_formula_forward_and_backward(attention: PackedAttention) -> None:
    total = sum(LENGTHS)
    ours, theirs = inputs(total), inputs(total)
    batch = pack(torch.tensor([0, *LENGTHS]).cumsum(0))
    assert batch.plan is not None and len(batch.plan.buckets) > 1
    out = attention(*ours, packed_seq_params=batch)
    parts = [reference(q, k, v, 10000.0) for q, k, v in zip(*(x.split(LENGTHS) for x in theirs), strict=True)]
    want = torch.cat(parts)
    seed = torch.randn(total, 64, generator=torch.Generator().manual_seed(1))
    out.backward(seed)
    want.backward(seed)
    torch.testing.assert_close(out, want, rtol=1e-5, atol=2e-6)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-5, atol=1e-5)


def test_shared_tokens_enter_once(attention: PackedAttention) -> None:  # invariant 5
    """Three sequences behind one prefix of 6, the second of them a prefix of the third but for its end, and a fourth
    alone: output and gradients are those of whole sequences, a shared token's gradient the sum over its places."""
    rows = [[*range(9)], [*range(6), 9, 10], [*range(6), 9, 11, 12, 13], [14, 15]]
    ids, offsets = joined(rows)
    shared, cu = SharedTokens.of(build_prefix_tree(ids, offsets)), torch.from_numpy(offsets)
    assert shared.tokens == 16
    ours, theirs = inputs(16), inputs(16)
    out = attention(*ours, packed_seq_params=pack(cu, shared))[shared.distinct]
    want = attention(*(x[shared.distinct] for x in theirs), packed_seq_params=pack(cu))
    seed = torch.randn(len(ids), 64, generator=torch.Generator().manual_seed(1))
    out.backward(seed)
    want.backward(seed)
    torch.testing.assert_close(out, want, rtol=0, atol=1e-6)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-5, atol=1e-6)


def test_shared_tokens_must_cover_the_pack(attention: PackedAttention) -> None:
    shared = SharedTokens.of(build_prefix_tree([1, 2, 1], [0, 2, 3]))
    with pytest.raises(ValueError, match="cover 3 places, the pack has 4"):
        pack(torch.tensor([0, 2, 4]), shared)
    with pytest.raises(ValueError, match="has 2 tokens, the forward 3"):
        attention(*inputs(3), packed_seq_params=pack(torch.tensor([0, 2, 3]), shared))


def test_batched_layout_equals_packed(attention: PackedAttention) -> None:
    n, b = 12, 3
    q, k, v = (x.detach().view(b, n, -1, 16) for x in inputs(n * b))
    out = attention(*(x.transpose(0, 1) for x in (q, k, v)))
    packed = attention(*(x.flatten(0, 1) for x in (q, k, v)), packed_seq_params=pack(torch.arange(0, n * b + 1, n)))
    torch.testing.assert_close(out.transpose(0, 1).reshape(n * b, -1), packed, rtol=1e-6, atol=1e-6)


def test_sequences_do_not_see_each_other_or_the_padding(attention: PackedAttention) -> None:
    batch = pack(torch.tensor([0, *LENGTHS]).cumsum(0))
    tensors = [x.detach() for x in inputs(sum(LENGTHS))]
    before = attention(*tensors, packed_seq_params=batch)
    first = slice(LENGTHS[0], LENGTHS[0] + LENGTHS[1])
    for x in tensors:
        x[first] += 7.0
    changed = (attention(*tensors, packed_seq_params=batch) - before).abs().amax(1) > 0
    assert bool(changed[first].all())
    changed[first] = False
    assert not bool(changed.any())


def test_the_plan_is_made_once(attention: PackedAttention) -> None:
    batch = pack(torch.tensor([0, 4, 9]))
    for _ in range(3):
        attention(*inputs(9), packed_seq_params=batch)
    assert len(batch.rotary) == 1


def test_wrong_calls_are_refused(attention: PackedAttention) -> None:
    from megatron.core.packed_seq_params import PackedSeqParams

    with pytest.raises(ValueError, match="has 9 tokens, the forward 8"):
        attention(*inputs(8), packed_seq_params=pack(torch.tensor([0, 4, 9])))
    with pytest.raises(TypeError, match="pack"):
        attention(*inputs(8), packed_seq_params=PackedSeqParams(qkv_format="thd"))
    with pytest.raises(ValueError, match="causal by construction"):
        attention(*inputs(8), attention_mask=torch.ones(1))


def test_zigzag_shares_cover_a_sequence() -> None:
    shares = [zigzag(12, 3, r, torch.device("cpu")).tolist() for r in range(3)]
    assert shares == [[0, 1, 10, 11], [2, 3, 8, 9], [4, 5, 6, 7]]
