"""The score cache (``credit/score_cache.py``)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ext.credit.score_cache import CacheCounters, ScoreCache
from megatron_ext.credit.score_plan import ScorePlan, ScoreWeights
from megatron_ext.credit.score_run import execute
from megatron_ext.credit.scoring import ScoreError, ScoreOutputs, ScoreReply, ScoreRequest
from megatron_ext.trajectory.record import TrajectoryBatch
from tests.helpers.records import build, model, random_batch, single, user
from tests.helpers.tiny_scorer import TinyModel, ask, assert_same, random_requests, table

ALL = ScoreOutputs(entropy=True, value=True, topk=2, hidden=(1, 2))


@dataclass
class Scorer:
    """A cache in front of a tiny model, and what each call ran."""

    budget: int = 10_000
    weights: dict[str, ScoreWeights] = field(default_factory=table)
    rows: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.cache, self.model = ScoreCache(self.budget), TinyModel()

    def __call__(self, requests: Sequence[ScoreRequest], batch: TrajectoryBatch) -> tuple[ScoreReply, ...]:
        return self.cache.score(requests, batch, self.weights, self.run)

    def run(self, plan: ScorePlan) -> Sequence[ScoreReply]:
        self.rows.append(plan.num_rows)
        return execute(plan, self.model, tokens_per_microbatch=64)


def batch(response: Sequence[int] = (12, 13)) -> TrajectoryBatch:
    return build([(single([user([10, 11]), model(response), user([14]), model([15, 16])]),)])


def at(weights: Mapping[str, ScoreWeights], version: int) -> dict[str, ScoreWeights]:
    return {**weights, "current": replace(weights["current"], version=version)}


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**31), st.sampled_from([0, 20, 10_000]))
def test_a_cache_never_changes_a_reply(seed: int, budget: int) -> None:
    record, scorer = random_batch(seed % 50), Scorer(budget)
    requests = random_requests(record, seed, 10)
    want = Scorer(0)(requests, record)
    for number in range(3):
        part = requests if number != 1 else requests[::-2]
        for request, reply in zip(part, scorer(part, record), strict=True):
            assert_same(reply, want[requests.index(request)].arrays())
        assert 0 <= scorer.cache.size <= budget
    asked = [r for r in requests if len(r.positions)]
    if budget == 10_000:
        assert scorer.rows[1:] == [0, 0]
    if budget == 0 and asked:
        assert scorer.cache.counters.hits == 0 and scorer.rows[2] > 0


def test_hits_need_no_forward_and_are_counted() -> None:
    scorer, record = Scorer(), batch()
    request = ask(0, None, [2, 3, 5], outputs=ALL, given_ids=[[1, 2]] * 3)
    first = scorer([request], record)[0]
    second = scorer([request], record)[0]
    assert scorer.rows == [1, 0] and scorer.cache.counters == CacheCounters(hits=1, misses=1, forward_tokens=6)
    assert all(second.arrays()[name] is array for name, array in first.arrays().items())
    # logp, entropy, value, 2 x top-2, given, two layers of hidden states
    assert scorer.cache.size == 3 * (3 + 4 + 2 + 2 * 8)


def test_a_part_of_what_was_scored_is_a_hit() -> None:
    scorer, record = Scorer(), batch()
    scorer([ask(0, None, [2, 3], outputs=ALL)], record)
    scorer([ask(0, None, [2, 3]), ask(0, None, [2, 3], outputs=ScoreOutputs(hidden=(2,)))], record)
    assert scorer.rows == [1, 0]
    scorer([ask(0, None, [2, 3], outputs=ScoreOutputs(topk=1))], record)
    scorer([ask(0, None, [2, 3], given_ids=[[1], [1]])], record)
    scorer([ask(0, None, [2])], record)
    scorer([ask(0, [10, 12], [2, 3])], record)
    scorer([ask(0, None, [3])], record)
    assert scorer.rows[2:] == [1, 1, 1, 1, 1]


def test_content_is_what_counts() -> None:
    """The same ids elsewhere are a hit; another response, or context, at the same place is not."""
    scorer = Scorer()
    scorer([ask(0, None, [2, 3])], batch())
    two = build([(single([user([1]), model([2])]), single([user([10, 11]), model([12, 13])]))])
    scorer([ask(1, None, [4, 5]), ask(1, [10, 11], [4, 5])], two)
    scorer([ask(0, None, [2, 3])], batch((12, 99)))
    assert scorer.rows == [1, 0, 1]


def test_skill_free_scores_are_kept_for_the_next_skills() -> None:
    """skill_scaffold: N + M N sequences, then M N for the next M skills."""
    scorer = Scorer()
    record = build([tuple(single([user([10]), model([20 + n])]) for n in range(3))])
    free = [ask(n, None, [2 * n + 1]) for n in range(3)]
    for skills in ((1, 2), (3, 4)):
        scorer([*free, *(ask(n, [10, skill], [2 * n + 1]) for skill in skills for n in range(3))], record)
    assert scorer.rows == [3 + 2 * 3, 2 * 3]


def test_current_is_forgotten_with_its_version_and_others_stay() -> None:
    scorer, record = Scorer(), batch()
    requests = [ask(0, None, [2, 3], name) for name in ("current", "snapshot", "teacher")]
    old = scorer(requests, record)
    scorer.weights = at(scorer.weights, 2)
    new = scorer(requests, record)
    assert scorer.rows == [3, 1] and scorer.cache.size == 6
    assert not np.array_equal(new[0].arrays()["logp"], old[0].arrays()["logp"])
    del scorer.weights["teacher"]
    scorer(requests[:2], record)
    assert scorer.rows[-1] == 0 and scorer.cache.size == 4


def test_a_name_for_the_same_weights_shares_their_scores() -> None:
    scorer, record = Scorer(), batch()
    scorer.weights["opening"] = scorer.weights["current"]
    scorer([ask(0, None, [2, 3])], record)
    scorer([ask(0, None, [2, 3], "opening")], record)
    # The policy moves on; what it was is still called ``opening``.
    scorer.weights = at(scorer.weights, 2)
    scorer([ask(0, None, [2, 3], "opening")], record)
    assert scorer.rows == [1, 0, 0]


def test_what_was_not_used_for_longest_goes_first() -> None:
    scorer, record = Scorer(budget=4), batch()
    a, b, c = (ask(0, [10, n], [2, 3]) for n in range(3))
    scorer([a, b], record)
    scorer([a], record)
    scorer([c], record)  # drops b
    scorer([a], record)
    assert scorer.rows == [2, 0, 1, 0]
    scorer([b], record)
    assert scorer.rows[-1] == 1 and scorer.cache.counters.dropped == 2
    scorer([ask(0, None, [2, 3], outputs=ScoreOutputs(logp=False, hidden=(1,)))], record)
    assert scorer.cache.size == 4 and scorer.cache.counters.dropped == 3  # larger than the budget: not kept


def test_replayed_routing_is_never_kept() -> None:
    scorer = Scorer()
    record = build([(single([user([10, 11]), model([12, 13])]),)], routed=(2, 1))
    for _ in range(2):
        scorer([ask(0, None, [2, 3], replay_routing=True)], record)
    assert scorer.rows == [1, 1] and scorer.cache.size == 0


def test_two_caches_share_nothing() -> None:
    """Kept state belongs to its cache, not to a class or a module (verl 4562)."""
    one, other = Scorer(), Scorer()
    one([ask(0, None, [2, 3])], batch())
    other([ask(0, None, [2, 3])], batch())
    assert other.rows == [1] and other.cache.counters.hits == 0


def test_bad_arguments() -> None:
    with pytest.raises(ScoreError, match="budget -1"):
        ScoreCache(-1)
    with pytest.raises(ScoreError, match="0 replies to a plan of 1 requests"):
        ScoreCache(9).score([ask(0, None, [2])], batch(), table(), lambda plan: ())
