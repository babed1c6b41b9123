from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from megatron_ext.models.parallel import ParallelContext
from megatron_ext.moe.policies import FrozenRouter, TrainedRouter
from megatron_ext.moe.replay_tokens import ReplayRule
from megatron_ext.moe.statistics import RoutingStatistics, pairs
from megatron_ext.moe.structured import StructuredRouter
from megatron_ext.moe.tap import RouterCall
from megatron_ext.training.microbatch import MicroBatch, build_microbatch
from megatron_ext.training.routing.routing import RoutingLosses
from megatron_ext.training.trainer import TokenInputs, Trainer
from megatron_ext.trajectory.record import Status, TrajectoryBatch
from tests.helpers.records import build, model, random_batch, single, user
from tests.helpers.replaying import randomly_routed
from tests.helpers.structured import plain_losses, with_operations
from tests.helpers.training import (
    TERMS,
    TINY,
    flat,
    gradients,
    identical,
    make_trainer,
    micro_of,
    one_rank,
    parameters,
    plain_gradients,
    plain_model,
    random_inputs,
    rows_of,
)

OPEN: dict[str, Any] = {"entropy_high": 100.0, "operations": 3}
BATCH = with_operations(random_batch(5, groups=2, untrainable=0.3, tokens=(2, 6)))
assert not BATCH.trainable().all() and (BATCH.weight == 0).any()


@pytest.fixture(scope="module")
def context() -> Iterator[ParallelContext]:
    with one_rank() as made:
        yield made


def read(routing: RoutingLosses) -> RoutingStatistics:
    """Statistics by field and operation of the open batch."""
    policy = routing.policy
    assert isinstance(policy, StructuredRouter)
    return policy.statistics(routing.statistics)


def no_reward(batch: TrajectoryBatch) -> TokenInputs:
    """Loss inputs whose gradient is exactly 0: what a step then has is the routing loss's."""
    return replace(random_inputs(batch), weight=torch.zeros(batch.num_tokens))


def step(
    trainer: Trainer,
    policy: StructuredRouter,
    batch: TrajectoryBatch,
    inputs: TokenInputs,
    micro: list[MicroBatch] | None = None,
) -> RoutingLosses:
    micro = micro_of(batch, rows_of(batch), cap=60) if micro is None else micro
    routing = RoutingLosses(trainer, policy)
    routing.open(batch, micro)
    with routing.attached(micro):
        trainer.update(micro, inputs, TERMS, lr=1e-2)
    return routing


def wanted(context: ParallelContext, batch: TrajectoryBatch, mi: float, local: float, **values: Any) -> tuple[Any, ...]:
    chunk = plain_model(context)
    losses = plain_losses(chunk, batch, **values)
    (mi * losses[0] + local * losses[1]).backward()
    return (*(float(loss.detach()) for loss in losses), plain_gradients(chunk))


def test_what_the_policy_loss_leaves_out_is_left_out(context: ParallelContext) -> None:
    broken = replace(BATCH, status=np.full_like(BATCH.status, int(Status.ENV_ERROR)))
    weightless = replace(BATCH, weight=np.zeros_like(BATCH.weight))
    for batch in (broken, weightless):
        policy = StructuredRouter(mutual_information=0.3, consistency=0.2, **OPEN)
        trainer = make_trainer(context, router=policy)
        routing = step(trainer, policy, batch, no_reward(batch))
        assert not any(grad.any() for grad in gradients(trainer).values())
        opened = read(routing)
        assert (opened.information(), opened.local_loss(), opened.pairs, opened.entropy) == (0.0, 0.0, 0, 0.0)


