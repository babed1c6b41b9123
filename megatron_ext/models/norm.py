"""RMSNorm of the local layer spec.

Invariants (``tests/models/test_norm.py``):

1. Output and gradients equal ``torch.nn.RMSNorm``; statistics are computed in fp32 for every input type.
2. Under sequence parallelism the weight is marked, so that Megatron sums its gradient over the tensor-parallel ranks
   (Megatron's own torch norm refuses sequence parallelism instead).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from megatron_ext.models import cpu_platform

cpu_platform.install()
with cpu_platform.quiet_import():
    from megatron.core.transformer import TransformerConfig


class _CpuRMSNorm(torch.autograd.Function):
    """The same formula in fewer passes over memory: torch's CPU version is a chain of elementwise operations whose
    reductions over a short last dimension are slow; as matrix-vector products they are not."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        size = x.size(-1)
        rows = x.reshape(-1, size)
        inverse = torch.mv(rows * rows, rows.new_full((size,), 1.0 / size)).add_(eps).rsqrt_().unsqueeze(1)
        normed = rows * inverse
        ctx.save_for_backward(normed, inverse, weight)
        return (normed * weight).view(x.shape)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        (grad,) = grads
        normed, inverse, weight = ctx.saved_tensors
        rows = grad.reshape(-1, grad.size(-1))
        along = rows * normed
        mean = torch.mv(along, weight / weight.size(0)).unsqueeze(1)
        dx = torch.addcmul(rows * weight, normed, mean, value=-1).mul_(inverse)
        return dx.view(grad.shape), along.sum(0), None


class RMSNorm(nn.Module):
    """``x / sqrt(mean(x^2) + eps) * weight`` over the last dimension (https://arxiv.org/abs/1910.07467)."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **kwargs: object) -> None:
        super().__init__()
        device = torch.device("cpu") if config.use_cpu_initialization else torch.device("cuda")
        self.weight = nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype, device=device))
        self.weight.sequence_parallel = config.sequence_parallel
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., hidden_size] -> the same shape and type."""
        if x.device.type == "cpu" and x.dtype == self.weight.dtype and x.dtype in (torch.float32, torch.float64):
            out: torch.Tensor = _CpuRMSNorm.apply(x, self.weight, self.eps)
            return out
        return nn.functional.rms_norm(x, self.weight.shape, self.weight, self.eps)
