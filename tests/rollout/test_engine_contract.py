"""The contract of an engine: the seven invariants of ``rollout/engine.py`` and its life cycle, for every engine.

A new engine is one more entry of ``ENGINES``: a function that starts it for a configuration. It is started once.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron_ext.models.hf_config import HFConfig
from megatron_ext.rollout.embedded.engine import EmbeddedEngine
from megatron_ext.rollout.engine import EngineControl, EngineError, FinishReason, GenerationClient
from megatron_ext.rollout.replicas import ReplicatedEngine
from tests.helpers.engines import MOE, Check, Twin, ask, collect, joined, prompt, request
from tests.helpers.engines import request as ask_for

CONTEXT = 160
SLOTS = 16
TOLERANCE = 1e-5

pytestmark = pytest.mark.integration


def embedded(config: HFConfig, folder: Path) -> EngineControl:
    return EmbeddedEngine(
        hf_config=config.to_dict(), max_context=CONTEXT, threads=1, slots=SLOTS, log_path=folder / "engine.log"
    )


def replicated(config: HFConfig, folder: Path) -> EngineControl:
    node = {"_target_": "megatron_ext.rollout.embedded.engine.EmbeddedEngine", "slots": SLOTS}
    return ReplicatedEngine(
        engine=node,
        replicas=2,
        hf_config=config.to_dict(),
        max_context=CONTEXT,
        threads=2,
        log_path=folder / "engine.log",
    )


ENGINES: dict[str, Callable[[HFConfig, Path], EngineControl]] = {"embedded": embedded, "replicated": replicated}


@dataclass
class Served:
    """A running engine with a client, and the models it may be given."""

    control: EngineControl
    client: GenerationClient
    twins: tuple[Twin, Twin]
    current: Twin
    published: int = 0
    rng: np.random.Generator = field(default_factory=lambda: np.random.default_rng(7))

    def publish(self, twin: Twin) -> int:
        """Gives the engine a model under the next version."""
        self.published += 1
        self.control.publish(twin.tensors(), self.published)
        self.current = twin
        return self.published


@pytest.fixture(scope="session", params=sorted(ENGINES))
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    torch.set_num_threads(1)
    twins = Twin(MOE, 1), Twin(MOE, 2)
    control = ENGINES[request.param](MOE, tmp_path_factory.mktemp(request.param))
    try:
        assert control.version() == -1
        client = pickle.loads(pickle.dumps(control.connect())).open()
        early = ask_for("too-early", np.array([1, 2, 3], dtype=np.int32))
        with pytest.raises(EngineError, match="too-early.*publish"):
            ask(client, [early])
        served = Served(control, client, twins, twins[0])
        served.publish(twins[0])
        yield served
        client.close()
    finally:
        control.close()


# -- the seven invariants ------------------------------------------------------------------------------------------
def test_tokens_in_tokens_out(engine: Served) -> None:
    """1: the result continues exactly what was sent; the reference finds its log-probs on that very sequence."""
    requests = [request(f"io{n}", prompt(engine.rng, n), seed=n, max_new_tokens=12) for n in (1, 2, 9, 33)]
    results = ask(engine.client, requests)
    for r in requests:
        result = results[r.request_id]
        assert result.ids.dtype == np.int32 and len(result.ids) == len(result.logp) == len(result.versions) == 12
        assert result.finish is FinishReason.LENGTH
        assert Check.of(engine.current, r, result).error < TOLERANCE


@pytest.mark.parametrize("temperature", [1.0, 0.7, 2.5])
def test_logp_is_of_the_tempered_untruncated_distribution(engine: Served, temperature: float) -> None:
    """2."""
    requests = [
        request(f"lp{i}", prompt(engine.rng, 6 + i), temperature=temperature, top_k=k, top_p=p, seed=i)
        for i, (k, p) in enumerate([(0, 1.0), (3, 1.0), (0, 0.5), (5, 0.8)])
    ]
    results = ask(engine.client, requests)
    for r in requests:
        check = Check.of(engine.current, r, results[r.request_id])
        assert check.sampled == 8 and check.error < TOLERANCE
        assert np.all(results[r.request_id].logp <= 0)


def test_greedy_takes_the_likeliest_and_reports_temperature_one(engine: Served) -> None:
    """2."""
    r = request("greedy", prompt(engine.rng, 10), temperature=0.0, max_new_tokens=20)
    result = ask(engine.client, [r])["greedy"]
    whole = joined(r, result)
    reference = engine.current.logp(whole)[9:-1]
    assert np.array_equal(reference.argmax(-1), result.ids)
    assert Check.of(engine.current, r, result).error < TOLERANCE
    again = ask(engine.client, [request("again", r.input_ids, temperature=0.0, max_new_tokens=20, seed=99)])["again"]
    assert np.array_equal(again.ids, result.ids)


def test_a_stop_id_ends_the_result_and_carries_its_logp(engine: Served) -> None:
    """3."""
    free = request("free", prompt(engine.rng, 5), seed=3, max_new_tokens=30)
    ids = ask(engine.client, [free])["free"].ids
    stop = int(ids[11])
    first = int(np.flatnonzero(ids == stop)[0])
    r = request("stopped", free.input_ids, seed=3, max_new_tokens=30, stop_ids=(stop, 100_000))
    result = ask(engine.client, [r])["stopped"]
    assert result.finish is FinishReason.STOP
    assert np.array_equal(result.ids, ids[: first + 1])
    assert Check.of(engine.current, r, result).error < TOLERANCE
    full = ask(engine.client, [request("last", free.input_ids, seed=3, max_new_tokens=first + 1, stop_ids=(stop,))])
    assert full["last"].finish is FinishReason.STOP, "a stop id counts as STOP also where the length ends"


def test_versions_never_fall_within_a_result(engine: Served) -> None:
    """4 and 7: weights published under way take over between two tokens, with the context computed anew."""
    before = engine.published
    r = request("across", prompt(engine.rng, 4), seed=5, max_new_tokens=CONTEXT - 4)
    engine.client.submit([r])
    after = engine.publish(engine.twins[1])
    result = collect(engine.client, 1)["across"]
    assert set(result.versions.tolist()) <= {before, after}
    assert np.all(np.diff(result.versions) >= 0)
    whole = joined(r, result)
    for version, twin in ((before, engine.twins[0]), (after, engine.twins[1])):
        at = 4 + np.flatnonzero(result.versions == version)
        wanted = twin.logp(whole)[at - 1, whole[at]]
        assert np.abs(wanted - result.logp[at - 4]).max(initial=0) < TOLERANCE
    engine.publish(engine.twins[0])


@pytest.mark.parametrize("top_k", [0, 4])
def test_random_numbers_are_keyed_by_seed_and_position(engine: Served, top_k: int) -> None:
    """5: alone, in a crowd, or continued from its own tokens, a request samples the same."""
    r = request("alone", prompt(engine.rng, 7), seed=11, max_new_tokens=16, top_k=top_k)
    alone = ask(engine.client, [r])["alone"]
    crowd = [request(f"c{i}", prompt(engine.rng, 3 + 2 * i), seed=i, max_new_tokens=5 + i) for i in range(SLOTS + 5)]
    twin = request("crowded", r.input_ids, seed=11, max_new_tokens=16, top_k=top_k)
    other = request("other-seed", r.input_ids, seed=12, max_new_tokens=16, top_k=top_k)
    results = ask(engine.client, [*crowd[:9], twin, other, *crowd[9:]])
    assert np.array_equal(results["crowded"].ids, alone.ids)
    assert np.abs(results["crowded"].logp - alone.logp).max() < TOLERANCE
    assert not np.array_equal(results["other-seed"].ids, alone.ids)
    rest = request("rest", joined(r, alone)[: 7 + 6], seed=11, max_new_tokens=10, top_k=top_k)
    assert np.array_equal(ask(engine.client, [rest])["rest"].ids, alone.ids[6:])


def test_routed_experts_belong_to_the_forward_of_their_token(engine: Served) -> None:
    """6: from ``routed_from`` to the last token but one, equal to the reference's choice."""
    first = request("t1", prompt(engine.rng, 20), session="routed", seed=1, return_routed=True)
    one = ask(engine.client, [first])["t1"]
    second = request("t2", np.concatenate([joined(first, one), prompt(engine.rng, 9)]), "routed", return_routed=True)
    two = ask(engine.client, [second])["t2"]
    for r, result in ((first, one), (second, two)):
        whole = joined(r, result)
        assert result.routed is not None and result.routed.dtype == np.uint8
        assert result.routed_from + len(result.routed) == len(whole) - 1
        reference = engine.current.routed(whole[:-1])[result.routed_from :]
        assert np.array_equal(np.sort(result.routed, -1), np.sort(reference, -1))
    assert one.routed_from == 0
    assert two.routed_from <= len(joined(first, one)) - 1, "the last sampled token's forward is part of the next call"


