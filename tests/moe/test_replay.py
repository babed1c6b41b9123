"""Invariants of routing replay on one rank, on real Megatron models (``megatron_ext/moe/replay.py``)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from megatron_ext.credit.score_plan import plan_scores
from megatron_ext.credit.scoring import ScoreError, ScoreOutputs
from megatron_ext.models.forward import packed_logits, unwrap
from megatron_ext.models.parallel import ParallelContext
from megatron_ext.moe.policies import FrozenRouter
from megatron_ext.moe.replay import check_replayable, replaying
from megatron_ext.moe.replay_tokens import ReplayCounts, ReplayError, ReplayRule
from megatron_ext.moe.tap import RouterCall
from megatron_ext.training.microbatch import MicroBatch, build_microbatch
from megatron_ext.training.scoring.execution import execute_plan
from megatron_ext.training.scoring.microbatch import Recorded
from megatron_ext.training.trainer import Trainer, UpdateResult
from megatron_ext.trajectory.record import TrajectoryBatch
from tests.helpers.records import random_batch
from tests.helpers.replaying import RECOMPUTE, Overridden, randomly_routed, with_routing
from tests.helpers.score_ranks import table
from tests.helpers.tiny_scorer import ask
from tests.helpers.training import (
    TERMS,
    TINY,
    gradients,
    identical,
    make_trainer,
    micro_of,
    one_rank,
    random_inputs,
    relative,
    rows_of,
)

# Dense layers lead and stand between.
HF = replace(TINY, layers=4, mlp_only_layers=(0, 2))
RULE = ReplayRule.of(HF)
LIVE = ReplayRule.of(HF, "live")


@pytest.fixture(scope="module")
def rank() -> Iterator[ParallelContext]:
    with one_rank() as context:
        yield context


@pytest.fixture(scope="module")
def batch() -> TrajectoryBatch:
    return randomly_routed(random_batch(3, groups=4), hf=HF)


def replayed(batch: TrajectoryBatch, cap: int = 60, rule: ReplayRule | None = RULE) -> list[MicroBatch]:
    rows = rows_of(batch)
    packed = micro_of(batch, rows, cap=cap)
    starts = {int(t): r for r, t in enumerate(rows.token[rows.row_offsets[:-1]])}
    members = [[starts[int(mb.source[o])] for o in mb.cu_seqlens[:-1]] for mb in packed]
    return [build_microbatch(batch, rows, part, rows.mask, replay=rule) for part in members]


def update(trainer: Trainer, batch: TrajectoryBatch, micro: list[MicroBatch], **options: Any) -> UpdateResult:
    return trainer.update(micro, random_inputs(batch), TERMS, lr=0.0, **options)


def chosen_by(trainer: Trainer, batch: TrajectoryBatch) -> TrajectoryBatch:
    """The batch recorded by this trainer's own routers."""
    scores = trainer.score(micro_of(batch, rows_of(batch), cap=60), batch.num_tokens, record_experts=True)
    assert scores.experts is not None
    return with_routing(batch, scores.experts.astype(np.uint8))


def test_the_routers_own_choice_replayed_changes_nothing(rank: ParallelContext) -> None:
    """Invariants 2 and 3, bit for bit: values, gradients, and the places without a recording."""
    trainer = make_trainer(rank, hf=HF)
    batch = chosen_by(trainer, random_batch(3, groups=4))
    plain = update(trainer, batch, replayed(batch, rule=None), keep_scores=True, record_experts=True)
    grads = gradients(trainer)
    again = update(trainer, batch, replayed(batch), keep_scores=True, record_experts=True)
    assert identical(gradients(trainer), grads) and again.loss == plain.loss and plain.replay is None
    assert again.scores is not None and plain.scores is not None
    assert np.array_equal(again.scores.logp, plain.scores.logp)
    assert np.array_equal(again.scores.experts, plain.scores.experts)  # type: ignore[arg-type]
    assert again.replay is not None and again.replay.replayed >= again.replay.due > 200


