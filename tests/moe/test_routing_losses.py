from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ext.moe.routing_losses import (
    Pull,
    consistency,
    direction,
    jaccard,
    linearised,
    log_probabilities,
    mutual_information,
    pulled,
)

TURNS = torch.tensor([[0.7, 0.2, 0.1], [0.5, 0.4, 0.1], [0.1, 0.2, 0.7]], dtype=torch.float64)
OPERATION = torch.tensor([0, 0, 1])


def sums_of(p: torch.Tensor, operation: torch.Tensor, operations: int) -> tuple[torch.Tensor, torch.Tensor]:
    sums = torch.zeros(operations, p.shape[1], dtype=p.dtype).index_add(0, operation, p)
    return sums, torch.bincount(operation, minlength=operations)


def sets(*members: tuple[int, ...], experts: int = 4) -> torch.Tensor:
    found = torch.zeros(len(members), experts, dtype=torch.bool)
    for row, one in enumerate(members):
        found[row, list(one)] = True
    return found


def test_worked_numbers_of_the_mutual_information() -> None:
    sums, turns = sums_of(TURNS, OPERATION, 2)
    assert torch.allclose(sums[0] / 2, torch.tensor([0.6, 0.3, 0.1], dtype=torch.float64))
    whole = sums.sum(0) / 3
    assert torch.allclose(whole, torch.tensor([0.433333, 0.266667, 0.3], dtype=torch.float64), atol=1e-6)
    information = float(mutual_information(sums, turns))
    assert information == pytest.approx(0.2101309, abs=5e-8)
    share = torch.tensor([2 / 3, 1 / 3], dtype=torch.float64)
    assert -float((share * share.log()).sum()) == pytest.approx(0.6365142, abs=5e-8)

    def entropy(p: torch.Tensor) -> float:
        return -float((p * p.log()).sum())

    parts = 2 / 3 * entropy(sums[0] / 2) + 1 / 3 * entropy(sums[1])
    assert information == pytest.approx(entropy(whole) - parts, abs=1e-12)


def test_worked_numbers_of_the_token_loss() -> None:
    before, now = sets((0, 1)), sets((0, 2))
    assert float(1 - jaccard(before, now)) == pytest.approx(2 / 3)
    assert not pulled(before, now, Pull.SELECTIVE, 0.5).item()
    assert float(1 - jaccard(before, before)) == 0 and pulled(before, before, "selective", 0.5).item()
    p = torch.tensor([[0.5, 0.1, 0.3, 0.1]], dtype=torch.float64)
    assert float(consistency(p.log(), before)) == pytest.approx(0.5108256, abs=5e-8)


@pytest.mark.parametrize(
    ("pull", "want"), [("selective", [False, True, True]), ("all", [True] * 3), ("off", [False] * 3)]
)
def test_who_is_pulled(pull: str, want: list[bool]) -> None:
    before = sets((0, 1), (0, 1), (2, 3))
    now = sets((0, 2), (0, 1), (3, 2))
    assert pulled(before, now, pull, 0.5).tolist() == want
    if pull == "selective":
        assert pulled(before, now, pull, 2 / 3 + 1e-6).all(), "the threshold is what decides"
        assert not pulled(before, now, pull, 0.0).any(), "a distance of 0 is not below 0"


@st.composite
def turns_of(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor, int]:
    seed = draw(st.integers(0, 10**6))
    experts, operations = draw(st.integers(2, 6)), draw(st.integers(1, 4))
    number = draw(st.integers(1, 12))
    generator = torch.Generator().manual_seed(seed)
    sharp = draw(st.sampled_from([0.1, 1.0, 30.0]))
    p = (sharp * torch.randn(number, experts, generator=generator, dtype=torch.float64)).softmax(-1)
    return p, torch.randint(operations, (number,), generator=generator), operations


