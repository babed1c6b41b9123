"""SwiGLU of Megatron's local layers on a CPU, with a backward pass that writes both halves in place.

Megatron's own is three operations of autograd, whose gradient is put together by a concatenation; here it is one.

Invariant (``tests/models/test_swiglu.py``): values and gradients are those of ``silu(x[..., :n]) * x[..., n:]``.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        gate, up = x.chunk(2, dim=-1)
        ctx.save_for_backward(x)
        return F.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        (grad,) = grads
        (x,) = ctx.saved_tensors
        gate, up = x.chunk(2, dim=-1)
        out = torch.empty_like(x)
        to_gate, to_up = out.chunk(2, dim=-1)
        torch.mul(F.silu(gate), grad, out=to_up)
        to_gate.copy_(torch.ops.aten.silu_backward(grad * up, gate))
        return out


class SwiGLU(nn.Module):
    """[..., 2n] (gate first) -> [..., n]. Takes ``config`` because Megatron builds activations with it."""

    def __init__(self, *, config: object) -> None:
        super().__init__()

    def forward(self, x: torch.Tensor, /) -> torch.Tensor:
        out: torch.Tensor = _SwiGLU.apply(x)
        return out