def oracle_logits(chunk: torch.nn.Module, batch: TrajectoryBatch, mb: MicroBatch) -> torch.Tensor:
    """Logits under experts that are put in by hand: each router call is answered from the record, in layer order."""
    from megatron.core.transformer.moe.router import TopKRouter

    routers = [module for module in chunk.modules() if isinstance(module, TopKRouter)]
    assert batch.routed is not None and batch.routed_valid is not None
    source = mb.source.numpy()
    valid = torch.from_numpy(batch.routed_valid[source])
    own = [router.routing for router in routers]

    def answer(layer: int, logits: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        flat = logits.view(-1, HF.num_experts)
        live = flat.topk(HF.top_k, dim=1).indices
        given = torch.from_numpy(batch.routed[source, layer].astype(np.int64))  # type: ignore[index]
        ids = torch.where(valid[:, None], given, live)
        weights = flat.gather(1, ids).softmax(dim=-1)
        probs = torch.zeros_like(flat).scatter(1, ids, weights)
        return probs, torch.zeros_like(flat, dtype=torch.bool).scatter(1, ids, True)

    for layer, router in enumerate(routers):
        router.routing = lambda *args, layer=layer, **kwargs: answer(layer, *args, **kwargs)
    try:
        return packed_logits(chunk, mb.ids, mb.positions, mb.cu_seqlens)
    finally:
        for router, before in zip(routers, own, strict=True):
            router.routing = before


def test_recorded_experts_are_used_and_the_router_keeps_its_gradient(
    rank: ParallelContext, batch: TrajectoryBatch
) -> None:
    """Values and gradients against a router that is answered by hand (verl's replay lost the router's gradient)."""
    trainer, other = make_trainer(rank, hf=HF), make_trainer(rank, hf=HF)
    micro = replayed(batch)
    inputs = replace(random_inputs(batch), old_logp=None)
    trainer.update(micro, inputs, TERMS, lr=0.0)
    grads = gradients(trainer)
    chunk = unwrap(other.chunks[0])
    want = 0.0
    for mb in micro:
        logits = oracle_logits(chunk, batch, mb)
        logp = logits.log_softmax(-1)[mb.logit_index, mb.target]
        # At the old log-probs the surrogate's ratio is 1: its gradient is that of the weighted log-prob.
        loss = -(inputs.weight * inputs.advantage)[mb.token] * (logp - logp.detach()).exp()
        loss.sum().backward()
        want += float(loss.detach().sum())
    by_hand = {
        f"0:module.{name}": p.grad if p.grad is not None else p.main_grad for name, p in chunk.named_parameters()
    }
    assert relative(grads, {name: value.clone() for name, value in by_hand.items()}) <= 1e-5
    routers = [value for name, value in grads.items() if ".router." in name]
    assert len(routers) == 2 and all(float(value.norm()) > 1e-6 for value in routers)
    live = make_trainer(rank, hf=HF)
    live.update(replayed(batch, rule=None), inputs, TERMS, lr=0.0)
    assert relative(gradients(live), grads) > 0.05, "recorded experts are not the routers' own"


def test_a_frozen_router_replays_too(rank: ParallelContext, batch: TrajectoryBatch) -> None:
    trained, frozen = make_trainer(rank, hf=HF), make_trainer(rank, hf=HF, router=FrozenRouter())
    update(trained, batch, replayed(batch))
    update(frozen, batch, replayed(batch))
    want = {name: value for name, value in gradients(trained).items() if ".router." not in name}
    assert identical(gradients(frozen), want)


@pytest.mark.parametrize("recompute", sorted(RECOMPUTE.keys() - {"none"}))
def test_recomputed_activations_replay_the_same_experts(
    rank: ParallelContext, batch: TrajectoryBatch, recompute: str
) -> None:
    """Several micro-batches in flight; without replay in the recomputation gradients belong to other experts."""
    plain, saving = (
        make_trainer(rank, hf=HF, router=Overridden(fields=RECOMPUTE[name])) for name in ("none", recompute)
    )
    assert update(plain, batch, replayed(batch)).loss == update(saving, batch, replayed(batch)).loss
    assert relative(gradients(saving), gradients(plain)) <= 1e-6


def test_cutting_and_packing_change_nothing(rank: ParallelContext, batch: TrajectoryBatch) -> None:
    trainer = make_trainer(rank, hf=HF)
    one = update(trainer, batch, replayed(batch, cap=4096), keep_scores=True)
    grads = gradients(trainer)
    many = update(trainer, batch, replayed(batch, cap=30), keep_scores=True)
    assert abs(many.loss - one.loss) <= 1e-6 and relative(gradients(trainer), grads) <= 1e-5
    assert one.replay == many.replay
    scored = trainer.score(replayed(batch, cap=30), batch.num_tokens)
    assert one.scores is not None and many.scores is not None
    for scores in (many.scores, scored):
        assert float(np.abs(scores.logp - one.scores.logp).max()) <= 1e-5


def test_what_routers_would_have_chosen_is_recorded_beside(rank: ParallelContext, batch: TrajectoryBatch) -> None:
    trainer = make_trainer(rank, hf=HF)
    scores = trainer.score(replayed(batch), batch.num_tokens, record_experts=True)
    live = trainer.score(replayed(batch, rule=None), batch.num_tokens, record_experts=True)
    assert scores.experts is not None and live.experts is not None and batch.routed is not None
    first = np.sort(scores.experts[scores.routed][:, 0], axis=-1)
    assert np.array_equal(first, np.sort(live.experts[live.routed][:, 0], axis=-1)), "nothing differs before layer 1"
    recorded = np.sort(batch.routed[scores.routed][:, 0].astype(np.int64), axis=-1)
    assert (first != recorded).any(axis=-1).mean() > 0.3


def score_function(trainer: Trainer, kind: str) -> None:
    """Makes the routers those of another family; their builders refuse it for this one."""
    config = unwrap(trainer.chunks[0]).config
    for number, router in trainer.tap.routers():
        if kind == "softmax first":
            config.moe_router_pre_softmax = True
            continue
        router.score_function = "sigmoid"
        if kind != "sigmoid":
            delattr(router, "expert_bias")
            bias = torch.linspace(-1, 1, HF.num_experts).roll(number)
            router.register_buffer("expert_bias", bias)
        if kind == "groups":
            config.moe_router_num_groups, config.moe_router_group_topk = 2, 1
            config.moe_router_topk_scaling_factor = 2.5


@pytest.mark.parametrize("kind", ["softmax first", "sigmoid", "bias", "groups"])
def test_every_score_function_is_replayed(rank: ParallelContext, batch: TrajectoryBatch, kind: str) -> None:
    """The bias chooses, and does not weigh; what it would have chosen is not asked."""
    trainer = make_trainer(rank, hf=HF)
    score_function(trainer, kind)
    own = chosen_by(trainer, batch)
    plain = update(trainer, own, replayed(own, rule=None))
    grads = gradients(trainer)
    assert update(trainer, own, replayed(own)).loss == plain.loss
    assert identical(gradients(trainer), grads)
    update(trainer, batch, replayed(batch))
    assert all(float(v.norm()) > 1e-6 for n, v in gradients(trainer).items() if ".router." in n)
    assert relative(gradients(trainer), grads) > 0.05


def test_two_models_do_not_share_a_replay(rank: ParallelContext, batch: TrajectoryBatch) -> None:
    """Invariant 4 (verl 4562): another model runs in the midst of a replay and routes for itself."""
    one, other = make_trainer(rank, hf=HF), make_trainer(rank, hf=HF, seed=2)
    (mb,) = replayed(batch, cap=4096)
    plain = other.score(replayed(batch, cap=4096, rule=None), batch.num_tokens).logp
    with replaying(one.tap):
        assert np.array_equal(other.score(replayed(batch, cap=4096, rule=None), batch.num_tokens).logp, plain)
    again = other.score([mb], batch.num_tokens).logp
    assert not np.array_equal(again, plain)
    assert np.array_equal(other.score(replayed(batch, cap=4096, rule=None), batch.num_tokens).logp, plain)
    for trainer in (one, other):
        assert all(router.router_replay is None for _, router in trainer.tap.routers())


def test_a_place_without_a_recording_runs_as_the_router_chooses(rank: ParallelContext, batch: TrajectoryBatch) -> None:
    trainer = make_trainer(rank, hf=HF)
    assert batch.routed is not None
    nothing = with_routing(batch, batch.routed, np.zeros(batch.num_tokens, dtype=bool))
    plain = update(trainer, batch, replayed(batch, rule=None))
    grads = gradients(trainer)
    live = update(trainer, nothing, replayed(nothing, rule=LIVE))
    assert live.loss == plain.loss and identical(gradients(trainer), grads)
    assert live.replay is not None and live.replay.replayed == 0 and live.replay.missing == live.replay.due > 0


# -- what is counted -------------------------------------------------------------------------------------------------
def test_an_expert_that_was_not_used_is_an_error(rank: ParallelContext, batch: TrajectoryBatch) -> None:
    """Invariant 1: something changes a token's experts behind the selection."""
    trainer = make_trainer(rank, hf=HF)
    _, router = trainer.tap.routers()[1]
    own = type(router).routing

    def changing(logits: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        probs, routing_map = own(router, logits, *args, **kwargs)
        routing_map[2] = routing_map[2].roll(1)
        return probs, routing_map

    with pytest.MonkeyPatch.context() as patch:  # the class: the tap stands around the instance's
        patch.setattr(
            type(router), "routing", lambda self, *a, **k: changing(*a, **k) if self is router else own(self, *a, **k)
        )
        with pytest.raises(
            ReplayError, match=r"micro-batch 0, layer 3: \d+ of \d+ recorded expert ids were used in the"
        ):
            trainer.score(replayed(batch), batch.num_tokens)
    trainer.score(replayed(batch), batch.num_tokens)


def test_a_layer_that_asks_too_often_or_not_at_all_is_an_error(rank: ParallelContext, batch: TrajectoryBatch) -> None:
    trainer = make_trainer(rank, hf=HF)
    micro = replayed(batch)
    router = trainer.tap.routers()[0][1]
    twice = router.register_forward_pre_hook(lambda module, args: module.routing(module.gating(args[0])) and None)
    with pytest.raises(ReplayError, match="asked layer 1 for experts 2 times"):
        trainer.score(micro, batch.num_tokens)
    twice.remove()
    trainer.tap.layers_of = lambda chunk: [0, 1, 3]  # type: ignore[method-assign]
    with pytest.raises(ReplayError, match="micro-batch 0 asked layer 0 for experts 0 times"):
        update(trainer, batch, micro)


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"moe_router_fusion": True}, "moe_router_fusion=True"),
        ({"moe_expert_capacity_factor": 1.0}, "moe_expert_capacity_factor=1.0"),
        ({"moe_input_jitter_eps": 0.1}, "moe_input_jitter_eps=0.1"),
        ({"moe_router_load_balancing_type": "sinkhorn"}, "moe_router_load_balancing_type=sinkhorn"),
        ({"moe_router_force_load_balancing": True}, "moe_router_force_load_balancing=True"),
    ],
)
def test_routers_that_would_not_use_a_record_are_refused(
    rank: ParallelContext, change: dict[str, Any], line: str
) -> None:
    config = unwrap(make_trainer(rank, hf=HF).chunks[0]).config
    check_replayable(config)
    with pytest.raises(ReplayError, match=f"does not go with {line}"):
        check_replayable(replace_fields(config, change))


