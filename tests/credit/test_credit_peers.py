"""Group statistics and loss weights against verl 0.9.1 and TRL 1.16, on random groups in double precision, to 1e-6.

| ours | verl | TRL |
|---|---|---|
| group_normalize, sample std and none | grpo outcome advantage | mean and spread of its reward scaling |
| group_normalize, leave one out | rloo outcome advantage | |
| weighted_z_sum, then Whiten | gdpo outcome advantage | |
| group_normalize without std, then Whiten | reinforce++ with baseline | |
| token_mean, trajectory_mean | agg_loss token-mean, seq-mean-token-mean | |

TRL scales rewards inside its generation step, which needs an engine; its masked spread is the part that can be called.
Groups of one are compared nowhere: verl gives them their raw score.
"""

from __future__ import annotations

from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from megatron_ext.credit.base import Baseline
from megatron_ext.credit.edits.whiten import Whiten
from megatron_ext.credit.groups import group_normalize, weighted_z_sum
from megatron_ext.credit.levels import broadcast
from megatron_ext.credit.pipeline import Pipeline, local, open_view
from megatron_ext.losses.aggregation import token_weights
from tests.helpers.records import Group, build, model, single, user

seeds = pytest.mark.parametrize("seed", range(4))


@pytest.fixture(scope="module")
def verl() -> ModuleType:
    return pytest.importorskip("verl.trainer.ppo.core_algos")


@pytest.fixture(scope="module")
def trl() -> ModuleType:
    return pytest.importorskip("trl.trainer.utils")


def groups_of(seed: int) -> list[Group]:
    """Groups of 2-5 trajectories of unequal length, rewards on a coarse grid, no group constant."""
    rng = np.random.default_rng(seed)
    out: list[Group] = []
    for _ in range(4):
        size = int(rng.integers(2, 6))
        rewards = rng.integers(0, 8, size) / 8
        rewards[0] = (rewards[1] + 0.5) % 1.0
        out.append(
            tuple(
                single([user([1]), model(range(int(n)), mask=tuple(rng.random(n) < 0.7))], reward=float(r))
                for r, n in zip(rewards, rng.integers(2, 7, size), strict=True)
            )
        )
    return out


class Padded:
    """The batch of some groups as the peers hold it: a row a trajectory."""

    def __init__(self, groups: list[Group]) -> None:
        self.batch = build(groups)
        starts, ends = self.batch.trajectory_tokens()[:-1], self.batch.trajectory_tokens()[1:]
        self.rows, self.length = len(starts), int((ends - starts).max())
        self.index = self.batch.trajectory_group()
        self.mask = torch.from_numpy(self.pad(self.batch.loss_mask.astype(np.float64)))
        self.reward = torch.zeros(self.rows, self.length, dtype=torch.float64)
        self.reward[:, 0] = torch.from_numpy(self.batch.reward.astype(np.float64))

    def pad(self, values: np.ndarray) -> np.ndarray:
        out = np.zeros((self.rows, self.length))
        for row, (a, b) in enumerate(
            zip(self.batch.trajectory_tokens(), self.batch.trajectory_tokens()[1:], strict=False)
        ):
            out[row, : b - a] = values[a:b]
        return out

    def same(self, ours: np.ndarray, theirs: torch.Tensor) -> None:
        assert np.abs(ours).max() > 0.1, "a comparison of zeros says nothing"
        np.testing.assert_allclose(self.pad(ours), (theirs * self.mask).numpy(), atol=1e-6)


@seeds
@pytest.mark.parametrize("normalize", ["std", "mean"])
def test_grpo(verl: ModuleType, seed: int, normalize: str) -> None:
    padded = Padded(groups_of(seed))
    theirs, _ = verl.compute_grpo_outcome_advantage(
        padded.reward.clone(), padded.mask, padded.index, norm_adv_by_std_in_grpo=normalize == "std"
    )
    baseline = Baseline(normalize=normalize, std_ddof=1)
    padded.same(baseline.tokens(padded.batch, padded.batch.reward), theirs)


