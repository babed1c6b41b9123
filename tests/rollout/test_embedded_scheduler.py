"""Slots and continuous batching of the embedded engine, in this process."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from megatron_ext.models.hf_config import HFConfig
from megatron_ext.rollout.embedded import runner as module
from megatron_ext.rollout.embedded.scheduler import Scheduler
from megatron_ext.rollout.embedded.slots import Slots
from megatron_ext.rollout.embedded.weights import ModelWeights, WeightStage
from megatron_ext.rollout.engine import EngineError, FinishReason, GenerateResult
from tests.helpers.engines import DENSE, MOE, Check, Twin, joined, prompt, request

CPU = torch.device("cpu")
TWINS: dict[tuple[HFConfig, int], tuple[Twin, ModelWeights]] = {}


def loaded(config: HFConfig, seed: int) -> tuple[Twin, ModelWeights]:
    if (config, seed) not in TWINS:
        twin, stage = Twin(config, seed), WeightStage(config, CPU)
        for name, tensor in twin.tensors():
            stage.add(name, tensor)
        TWINS[config, seed] = twin, stage.finish()
    return TWINS[config, seed]


class Bench:
    """A scheduler with weights, and what its forwards were given: (tokens, prefill?)."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, slots: int, config: HFConfig = MOE) -> None:
        torch.set_num_threads(1)
        self.twin, weights = loaded(config, 1)
        self.scheduler = Scheduler(config, 160, slots, CPU, threads=1)
        self.scheduler.load(weights, 0)
        self.forwards: list[tuple[int, bool]] = []
        plain = module.Decoder.forward

        def counted(decoder, ids, attention, last, record):  # type: ignore[no-untyped-def]
            self.forwards.append((len(ids), isinstance(attention, module.Prefill)))
            return plain(decoder, ids, attention, last, record)

        monkeypatch.setattr(module.Decoder, "forward", counted)

    def run(self, limit: int = 2000) -> dict[str, GenerateResult]:
        for _ in range(limit):
            if not self.scheduler.busy:
                break
            self.scheduler.step()
        assert not self.scheduler.busy
        return {result.request_id: result for _, result in self.scheduler.take_results()}

    def prefilled(self) -> int:
        return sum(tokens for tokens, prefill in self.forwards if prefill)


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Bench]:
    return lambda slots=8, config=MOE: Bench(monkeypatch, slots, config)


# -- slots ---------------------------------------------------------------------------------------------------------
def test_arranging_sorts_by_zone_and_moves_only_what_stands_wrong() -> None:
    rng = np.random.default_rng(0)
    slots = Slots(DENSE, 9, 32, CPU)
    slots.cache.ensure(4)
    slots.cached[:] = 1 + np.arange(9) % 4
    for tensor in slots.cache.keys:
        tensor.copy_(torch.arange(9).repeat_interleave(DENSE.kv_heads)[:, None, None].expand(tensor.shape))
    wanted = {}
    for _ in range(60):
        zone = rng.integers(0, 3, 9)
        wanted = {int(slots.seat_of[s]): int(zone[s]) for s in range(9)}
        before = slots.seat_of.copy()
        slots.arrange(zone)
        zones = slots.zones()
        assert np.array_equal(slots.seat_of[slots.slot_of], np.arange(9))
        assert all(zones[slots.slot_of[seat]] == z for seat, z in wanted.items())
        stayed = zone == zones
        assert np.array_equal(slots.seat_of[stayed], before[stayed])
        for tensor in slots.cache.keys:
            held = tensor.unflatten(0, (9, DENSE.kv_heads))
            for slot, seat in enumerate(slots.seat_of):
                assert torch.all(held[slot, :, : slots.cached[seat]] == seat)