def replace_fields(config: Any, change: dict[str, Any]) -> Any:
    from copy import copy

    other = copy(config)
    for name, value in change.items():
        setattr(other, name, value)
    return other


# -- scoring requests ------------------------------------------------------------------------------------------------
def test_score_requests_replay_their_rows(rank: ParallelContext) -> None:
    batch = randomly_routed(random_batch(5))
    trainer = make_trainer(rank)
    recorded = Recorded(batch, ReplayRule.of(TINY))
    segments = [int(s) for s in np.unique(batch.token_segment()[batch.loss_mask])]
    rows = rows_of(batch)
    micro = [build_microbatch(batch, rows, [r], rows.mask, replay=recorded.rule) for r in range(rows.num_rows)]
    want = trainer.score(micro, batch.num_tokens).logp
    live = trainer.score([replace(mb, replay=None) for mb in micro], batch.num_tokens).logp
    requests, at = [], []
    for segment in segments:
        first, end = (int(x) for x in batch.segment_tokens[segment : segment + 2])
        trained = first + np.flatnonzero(batch.loss_mask[first:end])
        trained = trained[trained > first]
        outputs = ScoreOutputs(hidden=(2,)) if segment % 2 else ScoreOutputs()
        requests += [
            replace(ask(segment, None, trained, "current", outputs), replay_routing=flag) for flag in (True, False)
        ]
        at.append(trained)
    replies = execute_plan(
        trainer, plan_scores(requests, batch, table()), {}, tokens_per_microbatch=80, recorded=recorded
    )
    for number, trained in enumerate(at):
        np.testing.assert_allclose(replies[2 * number].logp, want[trained], atol=1e-5)  # type: ignore[arg-type]
        np.testing.assert_allclose(replies[2 * number + 1].logp, live[trained], atol=1e-5)  # type: ignore[arg-type]
    assert np.abs(want - live)[batch.loss_mask].mean() > 1e-3

    plan = plan_scores(requests[:1], batch, table())
    with pytest.raises(ScoreError, match="replay_routing, and the run replays none; set rollout.replay_routing=true"):
        execute_plan(trainer, plan, {}, tokens_per_microbatch=80)
    assert batch.routed is not None
    gone = with_routing(batch, batch.routed, np.zeros(batch.num_tokens, dtype=bool))
    with pytest.raises(ScoreError, match="segment .*, position 0 of .*: no experts were recorded"):
        execute_plan(trainer, plan, {}, tokens_per_microbatch=80, recorded=replace(recorded, batch=gone))


