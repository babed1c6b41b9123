"""Invariants of the speed of a step (numbers refer to ``megatron_ext/training/measures/throughput.py``)."""

from __future__ import annotations

import time

import numpy as np
import pytest
import torch

from megatron_ext.models.flops import Passes, Work, rows_work, total_flops
from megatron_ext.models.parallel import ParallelContext
from megatron_ext.tracking.names import check
from megatron_ext.training.measures.phases import Phases
from megatron_ext.training.measures.throughput import CALIBRATION_S, measured_peak, micro_work, speed_metrics
from megatron_ext.training.microbatch import build_microbatch
from tests.helpers.records import random_batch
from tests.helpers.training import TERMS, TINY, make_trainer, micro_of, random_inputs, rows_of


class Silent:
    def phase(self, name: str, total: int | None = None) -> None: ...


def clock(**seconds: float) -> Phases:
    made = Phases(Silent())  # type: ignore[arg-type]
    made._seconds = dict(seconds)
    return made


def test_every_pass_of_the_trainer_is_counted(rank: ParallelContext) -> None:  # invariant 1
    batch, trainer = random_batch(3, groups=4), make_trainer(rank)
    rows = rows_of(batch)
    micro = micro_of(batch, rows, cap=200)
    whole = rows_work(rows.lengths)
    assert len(micro) > 1 and sum((micro_work(mb) for mb in micro), Work()) == whole
    trainer.score(micro, batch.num_tokens)
    trainer.update(micro, random_inputs(batch), TERMS, lr=1e-3)
    assert trainer.take_passes() == Passes(forward=whole + whole, backward=whole)
    assert trainer.take_passes() == Passes()


def test_shared_tokens_count_once_and_padding_not_at_all() -> None:  # invariants 1 and 2
    batch = random_batch(3, groups=4)
    rows = rows_of(batch)
    members = list(range(rows.num_rows))
    whole = rows_work(rows.lengths)
    shared = build_microbatch(batch, rows, members, rows.mask, share_prefixes=True)
    assert shared.shared is not None and micro_work(shared).tokens == shared.num_tokens < whole.tokens
    assert micro_work(shared).pairs < whole.pairs
    # Context-parallel ranks have padded shares of the same rows.
    for part in (build_microbatch(batch, rows, members, rows.mask, context_size=2, context_rank=r) for r in (0, 1)):
        assert bool((part.source < 0).any()) and micro_work(part) == whole
    assert micro_work(build_microbatch(batch, rows, [], rows.mask)) == Work()


def test_metrics_of_a_step() -> None:
    passes = Passes(rows_work([10, 10]), rows_work([10]))
    flops = total_flops(TINY, passes)
    seconds = clock(rollout=3.0, scoring=0.5, update=1.5, publish=1.0, save=100.0)
    measured = {"rollout/tokens": 12.0, "train/trained_tokens": 6.0}
    got = speed_metrics(TINY, passes, seconds, measured, peak=float(flops))
    assert got == {
        "perf/flops": flops,
        "perf/model_tokens": 20.0,
        "perf/flops_per_s": flops / 2,
        "perf/model_tokens_per_s": 10.0,
        "perf/sampled_tokens_per_s": 2.0,
        "perf/trained_tokens_per_s": 1.0,
        "perf/peak_flops_per_s": flops,
        "perf/mfu": 0.5,
    }
    check(got)
    assert "perf/mfu" not in speed_metrics(TINY, passes, seconds, measured, peak=None)
    # A step whose groups were all filtered trained nothing.
    idle = speed_metrics(TINY, Passes(), clock(rollout=2.0), {"rollout/tokens": 4.0}, peak=1.0)
    assert idle["perf/flops"] == 0 and "perf/mfu" not in idle and idle["perf/trained_tokens_per_s"] == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_peak_is_a_speed_that_products_reach(dtype: torch.dtype) -> None:  # invariant 3
    start = time.monotonic()
    peak = measured_peak(torch.device("cpu"), dtype, seconds=0.1)
    assert time.monotonic() - start < 60 * CALIBRATION_S  # bounded by the budget and one product, on any machine
    a = torch.ones(256, 256, dtype=dtype)
    took = []
    for _ in range(5):
        began = time.perf_counter()
        torch.matmul(a, a)
        took.append(time.perf_counter() - began)
    assert np.isfinite(peak) and peak > 0.2 * 2 * 256**3 / min(took)
