"""The step agreement's numbered invariants."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ext.config.schema import FilterConfig
from megatron_ext.rollout.agreement import CONSTANT, UNTRAINABLE, Agreement, agree, assign, permute_rewards
from megatron_ext.rollout.events import GroupMeta
from megatron_ext.trajectory.builder import TrajectoryBuilder, build_group
from megatron_ext.trajectory.record import Status


def group(
    name: str,
    rewards: list[float],
    *,
    status: list[int] | None = None,
    trained: list[int] | None = None,
    tokens: int = 10,
) -> GroupMeta:
    n = len(rewards)
    return GroupMeta(
        name,
        name,
        (tokens,) * n,
        tuple(trained or [3] * n),
        (1,) * n,
        tuple(rewards),
        tuple(r > 0 for r in rewards),
        tuple(status or [0] * n),
        1,
        1,
    )


MIXED = [0.0, 1.0]


def run(
    finished: list[GroupMeta], tasks: int, *, draws: int | None = None, in_flight: int = 0, own: bool = False,
    filters: FilterConfig | None = None, ranks: int = 1,
) -> Agreement:  # fmt: skip
    return agree(
        finished,
        tasks_per_step=tasks,
        filters=filters or FilterConfig(),
        own_signal=own,
        draws_so_far=len(finished) + in_flight if draws is None else draws,
        in_flight=in_flight,
        ranks=ranks,
    )


def test_order_filtering_and_what_is_left_for_later() -> None:
    finished = [
        group("a", [1.0, 1.0]),
        group("b", MIXED),
        group("c", MIXED, status=[3, 3]),
        group("d", MIXED),
        group("e", [0.0, 0.0]),
    ]
    result = run(finished, 2)
    assert result.train == ("b", "d") and result.missing == 0 and result.draw == 0 and not result.exhausted
    assert result.filtered == (("a", CONSTANT), ("c", UNTRAINABLE))  # e stands behind the last one needed


def test_masked_trajectories_do_not_vote() -> None:
    """NeMo-RL 4160: an aborted trajectory's reward must not make a constant group look varied."""
    assert run([group("a", [1.0, 1.0, 0.0], status=[0, 0, 6])], 1).filtered == (("a", CONSTANT),)
    assert run([group("a", [1.0, 1.0, 0.0], trained=[3, 3, 0])], 1).filtered == (("a", CONSTANT),)
    assert run([group("a", [1.0, 0.0, 0.0], status=[0, 0, 6])], 1).train == ("a",)
    assert run([group("a", [1.0])], 1).filtered == (("a", CONSTANT),)


def test_float_noise_is_constant() -> None:
    assert run([group("a", [0.1 + 0.2, 0.3])], 1).train == ()
    assert run([group("a", [0.3, 0.31])], 1).train == ("a",)
    assert run([group("a", [0.3, 0.31])], 1, filters=FilterConfig(tolerance=0.1)).train == ()


def test_own_signal_and_the_switch_keep_constant_groups_but_not_untrainable_ones() -> None:
    finished = [group("a", [1.0, 1.0]), group("b", MIXED, status=[4, 5])]
    for result in (run(finished, 2, own=True), run(finished, 2, filters=FilterConfig(constant_groups=False))):
        assert result.train == ("a",) and result.filtered == (("b", UNTRAINABLE),) and result.missing == 1


def test_refill_stops_at_the_draw_limit() -> None:
    filters = FilterConfig(draw_limit=2.5)
    finished = [group("a", MIXED), group("b", [0.0, 0.0])]
    result = run(finished, 2, filters=filters)
    assert (result.missing, result.draw, result.exhausted) == (1, 1, False)
    waiting = run(finished, 2, filters=filters, in_flight=1)
    assert (waiting.missing, waiting.draw, waiting.exhausted) == (1, 0, False)
    last = run(finished, 2, filters=filters, draws=5)
    assert (last.missing, last.draw, last.exhausted) == (1, 0, True) and last.train == ("a",)
    assert run(finished, 2, filters=filters, draws=5, in_flight=1).exhausted is False
    assert run([], 4, filters=FilterConfig(draw_limit=0.5)).draw == 4  # a step may always draw what it trains
    with pytest.raises(ValueError, match="tasks_per_step"):
        run([], 0)


@settings(max_examples=60)
@given(st.lists(st.integers(1, 1000), max_size=40), st.integers(1, 6))
def test_homes_are_a_balanced_partition(tokens: list[int], ranks: int) -> None:
    train = [group(f"g{i}", [0.0], tokens=n) for i, n in enumerate(tokens)]
    homes = assign(train, ranks)
    assert len(homes) == ranks
    assert sorted(g for home in homes for g in home) == sorted(m.group_id for m in train)
    index = {m.group_id: i for i, m in enumerate(train)}
    loads = [sum(tokens[index[g]] for g in home) for home in homes]
    # The longest-first rule: no rank is ahead of another by more than one group.
    assert max(loads) - min(loads) <= max(tokens, default=0)
    assert all([index[g] for g in home] == sorted(index[g] for g in home) for home in homes)
    assert homes == assign(train, ranks)


def test_permuted_rewards_are_the_same_rewards_elsewhere() -> None:
    rng = np.random.default_rng(0)
    finished = [group(f"g{i}", rng.random(4).tolist(), status=[0, 0, 3, 0], trained=[1, 1, 1, 0]) for i in range(8)]
    permuted = permute_rewards(finished, seed=1, step=5)
    for before, after in zip(finished, permuted, strict=True):
        assert after.rewards[2:] == before.rewards[2:]
        assert (after.success, after.tokens, after.group_id) == (before.success, before.tokens, before.group_id)
    pool = sorted(r for m in finished for r in m.rewards[:2])
    assert sorted(r for m in permuted for r in m.rewards[:2]) == pool
    moved = [a.rewards[:2] != b.rewards[:2] for a, b in zip(finished, permuted, strict=True)]
    assert sum(moved) >= 6
    assert permuted == permute_rewards(finished, seed=1, step=5)
    assert permuted != permute_rewards(finished, seed=1, step=6) and permuted != permute_rewards(
        finished, seed=2, step=5
    )
    assert permute_rewards([], 0, 0) == []


def test_metadata_tells_what_the_batch_holds() -> None:
    finished = []
    for sample, status in enumerate((Status.DONE, Status.ENV_ERROR)):
        b = TrajectoryBuilder(f"g/{sample}", sample, "h")
        s = b.open_session()
        b.add_context(s, [1, 2])
        for turn in range(sample + 1):
            b.add_model_turn(s, [3, 4], [-1, -1], [sample + turn + 1] * 2)
        finished.append(b.finish(0.5 * sample, {}, bool(sample), status))
    m = GroupMeta.from_batch(build_group("g", "t", finished), "there")
    assert m == GroupMeta("g", "there", (4, 6), (2, 0), (1, 2), (0.0, 0.5), (False, True), (0, 3), 1, 3)
    assert m.trainable == (True, False) and m.total_tokens == 10
    with pytest.raises(ValueError, match="group g: rewards has 1 entries, tokens 2"):
        GroupMeta("g", "", (1, 2), (1, 1), (1, 1), (0.0,), (True, True), (0, 0), 0, 0)
