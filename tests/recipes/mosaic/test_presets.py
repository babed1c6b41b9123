"""What the CPU presets play: sessions of every kind, short enough for two cores, with answers ready for scoring."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest

from launch.paths import RECIPES
from launch.recipes_check import check_preset
from megatron_ext.config.compose import compose, recipes
from megatron_ext.config.instantiate import instantiate
from megatron_ext.environments.messages import Progress
from megatron_ext.environments.worker import Worker, build_environment
from megatron_ext.harness.template import COMPACT, ChatCodec
from megatron_ext.harness.tokenizer import learn_tokenizer
from megatron_ext.rollout.demonstrations import demonstration_batch
from megatron_ext.trajectory.record import SessionKind, Status

PRESETS = recipes(RECIPES)["mosaic"]
ARMS = [name for name in PRESETS if name.startswith("micro_")]


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_is_valid_where_it_is_meant_to_run(preset: str) -> None:
    found = check_preset("mosaic", preset, RECIPES)
    assert found.holds, found.lines


@pytest.mark.parametrize(
    "preset", ["micro_off", "micro_no_rank", "micro_no_gain", "micro_pooled", "micro_session_mean"]
)
def test_an_arm_differs_from_micro_in_its_credit_alone(preset: str) -> None:
    """So that all arms start from the same warm start, which is kept by what decides it."""
    micro, arm = (compose([f"recipe=mosaic/{name}"], RECIPES) for name in ("micro", preset))
    assert (micro.credit, micro.loss) != (arm.credit, arm.loss)
    for section in (
        "model",
        "tokenizer",
        "environments",
        "harness",
        "tasks",
        "batch",
        "rollout",
        "rewards",
        "evaluation",
    ):
        assert getattr(micro, section) == getattr(arm, section), section
    assert micro.warm_start == arm.warm_start and micro.optimizer == arm.optimizer


def test_demonstrations_hold_every_kind_of_session() -> None:
    config = compose(["recipe=mosaic/micro"], RECIPES)
    environment: Any = build_environment("library", config.environments["library"])
    tokenizer = learn_tokenizer(
        environment.corpus("train", config.tokenizer.corpus_tasks),
        vocab_size=config.tokenizer.vocab_size,
        phrases=config.tokenizer.phrases,
    )
    codec = ChatCodec(tokenizer, COMPACT)
    worker = Worker({}, Progress(Progress.allocate()))
    tasks = environment.tasks("train", 150)
    demonstrations = [
        worker._demonstrate(environment, task, 0, config.warm_start.mistake_rate, 1, config.rollout.max_turns)
        for task in tasks
    ]
    harness = instantiate(config.harness, where="harness")
    batch = demonstration_batch(codec, harness, demonstrations, environment.tools(), config.model.max_context)
    kinds = Counter(batch.session_kind.tolist())
    assert all(kinds[kind] > len(tasks) // 5 for kind in SessionKind), kinds
    sessions = Counter(np.diff(batch.trajectory_sessions).tolist())
    assert len([count for count in sessions.values() if count > len(tasks) // 8]) >= 2, "counts to rank"
    assert 100 < batch.num_tokens / len(tasks) < 300
    assert np.mean(batch.status == Status.DONE) > 0.95 and 0.2 < batch.success.mean() < 0.7
    for j, task in enumerate(tasks):
        answer = batch.prepared["answer"].row(j).tolist()
        assert codec.decode_turn(answer) == task.data["answer"]
        assert len(answer) == 2, "a name is two tokens, one a word"
        assert len(batch.prepared["answer_prefix"].row(j)) == 2, "the opening of the call is one token"
