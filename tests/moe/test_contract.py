"""Invariants of ``megatron_ext/moe/protocol.py`` for every router policy and every routing loss."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from megatron_ext.models.parallel import ParallelContext
from megatron_ext.moe.loss_policy import PlainRoutingLoss
from megatron_ext.moe.policies import FrozenRouter, TrainedRouter
from megatron_ext.moe.protocol import RouterPolicy, routing_loss
from megatron_ext.moe.structured import StructuredRouter
from megatron_ext.moe.view import BatchStatistics, Counts, RouterView
from megatron_ext.training.routing.routing import RoutingLosses
from tests.helpers.records import random_batch
from tests.helpers.routing_contract import (
    check_closed,
    check_loss,
    check_policy,
    check_reach,
    check_silence,
    silent,
    steps,
)
from tests.helpers.routing_policies import FrozenWithLoss, HalfALoss, PairsTogether, SampledEntropy, StayNear
from tests.helpers.structured import plain_distributions, with_operations
from tests.helpers.training import (
    gradients,
    make_trainer,
    micro_of,
    one_rank,
    plain_gradients,
    plain_model,
    random_inputs,
    rows_of,
)

STRUCTURED: Mapping[str, Any] = {"entropy_high": 100.0, "operations": 3, "error_every": 1}
POLICIES: Mapping[str, Callable[[], RouterPolicy]] = {"trained": TrainedRouter, "frozen": FrozenRouter}
LOSSES: Mapping[str, Callable[[], RouterPolicy]] = {
    "structured": lambda: StructuredRouter(mutual_information=0.3, consistency=0.2, **STRUCTURED),
    "entropy": SampledEntropy,
    "stay": lambda: StayNear(coefficient=3.0),
    "pairs": PairsTogether,
}
CLOSED: Mapping[str, Callable[[], RouterPolicy]] = {
    "structured": lambda: StructuredRouter(operations=3),
    "entropy": lambda: SampledEntropy(entropy_high=0.0),
    "no coefficient": lambda: SampledEntropy(coefficient=0.0),
    "stay": lambda: StayNear(coefficient=0.0),
    "pairs": lambda: PairsTogether(coefficient=0.0),
}
BATCH = with_operations(random_batch(5, groups=2, untrainable=0.3, tokens=(2, 6)))


@pytest.fixture(scope="module")
def context() -> Iterator[ParallelContext]:
    with one_rank() as made:
        yield made


@pytest.mark.parametrize("name", [*POLICIES, *LOSSES])
def test_a_policy_keeps_what_it_promises(context: ParallelContext, name: str) -> None:  # invariant 1
    check_policy({**POLICIES, **LOSSES}[name], context, BATCH)


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_does_not_depend_on_how_rows_are_packed(context: ParallelContext, name: str) -> None:  # 2, 4
    check_loss(LOSSES[name], context, BATCH)


@pytest.mark.parametrize("name", [name for name in LOSSES if name != "stay"])
def test_a_loss_reaches_routers_alone(context: ParallelContext, name: str) -> None:
    check_reach(LOSSES[name], context, BATCH)


@pytest.mark.parametrize("name", LOSSES)
def test_nothing_that_counts_is_no_loss(context: ParallelContext, name: str) -> None:  # invariant 3
    check_silence(LOSSES[name], context, BATCH)


@pytest.mark.parametrize("name", CLOSED)
def test_a_loss_that_does_not_act_is_plain_training(context: ParallelContext, name: str) -> None:  # invariant 3
    check_closed(CLOSED[name], context, BATCH)


def test_policies_without_a_loss_are_told_from_those_with_half_of_one() -> None:
    assert all(routing_loss(make()) is None for make in POLICIES.values())
    assert all(routing_loss(policy := make()) is policy for make in LOSSES.values())
    with pytest.raises(ValueError, match=r"HalfALoss has a loss, and lacks detach_input, error_every, tokens, sizes"):
        routing_loss(HalfALoss())
    with pytest.raises(TypeError, match="abstract"):
        PlainRoutingLoss()  # type: ignore[abstract]
    with pytest.raises(ValueError, match="error_every=-1"):
        SampledEntropy(error_every=-1)


def test_frozen_routers_have_no_loss(context: ParallelContext) -> None:
    trainer = make_trainer(context, router=FrozenWithLoss())
    with pytest.raises(ValueError, match="FrozenWithLoss freezes routers, and its routing loss trains them"):
        RoutingLosses.of(trainer)
    with pytest.raises(ValueError, match=r"router.weight is frozen, and a routing loss trains routers"):
        SampledEntropy().apply(trainer.chunks)


def test_the_entropy_loss_has_the_gradient_of_the_plain_formula(context: ParallelContext) -> None:
    """By hand, for one: every trained token once, mean over tokens and layers."""
    chunk = plain_model(context)
    tokens = [p for layer in plain_distributions(chunk, BATCH) for p in layer]
    (0.1 * torch.stack([(p * p.log()).sum() for p in tokens]).mean()).backward()
    want = plain_gradients(chunk)
    trainer = make_trainer(context, router=SampledEntropy(coefficient=0.1))
    steps(trainer, BATCH, micro_of(BATCH, rows_of(BATCH), cap=60), silent(BATCH), updates=1)
    found = {name: grad for name, grad in gradients(trainer).items() if name.endswith(".router.weight")}
    assert found
    for name, grad in found.items():
        assert grad.any() and torch.allclose(grad, want[name], atol=1e-5 * float(want[name].abs().max())), name


def test_what_is_kept_is_the_start_of_the_batch(context: ParallelContext) -> None:
    """The first step's KL is 0 and so is its gradient; later it holds the routers back."""
    moved = []
    for coefficient in (0.0, 30.0):
        trainer = make_trainer(context, router=StayNear(coefficient=coefficient))
        micro = micro_of(BATCH, rows_of(BATCH), cap=60)
        moved.append(steps(trainer, BATCH, micro, random_inputs(BATCH), updates=4)["moe/own/kl"])
    assert 0 < moved[1] < 0.8 * moved[0]


@dataclass(frozen=True)
class Careless(SampledEntropy):
    rows: int = 0

    def keep(self, view: RouterView) -> torch.Tensor | None:
        return view.log_p[: self.rows] if self.rows else None

    def sizes(self, experts: int) -> Mapping[str, tuple[int, ...]]:
        return {"n": ()}

    def measure(self, view: RouterView, sums: Mapping[str, torch.Tensor]) -> None:
        if not self.rows:
            sums["n"] = sums["n"] + 1  # type: ignore[index]

    def term(self, opened: BatchStatistics, counts: Counts) -> float | None:
        return None


def test_what_would_be_lost_is_an_error(context: ParallelContext) -> None:
    micro = micro_of(BATCH, rows_of(BATCH))
    with pytest.raises(TypeError, match="does not support item assignment"):
        RoutingLosses(make_trainer(context), Careless()).open(BATCH, micro)
    with pytest.raises(ValueError, match=r"keep: of \d+ tokens \[m, K\] is wanted, got \[1, "):
        RoutingLosses(make_trainer(context), Careless(rows=1)).open(BATCH, micro)


def test_a_step_on_tokens_that_were_not_scored_is_refused(context: ParallelContext) -> None:
    rows = rows_of(BATCH)
    routing = RoutingLosses(make_trainer(context), SampledEntropy())
    routing.open(BATCH, micro_of(BATCH, rows, members=[0]))
    with (
        pytest.raises(ValueError, match="were not scored when the batch was opened"),
        routing.attached(micro_of(BATCH, rows)),
    ):
        raise AssertionError("no update without statistics")
