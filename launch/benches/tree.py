"""Whole optimizer steps on rows that share prefixes: every row run whole, against their prefix tree.

The same ``Trainer.update`` on the same rows and weights, with ``batch.share_prefixes`` off and on, in turns; building
the micro-batch is part of the step, the learning rate is 0. ``tree_gradient_difference``: the largest difference of any
gradient over the largest gradient of its tensor.

Invariants (``tests/launch/test_bench_tree.py``):

1. Both sides predict the same tokens with the same weights, and give the same gradient.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median

import numpy as np
import torch

from launch.measurement import About, Measurement, Report
from megatron_ext.config.schema import BackendConfig, ModelConfig, OptimizerConfig, ParallelConfig
from megatron_ext.losses.policy import ClipLoss
from megatron_ext.models import cpu_platform
from megatron_ext.models.backends import resolve_backend
from megatron_ext.models.build import build_model
from megatron_ext.models.hf_config import HFConfig
from megatron_ext.models.parallel import initialize, shutdown
from megatron_ext.moe.policies import TrainedRouter
from megatron_ext.training.microbatch import build_microbatch
from megatron_ext.training.optimizer import wrap
from megatron_ext.training.trainer import TokenInputs, Trainer
from megatron_ext.trajectory.record import Role, TrajectoryBatch
from megatron_ext.trajectory.rows import Rows, make_rows

ABOUT = About(
    line="training steps on rows that share prefixes, run whole and as a prefix tree",
    takes="half a minute on one core",
    keys={
        "tree_step_speedup": "seconds on whole rows over those on the tree, of rows that share much",
        "tree_step_speedup_shallow": "the same of many short rows that share little",
        "tree_gradient_difference[_shallow]": "largest difference of a gradient over its tensor's largest",
        "tree_tokens_ratio[_shallow]": "tokens of the rows over those of the tree",
        "tree_step_rows[_shallow]": "seconds of a step on whole rows",
        "tree_step_tree[_shallow]": "seconds of a step on the tree",
    },
)
BAR, DIFFERENCE_BAR = 2.0, 1e-5
VOCAB = 258


@dataclass(frozen=True)
class Size:
    """``groups`` prompts of ``shared`` tokens, with ``branches`` answers of ``own`` trained tokens each."""

    groups: int
    branches: int
    shared: int
    own: int
    hidden: int = 128
    layers: int = 4
    experts: int = 8
    threads: int = 1
    repeats: int = 7

    def __str__(self) -> str:
        return (
            f"{self.groups} x {self.branches} rows of {self.shared + self.own} tokens, {self.shared} of them shared; "
            f"hidden {self.hidden}, {self.layers} layers, {self.experts} experts top-2, fp32, {self.threads} threads; "
            f"medians of {self.repeats} steps a side, in turns"
        )


DEEP = Size(groups=1, branches=16, shared=384, own=128)
SHALLOW = Size(groups=8, branches=8, shared=24, own=129)


def make_batch(size: Size, seed: int = 0) -> TrajectoryBatch:
    """Random tokens; a trajectory is its group's prompt and an answer of its own."""
    rng = np.random.default_rng(seed)
    count, length = size.groups * size.branches, size.shared + size.own
    prompts = rng.integers(0, VOCAB, (size.groups, size.shared)).repeat(size.branches, axis=0)
    ids = np.concatenate([prompts, rng.integers(0, VOCAB, (count, size.own))], axis=1).reshape(-1)
    mask = np.tile(np.arange(length) >= size.shared, count)
    starts = np.arange(count) * length
    offsets = np.arange(count + 1)
    return TrajectoryBatch(
        ids=ids,
        loss_mask=mask,
        turn=2 * np.repeat(np.arange(count), length) + mask,
        field=np.zeros(len(ids)),
        rollout_logp=np.where(mask, -np.log(VOCAB), 0.0),
        version=np.where(mask, 0, -1),
        weight=np.ones(len(ids)),
        turn_role=np.tile([int(Role.USER), int(Role.MODEL)], count),
        turn_start=np.stack([starts, starts + size.shared], axis=1).reshape(-1),
        turn_end=np.stack([starts + size.shared, starts + length], axis=1).reshape(-1),
        turn_number=np.tile([0, 1], count),
        turn_state_key=np.zeros(2 * count),
        turn_action_key=np.zeros(2 * count),
        turn_reward=np.zeros(2 * count),
        segment_tokens=offsets * length,
        segment_turns=offsets * 2,
        session_segments=offsets,
        trajectory_sessions=offsets,
        group_trajectories=np.arange(0, count + 1, size.branches),
        session_kind=np.zeros(count),
        session_parent=np.full(count, -1),
        session_return=np.full((count, 2), -1),
        trajectory_id=tuple(f"t{j}" for j in range(count)),
        sample=np.arange(count) % size.branches,
        reward=np.zeros(count),
        success=np.zeros(count, dtype=bool),
        status=np.zeros(count),
        harness=("bench",) * count,
        group_id=tuple(f"g{g}" for g in range(size.groups)),
        task_id=tuple(f"k{g}" for g in range(size.groups)),
    )


