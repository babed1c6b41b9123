"""Batches with recorded experts, and trainers of models that recompute activations, for the tests of routing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_ext.models.hf_config import HFConfig
from megatron_ext.moe.policies import TrainedRouter
from megatron_ext.trajectory.record import TrajectoryBatch
from tests.helpers.training import TINY

RECOMPUTE: Mapping[str, dict[str, Any]] = {
    "none": {},
    "full": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
    "some layers": {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 1},
    "moe": {"recompute_granularity": "selective", "recompute_modules": ["moe"]},
    "attention": {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]},
}


@dataclass(frozen=True)
class Overridden(TrainedRouter):
    """The trained router's policy with further fields of Megatron's configuration."""

    fields: dict[str, Any] = field(default_factory=dict)

    def config_overrides(self) -> dict[str, Any]:
        return super().config_overrides() | self.fields


def random_experts(rng: np.random.Generator, tokens: int, hf: HFConfig) -> NDArray[np.uint8]:
    """Distinct experts at random, uint8 [T, L_moe, k]."""
    draws = rng.random((tokens, sum(hf.moe_pattern), hf.num_experts))
    return np.argsort(draws, axis=-1)[..., : hf.top_k].astype(np.uint8)


def recorded_by_engine(batch: TrajectoryBatch) -> NDArray[np.bool_]:
    """bool [T]: tokens that an engine ran while it generated: all before the last sampled token of a segment."""
    valid = np.zeros(batch.num_tokens, dtype=bool)
    for first, end in zip(batch.segment_tokens[:-1].tolist(), batch.segment_tokens[1:].tolist(), strict=True):
        sampled = np.flatnonzero(batch.version[first:end] >= 0)
        valid[first : first + (int(sampled[-1]) if len(sampled) else 0)] = True
    return valid


def with_routing(
    batch: TrajectoryBatch, experts: NDArray[Any], valid: NDArray[np.bool_] | None = None
) -> TrajectoryBatch:
    """The batch with these recorded experts, valid where an engine would have recorded (or where ``valid`` says)."""
    valid = recorded_by_engine(batch) if valid is None else valid
    return replace(batch, routed=np.where(valid[:, None, None], experts, 0).astype(experts.dtype), routed_valid=valid)


def randomly_routed(batch: TrajectoryBatch, seed: int = 0, hf: HFConfig = TINY) -> TrajectoryBatch:
    """The batch with experts drawn at random: none that a router would choose."""
    return with_routing(batch, random_experts(np.random.default_rng(seed), batch.num_tokens, hf))
