"""Batch invariance: a request gets the same bits whatever runs beside it (``arithmetic``, ``cache``, ``scheduler``)."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from megatron_ext.models.hf_config import HFConfig
from megatron_ext.rollout.embedded.arithmetic import FAST, INVARIANT
from megatron_ext.rollout.embedded.scheduler import Scheduler
from megatron_ext.rollout.embedded.weights import ModelWeights, WeightStage
from megatron_ext.rollout.engine import GenerateRequest, GenerateResult, SamplingParams
from tests.helpers.engines import DENSE, MOE, Twin

CPU = torch.device("cpu")
CONTEXT = 96
# Sizes that leave ends of every kind in vectorised loops.
ODD = replace(MOE, hidden=36, moe_intermediate=13, vocab=83, tie_word_embeddings=True)


@pytest.mark.parametrize(("hidden", "out"), [(48, 64), (36, 83), (24, 7), (128, 512), (13, 36)])
def test_a_row_is_computed_alike_alone_and_in_company(hidden: int, out: int) -> None:
    """Arithmetic's invariants 1 and 2."""
    generator = torch.Generator().manual_seed(hidden)
    x, w = torch.randn(41, hidden, generator=generator), torch.randn(hidden, out, generator=generator)
    base, up = torch.randn(41, out, generator=generator), torch.randn(41, hidden, generator=generator)
    for name, arguments in (("product", (x,)), ("add_product", (base, x)), ("gated", (x, up))):
        tail = () if name == "gated" else (w,)
        both = [getattr(kind, name) for kind in (INVARIANT, FAST)]
        whole = both[0](*arguments, *tail)
        torch.testing.assert_close(whole, both[1](*arguments, *tail), rtol=1e-5, atol=1e-5)
        for first, count in ((0, 1), (3, 1), (40, 1), (1, 2), (5, 3), (7, 8), (2, 17), (9, 32)):
            part = [tensor[first : first + count].clone() for tensor in arguments]
            assert torch.equal(both[0](*part, *tail), whole[first : first + count]), (name, first, count)


def test_the_fast_arithmetic_is_not_invariant() -> None:
    """Why the slow one is there: if this ever passes everywhere, it can go."""
    x, w = torch.randn(41, 36), torch.randn(36, 83)
    whole = FAST.product(x, w)
    assert any(not torch.equal(FAST.product(x[:n].clone(), w), whole[:n]) for n in range(1, 41))


def weights_of(config: HFConfig, seed: int) -> ModelWeights:
    stage = WeightStage(config, CPU)
    for name, tensor in Twin(config, seed).tensors():
        stage.add(name, tensor)
    return stage.finish()


def requests(config: HFConfig, count: int, seed: int) -> list[GenerateRequest]:
    """Two calls each of ``count`` sessions, some with equal prompts; the second call continues the first."""
    rng = np.random.default_rng(seed)
    prompts = [rng.integers(0, config.vocab, int(rng.integers(1, 30))) for _ in range(count)]
    prompts[1] = prompts[0]
    return [
        GenerateRequest(
            f"{i}#0",
            str(i),
            prompt.astype(np.int32),
            SamplingParams(max_new_tokens=int(rng.integers(2, 12)), temperature=[1.0, 0.0, 0.7][i % 3], seed=i % 4),
            return_routed=bool(any(config.moe_pattern)),
        )
        for i, prompt in enumerate(prompts)
    ]


def play(config: HFConfig, weights: ModelWeights, slots: int, first: list[GenerateRequest], rng: np.random.Generator):  # type: ignore[no-untyped-def]
    """Runs all requests, arriving in a random order at random times, then a second call of every session."""
    scheduler = Scheduler(config, CONTEXT, slots, CPU, 1, invariant=True)
    scheduler.load(weights, 0)
    waiting = [first[i] for i in rng.permutation(len(first))]
    done: dict[str, GenerateResult] = {}
    while waiting or scheduler.busy:
        for _ in range(int(rng.integers(0, 4))):
            if waiting:
                scheduler.submit(0, waiting.pop())
        scheduler.step()
        for _, result in scheduler.take_results():
            done[result.request_id] = result
            name, turn = result.request_id.split("#")
            if turn == "0":
                asked = first[int(name)]
                ids = np.concatenate([asked.input_ids, result.ids, np.array([1, 2, 3], dtype=np.int32)])
                waiting.append(replace(asked, request_id=f"{name}#1", input_ids=ids))
    return done


@pytest.mark.parametrize("config", [MOE, DENSE, ODD], ids=["moe", "dense", "odd"])
def test_tokens_and_log_probs_do_not_depend_on_company_arrival_or_cache(config: HFConfig) -> None:
    """Scheduler's invariant 5, cache's invariant 4: alone, in any batch, with reused and evicted caches."""
    weights = weights_of(config, 1)
    asked = requests(config, 9, seed=4)
    rng = np.random.default_rng(0)
    alone = play(config, weights, 1, asked, rng)
    for slots in (2, 5, 16):
        together = play(config, weights, slots, asked, rng)
        assert together.keys() == alone.keys() and len(alone) == 18
        for name, result in alone.items():
            other = together[name]
            assert np.array_equal(result.ids, other.ids) and np.array_equal(result.logp, other.logp), (slots, name)
            if result.routed is not None and other.routed is not None and result.routed_from == other.routed_from:
                assert np.array_equal(result.routed, other.routed)


def test_they_equal_those_of_the_fast_engine_up_to_rounding() -> None:
    weights = weights_of(MOE, 2)
    asked = [replace(r, sampling=replace(r.sampling, temperature=0.0)) for r in requests(MOE, 6, seed=1)]
    results = []
    for invariant in (True, False):
        scheduler = Scheduler(MOE, CONTEXT, 8, CPU, 1, invariant=invariant)
        scheduler.load(weights, 0)
        for request in asked:
            scheduler.submit(0, request)
        while scheduler.busy:
            scheduler.step()
        results.append({result.request_id: result for _, result in scheduler.take_results()})
    for name, result in results[0].items():
        assert np.array_equal(result.ids, results[1][name].ids)
        np.testing.assert_allclose(result.logp, results[1][name].logp, atol=1e-5)
