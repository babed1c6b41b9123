"""Random numbers and truncation of the embedded sampler."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from megatron_ext.rollout.embedded.sampler import SamplingRows, sample, uniforms

CPU = torch.device("cpu")


def rows(temperature: list[float], top_k: list[int], top_p: list[float], vocab: int) -> SamplingRows:
    return SamplingRows.make(
        np.array(temperature, dtype=np.float32), np.array(top_k, dtype=np.int64), np.array(top_p), vocab, CPU
    )


def keys(n: int, start: int = 0) -> tuple[NDArray[np.uint64], NDArray[np.int64]]:
    return np.arange(start, start + n).astype(np.uint64), np.full(n, 5, dtype=np.int64)


def test_uniforms_depend_on_their_own_key_alone() -> None:
    seeds, positions = np.arange(50, dtype=np.uint64) * np.uint64(7), np.arange(50, dtype=np.int64)
    together = uniforms(seeds, positions)
    alone = np.concatenate([uniforms(seeds[i : i + 1], positions[i : i + 1]) for i in range(50)])
    assert np.array_equal(together, alone)


def test_uniforms_are_uniform_over_seeds_and_over_positions() -> None:
    n = 20_000
    line = np.arange(n)
    over_seeds = uniforms(line.astype(np.uint64), np.full(n, 3, dtype=np.int64))
    over_positions = uniforms(np.full(n, 3, dtype=np.uint64), line.astype(np.int64))
    for u in (over_seeds, over_positions):
        assert u.min() >= 0 and u.max() < 1
        counts = np.histogram(u, 20, (0, 1))[0]
        assert ((counts - n / 20) ** 2 / (n / 20)).sum() < 50, "beyond the 99.98 % quantile of 19 degrees of freedom"
        assert abs(np.corrcoef(u[1:], u[:-1])[0, 1]) < 0.03
    assert len(np.unique(np.concatenate([over_seeds, over_positions]))) == 2 * n - 1  # they share the key (3, 3)


def test_the_extreme_draw_stays_inside_the_support() -> None:
    assert uniforms(*keys(100_000)).max() <= 1 - 2.0**-40
    p = torch.tensor([0.25, 0.75, 0.0], dtype=torch.float64).cumsum(0)
    assert (
        int(torch.searchsorted(p, torch.tensor([(1 - 2.0**-40) * float(p[-1])], dtype=torch.float64), right=True)) == 1
    )


def test_logp_is_untruncated_and_tempered() -> None:
    logits = torch.randn(4, 30, generator=torch.Generator().manual_seed(0))
    ids, logp = sample(logits, rows([0.5, 1.0, 2.0, 0.0], [2, 0, 5, 0], [1.0, 0.3, 0.9, 1.0], 30), *keys(4))
    for i, t in enumerate([0.5, 1.0, 2.0, 1.0]):
        torch.testing.assert_close(logp[i], (logits[i] / t).log_softmax(-1)[ids[i]])
    assert ids[3] == logits[3].argmax()


def support(logits: torch.Tensor, top_k: int, top_p: float) -> set[int]:
    n = 4000
    ids, _ = sample(logits.expand(n, -1), rows([1.0] * n, [top_k] * n, [top_p] * n, len(logits)), *keys(n))
    return set(ids.tolist())


def test_top_k_and_top_p_keep_exactly_their_sets() -> None:
    p = torch.tensor([0.05, 0.4, 0.1, 0.3, 0.15])  # likeliest first: 1, 3, 4, 2, 0
    logits = p.log()
    assert support(logits, 0, 1.0) == {0, 1, 2, 3, 4}
    assert support(logits, 2, 1.0) == {1, 3}
    assert support(logits, 1, 1.0) == {1}
    assert support(logits, 99, 1.0) == {0, 1, 2, 3, 4}
    assert support(logits, 0, 0.39) == {1}
    assert support(logits, 0, 0.41) == {1, 3}  # the id that crosses p is kept
    assert support(logits, 0, 0.71) == {1, 3, 4}
    assert support(logits, 0, 1e-9) == {1}
    # top-p is a share of what top-k kept: 0.4 of {0.4, 0.3} is 0.57 > 0.5, but 0.4 < 0.5 without top-k.
    assert support(logits, 2, 0.5) == {1}
    assert support(logits, 0, 0.5) == {1, 3}


def test_truncated_and_free_rows_share_a_batch() -> None:
    logits = torch.randn(1, 40, generator=torch.Generator().manual_seed(1)).expand(6, -1)
    mixed = rows([1.0, 1.0, 0.7, 0.0, 1.0, 1.0], [0, 3, 0, 0, 1, 0], [1.0, 1.0, 0.5, 1.0, 1.0, 1.0], 40)
    seeds, positions = keys(6, start=9)
    together, _ = sample(logits, mixed, seeds, positions)
    for i, (t, k, p) in enumerate(
        [(1.0, 0, 1.0), (1.0, 3, 1.0), (0.7, 0, 0.5), (0.0, 0, 1.0), (1.0, 1, 1.0), (1.0, 0, 1.0)]
    ):
        alone, _ = sample(logits[:1], rows([t], [k], [p], 40), seeds[i : i + 1], positions[i : i + 1])
        assert int(alone) == int(together[i])
    assert together[4] == logits[0].argmax()


def test_frequencies_are_the_probabilities() -> None:
    p = torch.tensor([0.02, 0.5, 0.08, 0.3, 0.1])
    n = 20_000
    ids, _ = sample(p.log().expand(n, -1), rows([1.0] * n, [0] * n, [1.0] * n, 5), *keys(n))
    counts = np.bincount(ids.numpy(), minlength=5)
    expected = n * p.numpy()
    assert ((counts - expected) ** 2 / expected).sum() < 24, "beyond the 99.99 % quantile of 4 degrees of freedom"
