"""Routing metrics of a step (``megatron_ext/training/measures/routing_metrics.py``), and the file of the loads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from megatron_ext.moe.load import RoutingSums
from megatron_ext.moe.policies import MEASURED_FIELDS, FrozenRouter, TrainedRouter
from megatron_ext.moe.protocol import RouterPolicy
from megatron_ext.moe.structured import StructuredRouter
from megatron_ext.tracking.jsonl import MetricsFileError
from megatron_ext.tracking.names import check
from megatron_ext.training.measures.routing_metrics import FILE_NAME, RoutingLog, read_routing, step_routing
from megatron_ext.training.ranks.ranks import Gather, alone
from megatron_ext.training.scoring.scores import TokenScores
from megatron_ext.training.step_replay.sample_parts import group_tokens
from megatron_ext.trajectory.joining import select_groups
from megatron_ext.trajectory.record import Field, TrajectoryBatch
from tests.helpers.gathering import on_ranks
from tests.helpers.records import build, model, random_batch, single, user
from tests.helpers.structured import loads, with_operations


def scored(batch: TrajectoryBatch, experts: np.ndarray, routed: np.ndarray | None = None) -> TokenScores:
    zeros = np.zeros(batch.num_tokens, dtype=np.float32)
    return TokenScores(zeros, zeros, experts, np.ones(batch.num_tokens, dtype=bool) if routed is None else routed)


def measured(batch: TrajectoryBatch, scores: TokenScores, experts: int = 4, **values: object) -> RoutingSums:
    layers = range(0 if scores.experts is None else scores.experts.shape[1])
    given = {"label": "op", "fields": MEASURED_FIELDS, **values}
    sums = step_routing(batch, scores, experts, layers, **given)  # type: ignore[arg-type]
    assert sums is not None
    return sums


def test_routing_is_compared_where_both_sides_recorded_it() -> None:
    """Flips are tokens whose experts differ somewhere; loads are those of the training forward."""
    batch = build([(single([user([1]), model([2, 3, 4])] * 3),)])
    size = batch.num_tokens
    routed = np.zeros((size, 2, 2), dtype=np.uint8)
    routed[:, :, 1] = 1  # the rollout chose experts 0 and 1 everywhere
    batch = replace(batch, routed=routed, routed_valid=np.arange(size) != 5)
    experts = routed.astype(np.int64)
    experts[0, 0] = (1, 0)  # the same set
    experts[1, 1] = (0, 3)  # one of two flipped
    experts[5] = (2, 3)  # not recorded by the rollout
    experts[6] = (2, 3)  # not recorded by training
    found = measured(batch, scored(batch, experts, np.arange(size) != 6))
    metrics = found.metrics()
    check(metrics)
    compared = size - 2
    assert metrics["offpolicy/routing_flips"] == pytest.approx(1 / compared), "the share of tokens with a flip"
    assert metrics["moe/disagreement"] == pytest.approx(0.5 / compared), "of two layers one flipped"
    assert (metrics["moe/layer/0/disagreement"], metrics["moe/layer/1/disagreement"]) == (0, 1 / compared)
    assert metrics["moe/load_cv"] > 0.0 and metrics["moe/load_peak"] >= 1.0
    assert found.counts.tolist() == [[size - 2, size - 2, 1, 1], [size - 2, size - 3, 1, 2]]
    ran = measured(batch, scored(batch, experts, np.arange(size) != 6), replayed=True)
    assert ran.counts.tolist() == [[size - 2, size - 2, 1, 1]] * 2, "what was recorded ran; token 5 was not"


def test_without_a_recorded_rollout_everything_else_is_measured() -> None:
    batch = with_operations(random_batch(3))
    rng = np.random.default_rng(0)
    experts = np.argsort(rng.random((batch.num_tokens, 2, 4)))[..., :2]
    metrics = measured(batch, scored(batch, experts)).metrics()
    check(metrics)
    names = {"load_cv", "load_peak", "cold_fraction", "load_entropy", "token_jaccard", "op_mi"}
    assert {name.removeprefix("moe/") for name in metrics if name.count("/") == 1} == names
    assert 0.2 < metrics["moe/token_jaccard"] < 0.7 and metrics["moe/op_mi"] > 0
    same = measured(batch, scored(batch, np.zeros_like(experts) + [0, 3])).metrics()
    assert same["moe/token_jaccard"] == 1 and same["moe/op_mi"] == pytest.approx(0, abs=1e-12)
    none = measured(replace(batch, turn_labels={}), scored(batch, experts)).metrics()
    assert "moe/op_mi" not in none and none["moe/token_jaccard"] == metrics["moe/token_jaccard"]
    other = replace(batch, turn_labels={**batch.turn_labels, "kind": batch.turn_labels["op"] // 2})
    of_kind = measured(other, scored(batch, experts), label="kind").metrics()
    assert of_kind["moe/op_mi"] not in (metrics["moe/op_mi"], 0.0), "of the policy's own label"
    assert measured(other, scored(batch, experts)).metrics() == metrics
    unwritten = measured(batch, scored(batch, experts), label="kind").metrics()
    assert not any(name.endswith("op_mi") for name in unwritten) and "moe/token_jaccard" in unwritten
    zeros = np.zeros(batch.num_tokens, np.float32)
    assert step_routing(batch, TokenScores(zeros, zeros), 0, [], label="op", fields=MEASURED_FIELDS) is None


def test_experts_that_follow_the_operation_are_told_apart() -> None:
    batch = with_operations(random_batch(3, groups=6))
    operation = np.maximum(batch.turn_labels["op"][np.maximum(batch.turn, 0)], 0)
    experts = np.stack([operation, operation + 3], axis=-1)[:, None, :].astype(np.int64)
    found = measured(batch, scored(batch, experts), experts=6)
    labelled = found.units / found.units.sum(axis=1, keepdims=True)
    entropy = [-(p[p > 0] * np.log(p[p > 0])).sum() for p in labelled]
    assert found.metrics()["moe/op_mi"] == pytest.approx(np.mean(entropy)), "all that there is to know"


def test_operations_are_told_apart_in_the_fields_of_the_policy() -> None:
    batch = with_operations(random_batch(3, groups=6))
    operation = np.maximum(batch.turn_labels["op"][np.maximum(batch.turn, 0)], 0)
    told = np.where(batch.field == Field.THINKING, operation, 3)  # operations show in thoughts alone
    experts = np.stack([told, told + 4], axis=-1)[:, None, :].astype(np.int64)

    def information(router: RouterPolicy) -> float:
        found = measured(batch, scored(batch, experts), experts=8, label=router.label, fields=router.measured_fields)
        return found.metrics()["moe/op_mi"]

    there = information(StructuredRouter(fields=["thinking"]))
    assert there > 0.1 and information(StructuredRouter(fields=["tool_use"])) == pytest.approx(0, abs=1e-12)
    for router in (StructuredRouter(), TrainedRouter(), FrozenRouter()):
        assert information(router) == pytest.approx(there / 2), "mean of both fields"


@pytest.mark.parametrize("homes", [((0, 2), (1,)), ((1,), (), (0,), (2,))])
def test_ranks_that_share_a_step_get_the_metrics_of_one(homes: Sequence[tuple[int, ...]]) -> None:
    batch = with_operations(random_batch(7, groups=3, routed=(2, 2)))
    rng = np.random.default_rng(0)
    experts = np.argsort(rng.random((batch.num_tokens, 2, 8)))[..., :2]
    seen = rng.random(batch.num_tokens) < 0.9

    def of(part: TrajectoryBatch, token: np.ndarray, gather: Gather) -> dict[str, float]:
        return measured(part, scored(part, experts[token], seen[token]), 8, gather=gather).metrics()

    one = of(batch, np.arange(batch.num_tokens), alone)
    assert one["offpolicy/routing_flips"] > 0 and one["moe/op_mi"] > 0

    def rank(number: int, gather: Gather) -> dict[str, float]:
        return of(select_groups(batch, homes[number]), group_tokens(batch, homes[number]), gather)

    for found in on_ranks(rank, len(homes)):
        assert found == pytest.approx(one, rel=1e-9, abs=1e-12)


def test_loads_are_kept_and_undone_steps_dropped(tmp_path: Path) -> None:
    assert read_routing(tmp_path) is None
    log = RoutingLog(tmp_path)
    for step in (1, 2, 3):
        log.write(step, loads([[step, 2, 3], [4, 5, step]], layers=(1, 3)))
    history = read_routing(tmp_path)
    assert history is not None and history.layers == (1, 3) and history.steps.tolist() == [1, 2, 3]
    assert history.counts[2].tolist() == [[3, 2, 3], [4, 5, 3]]
    with (tmp_path / FILE_NAME).open("a") as file:
        file.write('{"step":4,"lay')  # torn
    RoutingLog(tmp_path).write(3, loads([[9, 2, 3], [4, 5, 9]], layers=(1, 3)))
    again = read_routing(tmp_path)
    assert again is not None and again.steps.tolist() == [1, 2, 3] and again.counts[2, 0].tolist() == [9, 2, 3]


def test_a_resumed_run_that_writes_nothing_at_first_keeps_no_undone_step(tmp_path: Path) -> None:
    """The step after the checkpoint may train nothing, and so write no line: the undone one must not stand for it."""
    log = RoutingLog(tmp_path)
    for step in (1, 2, 3):
        log.write(step, loads([[step, 2], [3, 4]]))
    resumed = RoutingLog(tmp_path)
    resumed.drop_after(1)
    history = read_routing(tmp_path)
    assert history is not None and history.steps.tolist() == [1]
    resumed.write(3, loads([[9, 2], [3, 4]]))
    history = read_routing(tmp_path)
    assert history is not None and history.steps.tolist() == [1, 3] and history.counts[1, 0].tolist() == [9, 2]
    RoutingLog(tmp_path / "none").drop_after(1)


def test_a_file_of_two_models_is_refused(tmp_path: Path) -> None:
    log = RoutingLog(tmp_path)
    log.write(1, loads([[1, 2], [3, 4]]))
    log.write(2, loads([[1, 2, 3], [3, 4, 5]]))
    with pytest.raises(MetricsFileError, match="line 2: no loads of the first line's model"):
        read_routing(tmp_path)
