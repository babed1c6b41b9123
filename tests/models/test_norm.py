from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from megatron_ext.models.norm import RMSNorm


def config(**fields: object) -> SimpleNamespace:
    return SimpleNamespace(
        **({"use_cpu_initialization": True, "params_dtype": torch.float32, "sequence_parallel": False} | fields)
    )


def test_equals_torch_forward_and_backward() -> None:
    torch.manual_seed(0)
    ours, reference = RMSNorm(config(), 24, eps=1e-6), torch.nn.RMSNorm(24, eps=1e-6)
    weight = torch.randn(24)
    for norm in (ours, reference):
        norm.weight.data.copy_(weight)
    x = torch.randn(5, 2, 24, requires_grad=True)
    y = x.detach().clone().requires_grad_()
    seed = torch.randn(5, 2, 24)
    ours(x).backward(seed)
    reference(y).backward(seed)
    torch.testing.assert_close(x.grad, y.grad, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(ours.weight.grad, reference.weight.grad, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(ours(x), reference(x), rtol=1e-6, atol=1e-6)


def test_bf16_statistics_are_fp32() -> None:
    norm = RMSNorm(config(params_dtype=torch.bfloat16), 4096, eps=1e-6)
    x = torch.full((1, 4096), 3.0, dtype=torch.bfloat16)
    out = norm(x)
    # A bf16 running sum of 4096 nines stalls near 2048 and would be off by a factor; fp32 gives 1 exactly.
    assert out.dtype is torch.bfloat16
    torch.testing.assert_close(out.float(), torch.ones(1, 4096))


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_weight_is_marked_for_sequence_parallelism(sequence_parallel: bool) -> None:
    assert RMSNorm(config(sequence_parallel=sequence_parallel), 8).weight.sequence_parallel is sequence_parallel
