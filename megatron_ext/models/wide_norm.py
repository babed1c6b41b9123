"""RMSNorm of queries or keys over all heads of a layer together, as MiniMax-M2 has it.

Megatron's attention hands a norm the heads of this tensor-parallel rank, [..., heads, D], each to be normed alone.

Invariants (``tests/integration/test_hf_layouts.py``):

1. Output and gradients are those of one norm over [..., heads x D], however the heads are shared out over ranks.
2. Every rank holds the whole weight. Megatron adds up the gradients of what is called ``q_layernorm`` and
   ``k_layernorm`` over the tensor-parallel ranks, whatever it is: a rank's own is therefore 0 outside its heads.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from megatron_ext.models import cpu_platform

cpu_platform.install()
with cpu_platform.quiet_import():
    from megatron.core import parallel_state
    from megatron.core.transformer import TransformerConfig


class _Sum(torch.autograd.Function):
    """Sum over the group; every rank uses the result, so the gradients of all of them add up."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        total = x.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        total = grads[0].clone()
        dist.all_reduce(total, group=ctx.group)
        return total, None


class WideRMSNorm(nn.Module):
    """``x / sqrt(mean(x^2) + eps) * weight`` over the last two dimensions, the heads of all tensor-parallel ranks."""

    def __init__(self, config: TransformerConfig, heads: int, head_dim: int, eps: float) -> None:
        super().__init__()
        self.group = parallel_state.get_tensor_model_parallel_group()
        self.width, self.eps = heads * head_dim, eps
        device = torch.device("cpu") if config.use_cpu_initialization else torch.device("cuda")
        self.weight = nn.Parameter(torch.ones(self.width, dtype=config.params_dtype, device=device))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., heads of this rank, D] -> the same shape and type; statistics in fp32."""
        wide = x.float()
        power = wide.square().sum(dim=(-2, -1), keepdim=True)
        if self.group.size() > 1:
            power = _Sum.apply(power, self.group)
        normed = wide * torch.rsqrt(power / self.width + self.eps)
        own = self.width // self.group.size()
        weight = self.weight.narrow(0, self.group.rank() * own, own).view(x.shape[-2:])
        return normed.to(x.dtype) * weight


class WideQueryNorm(WideRMSNorm):
    """Over all query heads; built by Megatron's attention, which gives the width of one head."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **kwargs: object) -> None:
        super().__init__(config, config.num_attention_heads, hidden_size, eps)


class WideKeyNorm(WideRMSNorm):
    """Over all key heads."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **kwargs: object) -> None:
        super().__init__(config, config.num_query_groups, hidden_size, eps)
