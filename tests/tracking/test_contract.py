"""What every tracker does: start, phases, progress, steps and finish, twice in the same run folder."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_ext.tracking.composite import TrackerSet
from megatron_ext.tracking.console import ConsoleTracker
from megatron_ext.tracking.jsonl import JsonlTracker
from megatron_ext.tracking.protocol import Tracker
from megatron_ext.tracking.wandb import WandbTracker

TRACKERS: dict[str, Callable[[], Tracker]] = {
    "jsonl": JsonlTracker,
    "console": lambda: ConsoleTracker(stream=io.StringIO()),
    "wandb": lambda: WandbTracker(project="tests", mode="offline"),
    "set": lambda: TrackerSet({"a": JsonlTracker(), "b": ConsoleTracker(stream=io.StringIO())}),
}
CONFIG = {"run": {"name": "r", "steps": 4}, "loss": {"terms": {"policy": {"clip_low": 0.2}}}, "method": None}


@pytest.mark.parametrize("make", TRACKERS.values(), ids=TRACKERS.keys())
def test_contract(make: Callable[[], Tracker], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for resumed_from in (None, 2, None):
        tracker = make()
        tracker.start(tmp_path, CONFIG, resumed_from)
        tracker.log(resumed_from or 0, {"eval/dev/greedy_pass1": 0.25})
        for step in range((resumed_from or 0) + 1, 5):
            tracker.phase("rollout", 10)
            tracker.advance(3, "3 finished")
            tracker.advance(10)
            tracker.phase("update")
            tracker.log(step, {"reward/mean": 0.5, "train/loss": float("nan"), "train/tokens": 12})
        tracker.finish({"success_after": 0.9, "steps": 4})
    out = capsys.readouterr()
    assert out.out == "" and out.err == ""


@pytest.mark.parametrize("make", [JsonlTracker, TRACKERS["wandb"]])
def test_logging_before_start_is_an_error(make: Callable[[], Tracker]) -> None:
    with pytest.raises(RuntimeError, match=r"call start\(\) first"):
        make().log(1, {"reward/mean": 0.5})