@pytest.mark.parametrize(
    ("mi", "local", "values"),
    [
        (0.3, 0.0, {}),
        (0.0, 0.2, {}),
        (0.3, 0.2, {"pull": "all"}),
        (0.3, 0.2, {"threshold": 0.7}),
        (0.3, 0.2, {"detach": False}),
    ],
    ids=["mi", "token", "all", "threshold", "input"],
)
def test_values_and_gradients_are_those_of_the_plain_computation(
    context: ParallelContext, mi: float, local: float, values: dict[str, Any]
) -> None:
    minus_information, token_loss, want = wanted(context, BATCH, mi, local, **values)
    given = dict(values)
    policy = StructuredRouter(
        mutual_information=mi, consistency=local, detach_input=given.pop("detach", True), **OPEN, **given
    )
    trainer = make_trainer(context, router=policy)
    routing = step(trainer, policy, BATCH, no_reward(BATCH))
    found = gradients(trainer)
    assert read(routing).information() == pytest.approx(-minus_information, rel=1e-5)
    assert read(routing).local_loss() == pytest.approx(token_loss, rel=1e-5)
    assert token_loss > 0 and minus_information < 0
    size = max(float(grad.abs().max()) for grad in want.values())
    for name, grad in found.items():
        if policy.detach_input and not name.endswith(".router.weight"):
            assert not grad.any(), f"{name}: only routers learn from routing losses"
        assert torch.allclose(grad, want.get(name, torch.zeros_like(grad)), atol=1e-5 * size), name
    assert any(grad.any() for name, grad in found.items() if name.endswith(".router.weight"))
    if not policy.detach_input:
        last = f"0:module.decoder.layers.{TINY.layers - 1}.mlp.experts"
        assert all(not grad.any() for name, grad in found.items() if name.startswith(last)), "experts behind no router"
        assert found["0:module.embedding.word_embeddings.weight"].any()


def test_packing_and_shared_prefixes_change_nothing(context: ParallelContext) -> None:
    policy = StructuredRouter(**OPEN)
    rows, found, values = rows_of(BATCH), [], []
    everything = list(range(rows.num_rows))
    for micro in (
        micro_of(BATCH, rows),
        micro_of(BATCH, rows, cap=40, members=everything[::-1]),
        [build_microbatch(BATCH, rows, everything, rows.mask, share_prefixes=True)],
        [build_microbatch(BATCH, rows, part, rows.mask) for part in (everything, [])],
    ):
        trainer = make_trainer(context, router=policy)
        routing = step(trainer, policy, BATCH, no_reward(BATCH), micro)
        found.append(flat(gradients(trainer)))
        values.append((read(routing).information(), read(routing).local_loss()))
    for other, value in zip(found[1:], values[1:], strict=True):
        assert torch.allclose(other, found[0], atol=1e-6 * float(found[0].abs().max()))
        assert value == pytest.approx(values[0], rel=1e-6)


def test_sampled_tokens_that_rows_share_count_for_each_row(context: ParallelContext) -> None:
    said = [user([1, 2, 3]), model([4, 5, 6, 7, 8]), user([9]), model([10, 11, 12, 13])]
    other = [user([1, 2, 3]), model([4, 5, 6, 7, 20]), user([9]), model([10, 11, 12, 13])]
    batch = with_operations(build([(single(said), single(said), single(other))]), seed=2)
    policy, rows = StructuredRouter(mutual_information=0.3, consistency=0.2, pull="all", **OPEN), rows_of(batch)
    shared = [build_microbatch(batch, rows, [0, 1, 2], rows.mask, share_prefixes=True)]
    assert shared[0].num_tokens < 0.7 * len(shared[0].source)
    want = wanted(context, batch, 0.3, 0.2, pull="all")[2]
    trainer = make_trainer(context, router=policy)
    step(trainer, policy, batch, no_reward(batch), shared)
    for name, grad in gradients(trainer).items():
        if name.endswith(".router.weight"):
            assert torch.allclose(grad, want[name], atol=1e-5 * float(want[name].abs().max())), name


def test_it_adds_to_the_gradient_of_the_policy_loss(context: ParallelContext) -> None:
    policy = StructuredRouter(mutual_information=0.3, consistency=0.2, **OPEN)
    sums = []
    for inputs, router in ((random_inputs(BATCH), policy), (no_reward(BATCH), policy), (random_inputs(BATCH), None)):
        trainer = make_trainer(context, router=router)
        if router is None:
            trainer.update(micro_of(BATCH, rows_of(BATCH), cap=60), inputs, TERMS, lr=1e-2)
        else:
            step(trainer, policy, BATCH, inputs)
        sums.append(flat(gradients(trainer)))
    both, alone, plain = sums
    assert torch.allclose(both, alone + plain, atol=1e-6 * float(both.abs().max()))
    assert alone.norm() > 1e-3 * plain.norm()


