"""Invariants 1-6 of ``tracking/console.py``."""

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
        tracker.log(step, {"reward/mean": 0.25, "reward/success": 0.5, "rollout/tokens_per_s": 1234.4, "train/lr": 1})
    tracker.log(step, {"eval/test/greedy_pass1": 0.75})
    tracker.finish({"success_after": 0.75, "steps": 2})
    return stream.getvalue()


@pytest.mark.parametrize("colours", ["", "1"])
def test_plain_lines_without_a_terminal(monkeypatch: pytest.MonkeyPatch, colours: str) -> None:  # invariants 2 and 3
    monkeypatch.setenv("FORCE_COLOR", colours)
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


def shown(*steps: dict[str, float], routers: str = "") -> list[str]:
    """The lines behind the first of a run whose steps logged ``steps``."""
    stream = io.StringIO()
    tracker = ConsoleTracker(stream=stream)
    tracker.start(Path("runs/x"), {"run": {"steps": 9}, "routers": routers}, None)
    for step, metrics in enumerate(steps, 1):
        tracker.log(step, metrics)
    return stream.getvalue().splitlines()[1:]


def test_a_step_that_trained_nothing_says_so() -> None:  # invariant 5
    kept = {"reward/mean": 0.0, "filter/groups_kept": 0.0, "filter/groups_drawn": 16.0}
    kept |= {"filter/groups_all_failure": 15.0, "filter/groups_all_success": 1.0, "filter/groups_untrainable": 0.0}
    why = "(15 always failed, 1 always succeeded)"
    assert shown(kept, {"reward/mean": 0.5, "filter/groups_kept": 3.0}, {"filter/groups_kept": 0.0}) == [
        f"step 1/9  no group kept, nothing trained {why}  reward 0.000",
        "step 2/9  reward 0.500",
        "step 3/9  no group kept, nothing trained",
    ]


def test_groups_from_the_store_have_no_speed() -> None:  # invariant 5
    stored = {"reward/mean": 0.5, "rollout/tokens": 640.0, "train/tokens_per_s": 78.0, "policy/entropy": 2.172}
    line = "train tok/s 78  entropy in the update 2.172"
    assert shown(stored, stored | {"rollout/tokens_per_s": 12.0}, {"rollout/tokens": 0.0, "reward/mean": 0.0}) == [
        f"step 1/9  reward 0.500  rollout from the store  {line}",
        f"step 2/9  reward 0.500  rollout tok/s 12  {line}",
        "step 3/9  reward 0.000",
    ]


def test_experts_have_a_line_of_their_own() -> None:  # invariant 2
    load = {"moe/load_cv": 0.3, "moe/load_peak": 1.9, "moe/cold_fraction": 0.0, "moe/load_entropy": 0.97}
    more = {"moe/token_jaccard": 0.6, "moe/op_mi": 0.12, "moe/router_change": 0.0, "moe/layer/0/load_cv": 0.1}
    gate = {"moe/gate": 1.0, "moe/gate_entropy": 0.17}
    line = "experts:  load CV 0.30  peak 1.90  cold 0.00  load entropy 0.970"
    assert shown(load | {"reward/mean": 0.5}, load | more | gate, gate | {"moe/gate": 0.0}, {"reward/mean": 0.5}) == [
        "step 1/9  reward 0.500",
        f"step 1/9  {line}",
        f"step 2/9  {line}  Jaccard 0.60  op MI 0.120  routers moved 0  gate open at entropy 0.170 before the update",
        "step 3/9  experts:  gate closed at entropy 0.170 before the update",
        "step 4/9  reward 0.500",
    ]


def test_the_router_policy_is_told_at_the_start() -> None:
    assert shown(routers="frozen, replayed") == ["routers: frozen, replayed"]
    assert shown() == []


def test_what_is_said_of_a_phase_does_not_end_it() -> None:  # invariant 6
    stream, clock = io.StringIO(), Clock()
    tracker = ConsoleTracker(stream=stream, seconds_between_lines=10.0, clock=clock)
    tracker.start(Path("runs/x"), {"run": {"steps": 9}}, None)
    tracker.phase("warm_start", 100)
    tracker.phase("warm start, step 50: loss 0.4, dev success 0.2")
    clock.now += 11
    tracker.advance(60)
    assert stream.getvalue().splitlines()[1:] == [
        "warm start: 100 to do",
        "warm start, step 50: loss 0.4, dev success 0.2",
        "warm start 60/100",
    ]


def test_durations() -> None:
    assert [duration(x) for x in (0, 59.6, 61, 3600, 7325)] == ["0:00", "1:00", "1:01", "1:00:00", "2:02:05"]
