"""What the CPU presets play: every operation, short enough for two cores; arms that differ in their routers alone."""

from __future__ import annotations

from collections import Counter
from random import Random
from typing import Any

import numpy as np
import pytest

from launch.comparison import plan, read_comparison, warm_starts
from launch.paths import RECIPES
from launch.prepare import prepare
from launch.recipes_check import check_preset
from megatron_ext.config.compose import ConfigError, compose, recipes
from megatron_ext.config.instantiate import instantiate
from megatron_ext.environments.messages import Progress
from megatron_ext.environments.worker import Worker, build_environment
from megatron_ext.harness.template import COMPACT, ChatCodec
from megatron_ext.harness.tokenizer import learn_tokenizer
from megatron_ext.moe.policies import FrozenRouter, TrainedRouter
from megatron_ext.moe.statistics import token_structure
from megatron_ext.moe.structured import StructuredRouter
from megatron_ext.rollout.demonstrations import demonstration_batch
from megatron_ext.trajectory.record import Field, Status

SLUG = "moe_expert_structuring"
PRESETS = recipes(RECIPES)[SLUG]
ARMS = {
    "micro": StructuredRouter,
    "micro_off": TrainedRouter,
    "micro_forced": StructuredRouter,
    "micro_nogate": StructuredRouter,
    "micro_frozen": FrozenRouter,
}


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_is_valid_where_it_is_meant_to_run(preset: str) -> None:
    found = check_preset(SLUG, preset, RECIPES)
    assert found.holds, found.lines


@pytest.mark.parametrize("preset", ["recipe", "paper"])
def test_tasks_can_be_played(preset: str) -> None:
    config = compose([f"recipe={SLUG}/{preset}"], RECIPES)
    environment: Any = build_environment("store", config.environments["store"])
    assert len(environment.label_words()["op"]) == config.model.router["operations"]
    for task in environment.tasks("train", 3):
        observation, turns = environment.reset(task.seed), 0
        while not observation.done:
            observation, turns = environment.step(environment.expert_action(Random(0), 0.0)), turns + 1
        assert observation.success and turns < config.rollout.max_turns


@pytest.mark.parametrize("preset", ARMS)
def test_an_arm_differs_in_its_router_alone(preset: str) -> None:
    micro, arm = (compose([f"recipe={SLUG}/{name}"], RECIPES) for name in ("micro", preset))
    assert type(instantiate(arm.model.router, where="model.router")) is ARMS[preset]
    assert (micro.model.router == arm.model.router) == (preset == "micro")
    arm.model.router, arm.recipe, arm.run.name = micro.model.router, micro.recipe, micro.run.name
    assert arm == micro


def test_all_arms_share_one_warm_start(tmp_path_factory: pytest.TempPathFactory) -> None:
    comparison = read_comparison(SLUG, RECIPES)
    assert {arm.preset for arm in comparison.arms} == set(ARMS)
    jobs = plan(comparison, [], tmp_path_factory.mktemp("compare"), RECIPES, None)
    assert len(jobs) == 15 and warm_starts(jobs) == 1


def test_base_presets_turn_their_mechanism_on() -> None:
    frozen = compose([f"recipe={SLUG}/micro_frozen"], RECIPES)
    assert frozen.model.aux_loss_coefficient == 0.0 and frozen.warm_start.aux_loss_coefficient > 0
    with pytest.raises(ConfigError):
        prepare([f"recipe={SLUG}/micro_off", "rollout.replay_routing=true", "rollout.record_routing=false"])


def test_demonstrations_hold_every_operation() -> None:
    config = compose([f"recipe={SLUG}/micro"], RECIPES)
    environment: Any = build_environment("store", config.environments["store"])
    tokenizer = learn_tokenizer(
        environment.corpus("train", 200), vocab_size=config.tokenizer.vocab_size, phrases=config.tokenizer.phrases
    )
    codec = ChatCodec(tokenizer, COMPACT)
    worker = Worker({}, Progress(Progress.allocate()))
    tasks = environment.tasks("train", 150)
    rate, turns = config.warm_start.mistake_rate, config.rollout.max_turns
    demonstrations = [worker._demonstrate(environment, task, 0, rate, 1, turns) for task in tasks]
    harness = instantiate(config.harness, where="harness")
    batch = demonstration_batch(codec, harness, demonstrations, environment.tools(), config.model.max_context)
    words = environment.label_words()["op"]
    router = instantiate(config.model.router, where="model.router")
    assert len(words) == router.operations
    labels = Counter(batch.turn_labels[router.label].tolist())
    assert all(labels[number] > 20 for number in range(len(words))), labels
    structure = token_structure(batch, router.measured_fields, router.label, router.operations)
    assert structure.counts()[:-1].sum() == len(batch.turn_role) - labels[-1], "every model turn is one unit"
    assert 1.5 < structure.pair.sum() / structure.counts()[:-1].sum() < 10, "and has pairs of tokens"
    assert set(np.unique(batch.field[batch.loss_mask])) == {Field.OTHER, Field.TOOL_USE}
    assert 40 < batch.num_tokens / len(tasks) < 200
    assert np.mean(batch.status == Status.DONE) > 0.95 and 0.15 < batch.success.mean() < 0.6
