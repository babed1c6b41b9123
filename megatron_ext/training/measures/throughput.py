"""How fast a step was: tokens a second, model FLOPs, and their share of what the machine can do.

Invariants (``tests/training/measures/test_throughput.py``):

1. Work is counted as it was run: every forward of every micro-batch, tokens that rows share once, padding not at all.
2. Data-parallel ranks' work adds up; ranks of one replica (tensor, context, pipeline) share theirs and count it once.
3. The peak is the best of repeated products in the training's own type and threads, and costs at most about
   ``CALIBRATION_S``; without one there is no ``perf/mfu``.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

import numpy as np
import torch

from megatron_ext.models.flops import Passes, Work, rows_work, total_flops, tree_work
from megatron_ext.models.hf_config import HFConfig
from megatron_ext.training.measures.phases import Phases
from megatron_ext.training.microbatch import MicroBatch

CALIBRATION_S = 0.3
_FIRST_SIZE, _LAST_SIZE = 256, 16384
_LONG_ENOUGH_S = 5e-3  # a product of this duration is no longer told by its start
TRAINING_PHASES = ("scoring", "update")
STEP_PHASES = ("rollout", "scoring", "update", "publish")


def micro_work(mb: MicroBatch) -> Work:
    """What a forward over the micro-batch runs, on all ranks of a replica together; the head runs on every token."""
    if mb.shared is not None:
        return tree_work(mb.positions.cpu().numpy())
    real = np.concatenate([[0], np.cumsum(mb.source.cpu().numpy() >= 0)])
    return rows_work(np.diff(real[mb.cu_seqlens.cpu().numpy()]))


def measured_peak(device: torch.device, dtype: torch.dtype, seconds: float = CALIBRATION_S) -> float:
    """FLOP/s of this process's best square matrix product, with the threads that torch has now."""
    deadline = time.monotonic() + seconds
    size, best = _FIRST_SIZE, 0.0
    factor = torch.ones(size, size, device=device, dtype=dtype)
    while True:
        took = _timed(factor)
        best = max(best, 2.0 * size**3 / took)
        if time.monotonic() >= deadline:
            return best
        if took < _LONG_ENOUGH_S and size < _LAST_SIZE:
            size *= 2
            factor = torch.ones(size, size, device=device, dtype=dtype)
            _timed(factor)  # the first product of a size may choose its kernel


def _timed(factor: torch.Tensor) -> float:
    if factor.device.type == "cuda":
        torch.cuda.synchronize(factor.device)
    start = time.perf_counter()
    torch.matmul(factor, factor)
    if factor.device.type == "cuda":
        torch.cuda.synchronize(factor.device)
    return max(time.perf_counter() - start, 1e-9)


def speed_metrics(
    hf: HFConfig, passes: Passes, clock: Phases, measured: Mapping[str, float], peak: float | None
) -> dict[str, float]:
    """``perf/...`` of a step: ``passes`` over all ranks, ``measured`` its other metrics (which say how many tokens were
    sampled and trained), ``peak`` FLOP/s of all ranks (None: not measured)."""
    training, step = (sum(clock.seconds(name) for name in names) for names in (TRAINING_PHASES, STEP_PHASES))
    flops, tokens = float(total_flops(hf, passes)), float(passes.forward.tokens)
    metrics = {"perf/flops": flops, "perf/model_tokens": tokens}
    if training > 0:
        metrics |= {"perf/flops_per_s": flops / training, "perf/model_tokens_per_s": tokens / training}
    if step > 0:
        told = {"sampled": "rollout/tokens", "trained": "train/trained_tokens"}
        metrics |= {f"perf/{kind}_tokens_per_s": measured.get(name, 0.0) / step for kind, name in told.items()}
    if peak is not None:
        metrics["perf/peak_flops_per_s"] = peak
        if training > 0:
            metrics["perf/mfu"] = flops / training / peak
    return metrics