@pytest.mark.parametrize(
    "closed",
    [
        {"entropy_high": 0.2},
        {"entropy_low": 50.0, "entropy_high": 100.0},
        {"mutual_information": 0.0, "consistency": 0.0, "entropy_high": 100.0},
        {"mutual_information": 0.0, "pull": "off", "entropy_high": 100.0},
    ],
    ids=["above", "below", "no coefficients", "no pull"],
)
def test_a_closed_gate_leaves_the_step_of_plain_training(context: ParallelContext, closed: dict[str, Any]) -> None:
    policy, after = StructuredRouter(operations=3, **closed), []
    for router in (policy, TrainedRouter()):
        trainer = make_trainer(context, router=router)
        for seed in range(3):
            inputs = random_inputs(BATCH, seed)
            if isinstance(router, StructuredRouter):
                step(trainer, router, BATCH, inputs)
            else:
                trainer.update(micro_of(BATCH, rows_of(BATCH), cap=60), inputs, TERMS, lr=1e-2)
        after.append(parameters(trainer))
    assert identical(*after)
    open_one = StructuredRouter(**OPEN)
    trainer = make_trainer(context, router=open_one)
    for seed in range(3):
        step(trainer, open_one, BATCH, random_inputs(BATCH, seed))
    assert not identical(parameters(trainer), after[0])


def test_it_teaches_what_it_says(context: ParallelContext) -> None:
    policy = StructuredRouter(mutual_information=1.0, consistency=0.0, **OPEN)
    trainer = make_trainer(context, router=policy)
    seen = [read(step(trainer, policy, BATCH, no_reward(BATCH))).information() for _ in range(8)]
    assert all(b > a for a, b in zip(seen, seen[1:], strict=False)) and seen[-1] > 1.5 * seen[0]
    policy = StructuredRouter(mutual_information=0.0, consistency=1.0, pull="all", **OPEN)
    trainer = make_trainer(context, router=policy)
    lost = [read(step(trainer, policy, BATCH, no_reward(BATCH))).local_loss() for _ in range(8)]
    assert lost[-1] < 0.9 * lost[0]


def test_the_error_of_the_linearisation_is_measured(context: ParallelContext) -> None:
    policy = StructuredRouter(mutual_information=1.0, consistency=0.0, **OPEN)
    trainer, micro = make_trainer(context, router=policy), micro_of(BATCH, rows_of(BATCH))
    routing = RoutingLosses(trainer, policy)
    routing.open(BATCH, micro)
    still = routing.close(micro)
    assert still["moe/mi_linear_error"] == pytest.approx(0, abs=1e-12)
    assert still["moe/turn_mi_after"] == pytest.approx(still["moe/turn_mi"], abs=1e-12)
    routing.open(BATCH, micro)
    with routing.attached(micro):
        trainer.update(micro, no_reward(BATCH), TERMS, lr=1e-2)
    moved = routing.close(micro)
    gain = moved["moe/turn_mi_after"] - moved["moe/turn_mi"]
    assert 0 < moved["moe/mi_linear_error"] < gain, "the tangent of a convex function lies below it"
    with pytest.raises(RuntimeError, match="score it first"):
        routing.close()