def test_publish_changes_what_is_sampled_in_a_session(engine: Served) -> None:
    """7: the cache that older weights left behind is not used."""
    r = request("old", prompt(engine.rng, 12), session="renewed", seed=2)
    old = ask(engine.client, [r])["old"]
    version = engine.publish(engine.twins[1])
    assert engine.control.version() == version
    longer = request("new", joined(r, old), session="renewed", seed=2)
    new = ask(engine.client, [longer])["new"]
    assert set(new.versions.tolist()) == {version} and set(old.versions.tolist()) == {version - 1}
    assert Check.of(engine.twins[1], longer, new).error < TOLERANCE
    same = ask(engine.client, [request("same", r.input_ids, seed=2)])["same"]
    assert not np.array_equal(same.ids, old.ids)
    engine.publish(engine.twins[0])


# -- sampling ------------------------------------------------------------------------------------------------------
def test_truncation_never_leaves_its_support(engine: Served) -> None:
    ids = prompt(engine.rng, 8)
    logp = engine.current.logp(ids, 1.5)[-1]
    order = np.argsort(-logp)
    mass = np.exp(logp[order].astype(np.float64)).cumsum()
    nucleus = set(order[: int(np.searchsorted(mass, 0.4)) + 1].tolist())
    topk = set(order[:3].tolist())
    n = 120
    requests = [request(f"k{i}", ids, seed=i, top_k=3, temperature=1.5, max_new_tokens=1) for i in range(n)]
    requests += [request(f"p{i}", ids, seed=i, top_p=0.4, temperature=1.5, max_new_tokens=1) for i in range(n)]
    results = ask(engine.client, requests)
    assert {int(results[f"k{i}"].ids[0]) for i in range(n)} == topk
    drawn = {int(results[f"p{i}"].ids[0]) for i in range(n)}
    assert drawn <= nucleus and len(drawn) > len(nucleus) / 2


