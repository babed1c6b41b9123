"""Invariant of ``megatron_ext/models/swiglu.py``."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from megatron_ext.models.swiglu import SwiGLU


def test_values_and_gradients() -> None:
    torch.manual_seed(0)
    x = torch.randn(5, 2, 14, dtype=torch.float64, requires_grad=True)
    swiglu = SwiGLU(config=None)
    gate, up = x.chunk(2, dim=-1)
    torch.testing.assert_close(swiglu(x), F.silu(gate) * up)
    assert torch.autograd.gradcheck(swiglu, (x,))
    assert torch.autograd.gradcheck(swiglu, (torch.zeros(0, 6, dtype=torch.float64, requires_grad=True),))
