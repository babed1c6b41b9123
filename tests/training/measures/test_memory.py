"""Memory metrics of this process and of a child."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import torch

from megatron_ext.tracking import names
from megatron_ext.training.measures.memory import GIB, memory_metrics, resident_bytes
from megatron_ext.training.ranks.ranks import alone
from tests.helpers.gathering import on_ranks

CPU = torch.device("cpu")


def test_it_grows_with_what_is_held_and_the_peak_stays() -> None:
    before = memory_metrics(CPU, 0, alone)
    block = np.ones(40_000_000)
    held = memory_metrics(CPU, 0, alone)
    del block
    after = memory_metrics(CPU, 0, alone)
    # What an earlier test freed may be used again: only the peak says for certain that the block was there.
    assert before["memory/rss_gib"] > 0 and held["memory/rss_gib"] > 0
    assert after["memory/rss_peak_gib"] >= held["memory/rss_peak_gib"] >= before["memory/rss_peak_gib"]
    assert held["memory/rss_peak_gib"] >= 40_000_000 * 8 / GIB
    names.check(after)
    assert "memory/device_peak_gib" not in after


def test_the_engine_is_told_by_the_rank_that_started_it() -> None:
    found = on_ranks(lambda rank, gather: memory_metrics(CPU, int(2 * GIB) * (rank == 0), gather), 3)
    assert [metrics["memory/engine_gib"] for metrics in found] == pytest.approx([2.0] * 3)


def test_resident_memory_of_a_process_that_is_gone_is_nothing() -> None:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(30)"]) as child:
        assert resident_bytes(child.pid) > 0
        child.kill()
        child.wait()
    assert resident_bytes(child.pid) == 0
