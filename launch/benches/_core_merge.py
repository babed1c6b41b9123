"""Token-exact merge of one rollout: seconds, from the arrays of its calls to the checked record.

Three rollouts of 128 calls: a dialogue that grows to 64k tokens; one whose every prompt has 64k tokens; and 128
branches of 64k tokens that agree in three quarters, so that the record holds 8.4 million tokens.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median

import numpy as np
from numpy.typing import NDArray

from launch.bench import table
from launch.measurement import Measurement, Report
from megatron_ext.trajectory.calls import Call
from megatron_ext.trajectory.merge import Outcome, merge_calls
from megatron_ext.trajectory.merge_report import Merged

BAR = 1.0
TURNS, CONTEXT, SAMPLED, REPEATS = 128, 65_536, 256, 5

Raw = tuple[NDArray[np.int32], NDArray[np.int32]]


def dialogue(turns: int, first: int, step: int, sampled: int, seed: int = 0) -> list[Raw]:
    """Prompts and answers of a dialogue that starts with ``first`` tokens and grows by ``step`` a turn."""
    rng = np.random.default_rng(seed)
    history = rng.integers(0, 150_000, first + turns * step, dtype=np.int32)
    ends = [first + turn * step for turn in range(turns)]
    return [(history[:end].copy(), history[end : end + sampled].copy()) for end in ends]


def branches(turns: int, length: int, shared: int, sampled: int, seed: int = 0) -> list[Raw]:
    """Prompts of ``length`` tokens that agree in the first ``shared``."""
    rng = np.random.default_rng(seed)
    trunk = rng.integers(0, 150_000, shared, dtype=np.int32)
    made = []
    for _ in range(turns):
        own = rng.integers(0, 150_000, length - shared + sampled, dtype=np.int32)
        made.append((np.concatenate([trunk, own[: length - shared]]), own[length - shared :]))
    return made


def merge(raw: Sequence[Raw]) -> Merged:
    calls = [
        Call(
            order,
            prompt,
            ids,
            np.full(len(ids), -1.0, dtype=np.float32),
            np.zeros(len(ids), dtype=np.int64),
            request_id=f"r{order}",
        )
        for order, (prompt, ids) in enumerate(raw)
    ]
    return merge_calls(calls, trajectory_id="bench", sample=0, harness_id="bench", outcome=Outcome())


def seconds(work: Callable[[], Merged]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def run(report: Report) -> None:
    step = CONTEXT // TURNS
    cases = {
        "": dialogue(TURNS, CONTEXT, step, SAMPLED),
        "_growing": dialogue(TURNS, step - SAMPLED, step, SAMPLED),
        "_branches": branches(TURNS, CONTEXT, CONTEXT * 3 // 4, SAMPLED),
        "_half": dialogue(TURNS // 2, CONTEXT, step, SAMPLED),
    }
    taken: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(REPEATS):
        for name, raw in cases.items():
            taken[name].append(seconds(partial(merge, raw)))
    tokens = {name: sum(len(p) + len(a) for p, a in raw) for name, raw in cases.items()}
    for name, what in (
        ("", f"every prompt {CONTEXT} tokens or more"),
        ("_growing", f"one dialogue that grows to {CONTEXT} tokens"),
        ("_branches", f"prompts of {CONTEXT} tokens, three quarters shared, nothing merges"),
    ):
        size = f"{TURNS} calls, {what}; {tokens[name] / 1e6:.1f}M tokens sent"
        report(Measurement(f"merge_seconds{name}", median(taken[name]), "s", BAR, "lower", size))
    each = {name: min(taken[name]) / tokens[name] for name in cases}
    size = f"{TURNS} calls over {TURNS // 2} (1 = linear)"
    report(Measurement("merge_linearity", each[""] / each["_half"], "x time a token", None, "lower", size))


if __name__ == "__main__":
    rows: list[Measurement] = []
    run(rows.append)
    print(table(rows))