@settings(max_examples=60, deadline=None)
@given(turns_of())
def test_bounds_and_permutations(case: tuple[torch.Tensor, torch.Tensor, int]) -> None:
    p, operation, operations = case
    sums, turns = sums_of(p, operation, operations)
    information = float(mutual_information(sums, turns))
    share = turns[turns > 0].double() / len(p)
    bound = min(-float((share * share.log()).sum()), math.log(p.shape[1]))
    assert -1e-12 <= information <= bound + 1e-9
    experts = torch.randperm(p.shape[1], generator=torch.Generator().manual_seed(0))
    assert float(mutual_information(sums[:, experts], turns)) == pytest.approx(information, abs=1e-12)
    assert float(mutual_information(sums.flip(0), turns.flip(0))) == pytest.approx(information, abs=1e-12)
    wider = torch.cat([sums, torch.zeros_like(sums)]), torch.cat([turns, torch.zeros_like(turns)])
    assert float(mutual_information(*wider)) == pytest.approx(information, abs=1e-12)


def test_nothing_to_tell_apart() -> None:
    one = TURNS[:1].repeat(5, 1)
    assert float(mutual_information(*sums_of(one, torch.tensor([0, 1, 1, 2, 0]), 3))) == pytest.approx(0, abs=1e-15)
    assert float(mutual_information(*sums_of(TURNS, torch.zeros(3, dtype=torch.int64), 1))) == pytest.approx(
        0, abs=1e-15
    )
    nothing = torch.zeros(2, 3)
    assert float(mutual_information(nothing, torch.zeros(2, dtype=torch.int64))) == 0


@settings(max_examples=40, deadline=None)
@given(turns_of())
def test_at_the_statistics_the_linearised_loss_is_the_exact_one(case: tuple[torch.Tensor, torch.Tensor, int]) -> None:
    p, operation, operations = case
    values, grads = [], []
    for exact in (True, False):
        leaf = p.log().clone().requires_grad_()
        sums, turns = sums_of(leaf.softmax(-1), operation, operations)
        value = mutual_information(sums, turns) if exact else linearised(sums, turns, sums.detach())
        value.backward()
        values.append(float(value.detach()))
        assert leaf.grad is not None
        grads.append(leaf.grad)
    assert values[0] == pytest.approx(values[1], abs=1e-12)
    assert torch.allclose(grads[0], grads[1], atol=1e-12)


def test_away_from_the_statistics_it_is_a_lower_bound() -> None:
    # I is convex in the sums, so that its tangent lies below it.
    sums, turns = sums_of(TURNS, OPERATION, 2)
    other, _ = sums_of(TURNS.flip(0), OPERATION, 2)
    assert float(linearised(other, turns, sums)) < float(mutual_information(other, turns))


def test_experts_without_probability_are_finite() -> None:
    sums = torch.tensor([[1.0, 0.0, 0.0], [0.0, 0.0, 1.0]], requires_grad=True)
    turns = torch.tensor([1, 1])
    information = mutual_information(sums, turns)
    information.backward()
    assert float(information.detach()) == pytest.approx(math.log(2))
    assert sums.grad is not None and sums.grad.isfinite().all() and direction(sums.detach(), turns).isfinite().all()
    logits = torch.tensor([[200.0, 0.0, -200.0, 0.0]], requires_grad=True)
    loss = consistency(log_probabilities(logits, "softmax"), sets((2, 3))).sum()
    loss.backward()
    assert loss.isfinite() and logits.grad is not None and logits.grad.isfinite().all()


def test_experts_of_the_token_before_carry_no_gradient() -> None:
    logits = torch.randn(2, 4, requires_grad=True, generator=torch.Generator().manual_seed(0))
    log_p = log_probabilities(logits, "softmax")
    experts = torch.zeros(2, 4, dtype=torch.bool).scatter(1, log_p.topk(2).indices, True)
    consistency(log_p[1:], experts[:1]).sum().backward()
    assert logits.grad is not None and logits.grad[0].eq(0).all() and logits.grad[1].ne(0).any()


@pytest.mark.parametrize("function", ["softmax", "sigmoid"])
def test_a_distribution_over_all_experts(function: str) -> None:
    logits = torch.randn(5, 7, generator=torch.Generator().manual_seed(1))
    p = log_probabilities(logits, function).exp()
    assert torch.allclose(p.sum(-1), torch.ones(5))
    want = logits.softmax(-1) if function == "softmax" else logits.sigmoid() / logits.sigmoid().sum(-1, keepdim=True)
    assert torch.allclose(p, want)
    with pytest.raises(ValueError, match="softmax and sigmoid"):
        log_probabilities(logits, "tanh")
