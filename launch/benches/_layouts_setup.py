"""What the layout bench trains: a model that every layout can cut, a batch, the cases and what a case returns.

Invariants (``tests/integration/test_layouts.py``):

1. Everything is a function of constants and seeds: every rank of every layout makes the same model and batch.
2. A case's outcome is named independently of its layout: HF tensor names, the batch's tokens.
3. No router is near a tie: rounding cannot change which experts a token goes to (``Outcome.margin``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from megatron_ext.losses.entropy import EntropyBonus
from megatron_ext.losses.kl import KLToReference
from megatron_ext.losses.policy import GSPO, ClipLoss
from megatron_ext.losses.protocol import LossTerm
from megatron_ext.models.hf_config import HFConfig
from megatron_ext.trajectory.record import Role, TrajectoryBatch

# Divides by 2 in every dimension; one of the four layers is dense, and the embedding is tied across a pipeline.
MODEL = HFConfig(
    family="qwen3_moe",
    vocab=96,
    hidden=32,
    layers=4,
    heads=4,
    kv_heads=2,
    head_dim=16,
    intermediate=48,
    max_position_embeddings=128,
    rope_theta=10000.0,
    tie_word_embeddings=True,
    num_experts=4,
    top_k=2,
    moe_intermediate=24,
    norm_topk_prob=True,
    mlp_only_layers=(1,),
)
# As many MoE layers, so that the same experts are recorded.
SIGMOID = replace(
    MODEL,
    family="glm4_moe",
    qk_norm="none",
    qkv_bias=True,
    rotary_dim=8,
    expert_groups=2,
    top_groups=1,
    routed_scaling=1.5,
    shared_experts=1,
    mlp_only_layers=(0,),
)
TEMPERATURE = 0.8
LR = 0.03
STEPS = 3
SEED = 3
MARGIN = 1e-5
Arrays = Mapping[str, NDArray[Any]]

TERMS: Mapping[str, Callable[[], Mapping[str, LossTerm]]] = {
    "token": lambda: {"policy": ClipLoss(), "kl": KLToReference(coefficient=0.1), "entropy": EntropyBonus()},
    # A ratio of whole segments: cutting rows over ranks must not cut it.
    "sequence": lambda: {"policy": GSPO(clip_low=0.05, clip_high=0.05), "entropy": EntropyBonus()},
}


@dataclass(frozen=True)
class Case:
    """One layout and one way of cutting the batch. ``parallel`` are fields of ``ParallelConfig``, over ``world`` ranks.

    ``cap`` tokens a micro-batch and rank; ``tokens_per_row`` cuts rows at turns; ``plan`` pack | one (a row each) |
    permuted (rows in random order, cut under the cap) | first (as permuted, all on the first data-parallel rank: the
    others run empty micro-batches). ``poison`` asks for one more step, with a gradient of NaN, which must be skipped.
    ``recompute`` full | moe runs forwards of layers, or of their experts, again in the backward.
    The last six decide what is computed, so that only cases that agree in them are comparable:
    ``terms`` a key of ``TERMS``; ``tied`` the embedding; ``clip`` of the gradient; ``dense`` a model without experts,
    ``sigmoid`` one with biased sigmoid routing, groups of experts and a shared one;
    ``replay`` of recorded experts, which are none that the routers would choose.
    """

    name: str
    world: int = 1
    parallel: Mapping[str, Any] = field(default_factory=dict)
    cap: int = 200
    tokens_per_row: int = 0
    share_prefixes: bool = False
    plan: str = "pack"
    poison: bool = False
    recompute: str = ""
    terms: str = "token"
    tied: bool = True
    clip: float = 0.0
    dense: bool = False
    sigmoid: bool = False
    replay: bool = False

    @property
    def alone(self) -> Case:
        """One rank, cut plainly: what the case must equal."""
        kind = ("terms", "tied", "clip", "dense", "sigmoid", "replay")
        return Case("dp1", **{name: getattr(self, name) for name in kind})

    def model(self) -> HFConfig:
        hf = replace(SIGMOID if self.sigmoid else MODEL, tie_word_embeddings=self.tied)
        return replace(hf, family="qwen3", num_experts=0, top_k=0, mlp_only_layers=()) if self.dense else hf


@dataclass(frozen=True)
class Outcome:
    """``loss``, ``grad_norm`` and ``metrics`` (name ->) a step; ``grads`` of each step and ``params`` after the last,
    by HF name; ``scores`` by token: log-probs, entropies, reference, experts, and those that the first update kept.

    ``margin``: the smallest gap between the probabilities of neighbours among a router's best k + 1 experts, over every
    token, layer and step (measured on one rank, else infinite). ``skipped``: whether the step with a gradient of NaN
    was (None: not asked for). ``tokens`` that the first rank ran for one pass over its ``microbatches``.
    """

    loss: list[float]
    grad_norm: list[float]
    metrics: Mapping[str, list[float]]
    grads: Sequence[Arrays]
    params: Arrays
    scores: Arrays
    margin: float
    skipped: bool | None
    microbatches: int
    tokens: int


def with_experts(batch: TrajectoryBatch) -> TrajectoryBatch:
    """The batch with recorded experts: a token's follow from the ids up to it, so that rows that share it agree."""
    experts = np.empty((batch.num_tokens, sum(MODEL.moe_pattern), MODEL.num_experts), dtype=np.uint8)
    for first, end in zip(batch.segment_tokens[:-1].tolist(), batch.segment_tokens[1:].tolist(), strict=True):
        for token in range(first, end):
            rng = np.random.default_rng(crc32(batch.ids[first : token + 1].tobytes()))
            experts[token] = rng.random(experts.shape[1:]).argsort(axis=-1)
    # The last token of every conversation was sampled, and nothing was generated from it.
    valid = np.ones(batch.num_tokens, dtype=bool)
    valid[batch.segment_tokens[1:] - 1] = False
    return replace(batch, routed=experts[:, :, : MODEL.top_k], routed_valid=valid)