def test_samples_follow_the_distribution(engine: Served) -> None:
    """Frequencies over 1,500 seeds against the reference, chi-square over the 12 likeliest ids and the rest."""
    ids, n = prompt(engine.rng, 5), 1500
    results = ask(engine.client, [request(f"f{i}", ids, seed=1000 + i, max_new_tokens=1) for i in range(n)])
    p = np.exp(engine.current.logp(ids)[-1].astype(np.float64))
    counts = np.bincount([int(r.ids[0]) for r in results.values()], minlength=len(p))
    top = np.argsort(-p)[:12]
    observed = np.append(counts[top], n - counts[top].sum())
    expected = n * np.append(p[top], 1 - p[top].sum())
    assert ((observed - expected) ** 2 / expected).sum() < 36, "beyond the 99.97 % quantile of 12 degrees of freedom"


# -- sessions, limits, life cycle ----------------------------------------------------------------------------------
def test_a_reused_prefix_equals_a_fresh_prefill(engine: Served) -> None:
    ids, turns = prompt(engine.rng, 6), []
    for turn in range(4):
        r = request(f"turn{turn}", ids, session="dialogue", seed=turn, max_new_tokens=7)
        result = ask(engine.client, [r])[r.request_id]
        turns.append((r, result))
        ids = np.concatenate([joined(r, result), prompt(engine.rng, 5)])
    fork = request("fork", np.concatenate([turns[1][0].input_ids, prompt(engine.rng, 3)]), session="dialogue")
    turns.append((fork, ask(engine.client, [fork])["fork"]))
    engine.client.end_sessions(["dialogue"])
    for i, (r, result) in enumerate(turns):
        fresh = request(f"fresh{i}", r.input_ids, seed=r.sampling.seed, max_new_tokens=r.sampling.max_new_tokens)
        again = ask(engine.client, [fresh])[fresh.request_id]
        assert np.array_equal(again.ids, result.ids)
        assert np.abs(again.logp - result.logp).max() < TOLERANCE
        assert Check.of(engine.current, r, result).error < TOLERANCE