class Bench:
    """One trainer, and the step on its batch as rows or as a tree."""

    def __init__(self, trainer: Trainer, size: Size) -> None:
        self.trainer, self.batch = trainer, make_batch(size)
        self.rows: Rows = make_rows(self.batch)
        total = self.batch.num_tokens
        advantage = torch.randn(total, generator=torch.Generator().manual_seed(1))
        self.inputs = TokenInputs(
            old_logp=None,
            rollout_logp=torch.from_numpy(np.asarray(self.batch.rollout_logp, dtype=np.float32).copy()),
            advantage=advantage,
            weight=torch.full((total,), 1.0 / int(np.count_nonzero(self.batch.loss_mask))),
        )
        self.terms = {"policy": ClipLoss()}

    def step(self, share: bool) -> float:
        """Seconds of one step; the gradient stays with the parameters."""
        began = time.perf_counter()
        members = np.arange(self.rows.num_rows)
        micro = build_microbatch(self.batch, self.rows, members, self.rows.mask, share_prefixes=share)
        self.trainer.update([micro], self.inputs, self.terms, lr=0.0)
        return time.perf_counter() - began

    def gradients(self) -> list[torch.Tensor]:
        """Of the last step, before clipping, which is off."""
        parameters = [p for chunk in self.trainer.chunks for p in chunk.parameters() if p.requires_grad]
        return [vars(p)["main_grad"].clone() for p in parameters]

    def difference(self) -> float:
        """Largest |difference| of a gradient over the largest |gradient| of its tensor, tree against rows."""
        found = []
        for share in (False, True):
            self.step(share)
            found.append(self.gradients())
        return max(float((b - a).abs().max() / a.abs().max()) for a, b in zip(*found, strict=True))


@contextmanager
def bench(size: Size) -> Iterator[Bench]:
    """A fresh model of one rank with its batch, on ``size.threads`` threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(size.threads)
    cpu_platform.tune_allocator()
    parallel, backend, router = ParallelConfig(), resolve_backend(BackendConfig(device="cpu")), TrainedRouter()
    context = initialize(parallel, backend, seed=1)
    hf = HFConfig(
        family="qwen3_moe",
        vocab=VOCAB,
        hidden=size.hidden,
        layers=size.layers,
        heads=4,
        kv_heads=2,
        head_dim=size.hidden // 4,
        intermediate=2 * size.hidden,
        max_position_embeddings=1024,
        rope_theta=10000.0,
        tie_word_embeddings=True,
        num_experts=size.experts,
        top_k=2,
        moe_intermediate=size.hidden,
        norm_topk_prob=True,
    )
    try:
        model = ModelConfig(hf_config="", max_context=size.shared + size.own)
        chunks = build_model(hf, model, parallel, backend, router.config_overrides(), seed=1)
        router.apply(chunks)
        wrapped, optimizer = wrap(chunks, OptimizerConfig(clip_grad=0.0), parallel, backend)
        yield Bench(Trainer(wrapped, optimizer, context, temperature=1.0, router=router), size)
    finally:
        shutdown(context)
        torch.set_num_threads(threads)


def measure(size: Size) -> tuple[float, float, float, float]:
    """Seconds of a step on whole rows and on the tree, tokens of the rows over those of the tree, and the difference
    of the gradients."""
    with bench(size) as both:
        difference = both.difference()
        seconds: dict[bool, list[float]] = {False: [], True: []}
        for _ in range(size.repeats):
            for share, taken in seconds.items():
                taken.append(both.step(share))
    count = size.branches * (size.shared + size.own) / (size.shared + size.branches * size.own)
    return median(seconds[False]), median(seconds[True]), count, difference


def run(report: Report) -> None:
    for size, suffix, bar in ((DEEP, "", BAR), (SHALLOW, "_shallow", 1.0)):
        rows, tree, ratio, difference = measure(size)
        label = str(size)
        report(Measurement(f"tree_step_speedup{suffix}", rows / tree, "x", bar, "higher", label))
        name = f"tree_gradient_difference{suffix}"
        report(Measurement(name, difference, "of a tensor's largest", DIFFERENCE_BAR, "lower", label))
        report(Measurement(f"tree_tokens_ratio{suffix}", ratio, "x", None, "higher", label))
        report(Measurement(f"tree_step_rows{suffix}", rows, "s", None, "lower", label))
        report(Measurement(f"tree_step_tree{suffix}", tree, "s", None, "lower", label))