# -- batching ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("config", [MOE, DENSE], ids=["moe", "dense"])
def test_requests_join_and_leave_at_every_step(bench: Callable[..., Bench], config: HFConfig) -> None:
    b, rng = bench(5, config), np.random.default_rng(0)
    requests = [
        request(f"r{i}", prompt(rng, 1 + 5 * i % 23), seed=i, max_new_tokens=1 + 7 * i % 19, top_k=i % 4)
        for i in range(24)
    ]
    results: dict[str, GenerateResult] = {}
    for i, r in enumerate(requests):
        b.scheduler.submit(i % 3, r)
        if i % 2:
            b.scheduler.step()
    results = b.run()
    assert sorted(results) == sorted(r.request_id for r in requests)
    for r in requests:
        check = Check.of(b.twin, r, results[r.request_id])
        assert check.sampled == r.sampling.max_new_tokens and check.error < 1e-5
        alone = bench(1, config)
        alone.scheduler.submit(0, r)
        assert np.array_equal(alone.run()[r.request_id].ids, results[r.request_id].ids)


def test_a_session_pays_only_for_new_tokens(bench: Callable[..., Bench]) -> None:
    b, rng = bench(), np.random.default_rng(1)
    ids = prompt(rng, 50)
    first = request("a", ids, session="s", max_new_tokens=6)
    b.scheduler.submit(0, first)
    ids = joined(first, b.run()["a"])
    assert b.prefilled() == 50
    second = request("b", np.concatenate([ids, prompt(rng, 4)]), session="s")
    b.scheduler.submit(0, second)
    result = b.run()["b"]
    assert b.prefilled() == 50 + 1 + 4, "the last sampled token had no forward yet"
    assert Check.of(b.twin, second, result).error < 1e-5
    forked = request("c", np.concatenate([ids[:20], prompt(rng, 3)]), session="s")
    b.scheduler.submit(0, forked)
    assert Check.of(b.twin, forked, b.run()["c"]).error < 1e-5
    assert b.prefilled() == 55 + 3
    again = request("d", forked.input_ids, session="s", seed=4)
    b.scheduler.submit(0, again)
    assert Check.of(b.twin, again, b.run()["d"]).error < 1e-5
    assert b.prefilled() == 58, "a prompt that is cached but for its last token goes straight to decoding"


def test_equal_prompts_are_prefilled_once(bench: Callable[..., Bench]) -> None:
    b, rng = bench(8), np.random.default_rng(2)
    groups = [prompt(rng, 30), prompt(rng, 21)]
    requests = [
        request(f"g{i}", groups[i % 2], seed=i, max_new_tokens=5 + i, return_routed=i % 3 == 0) for i in range(20)
    ]
    for r in requests:
        b.scheduler.submit(0, r)
    results = b.run()
    assert b.prefilled() < 5 * (30 + 21), "10 of each; a few leaders, because only recorded prompts lend experts"
    for r in requests:
        result = results[r.request_id]
        assert Check.of(b.twin, r, result).error < 1e-5
        if r.return_routed:
            assert result.routed is not None and result.routed_from == 0
            wanted = b.twin.routed(joined(r, result)[:-1])
            assert np.array_equal(np.sort(result.routed, -1), np.sort(wanted, -1))
    short = bench(8)
    for i in range(8):
        short.scheduler.submit(0, request(f"one{i}", groups[0], seed=i, max_new_tokens=1))
    short.run()
    assert len(short.forwards) == 1, "requests of one token would wait for a leader that is gone"


def test_the_longest_unused_session_gives_way(bench: Callable[..., Bench]) -> None:
    b, rng = bench(2), np.random.default_rng(3)
    prompts = {name: prompt(rng, 10) for name in "xyz"}
    for name in "xy":
        b.scheduler.submit(0, request(name, prompts[name], session=name))
        b.run()
    b.scheduler.submit(0, request("x2", prompts["x"], session="x"))
    b.run()
    b.scheduler.submit(0, request("z", prompts["z"], session="z"))  # y was unused for longest
    b.run()
    spent = b.prefilled()
    b.scheduler.submit(0, request("x3", prompts["x"], session="x"))
    b.run()
    assert b.prefilled() == spent
    b.scheduler.submit(0, request("y2", prompts["y"], session="y"))
    b.run()
    assert b.prefilled() == spent + 10