def test_an_update_on_rows_without_tokens_counts_nothing(rank: ParallelContext, batch: TrajectoryBatch) -> None:
    trainer, rows = make_trainer(rank, hf=HF), rows_of(batch)
    empty = build_microbatch(batch, rows, [], rows.mask, replay=RULE)
    assert update(trainer, batch, [empty, empty]).replay == ReplayCounts()


def test_a_recording_that_crosses_policy_versions_is_replayed_as_it_is(rank: ParallelContext) -> None:
    """A partial rollout went on under other weights: each token keeps the experts of the weights that ran it."""
    trainer, plain = make_trainer(rank, hf=HF), random_batch(3, groups=4)
    old, new = (chosen_by(make_trainer(rank, hf=HF, seed=seed), plain).routed for seed in (1, 2))
    assert old is not None and new is not None
    newer = np.random.default_rng(1).random(plain.num_tokens) < 0.5
    batch = with_routing(plain, np.where(newer[:, None, None], new, old))
    used: list[np.ndarray] = []

    def listen(call: RouterCall, probs: torch.Tensor, routing_map: torch.Tensor) -> None:
        source, valid = call.run.micro.source.numpy(), call.run.micro.replay.valid.numpy()
        assert batch.routed is not None
        want = np.zeros(routing_map.shape, dtype=bool)
        np.put_along_axis(want, batch.routed[source, call.position].astype(np.int64), True, axis=1)
        used.append((routing_map.numpy() == want)[valid].all(axis=1))

    with trainer.tap.listening(listen):
        result = update(trainer, batch, replayed(batch))
    assert result.replay is not None and result.replay.missing == 0
    assert np.concatenate(used).all() and sum(map(len, used)) == 2 * result.replay.replayed
