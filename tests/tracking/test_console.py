"""Invariants 1-4 of ``tracking/console.py``."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from megatron_ext.tracking.console import ConsoleTracker, duration


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def play(stream: io.StringIO, resumed_from: int | None = None) -> str:
    clock = Clock()
    tracker = ConsoleTracker(stream=stream, seconds_between_lines=10.0, clock=clock)
    tracker.start(Path("runs/x"), {"run": {"steps": 10}}, resumed_from)
    tracker.phase("warm_start", 100)
    for done in range(0, 100, 10):
        clock.now += 3
        tracker.advance(done, f"loss {1 - done / 100:.2f}")
    for step in range((resumed_from or 0) + 1, (resumed_from or 0) + 3):
        tracker.phase("rollout", 16)
        tracker.advance(8)
        tracker.phase("update", 4)
        clock.now += 15
        tracker.log(
            step, {"reward/mean": 0.25, "reward/success": 0.5, "rollout/tokens_per_s": 1234.4, "moe/load_peak": 1}
        )
    tracker.log(step, {"eval/test/greedy_pass1": 0.75})
    tracker.finish({"success_after": 0.75, "steps": 2})
    return stream.getvalue()


def test_plain_lines_without_a_terminal() -> None:  # invariants 2 and 3
    lines = play(io.StringIO()).splitlines()
    assert lines == [
        "run runs/x",
        "warm start: 100 to do",
        "warm start 30/100 loss 0.70",
        "warm start 70/100 loss 0.30",
        "step 1/10  reward 0.250  success 0.500  rollout tok/s 1234  ETA 2:15",
        "step 2/10  reward 0.250  success 0.500  rollout tok/s 1234  ETA 2:00",
        "step 2/10  test greedy_pass1 0.750  ETA 2:00",
        "finished: success_after 0.750, steps 2",
    ]


def test_a_resumed_run_counts_its_own_steps() -> None:  # invariant 3
    text = play(io.StringIO(), resumed_from=6)
    assert "run runs/x, resumed from step 6" in text and "step 8/10" in text
    assert "step 7/10  reward 0.250  success 0.500  rollout tok/s 1234  ETA 2:15" in text  # 45 s a step so far, 3 left


def test_a_live_block_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:  # invariant 1
    monkeypatch.setenv("TERM", "xterm-256color")
    text = play(Terminal())
    assert "\x1b[" in text and "step 2/10" in text and "warm start: 100 to do" not in text


def test_troubles_of_a_step_are_one_warning() -> None:  # invariant 4
    stream = io.StringIO()
    tracker = ConsoleTracker(stream=stream)
    tracker.start(Path("runs/x"), {"run": {"steps": 9}}, None)
    fine = {"reward/mean": 0.5, "reward/missing/roles": 0.0, "judge/failed": 0.0, "judge/unknown": 0.0}
    tracker.log(1, fine)
    tracker.log(2, fine | {"reward/missing/roles": 2.0, "judge/failed": 7.0, "judge/unknown": 1.0})
    assert stream.getvalue().splitlines()[1:] == [
        "step 1/9  reward 0.500",
        "step 2/9  reward 0.500",
        "warning: step 2: reward 'roles' is missing in 2 trajectories; 7 turns have no answer of a judge; "
        "1 answers of a judge have an unknown label (why: logs/driver.log)",
    ]


def test_durations() -> None:
    assert [duration(x) for x in (0, 59.6, 61, 3600, 7325)] == ["0:00", "1:00", "1:01", "1:00:00", "2:02:05"]
