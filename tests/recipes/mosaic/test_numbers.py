"""Mosaic: the worked numbers of its specification, and the invariants of ``recipes/mosaic/credit.py``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from megatron_ext.credit.base import Baseline
from megatron_ext.credit.conservation import EditReport
from megatron_ext.credit.levels import trained_tokens
from megatron_ext.credit.pipeline import Pipeline, open_view
from megatron_ext.credit.protocol import CreditError, CreditView
from megatron_ext.credit.scoring import ScoreReply
from megatron_ext.losses.aggregation import token_weights
from megatron_ext.trajectory.record import SessionKind, TrajectoryBatch
from recipes.mosaic.credit import SessionCredit
from recipes.mosaic.gain import gains, places
from tests.helpers.credit_contract import canned, run_edits
from tests.helpers.records import (
    Group,
    Session,
    Traj,
    build,
    described_batches,
    model,
    random_groups,
    user,
    with_answers,
)

NORMAL, COMPRESS, SUBAGENT = SessionKind.NORMAL, SessionKind.COMPRESS, SessionKind.SUBAGENT
RANK = SessionCredit(eta=0.0)


def rollout(sessions: int, reward: float) -> Traj:
    """So many sessions of one exchange each, one trained token in all (in the first)."""
    one: Session = ((user([0]), model([1])),)
    idle: Session = ((user([0]), model([1], mask=False)),)
    return Traj((one, *[idle] * (sessions - 1)), reward=reward, success=reward > 0)


def per_trajectory(edit: SessionCredit, group: Group) -> NDArray[np.float64]:
    batch = build([group])
    view, _ = run_edits([("mosaic", edit)], batch, baseline=Baseline(eps=0.0))
    return view.advantage[trained_tokens(batch)]


FIVE: Group = tuple(rollout(n, r) for n, r in ((2, 1), (4, 1), (3, 1), (1, 0), (5, 0)))


def test_ranks_of_the_table() -> None:
    got = per_trajectory(RANK, FIVE)
    np.testing.assert_allclose(got, [1.020621, 0.612372, 0.816497, -1.530931, -0.918559], atol=1e-6)
    assert got.sum() == pytest.approx(0.0, abs=1e-12)
    plain = per_trajectory(SessionCredit(beta=0.0, eta=0.0), FIVE)
    np.testing.assert_allclose(plain, [0.816497] * 3 + [-1.224745] * 2, atol=1e-6)


def test_ties_of_the_table() -> None:
    group = tuple(rollout(n, r) for n, r in ((2, 1), (2, 1), (4, 1), (1, 0)))
    plain = per_trajectory(SessionCredit(beta=0.0, eta=0.0), group)
    factor = per_trajectory(RANK, group) / plain
    np.testing.assert_allclose(factor, 1 + 0.5 * np.array([0.25, 0.25, -0.5, 0.0]))


def test_failures_relax_or_harden() -> None:
    relaxed = per_trajectory(RANK, FIVE)
    hardened = per_trajectory(SessionCredit(eta=0.0, fail_direction="harden"), FIVE)
    np.testing.assert_allclose(hardened[:3], relaxed[:3])
    np.testing.assert_allclose(hardened[3:], relaxed[4:2:-1])
    assert relaxed[4] > relaxed[3]  # many sessions make a failure smaller


@settings(max_examples=25)
@given(
    sizes=st.lists(st.tuples(st.integers(1, 6), st.booleans()), min_size=2, max_size=9),
    beta=st.floats(0.0, 1.99),
    direction=st.sampled_from(["relax", "harden"]),
)
def test_the_rank_adds_no_advantage_to_an_outcome(
    sizes: list[tuple[int, bool]], beta: float, direction: str
) -> None:  # invariant 1
    group = tuple(rollout(n, float(won)) for n, won in sizes)
    won = np.array([won for _, won in sizes])
    plain = per_trajectory(SessionCredit(beta=0.0, eta=0.0), group)
    got = per_trajectory(SessionCredit(beta=beta, eta=0.0, fail_direction=direction), group)
    for outcome in (won, ~won):
        assert (got - plain)[outcome].sum() == pytest.approx(0.0, abs=1e-9)
    assert np.array_equal(np.sign(got), np.sign(plain))


def test_one_outcome_class_is_not_another() -> None:
    """A lone success has no rank, however many sessions the failures have."""
    got = per_trajectory(RANK, tuple(rollout(n, r) for n, r in ((9, 1), (1, 0), (1, 0))))
    np.testing.assert_allclose(got, per_trajectory(SessionCredit(beta=0.0, eta=0.0), build_group(9)))


def build_group(sessions: int) -> Group:
    return tuple(rollout(n, r) for n, r in ((sessions, 1), (1, 0), (1, 0)))


# -- sessions ----------------------------------------------------------------------------------------------------------
KINDS = (NORMAL, COMPRESS, NORMAL, NORMAL, COMPRESS, SUBAGENT)
GAIN = (0.5, -0.1, 0.9, 0.1, 0.1, 0.3)


def z_of(edit: SessionCredit, kinds: Sequence[SessionKind], gain: Sequence[float]) -> NDArray[np.float64]:
    """z of sessions with these gains, in one group."""
    one: Session = ((user([0]), model([1])),)
    batch = build([(Traj((one,) * len(kinds), kinds=tuple(kinds)),)])
    at = places(batch)
    at = type(at)(at.segment, at.cut, at.trajectory, np.zeros_like(at.before), np.zeros_like(at.before), at.inside)
    view = open_view(batch)
    reduced = {"gain/score": np.array(gain), "gain/key": edit._types(view)}
    return edit._normalized(view, at, np.array(gain), reduced)


def test_normalisation_by_type_of_the_table() -> None:
    z = z_of(SessionCredit(eps=0.0), KINDS, GAIN)
    np.testing.assert_allclose(z, [0, -1, 1.224745, -1.224745, 1, 0], atol=1e-6)
    pooled = z_of(SessionCredit(eps=0.0, normalize="pooled"), KINDS, GAIN)
    np.testing.assert_allclose(pooled, (np.array(GAIN) - np.mean(GAIN)) / np.std(GAIN), atol=1e-12)


def test_a_type_alone_or_of_equal_gains_gives_nothing() -> None:  # invariant 2
    assert not z_of(SessionCredit(), (NORMAL, SUBAGENT), (0.3, 0.9)).any()
    assert not z_of(SessionCredit(), (NORMAL, NORMAL), (0.3, 0.3)).any()


def agents(seed: int, groups: int = 5) -> TrajectoryBatch:
    return build(with_answers(random_groups(seed, groups=groups, sessions=(1, 4), untrainable=0.0), seed))


@pytest.mark.parametrize("seed", range(3))
def test_z_sums_to_zero_by_type(seed: int) -> None:  # invariant 2
    batch = agents(seed)
    edit = SessionCredit(fallback="zero", eps=0.0)
    view = open_view(batch)
    requests = edit.requests(view)
    view = CreditView(batch, view.reward, view.advantage, replies=canned(requests, batch))
    at = places(batch)
    z = edit._normalized(view, at, gains(at, view.replies, "log"), {})
    key = batch.trajectory_group()[batch.session_trajectory()] * 3 + batch.session_kind
    np.testing.assert_allclose(np.bincount(key, weights=z), 0.0, atol=1e-9)
    assert np.any(z != 0.0) and not z[~at.measured].any()


def test_a_lone_session_is_measured_against_the_batch() -> None:
    one: Session = ((user([0]), model([1])),)
    alone: list[Group] = [(Traj((one,), kinds=(NORMAL,), answer=(i,)),) for i in range(3)]
    batch = build(alone)
    before, after = (-3, -3, -3), (-1, -2, -2.5)  # places come by what they are: openings, then ends
    replies = {"m": tuple(ScoreReply(logp=np.array([x], dtype=np.float32)) for x in (*before, *after))}
    for fallback, want in (("zero", [0, 0, 0]), ("batch", [5 / 6, -1 / 6, -4 / 6])):
        edit = SessionCredit(fallback=fallback, eta=1.0, eps=0.0)
        view, _ = Pipeline([("m", edit)]).run(open_view(batch), replies=replies)
        got = view.advantage[trained_tokens(batch)]
        spread = np.std([2, 1, 0.5])
        np.testing.assert_allclose(got, np.array(want) / spread, atol=1e-6)


def test_nothing_is_asked_without_eta_or_answers() -> None:  # invariant 3
    batch = agents(1)
    assert SessionCredit().requests(open_view(batch)) and not RANK.requests(open_view(batch))
    silent = build(random_groups(1))
    assert not SessionCredit().requests(open_view(silent))
    with_gain, _ = run_edits([("mosaic", SessionCredit())], silent)
    without, _ = run_edits([("mosaic", RANK)], silent)
    np.testing.assert_array_equal(with_gain.advantage, without.advantage)


def test_answers_of_another_batch_are_refused() -> None:
    with pytest.raises(CreditError, match="1 answer likelihoods for"):
        view = open_view(agents(1))
        reply = ScoreReply(logp=np.zeros(1, dtype=np.float32))
        SessionCredit().local_stats(CreditView(view.batch, view.reward, view.advantage, replies=(reply,)))


# -- weights of tokens -------------------------------------------------------------------------------------------------
def test_splitting_of_the_table() -> None:
    """Tokens [1, 2, 3] + [4, 5] weigh as one trajectory; the mean by session is the mistake."""
    joined = Traj((((user([0]), model([1, 2, 3]), model([4, 5])),),))
    cut = Traj((((user([0]), model([1, 2, 3])),), ((user([0]), model([4, 5])),)))

    def mean(trajectory: Traj, mode: str) -> float:
        batch = build([(trajectory,)])
        return float(token_weights(batch, mode) @ batch.ids)

    assert mean(joined, "trajectory_mean") == pytest.approx(3.0)
    assert mean(cut, "trajectory_mean") == pytest.approx(3.0)
    assert mean(joined, "session_mean") == pytest.approx(3.0)
    assert mean(cut, "session_mean") == pytest.approx(3.25)


@settings(max_examples=15)
@given(groups=described_batches())
def test_sessions_of_a_trajectory_share_its_weight(groups: list[Group]) -> None:
    batch = build(groups)
    weight = np.bincount(batch.token_trajectory(), weights=token_weights(batch, "trajectory_mean"))
    filled = weight > 0
    np.testing.assert_allclose(weight[filled], 1 / max(int(filled.sum()), 1))


# -- counters ----------------------------------------------------------------------------------------------------------
def seen(group: Group, edit: SessionCredit) -> Mapping[str, float]:
    report: EditReport = run_edits([("mosaic", edit)], build([group]))[1][0]
    return report.counters


def test_counters_show_the_weight_by_session() -> None:
    counters = seen(FIVE, RANK)
    assert [counters[f"mean/weight_success_{n}"] for n in ("2", "3", "4_up")] == [1.25, 1.0, 0.75]
    assert counters["mean/weight_failure_1"] == 1.25 and counters["mean/weight_failure_4_up"] == 0.75
    assert "mean/weight_success_1" not in counters  # no success had one session
    assert counters["mean/sessions_per_success"] == 3.0 and counters["mean/sessions_per_failure"] == 3.0
    assert counters["count/sessions_subagent"] == 10 and counters["count/tokens_normal"] == 5
    assert counters["share/measured"] == 0.0


def test_counters_show_the_gain_by_type() -> None:
    batch = agents(4, groups=12)
    report = run_edits([("mosaic", SessionCredit())], batch)[1][0]
    assert 0 < report.counters["share/measured"] < 1
    assert {f"mean/gain_{kind}" for kind in ("normal", "compress", "subagent")} <= set(report.counters)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"beta": 2.0}, "beta 2.0: must be at least 0, and below 2"),
        ({"fail_direction": "soft"}, "fail_direction 'soft': must be one of relax, harden"),
        ({"space": "bits"}, "space 'bits': must be one of log, prob"),
        ({"normalize": "none"}, "normalize 'none': must be one of type, pooled"),
        ({"fallback": "one"}, "fallback 'one': must be one of batch, zero"),
        ({"max_tokens": -1}, "max_tokens -1"),
    ],
)
def test_bad_arguments(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SessionCredit(**arguments)
