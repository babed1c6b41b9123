"""Invariants 1-4 of ``losses/logprob.py``; the vocabulary split runs on real gloo process groups."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from launch.benches._ranks import RankPool
from megatron_ext.losses import logprob
from megatron_ext.losses.candidates import CandidateSets
from megatron_ext.losses.logprob import token_logprob_entropy


def plain(logits: torch.Tensor, targets: torch.Tensor, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    logq = torch.log_softmax(logits / temperature, dim=-1)
    return logq.gather(1, targets[:, None]).squeeze(1), -(logq.exp() * logq).sum(-1)


def case(n: int, v: int, dtype: torch.dtype = torch.float32, scale: float = 4.0) -> tuple[torch.Tensor, torch.Tensor]:
    rng = torch.Generator().manual_seed(n * 1000 + v)
    logits = (torch.randn(n, v, generator=rng, dtype=torch.float64) * scale).to(dtype)
    return logits.requires_grad_(), torch.randint(0, v, (n,), generator=rng)


def recorded(targets: torch.Tensor, vocab_size: int, whole: bool) -> CandidateSets:
    """Random sets that hold the targets; every third row drawn from the whole vocabulary if ``whole``."""
    n = len(targets)
    mask = torch.rand(n, vocab_size, generator=torch.Generator().manual_seed(n)) < 0.4
    mask[torch.arange(n), targets] = True
    mask[:, 0] &= targets == 0  # no set is the whole vocabulary by chance
    mask[::3] |= whole
    return CandidateSets.from_mask(mask)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("vocab_size", [None, 5])
@pytest.mark.parametrize("sets", ["none", "all rows", "some rows"])
def test_gradients_are_exact(temperature: float, vocab_size: int | None, sets: str) -> None:
    logits, targets = case(4, 7, torch.float64, scale=1.0)
    targets = targets % 5
    candidates = None if sets == "none" else recorded(targets, vocab_size or 7, whole=sets == "some rows")

    def both(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return token_logprob_entropy(x, targets, temperature=temperature, vocab_size=vocab_size, candidates=candidates)

    assert torch.autograd.gradcheck(both, logits)


@pytest.mark.parametrize("n", [1, 3, 700])
def test_matches_log_softmax(n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logprob, "_CHUNK_ELEMENTS", 200)  # many chunks, the last one short
    logits, targets = case(n, 53)
    other = logits.detach().clone().requires_grad_()
    g1, g2 = torch.randn(n), torch.randn(n)
    got, want = token_logprob_entropy(logits, targets, temperature=1.3), plain(other, targets, 1.3)
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)
    (got[0] @ g1 + got[1] @ g2).backward()
    (want[0] @ g1 + want[1] @ g2).backward()
    torch.testing.assert_close(logits.grad, other.grad, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_candidate_sets_are_a_mask_of_the_logits(whole: bool, dtype: torch.dtype) -> None:
    logits, targets = case(30, 53, dtype)
    candidates = recorded(targets, 53, whole)
    mask = torch.zeros(30, 53, dtype=torch.bool)
    mask[candidates.rows(), candidates.ids.long()] = True
    mask[candidates.whole_rows()] = True
    other = logits.detach().clone().requires_grad_()
    got = token_logprob_entropy(logits, targets, temperature=0.8, candidates=candidates)
    want = token_logprob_entropy(other.masked_fill(~mask, -torch.inf), targets, temperature=0.8)
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)
    (got[0].sum() + 2 * got[1].sum()).backward()
    (want[0].sum() + 2 * want[1].sum()).backward()
    torch.testing.assert_close(logits.grad, other.grad, atol=1e-5, rtol=1e-2 if dtype == torch.bfloat16 else 1e-5)


def test_a_truncated_sampler_is_replayed() -> None:
    """MiMo-V2.6's worked number, and the drift without it (miles 2722): the rollout drew from the cut distribution."""
    logits = torch.tensor([[0.6, 0.25, 0.15]]).log()
    rollout = torch.tensor(0.6 / 0.85).log()
    candidates = CandidateSets(torch.tensor([0, 1]), torch.tensor([0, 2]))
    logp, entropy = token_logprob_entropy(logits, torch.tensor([0]), temperature=1.0, candidates=candidates)
    assert float(logp.exp()) == pytest.approx(0.7058824) and float((logp - rollout).exp()) == pytest.approx(1.0)
    p = torch.tensor([0.7058824, 0.2941176])
    assert float(entropy) == pytest.approx(float(-(p * p.log()).sum()))
    full = token_logprob_entropy(logits, torch.tensor([0]), temperature=1.0)[0]
    assert float((full - rollout).exp()) == pytest.approx(0.85)


@pytest.mark.slow
def test_a_row_does_not_depend_on_its_micro_batch() -> None:
    """verl 2996: log-probs changed with the micro-batch size. Here a row's bits are its own, on one thread and on two
    (which split a lone row longer than 32,768 logits, if asked to reduce one)."""
    before = torch.get_num_threads()
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            for n, v in ((40, 211), (5, 40_000)):
                logits, targets = case(n, v)
                logits, candidates = logits.detach(), recorded(targets, v, whole=True)
                for sets in (None, candidates):
                    whole = token_logprob_entropy(logits, targets, temperature=0.9, candidates=sets)
                    for rows in (torch.arange(n)[k : k + size] for size in (1, 2, 17) for k in (0, n - size)):
                        if len(rows) == 0 or int(rows.min()) < 0:
                            continue
                        part = token_logprob_entropy(
                            logits[rows], targets[rows], temperature=0.9, candidates=sets and sets.take(rows)
                        )
                        for got, want in zip(part, whole, strict=True):
                            assert torch.equal(got, want[rows])
    finally:
        torch.set_num_threads(before)


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