def make_batch(seed: int = SEED, groups: int = 4, samples: int = 3) -> TrajectoryBatch:
    """Groups of conversations of random length that begin with their task's prompt, so that rows share prefixes."""
    rng = np.random.default_rng(seed)
    ids: list[int] = []
    model: list[bool] = []
    turn: list[int] = []
    roles: list[Role] = []
    bounds: list[tuple[int, int]] = []
    numbers: list[int] = []
    ends, turn_ends = [0], [0]
    for _ in range(groups):
        prompt = rng.integers(0, MODEL.vocab, int(rng.integers(4, 12))).tolist()
        for _ in range(samples):
            for number in range(2 * int(rng.integers(1, 4))):
                said = rng.integers(0, MODEL.vocab, int(rng.integers(2, 12))).tolist() if number else prompt
                role = Role.MODEL if number % 2 else Role.USER
                bounds.append((len(ids), len(ids) + len(said)))
                ids += said
                model += [role is Role.MODEL] * len(said)
                turn += [len(roles)] * len(said)
                roles.append(role)
                numbers.append(number)
            ends.append(len(ids))
            turn_ends.append(len(roles))
    count, mask = groups * samples, np.array(model)
    offsets = np.arange(count + 1)
    start, stop = np.array(bounds).T
    return TrajectoryBatch(
        ids=np.array(ids),
        loss_mask=mask,
        turn=np.array(turn),
        field=np.zeros(len(ids)),
        rollout_logp=np.where(mask, -np.log(MODEL.vocab) + rng.normal(0, 0.1, len(ids)), 0.0),
        version=np.where(mask, 0, -1),
        weight=np.ones(len(ids)),
        turn_role=np.array([int(role) for role in roles]),
        turn_start=start,
        turn_end=stop,
        turn_number=np.array(numbers),
        turn_state_key=np.zeros(len(roles)),
        turn_action_key=np.zeros(len(roles)),
        turn_reward=np.zeros(len(roles)),
        segment_tokens=np.array(ends),
        segment_turns=np.array(turn_ends),
        session_segments=offsets,
        trajectory_sessions=offsets,
        group_trajectories=np.arange(0, count + 1, samples),
        session_kind=np.zeros(count),
        session_parent=np.full(count, -1),
        session_return=np.full((count, 2), -1),
        trajectory_id=tuple(f"t{j}" for j in range(count)),
        sample=np.arange(count) % samples,
        reward=rng.random(count).round(3),
        success=np.zeros(count, dtype=bool),
        status=np.zeros(count),
        harness=("bench",) * count,
        group_id=tuple(f"g{g}" for g in range(groups)),
        task_id=tuple(f"k{g}" for g in range(groups)),
    )