def test_two_sessions_of_one_episode_keep_apart(engine: Served) -> None:
    """A sub-agent's dialogue runs while its parent's waits, and a compression goes on from the parent's tokens."""
    parent = request("episode#0", prompt(engine.rng, 20), session="episode", seed=3)
    asked = [(parent, ask(engine.client, [parent])["episode#0"])]
    ids = prompt(engine.rng, 11)
    for turn in (1, 2):
        child = request(f"episode#{turn}", ids, session="episode~1", seed=3)
        asked.append((child, ask(engine.client, [child])[child.request_id]))
        ids = np.concatenate([joined(*asked[-1]), prompt(engine.rng, 4)])
    engine.client.end_sessions(["episode~1"])
    for turn in (3, 4):  # the parent goes on; then its summary
        more = request(
            f"episode#{turn}",
            np.concatenate([joined(*(asked[0] if turn == 3 else asked[-1])), prompt(engine.rng, 6)]),
            session="episode",
            seed=3,
        )
        asked.append((more, ask(engine.client, [more])[more.request_id]))
    engine.client.end_sessions(["episode"])
    for i, (r, result) in enumerate(asked):
        fresh = request(f"alone{i}", r.input_ids, seed=3)
        assert np.array_equal(ask(engine.client, [fresh])[fresh.request_id].ids, result.ids)
        assert Check.of(engine.current, r, result).error < TOLERANCE


def test_more_sessions_than_slots_take_turns(engine: Served) -> None:
    requests = [request(f"s{i}", prompt(engine.rng, 5 + i % 7), seed=i) for i in range(3 * SLOTS)]
    results = ask(engine.client, requests)
    second = [
        request(f"x{r.request_id}", joined(r, results[r.request_id]), session=r.session_id, seed=1) for r in requests
    ]
    again = ask(engine.client, second)
    for r in (*requests[::5], *second[::5]):
        assert Check.of(engine.current, r, (results | again)[r.request_id]).error < TOLERANCE


def test_the_context_ends_a_request(engine: Served) -> None:
    r = request("full", prompt(engine.rng, CONTEXT - 3), max_new_tokens=50)
    result = ask(engine.client, [r])["full"]
    assert result.finish is FinishReason.CONTEXT and len(result.ids) == 3
    assert Check.of(engine.current, r, result).error < TOLERANCE
    for length in (CONTEXT, CONTEXT + 40):
        with pytest.raises(EngineError, match=f"'over'.*{CONTEXT}"):
            ask(engine.client, [request("over", prompt(engine.rng, length))])
    with pytest.raises(EngineError, match="'empty'"):
        ask(engine.client, [request("empty", prompt(engine.rng, 0))])
    with pytest.raises(EngineError, match=f"'foreign'.*{MOE.vocab - 1}"):
        ask(engine.client, [request("foreign", np.array([1, MOE.vocab], dtype=np.int32))])


def test_an_aborted_request_answers_with_what_it_has(engine: Served) -> None:
    requests = [request(f"a{i}", prompt(engine.rng, 4), seed=i, max_new_tokens=150) for i in range(SLOTS + 4)]
    engine.client.submit(requests)
    engine.client.abort([r.request_id for r in requests] + ["never-sent"])
    results = collect(engine.client, len(requests))
    aborted = [r for r in requests if results[r.request_id].finish is FinishReason.ABORT]
    assert aborted, "none was stopped"
    for r in requests:
        assert Check.of(engine.current, r, results[r.request_id]).error < TOLERANCE
    r = aborted[0]
    whole = ask(engine.client, [request("whole", r.input_ids, seed=r.sampling.seed, max_new_tokens=150)])["whole"]
    assert np.array_equal(whole.ids[: len(results[r.request_id].ids)], results[r.request_id].ids)


