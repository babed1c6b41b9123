"""Invariants of the router tap (``megatron_ext/moe/tap.py``), on real Megatron models."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace

import numpy as np
import pytest
import torch

from megatron_ext.models.forward import packed_logits, record_routing, unwrap
from megatron_ext.models.parallel import ParallelContext
from megatron_ext.moe.tap import MicroRun, RouterCall, RouterTap, recording
from megatron_ext.training.trainer import Trainer
from tests.helpers.records import random_batch
from tests.helpers.replaying import RECOMPUTE, Overridden
from tests.helpers.training import (
    TERMS,
    TINY,
    gradients,
    identical,
    make_trainer,
    micro_of,
    one_rank,
    random_inputs,
    rows_of,
)

# Dense layers lead and stand between: verl 5037 counted them.
HF = replace(TINY, layers=4, mlp_only_layers=(0, 2))


@pytest.fixture(scope="module")
def rank() -> Iterator[ParallelContext]:
    with one_rank() as context:
        yield context


def trainer_of(rank: ParallelContext, recompute: str = "none", seed: int = 1) -> Trainer:
    return make_trainer(rank, hf=HF, router=Overridden(fields=RECOMPUTE[recompute]), seed=seed)


def step(trainer: Trainer, cap: int = 60) -> None:
    batch = random_batch(3, groups=4)
    trainer.update(micro_of(batch, rows_of(batch), cap=cap), random_inputs(batch), TERMS, lr=0.0)


@pytest.mark.parametrize("recompute", sorted(RECOMPUTE))
def test_each_layer_calls_once_and_once_more_when_it_is_recomputed(rank: ParallelContext, recompute: str) -> None:
    """Invariant 1, and 2 on one rank: rows are the micro-batch's tokens."""
    trainer = trainer_of(rank, recompute)
    calls: list[RouterCall] = []

    def listen(call: RouterCall, probs: torch.Tensor, routing_map: torch.Tensor) -> None:
        assert probs.shape == routing_map.shape == call.logits.shape
        assert bool((routing_map.sum(1) == HF.top_k).all()) and call.chosen is None
        calls.append(call)

    with trainer.tap.listening(listen):
        step(trainer)
    numbers = {call.run.number for call in calls}
    assert len(numbers) > 2
    seen = [(call.run.number, call.layer, call.position, call.recomputed) for call in calls]
    twice = {"none": (), "attention": (), "some layers": ()}.get(recompute, (1, 3))
    want = {(n, layer, at, False) for n in numbers for at, layer in enumerate((1, 3))}
    want |= {(n, layer, at, True) for n in numbers for at, layer in enumerate((1, 3)) if layer in twice}
    assert len(seen) == len(want) and set(seen) == want
    for call in calls:
        assert (call.start, call.count) == (
            0,
            call.run.micro.num_tokens,
        ) and call.run.micro.num_tokens == call.run.tokens
        again = call.recomputed or call.layer not in twice
        assert call.run.calls[call.layer] == ([False, True] if call.layer in twice else [True])
        assert call.logits.requires_grad == again


def test_a_recomputed_call_sees_the_forward_of_its_own_micro_batch(rank: ParallelContext) -> None:
    """Also where nothing names it in the recomputation, and backwards come in another order than forwards."""
    trainer, batch = trainer_of(rank, "moe"), random_batch(3, groups=4)
    rows, chunk = rows_of(batch), trainer.chunks[0]
    seen: dict[tuple[int, int, bool], torch.Tensor] = {}

    def listen(call: RouterCall, probs: torch.Tensor, routing_map: torch.Tensor) -> None:
        seen[call.run.number, call.layer, call.recomputed] = call.logits.detach().clone()

    micro = micro_of(batch, rows, cap=60)[:3]
    with trainer.tap.listening(listen):
        outputs = [
            packed_logits(chunk, mb.ids, mb.positions, mb.cu_seqlens, run=MicroRun(mb, n, mb.num_tokens))
            for n, mb in enumerate(micro)
        ]
        for n in (1, 2, 0):
            outputs[n].logsumexp(-1).sum().backward()
    assert len(seen) == 12
    for n in range(3):
        for layer in (1, 3):
            assert torch.equal(seen[n, layer, False], seen[n, layer, True])


