"""RMSNorm of the local layer spec.

Invariants (``tests/models/test_norm.py``):

1. Output and gradients equal ``torch.nn.RMSNorm``; statistics are computed in fp32 for every input type.
2. Under sequence parallelism the weight is marked, so that Megatron sums its gradient over the tensor-parallel ranks
   (Megatron's own torch norm refuses sequence parallelism instead).
"""

from __future__ import annotations

import torch
from torch import nn

from megatron_ext.models import cpu_platform

cpu_platform.install()
with cpu_platform.quiet_import():
    from megatron.core.transformer import TransformerConfig


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
        return nn.functional.rms_norm(x, self.weight.shape, self.weight, self.eps)