def test_a_bad_publish_names_the_weight_and_changes_nothing(engine: Served) -> None:
    good = dict(engine.twins[1].tensors())
    name = "model.layers.0.mlp.experts.3.down_proj.weight"
    assert name in good

    def pairs(change: str) -> Iterator[tuple[str, torch.Tensor]]:
        for key, tensor in good.items():
            if key == name and change == "missing":
                continue
            yield key, tensor.t() if key == name and change == "shape" else tensor
            if key == name and change == "twice":
                yield key, tensor
        if change == "extra":
            yield "model.layers.0.mlp.bias", torch.zeros(3)

    for change, text in (("missing", name), ("twice", name), ("shape", name), ("extra", "model.layers.0.mlp.bias")):
        with pytest.raises(EngineError, match=text.replace(".", r"\.")):
            engine.control.publish(pairs(change), engine.published + 1)
    assert engine.control.version() == engine.published
    r = request("unchanged", prompt(engine.rng, 6))
    assert Check.of(engine.current, r, ask(engine.client, [r])["unchanged"]).error < TOLERANCE


def test_a_publish_whose_source_fails_changes_nothing(engine: Served) -> None:
    def broken() -> Iterator[tuple[str, torch.Tensor]]:
        yield from list(engine.twins[1].tensors())[:4]
        raise RuntimeError("the source broke")

    with pytest.raises(RuntimeError, match="the source broke"):
        engine.control.publish(broken(), engine.published + 1)
    assert engine.control.version() == engine.published
    engine.publish(engine.twins[0])


def test_sleep_releases_and_wake_needs_a_publish(engine: Served) -> None:
    # Sleep comes by another connection: two short requests tell when the engine (or two replicas) has the long one.
    short = [request(f"short{i}", prompt(engine.rng, 3), max_new_tokens=1) for i in range(2)]
    engine.client.submit([request("running", prompt(engine.rng, 3), max_new_tokens=150), *short])
    results = collect(engine.client, 2)
    engine.control.sleep()
    results |= collect(engine.client, 3 - len(results))
    assert results["running"].finish in (FinishReason.ABORT, FinishReason.LENGTH)
    with pytest.raises(EngineError, match="'drowsy'.*asleep"):
        ask(engine.client, [request("drowsy", prompt(engine.rng, 3))])
    with pytest.raises(EngineError, match="asleep"):
        engine.control.publish(engine.twins[0].tensors(), engine.published + 1)
    engine.control.wake()
    with pytest.raises(EngineError, match="'yawning'.*publish"):
        ask(engine.client, [request("yawning", prompt(engine.rng, 3))])
    engine.publish(engine.twins[1])
    r = request("awake", prompt(engine.rng, 6), return_routed=True)
    assert Check.of(engine.twins[1], r, ask(engine.client, [r])["awake"]).error < TOLERANCE
    engine.publish(engine.twins[0])


def test_several_clients_do_not_see_each_other(engine: Served) -> None:
    other = engine.control.connect().open()
    ids = prompt(engine.rng, 5)
    engine.client.submit([request("name", ids, seed=1)])
    other.submit([request("name", ids, seed=2)])
    mine, theirs = collect(engine.client, 1)["name"], collect(other, 1)["name"]
    assert not np.array_equal(mine.ids, theirs.ids)
    other.submit([request(f"left{i}", ids, max_new_tokens=100) for i in range(SLOTS)])
    other.close()
    r = request("still-served", ids, seed=1)
    assert np.array_equal(ask(engine.client, [r])["still-served"].ids, mine.ids)


def test_a_name_cannot_be_outstanding_twice(engine: Served) -> None:
    r = request("double", prompt(engine.rng, 5))
    with pytest.raises(EngineError, match="'double'"):
        engine.client.submit([r, r])
    assert engine.client.poll(0.0) == []
