"""A rollout driver in a process of its own over the walk (``worlds.py``), with a script player as engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megatron_ext.rollout.driver_process import DriverSpec
from megatron_ext.rollout.episode import EpisodeLimits
from tests.helpers.worlds import WALK


def spec(folder: Path, **changes: Any) -> DriverSpec:
    """What such a driver is told; ``changes`` are fields of ``DriverSpec``."""
    fields: dict[str, Any] = {
        "environments": {"walk": WALK},
        "harness": {"_target_": "megatron_ext.harness.text.TextHarness"},
        "rewards": {"success": {"_target_": "megatron_ext.rewards.outcome.Success", "weight": 2.0}},
        "limits": EpisodeLimits(max_turns=6, max_context=120, max_new_tokens=16),
        "concurrency": 8,
        "env_workers": 1,
        "env_deadline_s": 60.0,
        "engine_deadline_s": 60.0,
        "run_seed": 1,
        "store": folder / "store",
        "logs": folder / "logs",
    }
    return DriverSpec(**(fields | changes))


def number_of(session: str) -> tuple[int, int]:
    """(group, sample) of a coordinator's episode id such as ``g0000012/3``."""
    group, _, sample = session.partition("/")
    return int(group[1:]), int(sample)


def walk_on(session: str, turn: int) -> str:
    """Always on; sessions with /hang/ or /raise/ in their name do that."""
    return "hang" if "/hang/" in session else "raise" if "/raise/" in session else "go"


def first_sample_stops(session: str, turn: int) -> str:
    """Every group has one failure (sample 0) and successes; groups of an even number take two turns longer, so that
    they finish after the odd one that was ordered behind them."""
    group, sample = number_of(session)
    if group % 2 == 0 and turn < 2:
        return "talk 1"
    return "stop" if sample == 0 else "go"


def odd_groups_are_constant(session: str, turn: int) -> str:
    """Groups of an odd number always succeed, the others have one failure."""
    group, sample = number_of(session)
    return "stop" if sample == 0 and group % 2 == 0 else "go"


def all_groups_are_constant(session: str, turn: int) -> str:
    """Groups of an odd number always succeed, the others never."""
    return "go" if number_of(session)[0] % 2 else "stop"


def trouble_now_and_then(session: str, turn: int) -> str:
    """Group 1: all environments fail. Group 2: one of them, one malformed turn and one action not understood."""
    group, sample = number_of(session)
    if group == 1 or (group, sample) == (2, 2):
        return "raise"
    if group == 2 and sample == 1 and turn < 2:
        return ("", "fly")[turn]
    return "stop" if sample == 0 else "go"


def by_task(session: str, turn: int) -> str:
    """For evaluations (``eval/walk/<split>/<n>/greedy/0``): even tasks are solved greedily; when sampled, sample 1.
    Task 5 fails greedily, and in sample 2."""
    parts = session.split("/")
    task, mode, sample = int(parts[3]), parts[4], int(parts[5])
    if mode == "sampled":
        return "raise" if (task, sample) == (5, 2) else "go" if sample == 1 else "stop"
    return "raise" if task == 5 else "go" if task % 2 == 0 else "stop"