def test_nothing_is_left_behind(rank: ParallelContext) -> None:
    """Invariants 3 and 4: without listeners routers are Megatron's own, and a tap sees its own model alone."""
    one, other = trainer_of(rank), trainer_of(rank, seed=2)
    step(one)
    plain = gradients(one)
    calls: list[RouterCall] = []
    with one.tap.listening(lambda call, probs, routing_map: calls.append(call)):
        step(other)
        assert not calls, "another model's routers"
        step(one)
        assert identical(gradients(one), plain) and calls
        with pytest.raises(RuntimeError, match="layer 1: its router has a tap already"), ExitStack() as stack:
            stack.enter_context(RouterTap(one.chunks).listening(lambda *args: None))
    count = len(calls)
    step(one)
    assert len(calls) == count and identical(gradients(one), plain)
    for _, router in one.tap.routers():
        assert "routing" not in vars(router) and router.router_replay is None


@pytest.mark.parametrize("recompute", sorted(RECOMPUTE))
def test_a_trained_model_is_freed(rank: ParallelContext, recompute: str) -> None:  # invariant 5
    trainer = trainer_of(rank, recompute)
    step(trainer)
    wrapper, bare = (weakref.ref(chunk) for chunk in (trainer.chunks[0], unwrap(trainer.chunks[0])))
    del trainer
    gc.collect()
    assert wrapper() is None and bare() is None


def test_a_listener_may_replace_the_probabilities(rank: ParallelContext) -> None:
    trainer = trainer_of(rank)
    step(trainer)
    plain = gradients(trainer)
    with trainer.tap.listening(lambda call, probs, routing_map: probs * 1.0):
        step(trainer)
    assert identical(gradients(trainer), plain)
    with trainer.tap.listening(lambda call, probs, routing_map: probs * 0.5):
        step(trainer)
    assert not identical(gradients(trainer), plain)


def test_a_selector_decides_and_hears_what_the_router_would_have_chosen(rank: ParallelContext) -> None:
    trainer = trainer_of(rank)
    step(trainer)
    plain = gradients(trainer)
    maps: list[torch.Tensor] = []

    def select(call: RouterCall, own: torch.Tensor) -> torch.Tensor:
        scores = call.logits.detach().gather(1, own)
        assert bool((scores[:, 1:] <= scores[:, :-1]).all()), "the largest score first"
        return (own + 1) % HF.num_experts

    def listen(call: RouterCall, probs: torch.Tensor, routing_map: torch.Tensor) -> None:
        assert call.chosen is not None and bool(routing_map.gather(1, (call.chosen + 1) % HF.num_experts).all())
        maps.append(routing_map)

    with trainer.tap.selecting(select), trainer.tap.listening(listen):
        step(trainer)
    assert maps and not identical(gradients(trainer), plain)
    with trainer.tap.selecting(lambda call, own: own):
        step(trainer)
        with pytest.raises(RuntimeError, match="two selectors"), trainer.tap.selecting(select):
            pass
    assert identical(gradients(trainer), plain), "its own choice, and its own gradient"


def test_recording_is_what_the_forward_used(rank: ParallelContext) -> None:
    trainer, batch = trainer_of(rank, "full"), random_batch(3, groups=4)
    micro = micro_of(batch, rows_of(batch), cap=60)
    with record_routing(trainer.chunks) as plain, torch.no_grad():
        trainer.score(micro, batch.num_tokens)
    with recording(trainer.tap) as routing:
        trainer.update(micro, random_inputs(batch), TERMS, lr=0.0)
    assert sorted(routing.by_layer) == sorted(plain.by_layer) == [1, 3]
    for layer, forwards in plain.by_layer.items():
        assert len(forwards) == len(micro) == len(routing.by_layer[layer]), "recomputed ones do not count"
        assert all(torch.equal(a, b) for a, b in zip(forwards, routing.by_layer[layer], strict=True))


def test_a_forward_that_names_no_micro_batch_is_not_heard(rank: ParallelContext) -> None:
    trainer, batch = trainer_of(rank), random_batch(3, groups=4)
    (mb, *_) = micro_of(batch, rows_of(batch), cap=60)
    with trainer.tap.listening(lambda call, probs, routing_map: pytest.fail("heard")), torch.no_grad():
        out = packed_logits(trainer.chunks[0], mb.ids, mb.positions, mb.cu_seqlens)
    assert np.isfinite(out.numpy()).all()


def test_a_dense_model_has_no_tap(rank: ParallelContext) -> None:
    dense = make_trainer(rank, hf=replace(TINY, family="qwen3", num_experts=0, top_k=0))
    assert dense.tap.layers == []
    with dense.tap.listening(lambda *args: pytest.fail("heard")):
        step(dense)