@pytest.mark.parametrize("offset", [40.0, 1e4])
def test_an_offset_of_all_logits_costs_no_digits(offset: float) -> None:
    logits, targets = case(32, 500)
    moved = (logits.detach() + offset).requires_grad_()
    got = token_logprob_entropy(moved, targets, temperature=1.0)
    torch.testing.assert_close(got, plain(moved.double(), targets, 1.0), atol=3e-6, rtol=1e-6, check_dtype=False)


def test_logits_of_minus_infinity_are_tokens_of_probability_zero() -> None:
    logits, targets = case(6, 11, torch.float64)
    padded = torch.cat([logits.detach(), torch.full((6, 5), -torch.inf, dtype=torch.float64)], dim=1).requires_grad_()
    got, want = (token_logprob_entropy(x, targets, temperature=0.8) for x in (padded, logits))
    torch.testing.assert_close(got, want)
    (got[0].sum() + got[1].sum()).backward()
    (want[0].sum() + want[1].sum()).backward()
    torch.testing.assert_close(padded.grad[:, :11], logits.grad)
    assert not padded.grad[:, 11:].any()


def test_an_impossible_target_and_a_broken_row_stay_with_their_rows() -> None:
    logits, targets = case(4, 9)
    spoilt = logits.detach().clone()
    spoilt[1, targets[1]] = -torch.inf
    spoilt[2, 3] = torch.nan
    spoilt.requires_grad_()
    logp, entropy = token_logprob_entropy(spoilt, targets, temperature=1.0)
    fine = token_logprob_entropy(logits, targets, temperature=1.0)
    assert float(logp[1].detach()) == -torch.inf and bool(torch.isnan(logp[2]))
    for got, want in zip((logp, entropy), fine, strict=True):
        assert torch.equal(got[[0, 3]], want[[0, 3]])
    (logp.sum() + entropy.sum()).backward()
    assert torch.isfinite(spoilt.grad[[0, 1, 3]]).all()


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
        ((2, 4), [0, 1], {"temperature": float("nan")}, "temperature nan: must be above 0"),
        (
            (2, 4),
            [0, 1],
            {"candidates": CandidateSets(torch.tensor([0, 2]), torch.tensor([0, 1, 2]))},
            "row 1: token 1 was sampled, but is not among its 1 recorded candidates",
        ),
        ((2, 4), [0, 1], {"vocab_size": 9}, "there are 4 columns"),
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


CASES = [("plain", 16, 5), ("plain", 9, 5), ("sets", 16, 5), ("mixed", 9, 5), ("plain", 16, 0)]


def _split_case(kind: str, vocab_size: int, n: int) -> tuple[torch.Tensor, torch.Tensor, CandidateSets | None]:
    """A vocabulary of 9: the last rank of two (columns 8..) keeps one token, of four the last two keep none."""
    logits, targets = case(n, 16)
    logits = logits.detach().clone()
    logits[:, 12:15] = -torch.inf  # most of the last rank of four
    targets = targets % min(vocab_size, 12)
    candidates = None if kind == "plain" else recorded(targets, vocab_size, whole=kind == "mixed")
    return logits, targets, candidates


def _both(logits: torch.Tensor, targets: torch.Tensor, **options: Any) -> tuple[torch.Tensor, ...]:
    logits = logits.clone().requires_grad_()
    logp, entropy = token_logprob_entropy(logits, targets, temperature=0.8, **options)
    (logp @ torch.arange(float(len(logp))) + 2 * entropy.sum()).backward()
    assert logits.grad is not None
    return logp.detach(), entropy.detach(), logits.grad


def on_this_rank() -> list[list[Any]]:
    """What a rank of the process group makes of its piece of each case."""
    rank, world, results = dist.get_rank(), dist.get_world_size(), []
    for kind, vocab_size, n in CASES:
        logits, targets, candidates = _split_case(kind, vocab_size, n)
        piece = logits.chunk(world, dim=1)[rank]
        found = _both(piece, targets, group=dist.group.WORLD, vocab_size=vocab_size, candidates=candidates)
        results.append([tensor.numpy() for tensor in found])
    return results


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankPool]:
    with RankPool(4, tmp_path_factory.mktemp("ranks"), preload="megatron_ext.losses.logprob") as ranks:
        yield ranks


@pytest.mark.parametrize("world", [2, 4])
def test_vocabulary_split_over_ranks(world: int, pool: RankPool) -> None:
    ranks = pool.call("tests.losses.test_logprob:on_this_rank", world=world)
    ranks = [[tuple(map(torch.from_numpy, found)) for found in rank] for rank in ranks]
    for index, (kind, vocab_size, n) in enumerate(CASES):
        logits, targets, candidates = _split_case(kind, vocab_size, n)
        logp, entropy, grad = _both(logits, targets, vocab_size=vocab_size, candidates=candidates)
        assert torch.isfinite(logp).all() and torch.isfinite(entropy).all() and torch.isfinite(grad).all()
        for rank in ranks:
            torch.testing.assert_close(rank[index][:2], (logp, entropy))
        torch.testing.assert_close(torch.cat([rank[index][2] for rank in ranks], dim=1), grad)
        assert not grad[:, vocab_size:].any()
