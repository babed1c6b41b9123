"""Score requests and replies (``credit/scoring.py``): what is refused, what a reply must be, and the numbers made of
replies."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from megatron_ext.credit.scoring import (
    ScoreError,
    ScoreOutputs,
    ScoreReply,
    ScoreRequest,
    answer_likelihood,
    gap,
    token_scores,
)
from tests.helpers.tiny_scorer import ask, hint

AT = np.array([3, 5, 6])


def reply(*logp: float) -> ScoreReply:
    return ScoreReply(logp=np.array(logp, dtype=np.float32))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"positions": [5, 3]}, "positions must rise"),
        ({"positions": [3, 3]}, "positions must rise"),
        ({"positions": [-1, 3]}, "positions: -1 is negative"),
        ({"positions": [1.0, 2.0]}, "positions: expected 1-dimensional integers, got float64"),
        ({"segment": -1}, "segment -1"),
        ({"context_ids": [[1, 2]]}, "context_ids: expected 1-dimensional integers"),
        ({"context_ids": [-4]}, "context_ids: -4 is negative"),
        ({"start": 2}, "start is where the record goes on after context_ids"),
        ({"cut": 4}, "cut is where answer_ids follow"),
        ({"answer_ids": [1, 2, 3]}, "positions reach 6, the answer has 3 ids"),
        ({"given_ids": [[1], [2]]}, "given_ids .2, 1. for 3 positions"),
        ({"inserts": (hint(4, [1]), hint(3, [1]))}, "inserts must rise"),
        ({"replay_routing": True, "context_ids": [1]}, "another context routes differently"),
        ({"outputs": ScoreOutputs(logp=False)}, "wants no output"),
    ],
)
def test_bad_requests_are_one_line(values: dict[str, Any], message: str) -> None:
    good: dict[str, Any] = {"segment": 0, "context_ids": None, "positions": AT}
    ScoreRequest(**good)
    with pytest.raises(ScoreError, match=message) as error:
        ScoreRequest(**(good | values))
    assert "\n" not in str(error.value)


def test_a_request_holds_its_own_read_only_arrays() -> None:
    context, positions = np.array([1, 2]), np.array([3, 5])
    request = ask(0, context, positions)
    context[0] = positions[0] = 4
    assert request.context_ids is not None
    assert request.context_ids.tolist() == [1, 2] and request.positions.tolist() == [3, 5]
    assert (request.context_ids.dtype, request.positions.dtype) == (np.int32, np.int64)
    with pytest.raises(ValueError, match="read-only"):
        request.context_ids[0] = 5


def test_outputs() -> None:
    with pytest.raises(ScoreError, match="topk -1"):
        ScoreOutputs(topk=-1)
    with pytest.raises(ScoreError, match="rising"):
        ScoreOutputs(hidden=(2, 1))
    both = ScoreOutputs(topk=2, hidden=(1,)).union(ScoreOutputs(logp=False, entropy=True, topk=1, hidden=(0, 1)))
    assert both == ScoreOutputs(entropy=True, topk=2, hidden=(0, 1))


def test_likelihood_asks_for_every_id_of_the_answer() -> None:
    request = ScoreRequest.likelihood(2, [7, 8, 9], cut=4)
    assert request.positions.tolist() == [0, 1, 2] and request.cut == 4
    assert not len(ScoreRequest.likelihood(0, []).positions)


def full(**other: Any) -> ScoreReply:
    values: dict[str, Any] = {
        "logp": np.array([-1, -2, -3], dtype=np.float32),
        "topk_ids": np.array([[1, 2]] * 3, dtype=np.int32),
        "topk_logp": np.array([[-0.5, -1.5]] * 3, dtype=np.float32),
        "hidden": {1: np.zeros((3, 4), dtype=np.float32)},
    }
    return ScoreReply(**{name: value for name, value in (values | other).items() if value is not None})


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"logp": None}, "reply holds .* the request wants"),
        ({"entropy": np.zeros(3)}, "reply holds"),
        ({"logp": np.zeros(2)}, "logp is .2,., expected .3,."),
        ({"logp": np.array([-1.0, np.nan, 0.0])}, "logp is not finite at position 5"),
        ({"logp": np.array([-1.0, 0.5, 0.0])}, "logp reaches 0.5"),
        ({"topk_logp": np.array([[-2.0, -1.0]] * 3)}, "must fall"),
        ({"topk_ids": np.zeros((3, 1), dtype=np.int32)}, "topk_ids is .3, 1., expected .3, 2."),
        ({"hidden": {1: np.zeros((2, 4))}}, "hidden.1. is .2, 4., expected .3, 4."),
        ({"hidden": {1: np.zeros(3)}}, "hidden.1. is .3,., expected .3, -1."),
        ({"hidden": {1: np.full((3, 4), np.inf)}}, "hidden.1. is not finite at position 3"),
        ({"hidden": {2: np.zeros((3, 4))}}, "reply holds"),
    ],
)
def test_a_reply_is_checked_against_its_request(other: dict[str, Any], message: str) -> None:
    request = ask(0, None, AT, "current", ScoreOutputs(topk=2, hidden=(1,)))
    full().check(request)
    with pytest.raises(ScoreError, match=message):
        full(**other).check(request)


def test_replies_are_read_only() -> None:
    with pytest.raises(ValueError, match="read-only"):
        full().arrays()["logp"][0] = 0


def test_gap_numbers() -> None:
    # Multi-teacher distillation (sail): a = log pi_T - log pi_S.
    np.testing.assert_allclose(gap(reply(-0.5, -1.2, -0.1), reply(-0.9, -0.7, -0.1)), [0.4, -0.5, 0], atol=1e-6)
    assert not gap(reply(-0.5, -1.2), reply(-0.5, -1.2)).any()
    with pytest.raises(ScoreError, match=r"gap between \(1,\) and \(2,\)"):
        gap(reply(-1), reply(-1, -1))
    with pytest.raises(ScoreError, match="holds no logp"):
        gap(ScoreReply(entropy=np.zeros(1, dtype=np.float32)), reply(-1))


def test_hindsight_weights_from_gaps() -> None:
    """trial: w_k = m_k N / sum n_j m_j, from the gap of each turn under its own outcome."""
    deltas: list[list[float]] = [[0.2, -0.1], [1, 0.6, 0.8, -0.4], [0, 0]]
    gaps = [gap(reply(*[d - 2 for d in turn]), reply(*[-2.0] * len(turn))) for turn in deltas]
    size = np.array([len(g) for g in gaps])
    m = np.array([np.abs(g).mean() for g in gaps])
    np.testing.assert_allclose(m * size.sum() / (size @ m), [0.387097, 1.806452, 0], atol=1e-6)


def test_answer_likelihood_numbers() -> None:
    """mosaic: information gain of a session, the difference of answer likelihoods, by log and by probability."""
    after = [reply(level - 0.5, level + 0.5) for level in (-2, -1.5, -1.6, -0.7)]
    np.testing.assert_allclose(np.diff(answer_likelihood(after)), [0.5, -0.1, 0.9], atol=1e-6)
    gain = np.diff(answer_likelihood(after, space="prob"))
    np.testing.assert_allclose(gain, [0.087795, -0.021234, 0.294689], atol=1e-6)
    np.testing.assert_allclose(answer_likelihood(after, length="sum"), [-4, -3, -3.2, -1.4], atol=1e-6)
    assert answer_likelihood([ScoreReply(logp=np.empty(0, dtype=np.float32))]).tolist() == [0.0]
    assert answer_likelihood([]).shape == (0,)
    with pytest.raises(ScoreError, match="length 'max'"):
        answer_likelihood(after, length="max")


def test_skill_utility_numbers() -> None:
    """skill_scaffold: U_m = mean (R_n - mean R) (l(tau_n | q, z_m) - l(tau_n | q))."""
    free = answer_likelihood([reply(-1), reply(-0.8), reply(-1.2)])
    skills = [answer_likelihood([reply(x) for x in row]) for row in ((-0.7, -0.9, -1), (-0.9, -0.5, -1.3))]
    centred = np.array([1, 0, 1]) - 2 / 3
    np.testing.assert_allclose([np.mean(centred * (s - free)) for s in skills], [0.0777778, -0.0666667], atol=1e-6)


def test_token_scores() -> None:
    requests = [ask(0, None, np.array([1, 4])), ask(1, None, np.array([6]))]
    got = token_scores(requests, [reply(-1, -2), reply(-3)], 8)
    assert got.tolist() == [0, -1, 0, 0, -2, 0, -3, 0]
    assert not token_scores([], [], 3).any() and len(token_scores([], [], 3)) == 3
    with pytest.raises(ScoreError, match="token 4 was scored by several"):
        token_scores([requests[0], ask(0, None, np.array([4]))], [reply(-1, -2), reply(-3)], 8)
    with pytest.raises(ScoreError, match="position 6 in a batch of 5"):
        token_scores(requests, [reply(-1, -2), reply(-3)], 5)
    with pytest.raises(ScoreError, match="not every reply holds 'value'"):
        token_scores(requests, [reply(-1, -2), reply(-3)], 8, "value")
    with pytest.raises(ScoreError, match="appended answer"):
        token_scores([ScoreRequest.likelihood(0, [1])], [reply(-1)], 8)
