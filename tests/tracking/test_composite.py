"""Invariants 1-2 of ``tracking/composite.py``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from megatron_ext.tracking.composite import TrackerSet
from megatron_ext.tracking.jsonl import JsonlTracker, read_metrics
from megatron_ext.tracking.names import MetricNameError


class Failing(JsonlTracker):
    """A tracker whose end fails."""

    def finish(self, summary: Mapping[str, Any]) -> None:
        super().finish(summary)
        raise OSError("disk full")


class Recording(JsonlTracker):
    """A tracker that knows whether it was finished."""

    finished = False

    def finish(self, summary: Mapping[str, Any]) -> None:
        super().finish(summary)
        self.finished = True


def test_names_are_checked_before_anything_is_written(tmp_path: Path) -> None:  # invariant 1
    both = TrackerSet({"metrics": JsonlTracker()})
    both.start(tmp_path, {}, None)
    with pytest.raises(MetricNameError, match="reward/mean"):
        both.log(1, {"reward/mean": 1.0, "reward/meann": 1.0})
    assert read_metrics(tmp_path / "metrics.jsonl") == []
    both.log(1, {"reward/mean": 1.0})
    both.finish({})
    assert len(read_metrics(tmp_path / "metrics.jsonl")) == 1


@pytest.mark.parametrize("order", [("bad", "good"), ("good", "bad")])
def test_finish_reaches_every_tracker(order: tuple[str, str], tmp_path: Path) -> None:  # invariant 2
    good = Recording()
    trackers = {"bad": Failing(), "good": good}
    both = TrackerSet({name: trackers[name] for name in order})
    both.start(tmp_path, {}, None)
    with pytest.raises(OSError, match="disk full"):
        both.finish({})
    assert good.finished