@seeds
def test_rloo(verl: ModuleType, seed: int) -> None:
    padded = Padded(groups_of(seed))
    theirs, _ = verl.compute_rloo_outcome_advantage(padded.reward.clone(), padded.mask, padded.index)
    ours = group_normalize(padded.batch.reward, padded.index, std=False, baseline="leave_one_out")
    padded.same(broadcast(padded.batch, ours), theirs)


def whitened(padded: Padded, values: np.ndarray) -> np.ndarray:
    """verl whitens over tokens, by the sample variance, with 1e-8 under the root."""
    edit = Whiten(over="tokens", center=True, ddof=1, eps=0.0)
    view = replace(open_view(padded.batch), advantage=broadcast(padded.batch, values))
    return edit.apply(view, local(edit.local_stats(view))).advantage


@seeds
def test_gdpo(verl: ModuleType, seed: int) -> None:
    padded = Padded(groups_of(seed))
    rng = np.random.default_rng(seed)
    parts = {"a": padded.batch.reward.astype(np.float64), "b": rng.integers(0, 3, padded.rows).astype(np.float64)}
    weights = {"a": 1.0, "b": 0.5}
    config = {"gdpo_reward_keys": ["a", "b"], "gdpo_reward_weights": [1.0, 0.5]}
    tensors: Any = {
        "prompts": torch.zeros(padded.rows, 1),
        "attention_mask": torch.ones(padded.rows, padded.length + 1, dtype=torch.long),
    }
    theirs, _ = verl.compute_gdpo_outcome_advantage(
        padded.reward, padded.mask, padded.index, config=config, non_tensor_batch=parts, batch=tensors
    )
    ours = weighted_z_sum(parts, weights, padded.index, ddof=1)
    padded.same(whitened(padded, ours), theirs)


@seeds
@pytest.mark.parametrize(("mode", "theirs"), [("token_mean", "token-mean"), ("trajectory_mean", "seq-mean-token-mean")])
def test_aggregation(verl: ModuleType, seed: int, mode: str, theirs: str) -> None:
    padded = Padded(groups_of(seed))
    loss = np.random.default_rng(seed).normal(size=padded.batch.num_tokens)
    want = verl.agg_loss(torch.from_numpy(padded.pad(loss)), padded.mask, theirs)
    assert token_weights(padded.batch, mode) @ loss == pytest.approx(float(want), abs=1e-6)


@seeds
def test_trl_scaling_with_members_that_do_not_vote(trl: ModuleType, seed: int) -> None:
    """NeMo-RL 4160: rewards that could not be scored are NaN there and absent here."""
    rng = np.random.default_rng(seed)
    rewards = rng.integers(0, 4, (5, 6)) / 4
    rewards[rng.random((5, 6)) < 0.2] = np.nan
    table = torch.from_numpy(rewards)
    mean, spread = torch.nanmean(table, dim=1, keepdim=True), trl.nanstd(table, dim=1, keepdim=True)
    theirs = torch.nan_to_num((table - mean) / (spread + 1e-4), nan=0.0)
    flat, key = rewards.reshape(-1), np.repeat(np.arange(5), 6)
    ours = group_normalize(flat, key, present=np.isfinite(flat), ddof=1, eps=1e-4)
    np.testing.assert_allclose(ours, theirs.numpy().reshape(-1), atol=1e-6)


@seeds
def test_reinforce_plus_plus_with_baseline(verl: ModuleType, seed: int) -> None:
    padded = Padded(groups_of(seed))
    theirs, _ = verl.compute_reinforce_plus_plus_baseline_outcome_advantage(
        padded.reward.clone(), padded.mask, padded.index, config=SimpleNamespace()
    )
    pipeline = Pipeline([("white", Whiten(center=True, ddof=1, eps=0.0))], baseline=Baseline(normalize="mean"))
    padded.same(pipeline.run(open_view(padded.batch))[0].advantage, theirs)
