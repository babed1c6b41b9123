"""Invariants 1-4 of ``losses/logprob.py``; the vocabulary split runs on real gloo process groups."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from megatron_ext.losses import logprob
from megatron_ext.losses.logprob import token_logprob_entropy


def plain(logits: torch.Tensor, targets: torch.Tensor, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    logq = torch.log_softmax(logits / temperature, dim=-1)
    return logq.gather(1, targets[:, None]).squeeze(1), -(logq.exp() * logq).sum(-1)


def case(n: int, v: int, dtype: torch.dtype = torch.float32, scale: float = 4.0) -> tuple[torch.Tensor, torch.Tensor]:
    rng = torch.Generator().manual_seed(n * 1000 + v)
    logits = (torch.randn(n, v, generator=rng, dtype=torch.float64) * scale).to(dtype)
    return logits.requires_grad_(), torch.randint(0, v, (n,), generator=rng)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("vocab_size", [None, 5])
def test_gradients_are_exact(temperature: float, vocab_size: int | None) -> None:
    logits, targets = case(4, 7, torch.float64, scale=1.0)
    targets = targets % 5

    def both(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return token_logprob_entropy(x, targets, temperature=temperature, vocab_size=vocab_size)

    assert torch.autograd.gradcheck(both, logits)


@pytest.mark.parametrize("n", [1, 3, 700])
def test_matches_log_softmax(n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logprob, "_MIN_CHUNK_ELEMENTS", 1)  # many chunks, the last one short
    logits, targets = case(n, 53)
    other = logits.detach().clone().requires_grad_()
    g1, g2 = torch.randn(n), torch.randn(n)
    got, want = token_logprob_entropy(logits, targets, temperature=1.3), plain(other, targets, 1.3)
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)
    (got[0] @ g1 + got[1] @ g2).backward()
    (want[0] @ g1 + want[1] @ g2).backward()
    torch.testing.assert_close(logits.grad, other.grad, atol=1e-5, rtol=1e-5)


def test_half_precision_logits_are_computed_in_fp32() -> None:
    logits, targets = case(8, 31, torch.bfloat16)
    logp, entropy = token_logprob_entropy(logits, targets, temperature=1.0)
    assert logp.dtype == entropy.dtype == torch.float32
    torch.testing.assert_close((logp, entropy), plain(logits.detach().float(), targets, 1.0), atol=1e-5, rtol=1e-5)
    logp.sum().backward()
    assert logits.grad is not None and logits.grad.dtype == torch.bfloat16


def test_extreme_logits_stay_finite() -> None:
    logits = torch.tensor([[1e4, -1e4, 0.0], [-1e38, 1e38, 0.0], [5.0, 5.0, 5.0]], requires_grad=True)
    logp, entropy = token_logprob_entropy(logits, torch.tensor([0, 2, 1]), temperature=1.0)
    log3 = pytest.approx(1.0986123)
    assert float(logp[0].detach()) == 0 and -float(logp[2].detach()) == log3 == float(entropy[2].detach())
    (logp.sum() + entropy.sum()).backward()
    assert torch.isfinite(logp).all() and torch.isfinite(entropy).all() and torch.isfinite(logits.grad).all()


def test_entropy_as_a_metric_has_no_gradient() -> None:
    logits, targets = case(6, 11)
    logp, entropy = token_logprob_entropy(logits, targets, temperature=1.0, need_entropy_grad=False)
    assert logp.requires_grad and not entropy.requires_grad
    logp.sum().backward()
    other = logits.detach().clone().requires_grad_()
    plain(other, targets, 1.0)[0].sum().backward()
    torch.testing.assert_close(logits.grad, other.grad)
    zero = token_logprob_entropy(logits, targets, temperature=1.0, need_entropy=False)[1]
    assert not zero.requires_grad and not zero.any()


def test_no_tokens() -> None:
    logits = torch.zeros(0, 5, requires_grad=True)
    logp, entropy = token_logprob_entropy(logits, torch.zeros(0, dtype=torch.int64), temperature=1.0)
    (logp.sum() + entropy.sum()).backward()
    assert logits.grad is not None and logits.grad.shape == (0, 5)


@pytest.mark.parametrize(
    ("logits", "targets", "options", "message"),
    [
        ((3, 4), [0, 1], {}, "expected"),
        ((2, 4), [0, 4], {}, r"targets span 0..4, outside the vocabulary of 4"),
        ((2, 4), [0, 3], {"vocab_size": 3}, "outside the vocabulary of 3"),
        ((2, 4), [-1, 1], {}, "outside the vocabulary"),
        ((2, 4), [0, 1], {"temperature": 0.0}, "temperature 0.0: must be above 0"),
        ((2, 4), [0, 1], {"vocab_size": 9}, "the logits have 4 columns"),
    ],
)
def test_bad_input_is_named(logits: tuple[int, int], targets: list[int], options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        token_logprob_entropy(torch.zeros(logits), torch.tensor(targets), **{"temperature": 1.0, **options})


def test_memory_kept_for_backward_is_per_row() -> None:
    logits, targets = case(256, 400)
    saved: list[torch.Tensor] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        token_logprob_entropy(logits, targets, temperature=0.9)
    beyond = sum(t.numel() for t in saved if t.data_ptr() != logits.data_ptr())
    assert beyond <= 8 * len(logits)


def _rank(rank: int, world: int, init: str, v: int, out: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=init, rank=rank, world_size=world)
    results = []
    for vocab_size in (v, 9):  # 9: the last rank of two (columns 8..) keeps one token, of four the last two keep none
        logits, targets = case(5, v)
        targets = targets % vocab_size
        width = v // world
        piece = logits.detach()[:, rank * width : (rank + 1) * width].clone().requires_grad_()
        logp, entropy = token_logprob_entropy(
            piece, targets, temperature=0.8, group=dist.group.WORLD, vocab_size=vocab_size
        )
        (logp @ torch.arange(5.0) + 2 * entropy.sum()).backward()
        results.append((logp.detach(), entropy.detach(), piece.grad))
    torch.save(results, f"{out}/{world}_{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.parametrize("world", [2, 4])
def test_vocabulary_split_over_ranks(world: int, tmp_path: Path) -> None:
    v = 16
    arguments = (world, f"file://{tmp_path}/rendezvous", v, str(tmp_path))
    mp.start_processes(_rank, arguments, nprocs=world, start_method="fork")  # spawn would import torch in every rank
    ranks = [torch.load(tmp_path / f"{world}_{r}.pt") for r in range(world)]
    for index, vocab_size in enumerate((v, 9)):
        logits, targets = case(5, v)
        logp, entropy = token_logprob_entropy(logits, targets % vocab_size, temperature=0.8, vocab_size=vocab_size)
        (logp @ torch.arange(5.0) + 2 * entropy.sum()).backward()
        for rank in ranks:
            torch.testing.assert_close(rank[index][:2], (logp.detach(), entropy.detach()))
        torch.testing.assert_close(torch.cat([rank[index][2] for rank in ranks], dim=1), logits.grad)
        assert not logits.grad[:, vocab_size:].any()
