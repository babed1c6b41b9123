"""Our side of ``launch.bench e2e``, small; the peer needs an environment of its own and is left out."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from launch.benches import e2e
from launch.benches._e2e_setup import (
    BYTES,
    VOCAB,
    Side,
    Size,
    differences,
    letters,
    prompts,
    write_tokenizer,
)
from launch.measurement import Measurement
from megatron_ext.environments.protocol import Observation, stable_hash
from megatron_ext.harness.protocol import Message
from megatron_ext.harness.template import load_codec
from megatron_ext.harness.text import TextHarness
from megatron_ext.rewards.compose import RewardSet
from megatron_ext.rollout.episode import EpisodeLimits, EpisodeRun, Sampling
from megatron_ext.trajectory.record import Role
from megatron_ext.trajectory.task import Task

TINY = Size(
    hidden=32,
    layers=1,
    experts=4,
    expert_hidden=16,
    prompts=2,
    samples=3,
    new_tokens=9,
    threads=1,
    warmup=1,
    steps=2,
    rounds=1,
)


def test_a_prompt_is_its_bytes_and_nothing_more(tmp_path: Path) -> None:
    write_tokenizer(tmp_path / "tokenizer")
    codec = load_codec(tmp_path / "tokenizer")
    assert codec.vocab_size == VOCAB and codec.stop_ids == (BYTES + 1,)
    texts = prompts(Size())
    assert len(set(texts)) == 8 and {len(text.encode()) for text in texts} == {len(texts[0])}
    for text in texts:
        ids = [*codec.opening(), *codec.message(Message(Role.USER, text)), *codec.generation_prompt()]
        assert len(ids) == len(text) and max(ids) < BYTES and codec.decode_turn(ids) == text
    everything = bytes(range(BYTES)).decode("latin-1")
    assert codec.decode_turn(codec.encode_turn(everything)) == everything


@pytest.mark.parametrize(("ignore", "stops"), [(True, ()), (False, (BYTES + 1,))])
def test_the_end_token_can_be_off(tmp_path: Path, ignore: bool, stops: tuple[int, ...]) -> None:
    write_tokenizer(tmp_path / "tokenizer")
    run = EpisodeRun(
        episode_id="g/0",
        task=Task("t", "letters", 0, "train"),
        sample=0,
        seed=1,
        sampling=Sampling(ignore_stop=ignore),
        limits=EpisodeLimits(max_turns=1, max_context=160, max_new_tokens=128),
        harness=TextHarness(),
        codec=load_codec(tmp_path / "tokenizer"),
        rewards=RewardSet.from_config({"score": {"_target_": "megatron_ext.rewards.outcome.Score"}}),
    )
    request = run.on_reset(Observation(prompts(Size())[0]), stable_hash("state"))
    assert request is not None
    assert request.sampling.stop_ids == stops and request.sampling.max_new_tokens == 128


def test_reward_and_times() -> None:
    assert letters("ab1 ", {}) == 0.5 and letters("", {}) == 0.0
    assert differences([1.0, 1.5, 4.0]) == (0.5, 2.5)


def test_a_side_that_did_other_work_is_refused() -> None:
    full = Side((1.0, 2.0), ({}, {}), (TINY.tokens, TINY.tokens))
    assert full.check(TINY, "x") is full
    with pytest.raises(RuntimeError, match="x: wanted 2 steps of 54"):
        Side((1.0, 2.0), ({}, {}), (TINY.tokens, TINY.tokens - 1)).check(TINY, "x")
    with pytest.raises(RuntimeError, match="x: wanted 2 steps"):
        Side((1.0,), ({},), (TINY.tokens,)).check(TINY, "x")


def test_figures_are_medians_over_steps() -> None:
    phases = {"rollout": 1.0, "scoring": 0.2, "update": 0.5, "publish": 0.1}
    sides = [Side((2.0, 4.0), (phases, phases), (54, 54)), Side((2.0,), (phases,), (54,))]
    rows: list[Measurement] = []
    e2e.report_ours(rows.append, sides, TINY)
    values = {row.name: row.value for row in rows}
    assert values == pytest.approx(
        {
            "e2e_tokens_per_s": 27.0,
            "e2e_share_generation": 0.5,
            "e2e_share_scoring": 0.1,
            "e2e_share_training": 0.25,
            "e2e_share_publish": 0.05,
        }
    )


@pytest.mark.slow
@pytest.mark.integration
def test_our_side_takes_real_steps(tmp_path: Path) -> None:
    """A whole turn: every completion has all its tokens and is trained, from the weights in the folder."""
    from megatron_ext.models.hf_io import SafetensorsReader
    from megatron_ext.tracking.jsonl import FILE_NAME, read_metrics

    e2e.prepare(tmp_path, TINY)
    assert SafetensorsReader(tmp_path / "model").shape("model.embed_tokens.weight") == (VOCAB, TINY.hidden)
    side = e2e.turn(e2e.OURS, tmp_path, "ours", TINY)
    assert side.tokens == (54, 54)
    for seconds, phases in zip(side.seconds, side.phases, strict=True):
        assert 0 < sum(phases.values()) <= seconds
    rows = read_metrics(tmp_path / "ours" / FILE_NAME)
    assert [row["step"] for row in rows] == [1, 2, 3]
    for row in rows:
        assert row["train/trained_tokens"] == TINY.tokens and row["filter/groups_kept"] == TINY.prompts
        assert row["train/nan_steps"] == 0 and row["train/grad_norm"] > 0
    assert np.ptp([row["policy/entropy"] for row in rows]) > 0  # it does learn something


def test_a_failing_side_shows_its_log(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="(?s)broken ended with exit status 3.*why it broke"):
        e2e.turn(("bash", "-c", "echo why it broke; exit 3", "-"), tmp_path, "broken", TINY)