def test_a_step_of_part_of_the_batch_divides_by_its_own_turns(context: ParallelContext) -> None:
    half = np.isin(BATCH.token_trajectory(), np.arange(BATCH.num_trajectories // 2))
    trajectory = BATCH.segment_trajectory()[rows_of(BATCH).segment]
    policy = StructuredRouter(mutual_information=0.0, consistency=0.2, **OPEN)
    trainer = make_trainer(context, router=policy)
    routing, rows = RoutingLosses(trainer, policy), rows_of(BATCH)
    routing.open(BATCH, micro_of(BATCH, rows))
    members = np.flatnonzero(trajectory < BATCH.num_trajectories // 2)
    micro = micro_of(BATCH, rows, members=members.tolist())
    with routing.attached(micro):
        trainer.update(micro, no_reward(BATCH), TERMS, lr=1e-2)
    chunk = plain_model(context)
    (0.2 * plain_losses(chunk, BATCH, tokens=half)[1]).backward()
    want = plain_gradients(chunk)
    size = max(float(grad.abs().max()) for grad in want.values())
    for name, grad in gradients(trainer).items():
        assert torch.allclose(grad, want.get(name, torch.zeros_like(grad)), atol=1e-5 * size), name


def _note(again: list[bool], call: RouterCall, probs: torch.Tensor, routing_map: torch.Tensor) -> None:
    again.append(call.recomputed)


@pytest.mark.parametrize("granularity", ["full", "selective"])
def test_recomputed_activations_count_once(context: ParallelContext, granularity: str) -> None:
    policy, found = StructuredRouter(mutual_information=0.3, consistency=0.2, **OPEN), []
    for recompute in (False, True):
        trainer = make_trainer(context, router=policy)
        if recompute:
            for module in trainer.chunks[0].modules():
                config = getattr(module, "config", None)
                if config is not None and hasattr(config, "recompute_granularity"):
                    config.recompute_granularity = granularity
                    config.recompute_method, config.recompute_num_layers = "uniform", 1
                if granularity == "selective" and hasattr(module, "moe_layer_recompute"):
                    module.moe_layer_recompute = True
        again: list[bool] = []
        with trainer.tap.listening(partial(_note, again)):
            step(trainer, policy, BATCH, random_inputs(BATCH))
        assert any(again) is recompute
        found.append(flat(gradients(trainer)))
    assert torch.allclose(found[0], found[1], atol=1e-6 * float(found[0].abs().max()))


def test_with_replayed_experts_the_recorded_ones_are_held_together(context: ParallelContext) -> None:
    batch = randomly_routed(BATCH, hf=TINY)
    assert batch.routed is not None
    rows, rule = rows_of(batch), ReplayRule.of(TINY)
    micro = [build_microbatch(batch, rows, list(range(rows.num_rows)), rows.mask, replay=rule)]
    policy = StructuredRouter(mutual_information=0.0, consistency=0.2, threshold=0.7, **OPEN)
    trainer = make_trainer(context, router=policy)
    routing = step(trainer, policy, batch, no_reward(batch), micro)
    recorded = [[set(experts.tolist()) for experts in layer] for layer in batch.routed.transpose(1, 0, 2)]
    ends = np.flatnonzero(pairs(batch))
    # A trajectory's last token has no recording: its router chooses.
    last = set((batch.segment_tokens[1:] - 1).tolist())
    known = [t for t in ends.tolist() if t not in last]
    close = [
        sum(1 - len(layer[t] & layer[t - 1]) / len(layer[t] | layer[t - 1]) < 0.7 for t in known) for layer in recorded
    ]
    found = read(routing).pulled
    assert read(routing).pairs == len(ends)
    assert all(low <= count <= low + len(ends) - len(known) for low, count in zip(close, found.tolist(), strict=True))
    routers = [grad for name, grad in gradients(trainer).items() if name.endswith(".router.weight")]
    assert all(grad.any() for grad in routers), "probabilities are live"
    live = RoutingLosses(trainer, policy)
    live.open(batch, micro_of(batch, rows))
    assert read(live).pulled.tolist() != found.tolist()


def test_a_router_that_does_not_learn_is_refused(context: ParallelContext) -> None:
    trainer = make_trainer(context, router=FrozenRouter())
    with pytest.raises(ValueError, match=r"router.weight is frozen, and a routing loss trains routers"):
        StructuredRouter().apply(trainer.chunks)


def test_a_batch_without_operations_is_said_and_one_with_too_many_refused(context: ParallelContext) -> None:
    policy = StructuredRouter(label="what", consistency=0.0, **OPEN)
    trainer, plain = make_trainer(context, router=policy), make_trainer(context)
    micro = micro_of(BATCH, rows_of(BATCH), cap=60)
    metrics = step(trainer, policy, BATCH, random_inputs(BATCH)).close(micro)
    assert (metrics["moe/labelled_turns"], metrics["moe/unlabelled_batch"], metrics["moe/turn_mi"]) == (0, 1, 0)
    plain.update(micro, random_inputs(BATCH), TERMS, lr=1e-2)
    assert identical(parameters(trainer), parameters(plain))
    policy = StructuredRouter(operations=2)
    with pytest.raises(ValueError, match="op=2: model.router.operations=2"):
        RoutingLosses(trainer, policy).open(BATCH, micro)


@pytest.mark.parametrize(
    ("values", "line"),
    [
        ({"mutual_information": -1.0}, "mutual_information=-1.0"),
        ({"consistency": float("nan")}, "consistency=nan"),
        ({"threshold": 1.5}, "from 0 to 1"),
        ({"pull": "some"}, "one of selective, all, off"),
        ({"fields": ["thinking", "thinking"]}, "different ones of"),
        ({"fields": ["other"]}, "thinking, tool_use, text"),
        ({"threshold": 0.0}, "threshold=0: no distance is below it"),
        ({"operations": 0}, "operations=0"),
        ({"entropy_low": 1.0}, "low <= high"),
    ],
)
def test_bad_constants_are_refused(values: dict[str, Any], line: str) -> None:
    with pytest.raises(ValueError, match=line):
        StructuredRouter(**values)
