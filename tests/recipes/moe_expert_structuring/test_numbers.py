"""Structured expert selection: the worked numbers of its specification under the recipe's own configuration."""

from __future__ import annotations

import math

import pytest
import torch

from launch.paths import RECIPES
from megatron_ext.config.compose import compose
from megatron_ext.config.instantiate import instantiate
from megatron_ext.moe.routing_losses import consistency, jaccard, pulled
from megatron_ext.moe.statistics import RoutingStatistics
from megatron_ext.moe.structured import RoutingTerm, StructuredRouter
from megatron_ext.moe.view import BatchStatistics, Counts

TURNS = torch.tensor([[0.7, 0.2, 0.1], [0.5, 0.4, 0.1], [0.1, 0.2, 0.7]], dtype=torch.float64)
READ, UPDATE = 0, 2  # numbers of the environment's operations


def policy(preset: str = "recipe", *overrides: str) -> StructuredRouter:
    node = compose([f"recipe=moe_expert_structuring/{preset}", *overrides], RECIPES).model.router
    made = instantiate(node, where="model.router")
    assert isinstance(made, StructuredRouter)
    return made


def measured(router: StructuredRouter, operations: tuple[int, ...], entropy: float = 0.1) -> BatchStatistics:
    """Of one layer whose turns ``TURNS`` are tool use of ``operations``, without thinking."""
    sums = torch.zeros(1, 2, router.operations, 3, dtype=torch.float64)
    turns = torch.zeros(2, router.operations, dtype=torch.float64)
    for p, operation in zip(TURNS, operations, strict=True):
        sums[0, 1, operation] += p
        turns[1, operation] += 1
    parts = {"turns": sums.flatten(1, 2), "pairs": torch.zeros(1, 2, dtype=torch.float64)}
    return BatchStatistics(sums=parts, counts=Counts(turns.flatten(), 2), entropy=entropy, layers=1, experts=3)


def statistics(router: StructuredRouter, operations: tuple[int, ...]) -> RoutingStatistics:
    return router.statistics(measured(router, operations))


def term(router: StructuredRouter, opened: BatchStatistics) -> RoutingTerm | None:
    """Of the whole batch as one optimizer step."""
    return router.term(opened, opened.counts) if router.is_open(opened) else None


def sets(*members: tuple[int, ...]) -> torch.Tensor:
    found = torch.zeros(len(members), 4, dtype=torch.bool)
    for row, one in enumerate(members):
        found[row, list(one)] = True
    return found


def test_turns_of_two_operations() -> None:
    found = statistics(policy(), (READ, READ, UPDATE))
    assert torch.allclose(found.sums[0, 1, READ] / 2, torch.tensor([0.6, 0.3, 0.1], dtype=torch.float64))
    # The field without turns (thinking) is left out of the mean, not counted as 0.
    assert found.information() == pytest.approx(0.2101309, abs=5e-8)
    assert found.information() < (bound := 0.6365142) == pytest.approx(math.log(3) - 2 / 3 * math.log(2), abs=5e-8)
    assert found.information() < min(bound, math.log(3))
    assert statistics(policy(), (READ, READ, READ)).information() == pytest.approx(0, abs=1e-12)


def test_the_turn_loss_is_minus_the_information_times_its_coefficient() -> None:
    router = policy()
    found = term(router, measured(router, (READ, READ, UPDATE)))
    assert found is not None and found.turn is not None and found.token == pytest.approx(router.consistency / 2)
    weights = found.turn.view(2, router.operations, 3)[1].double()
    loss = sum(weights[o] @ p for o, p in zip((READ, READ, UPDATE), TURNS, strict=True))
    assert float(loss) == pytest.approx(-router.mutual_information * 0.2101309, rel=1e-6)


def test_pairs_of_tokens() -> None:
    before, now = sets((0, 1)), sets((0, 2))
    assert float(1 - jaccard(before, now)) == pytest.approx(2 / 3)
    selective, two, forced = policy("paper"), policy(), policy("micro_forced")
    assert selective.threshold == 0.5
    assert not pulled(before, now, selective.pull, selective.threshold).item()
    # Two experts a token, as on CPU, differ in one or in all: one is as near as they come.
    assert pulled(before, now, two.pull, two.threshold).item()
    assert not pulled(before, sets((2, 3)), two.pull, two.threshold).item()
    assert pulled(before, before, selective.pull, selective.threshold).item()
    assert pulled(before, now, forced.pull, forced.threshold).item()
    p = torch.tensor([[0.5, 0.1, 0.3, 0.1]], dtype=torch.float64)
    assert float(consistency(p.log(), before)) == pytest.approx(0.5108256, abs=5e-8)


@pytest.mark.parametrize(("entropy", "acts"), [(0.0, True), (0.1, True), (0.2, True), (0.2001, False), (2.0, False)])
def test_the_gate(entropy: float, acts: bool) -> None:
    gated, always = policy("paper"), policy("micro_nogate")
    for router, want in ((gated, acts), (always, True)):
        assert (term(router, measured(router, (READ, READ, UPDATE), entropy)) is not None) == want
    nothing = policy("recipe", "model.router.mutual_information=0", "model.router.consistency=0")
    assert term(nothing, measured(nothing, (READ, READ, UPDATE))) is None