def test_a_session_asked_twice_at_once(bench: Callable[..., Bench]) -> None:
    b, rng = bench(4), np.random.default_rng(4)
    requests = [request(f"t{i}", prompt(rng, 8), session="same", seed=i, max_new_tokens=9 - i) for i in range(3)]
    for r in requests:
        b.scheduler.submit(0, r)
    results = b.run()
    for r in requests:
        assert Check.of(b.twin, r, results[r.request_id]).error < 1e-5
    assert b.scheduler.counts == (0, 0, 1), "one cache remains for the session"


def test_ended_sessions_leave_nothing(bench: Callable[..., Bench]) -> None:
    b, rng = bench(3), np.random.default_rng(5)
    for i in range(6):
        b.scheduler.submit(i % 2, request(f"e{i}", prompt(rng, 5), session=f"s{i}"))
    b.scheduler.step()
    b.scheduler.end_sessions(0, [f"s{i}" for i in (0, 2, 4)])  # running and waiting ones
    b.run()
    b.scheduler.drop(1)
    assert b.scheduler.counts == (0, 0, 0)


def test_a_long_prompt_is_cut_and_decoding_goes_on(
    bench: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PREFILL_TOKENS", 16)
    b, rng = bench(8), np.random.default_rng(6)
    short = request("short", prompt(rng, 4), seed=1, max_new_tokens=30)
    b.scheduler.submit(0, short)
    b.scheduler.step()
    longs = [request(f"long{n}", prompt(rng, n), seed=n, return_routed=True) for n in (100, 15, 9, 40)]
    for r in longs:
        b.scheduler.submit(0, r)
    before = len(b.forwards)
    results = b.run()
    steps = b.forwards[before:]
    assert all(tokens <= 16 for tokens, prefill in steps if prefill)
    assert [prefill for _, prefill in steps[:6]] == [True, False] * 3, "a decode step follows every prefill step"
    for r in (short, *longs):
        assert Check.of(b.twin, r, results[r.request_id]).error < 1e-5
    for r in longs:
        routed = results[r.request_id].routed
        assert routed is not None
        wanted = b.twin.routed(joined(r, results[r.request_id])[:-1])
        assert np.array_equal(np.sort(routed, -1), np.sort(wanted, -1))


# -- weights -------------------------------------------------------------------------------------------------------
def test_new_weights_take_over_between_two_tokens(bench: Callable[..., Bench]) -> None:
    b, rng = bench(4), np.random.default_rng(7)
    other, weights = loaded(MOE, 2)
    requests = [request(f"w{i}", prompt(rng, 6 + i), seed=i, max_new_tokens=20, return_routed=True) for i in range(6)]
    for r in requests:
        b.scheduler.submit(0, r)
    for _ in range(7):
        b.scheduler.step()
    b.scheduler.load(weights, 3)
    results = b.run()
    mixed = 0
    for r in requests:
        result, first = results[r.request_id], len(r.input_ids)
        whole = joined(r, result)
        assert np.all(np.diff(result.versions) >= 0) and set(result.versions.tolist()) <= {0, 3}
        mixed += len(set(result.versions.tolist())) == 2
        for version, twin in ((0, b.twin), (3, other)):
            at = first + np.flatnonzero(result.versions == version)
            assert np.abs(twin.logp(whole)[at - 1, whole[at]] - result.logp[at - first]).max(initial=0) < 1e-5
        assert result.routed is not None
        wanted = other.routed(whole[:-1])
        assert np.array_equal(np.sort(result.routed, -1), np.sort(wanted, -1)), "experts of the latest forward"
        assert result.rerun == (result.versions == 0).sum() % 20, "none of those that were done before"
    assert mixed == 4
    # In a dialogue the tokens of earlier calls run again too: rows are of all of them.
    earlier = requests[0]
    longer = np.concatenate([joined(earlier, results["w0"]), prompt(rng, 3)])
    b.scheduler.submit(0, request("next", longer, session="w0", max_new_tokens=9, return_routed=True))
    for _ in range(4):
        b.scheduler.step()
    again, same = loaded(MOE, 1)
    b.scheduler.load(same, 4)
    result = b.run()["next"]
    assert result.routed is not None and result.routed_from == 0 and 0 < result.rerun < 9
    wanted = again.routed(np.concatenate([longer, result.ids])[:-1])
    assert np.array_equal(np.sort(result.routed, -1), np.sort(wanted, -1))
    with pytest.raises(EngineError, match="version 2 is older than the version 4"):
        b.scheduler.load(weights, 2)


def test_sleep_answers_what_ran_and_refuses_what_comes(bench: Callable[..., Bench]) -> None:
    b, rng = bench(2), np.random.default_rng(8)
    _, weights = loaded(MOE, 2)
    for i in range(4):
        b.scheduler.submit(0, request(f"q{i}", prompt(rng, 5), max_new_tokens=50, return_routed=True))
    for _ in range(3):
        b.scheduler.step()
    b.scheduler.sleep()
    results = {r.request_id: r for _, r in b.scheduler.take_results()}
    assert {r.finish for r in results.values()} == {FinishReason.ABORT} and len(results) == 4
    sampled: list[NDArray[np.int32]] = [results[f"q{i}"].ids for i in range(4)]
    assert [len(ids) for ids in sampled] == [4, 4, 0, 0]
    for result in results.values():
        assert result.routed is not None and len(result.routed) == (8 if len(result.ids) else 0)
    for action in (lambda: b.scheduler.submit(0, request("no", prompt(rng, 5))), lambda: b.scheduler.load(weights, 1)):
        with pytest.raises(EngineError, match="asleep"):
            action()
    b.scheduler.wake()
    assert b.scheduler.version == -1
    b.scheduler.load(weights, 1)
    b.scheduler.submit(0, request("yes", prompt(rng, 5)))
    assert set(b.run()["yes"].versions.tolist()) == {1}


@pytest.mark.parametrize("how", ["abort", "drop", "end_sessions and abort", "drop of who waits"])
def test_who_goes_early_leaves_the_others_as_they_were(bench: Callable[..., Bench], how: str) -> None:
    """Those behind it move up in the cache between two steps, and go on to the same tokens."""
    b, rng = bench(4), np.random.default_rng(9)
    requests = [request(f"g{i}", prompt(rng, 4 + 5 * i), seed=i, max_new_tokens=24) for i in range(6)]
    for owner, each in enumerate(requests):
        b.scheduler.submit(owner, each)
    for _ in range(5):
        b.scheduler.step()
    slots = b.scheduler._slots
    assert b.scheduler.counts[:2] == (4, 2) and slots.ready == 4
    gone = 5 if how == "drop of who waits" else int(slots.seat_of[0])
    gone = next(job.owner for seat, job in b.scheduler._running.items() if seat == gone) if gone < 5 else gone
    before = slots.slot_of.copy()
    if how.startswith("drop"):
        b.scheduler.drop(gone)
    else:
        if "end" in how:
            b.scheduler.end_sessions(gone, [requests[gone].session_id])
        b.scheduler.abort(gone, [requests[gone].request_id])
    assert bool((slots.slot_of != before).any()) == (gone < 5)
    results = b.run()
    left = results.pop(requests[gone].request_id, None)
    assert (left is None) == how.startswith("drop") and (left is None or left.finish is FinishReason.ABORT)
    assert len(results) == 5
    for each in requests:
        if each.request_id in results:
            alone = bench(1)
            alone.scheduler.submit(0, each)
            assert np.array_equal(alone.run()[each.request_id].ids, results[each.request_id].ids)
            assert Check.of(b.twin, each, results[each.request_id]).error < 1e-5


def test_a_dense_model_has_no_experts_to_return(bench: Callable[..., Bench]) -> None:
    with pytest.raises(EngineError, match="'d'.*dense"):
        bench(2, DENSE).scheduler.submit(0, request("d", np.array([1], dtype=np.int32), return_routed=True))
