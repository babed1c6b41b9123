"""``credit/gae.py`` against verl's token loop, on random masked batches."""

from __future__ import annotations

from types import ModuleType

import numpy as np
import pytest
import torch

from megatron_ext.credit.gae import GAEInput, gae


@pytest.fixture(scope="module")
def core_algos() -> ModuleType:
    pytest.importorskip("verl")
    return pytest.importorskip("verl.trainer.ppo.core_algos")


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (1.0, 0.95), (0.9, 0.7), (0.99, 0.0)])
def test_trained_tokens_get_what_verl_gives(core_algos: ModuleType, seed: int, gamma: float, lam: float) -> None:
    rng = np.random.default_rng(seed)
    rows, length = 6, 150
    mask = rng.random((rows, length)) < rng.random((rows, 1))
    mask[:, 0] = True
    values, rewards = rng.normal(size=(rows, length)), rng.normal(size=(rows, length)) * mask
    theirs, returns = core_algos.compute_gae_advantage_return(
        torch.from_numpy(rewards), torch.from_numpy(values), torch.from_numpy(mask).double(), gamma, lam
    )
    ours = gae(
        GAEInput(values.reshape(-1), rewards.reshape(-1), mask.reshape(-1), np.arange(rows + 1) * length),
        gamma=gamma,
        lam=lam,
    )
    np.testing.assert_allclose(ours.returns.reshape(rows, length)[mask], returns.numpy()[mask], atol=1e-9)
    # verl whitens what it returns: its raw advantages are its returns less the values.
    np.testing.assert_allclose(ours.advantage.reshape(rows, length)[mask], (returns.numpy() - values)[mask], atol=1e-9)
    whitened = core_algos.verl_F.masked_whiten(
        torch.from_numpy(ours.advantage.reshape(rows, length)), torch.from_numpy(mask).double()
    )
    np.testing.assert_allclose(whitened.numpy()[mask], theirs.numpy()[mask], atol=1e-6)


def test_ragged_rows_get_what_verl_gives_to_padded_ones(core_algos: ModuleType) -> None:
    rng = np.random.default_rng(9)
    lengths = [1, 40, 7, 300]
    offsets, size = np.concatenate([[0], np.cumsum(lengths)]), max(lengths)
    values, rewards, mask = rng.normal(size=offsets[-1]), rng.normal(size=offsets[-1]), rng.random(offsets[-1]) < 0.5
    rewards *= mask
    padded = np.zeros((3, len(lengths), size))
    for row, length in enumerate(lengths):
        padded[:, row, :length] = np.stack([values, rewards, mask])[:, offsets[row] : offsets[row + 1]]
    value, reward, on = (torch.from_numpy(x) for x in padded)
    _, returns = core_algos.compute_gae_advantage_return(reward, value, on, 0.95, 0.9)
    ours = gae(GAEInput(values, rewards, mask, offsets), gamma=0.95, lam=0.9)
    flat = np.concatenate([returns.numpy()[row, :length] for row, length in enumerate(lengths)])
    np.testing.assert_allclose(ours.returns[mask], flat[mask], atol=1e-9)
