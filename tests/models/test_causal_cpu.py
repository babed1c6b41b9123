"""Invariants of ``megatron_ext/models/causal_cpu.py`` against torch's own attention."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from megatron_ext.models.causal_cpu import MAX_LENGTH, causal_attention


@pytest.mark.parametrize(("heads", "kv"), [(4, 2), (4, 4), (6, 1)])
@pytest.mark.parametrize("length", [1, 2, 15, 16, 33, 64, 153])
def test_values_and_gradients_are_torchs(heads: int, kv: int, length: int) -> None:
    generator = torch.Generator().manual_seed(length)

    def draw(count: int) -> torch.Tensor:
        # Not contiguous, as the packed attention passes them.
        value = torch.randn(3, length, count, 8, generator=generator, dtype=torch.float64).transpose(1, 2)
        return value.requires_grad_()

    q, k, v, up = draw(heads), draw(kv), draw(kv), draw(heads).detach()
    own = causal_attention(q, k, v, 0.3)
    theirs = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.3, enable_gqa=True)
    torch.testing.assert_close(own, theirs, rtol=1e-12, atol=1e-12)
    mine, reference = (torch.autograd.grad(out, (q, k, v), up) for out in (own, theirs))
    for a, b in zip(mine, reference, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-12)


def test_gradients_in_double_precision() -> None:
    q, k, v = (torch.randn(2, h, 35, 4, dtype=torch.float64, requires_grad=True) for h in (4, 2, 2))
    assert torch.autograd.gradcheck(lambda a, b, c: causal_attention(a, b, c, 0.5), (q, k, v), fast_mode=True)


def test_what_it_cannot_do_is_refused() -> None:
    q, k = torch.zeros(1, 3, 4, 2), torch.zeros(1, 2, 4, 2)
    with pytest.raises(ValueError, match="3 query heads over 2"):
        causal_attention(q, k, k, 1.0)
    long = torch.zeros(1, 1, MAX_LENGTH + 1, 2)
    with pytest.raises(ValueError, match=str(MAX_LENGTH)):
        causal_attention(long, long, long, 1.0)
