"""Recorded calls of made-up rollouts, their merge, and what any merge must be, from the calls alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from hypothesis import strategies as st
from numpy.typing import ArrayLike

from megatron_ext.trajectory.calls import Call, MessageSpan
from megatron_ext.trajectory.merge import Outcome, merge_calls
from megatron_ext.trajectory.merge_report import Merged, Start
from megatron_ext.trajectory.record import Role, TrajectoryBatch
from megatron_ext.trajectory.version import pack


def call(order: int, prompt: ArrayLike, ids: ArrayLike, **values: Any) -> Call:
    """A call whose log-probs are told apart by order and position."""
    sampled = np.array(ids, np.int32)
    logp = values.pop("logp", -(order + 1) / 8 - np.arange(len(sampled)) / 1024)
    versions = values.pop("versions", [pack(0, 1)] * len(sampled))
    return Call(order, np.array(prompt, np.int32), sampled, np.array(logp), np.array(versions), **values)


def merge(calls: Sequence[Call], outcome: Outcome | None = None, **values: Any) -> Merged:
    return merge_calls(calls, trajectory_id="t", sample=0, harness_id="h", outcome=outcome or Outcome(), **values)


def segments(batch: TrajectoryBatch) -> list[tuple[list[int], list[int]]]:
    """(ids, mask) of each segment."""
    cuts = batch.segment_tokens[1:-1]
    masks = np.split(batch.loss_mask.astype(int), cuts)
    return [(a.tolist(), b.tolist()) for a, b in zip(np.split(batch.ids, cuts), masks, strict=True)]


def starts(merged: Merged) -> list[Start]:
    return [placement.start for placement in merged.placements]


def spelled(ids: Sequence[int]) -> str:
    """A toy tokenizer's text: 45 is what 4 and 5 spell one by one."""
    return "".join(str(i) + ("." if i not in (4,) else "") for i in ids)


def check_exact(calls: Sequence[Call], merged: Merged) -> None:
    """Invariants 1 and 2, from the calls alone."""
    batch = merged.finished.batch
    by_order = {c.order: c for c in calls}
    where = {int(number): n for n, number in enumerate(batch.turn_number)}
    done: dict[int, int] = {}
    for placement in merged.placements:
        c = by_order[placement.order]
        turn = where[placement.turn]
        begin = int(batch.turn_start[turn]) + done.get(turn, 0)
        span = slice(begin, begin + len(c.ids))
        done[turn] = done.get(turn, 0) + len(c.ids)
        segment = int(batch.session_segments[placement.session]) + placement.segment
        first = int(batch.segment_tokens[segment])
        assert batch.turn_segment()[turn] == segment
        assert batch.ids[first:begin].tolist() == c.prompt_ids.tolist()
        assert batch.ids[span].tolist() == c.ids.tolist()
        assert batch.rollout_logp[span].tolist() == c.logp.tolist()
        assert batch.version[span].tolist() == c.versions.tolist()
        assert batch.loss_mask[span].all()
    models = np.flatnonzero(batch.turn_role == Role.MODEL)
    assert sorted(done) == models.tolist()
    assert all(done[int(n)] == batch.turn_end[n] - batch.turn_start[n] for n in models)
    assert (
        batch.loss_mask.sum()
        == merged.stats.sampled_tokens
        == sum(len(by_order[p.order].ids) for p in merged.placements)
    )


SAMPLED, OBSERVED, CLOSED = 3, 3, 4  # ids 0..2 are sampled; an observation is 3, any of 0..2, 4


def next_prompt(rng: np.random.Generator, base: Call) -> tuple[np.ndarray, tuple[MessageSpan, ...]]:
    """What a harness may send after ``base``: its history whole, cut short or altered, and then an observation; or the
    history alone (an answer to resume, a branch inside it)."""
    whole = np.concatenate([base.prompt_ids, base.ids])
    observed = rng.random() < 0.7
    if rng.random() < 0.3:
        shortest = 1 if observed else len(base.prompt_ids)
        whole = whole[: int(rng.integers(shortest, len(whole) + 1))].copy()
        if whole[-1] < SAMPLED:
            whole[-1] = rng.integers(0, SAMPLED)
    if not observed:
        return whole, ()
    said = rng.integers(0, SAMPLED, rng.integers(0, 3))
    message = MessageSpan(Role.TOOL, len(whole), len(whole) + 1 + len(said))
    return np.concatenate([whole, [OBSERVED], said, [CLOSED]]), (message,)


@st.composite
def rollouts(draw: st.DrawFn) -> list[Call]:
    """Random trees of calls over few ids, so that forks, drifts, resumed and equal answers come by themselves."""
    size = draw(st.integers(0, 12))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    with_routing = bool(rng.random() < 0.5)
    calls: list[Call] = []
    for order in range(size):
        prompt = np.append(rng.integers(0, SAMPLED, rng.integers(1, 3)), CLOSED)
        messages: tuple[MessageSpan, ...] = ()
        tag = str(rng.choice(["", "", "a"]))
        if calls and rng.random() < 0.85:
            base = calls[int(rng.integers(len(calls)))]
            prompt, messages = next_prompt(rng, base)
            tag = base.session if rng.random() < 0.9 else tag
        ids = rng.integers(0, SAMPLED, rng.integers(0, 4))
        routed, routed_from = None, 0
        if with_routing and len(ids):
            routed_from = int(rng.choice([0, len(prompt) - 1]))
            routed = np.arange(routed_from, len(prompt) + len(ids) - 1, dtype=np.uint8)[:, None, None]
        calls.append(
            call(
                order,
                prompt,
                ids,
                versions=4 * order + np.sort(rng.integers(0, 3, len(ids))),  # a call may see a weight update
                finish=str(rng.choice(["stop", "stop", "abort", "length"])),
                request_id=f"r{order}",
                session=tag,
                messages=messages,
                routed=routed,
                routed_from=routed_from,
                reward=float(rng.integers(0, 3)),
                labels={"stage": int(rng.integers(0, 3))},
            )
        )
    return calls
