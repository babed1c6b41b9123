"""Invariants of the episode state machine (numbers refer to ``megatron_ext/rollout/episode.py``).

Real environments, harnesses, codec and rewards, in this process; the model's words come from a script.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from megatron_ext.config.schema import RolloutConfig
from megatron_ext.environments.calculator import Calculator
from megatron_ext.environments.protocol import (
    Action,
    Environment,
    Observation,
    ToolCall,
    canonical_action,
    key_of,
    stable_hash,
)
from megatron_ext.environments.textworld.games import TextWorld
from megatron_ext.harness.protocol import Harness, Message
from megatron_ext.harness.template import CHATML, ChatCodec, load_codec
from megatron_ext.harness.text import TextHarness
from megatron_ext.harness.tokenizer import save_tokenizer
from megatron_ext.harness.tools import ToolHarness
from megatron_ext.rewards.compose import RewardPart, RewardSet
from megatron_ext.rewards.outcome import StepRewardSum, Success
from megatron_ext.rewards.protocol import Reward
from megatron_ext.rollout.engine import FinishReason, GenerateRequest, GenerateResult
from megatron_ext.rollout.episode import EpisodeLimits, EpisodeRun, Sampling, sampling_seed
from megatron_ext.trajectory.record import Role, Status, TrajectoryBatch
from megatron_ext.trajectory.routed_rows import Rerun
from megatron_ext.trajectory.rows import make_rows
from megatron_ext.trajectory.task import Task
from tests.helpers.scripted import answer, small_codec
from tests.helpers.worlds import NotANumber, Raising, Walk

WALK_TASK = Task("walk/train/4", "walk", 4, "train")


@pytest.fixture(scope="module")
def codec(tmp_path_factory: pytest.TempPathFactory) -> ChatCodec:
    return small_codec(tmp_path_factory.mktemp("tokenizer"))


def make_run(
    codec: ChatCodec,
    environment: Environment,
    task: Task = WALK_TASK,
    *,
    harness: Harness | None = None,
    rewards: dict[str, Reward] | None = None,
    limits: EpisodeLimits | None = None,
    sampling: Sampling | None = None,
) -> EpisodeRun:
    parts = rewards or {"success": Success()}
    return EpisodeRun(
        episode_id="g0/1",
        task=task,
        sample=1,
        seed=77,
        sampling=sampling or Sampling(),
        limits=limits or EpisodeLimits(max_turns=8, max_context=200, max_new_tokens=32),
        harness=harness or TextHarness(),
        codec=codec,
        rewards=RewardSet([RewardPart(name, reward) for name, reward in parts.items()]),
        tools=tuple(environment.tools()),
    )


Say = Callable[[int], str]


def play(
    run: EpisodeRun,
    environment: Environment,
    say: Say | Sequence[str],
    change: Callable[[GenerateResult], GenerateResult] = lambda result: result,
    version: int = 3,
) -> tuple[TrajectoryBatch, list[GenerateRequest]]:
    """Carries out what the run asks for until it is finished. Returns the trajectory and the requests made."""
    requests: list[GenerateRequest] = []
    words = say if callable(say) else list(say).__getitem__
    first = environment.reset(run.task.seed, split=run.task.split, data=run.task.data)
    step: Action | GenerateRequest | None = run.on_reset(first, environment.state_hash())
    while step is not None:
        if isinstance(step, GenerateRequest):
            requests.append(step)
            step = run.on_tokens(change(answer(run.codec, step, words(run.turns), version)))
        else:
            observation = environment.step(step)
            step = run.on_step(observation, environment.state_hash())
    assert run.finished is not None
    return run.finished.batch, requests


def check_tokens(batch: TrajectoryBatch, requests: Sequence[GenerateRequest], said: Sequence[np.ndarray]) -> None:
    """Invariant 1, for a trajectory of one segment."""
    sampled = np.flatnonzero(batch.version >= 0)
    assert batch.ids[sampled].tolist() == [i for ids in said for i in ids.tolist()]
    for request, ids in zip(requests, said, strict=True):
        at = len(request.input_ids)
        assert request.input_ids.tolist() == batch.ids[:at].tolist()
        assert batch.ids[at : at + len(ids)].tolist() == ids.tolist()


# -- the whole way -------------------------------------------------------------------------------------------------
def test_a_walk_as_it_is_recorded(codec: ChatCodec) -> None:
    run = make_run(codec, Walk(), rewards={"success": Success(), "steps": StepRewardSum()})
    results: list[GenerateResult] = []

    def keep(result: GenerateResult) -> GenerateResult:
        results.append(result)
        return result

    batch, requests = play(run, Walk(), lambda turn: " go ", keep)
    assert Status(int(batch.status[0])) is Status.DONE and bool(batch.success[0])
    assert batch.reward[0] == 1.375 and batch.reward_parts["success"][0] == 1.0
    check_tokens(batch, requests, [r.ids for r in results])  # invariant 1
    # The ids are those of the chat template, told in one go.
    told = codec.opening()
    for text, said in (("walk 4 at 0", " go "), ("at 1", " go "), ("at 2", " go ")):
        told += codec.message(Message(Role.USER, text)) + codec.message(Message(Role.MODEL, said))
    assert batch.ids.tolist() == told
    model = batch.turn_role == Role.MODEL
    assert model.tolist() == [False, True] * 3
    assert batch.turn_reward[model].tolist() == [0.125] * 3
    np.testing.assert_array_equal(batch.rollout_logp[batch.loss_mask], np.concatenate([r.logp for r in results]))
    assert set(batch.version[batch.loss_mask].tolist()) == {3}
    world = Walk()
    world.reset(4)
    keys = []
    for _ in range(3):
        keys.append(key_of(world.state_hash()))
        world.step("go")
    assert batch.turn_state_key[model].tolist() == keys, "the state the action was chosen in"
    assert batch.turn_state_key[~model].tolist() == keys
    assert set(batch.turn_action_key[model].tolist()) == {key_of(stable_hash("go"))}
    assert batch.trajectory_id == ("g0/1",) and batch.sample.tolist() == [1] and batch.harness == ("text",)
    assert (run.counts.malformed, run.counts.invalid_actions, run.counts.env_problem) == (0, 0, "")


def test_every_request_says_how_to_sample(codec: ChatCodec) -> None:
    limits = EpisodeLimits(max_turns=8, max_context=40, max_new_tokens=9)
    run = make_run(codec, Walk(), limits=limits, sampling=Sampling(0.5, 0.9, 7, record_routing=True))
    batch, requests = play(run, Walk(), lambda turn: "go")
    assert [r.request_id for r in requests] == ["g0/1#0", "g0/1#1", "g0/1#2"]
    for request in requests:
        s = request.sampling
        assert (s.temperature, s.top_p, s.top_k, s.seed) == (0.5, 0.9, 7, 77)
        assert s.stop_ids == codec.stop_ids and request.session_id == "g0/1" and request.return_routed
        assert s.max_new_tokens == min(9, 40 - len(request.input_ids) - 1)
    # Routing rows stand at their tokens; the last sampled token has none.
    assert batch.routed is not None and batch.routed_valid is not None
    last = int(np.flatnonzero(batch.loss_mask)[-1])
    assert batch.routed_valid[:last].all() and not batch.routed_valid[last]
    np.testing.assert_array_equal(batch.routed[:last, 0, 0], np.arange(last) % 8)


@pytest.mark.parametrize("rerun", list(Rerun))
def test_a_prompt_that_ran_again_goes_where_the_order_says(codec: ChatCodec, rerun: Rerun) -> None:
    def lost_cache(result: GenerateResult) -> GenerateResult:
        assert result.routed is not None
        return replace(result, routed=(result.routed + run.turns) % 8)

    run = make_run(codec, Walk(), sampling=Sampling(record_routing=True, rerun=rerun))
    batch, requests = play(run, Walk(), lambda turn: "go", lost_cache)
    assert len(requests) == 3 and run.finished is not None and run.counts.sessions.sessions == 1
    assert batch.num_segments == (3 if rerun is Rerun.SEGMENT else 1) and batch.num_sessions == 1
    sampled = np.flatnonzero(batch.version >= 0)
    for segment, request in zip(np.unique(batch.token_segment()[sampled]).tolist(), requests, strict=False):
        first = int(batch.segment_tokens[segment])
        assert batch.ids[first : first + len(request.input_ids)].tolist() == request.input_ids.tolist()
    assert run.finished.reruns.positions > 0 and (run.finished.reruns.displaced == 0) == (rerun is Rerun.SEGMENT)


def test_what_is_not_replayed_is_recorded_in_one_segment() -> None:
    for replayed, key, want in (
        (True, "segment", Rerun.SEGMENT),
        (True, "first", Rerun.FIRST),
        (False, "segment", Rerun.FIRST),
    ):
        rollout = RolloutConfig(record_routing=True, replay_routing=replayed, replay_rerun=key)
        assert Sampling.of(rollout).rerun is want
    assert Rerun(RolloutConfig().replay_rerun) is Rerun.SEGMENT


def test_tools_with_a_real_calculator(codec: ChatCodec) -> None:
    environment = Calculator(operations=2, style="expression")
    (task,) = environment.tasks("train", 1)
    text = environment.reset(task.seed).text
    assert text.startswith("What is ")
    harness = ToolHarness(show_schema=False)
    world = Calculator(operations=2, style="expression")
    world.reset(task.seed)
    actions: list[ToolCall] = []

    from random import Random

    while not actions or actions[-1].name != "answer":
        actions.append(world.expert_action(Random(0), 0.0))
        world.step(actions[-1])
    run = make_run(codec, environment, task, harness=harness, limits=EpisodeLimits(8, 2000, 200))
    batch, _ = play(run, environment, [harness.render(action) for action in actions])
    assert bool(batch.success[0]) and batch.reward[0] == 1.0
    roles = [Role(int(role)) for role in batch.turn_role]
    assert roles == [Role.USER, Role.MODEL] + [Role.TOOL, Role.MODEL] * (len(actions) - 1)
    keys = batch.turn_action_key[batch.turn_role == Role.MODEL].tolist()
    assert keys == [key_of(stable_hash(canonical_action(action))) for action in actions]


def test_equal_actions_have_equal_keys() -> None:
    assert canonical_action("  go   north ") == canonical_action("go north") != canonical_action("go south")
    one, other = ToolCall("f", {"a": 1, "b": "x"}), ToolCall("f", {"b": "x", "a": 1})
    assert canonical_action(one) == canonical_action(other) == "f(a=1, b='x')"
    assert canonical_action(one) != canonical_action(ToolCall("f", {"a": "1", "b": "x"}))


def test_an_environment_says_which_actions_are_the_same(codec: ChatCodec) -> None:
    world, task = TextWorld(), Task("game/train/0", "game", 0, "train")
    run = make_run(codec, world, task, limits=EpisodeLimits(max_turns=5, max_context=8000, max_new_tokens=32))
    batch, _ = play(run, world, ["look", "LOOK the", "dance", "sing", "inventory"])
    keys = batch.turn_action_key[batch.turn_role == Role.MODEL].tolist()
    assert keys[0] == keys[1] == key_of(stable_hash("look")) and keys[2] == keys[3]
    assert len(set(keys)) == 3 and run.counts.invalid_actions == 2


# -- turns that are no action --------------------------------------------------------------------------------------
def test_malformed_text_is_answered_and_counted(codec: ChatCodec) -> None:
    environment = Calculator(operations=1, style="expression")
    (task,) = environment.tasks("train", 1)
    harness = ToolHarness(show_schema=False)
    run = make_run(codec, environment, task, harness=harness, limits=EpisodeLimits(3, 2000, 200))
    batch, requests = play(run, environment, lambda turn: "twelve, I think")
    assert Status(int(batch.status[0])) is Status.MAX_TURNS and batch.reward[0] == 0.0
    assert run.counts.malformed == 3 == len(requests)
    shown = codec.message(harness.malformed(harness.parse("twelve, I think", run.tools).error)[0])
    start = len(requests[0].input_ids) + len(codec.encode_turn("twelve, I think"))
    assert batch.ids[start : start + len(shown)].tolist() == shown, "the model is told what was wrong"
    assert batch.turn_action_key[batch.turn_role == Role.MODEL].tolist() == [0] * 3
    assert [step.action for step in run.steps] == [None] * 3 and not any(s.observation.valid for s in run.steps)
    assert batch.loss_mask.any(), "malformed turns are the policy's own, and trained"


def test_malformed_and_then_well(codec: ChatCodec) -> None:
    batch, _ = play(run := make_run(codec, Walk()), Walk(), ["", "go", "", "go", "go"])
    assert bool(batch.success[0]) and run.counts.malformed == 2
    assert batch.turn_reward[batch.turn_role == Role.MODEL].tolist() == [0.0, 0.125, 0.0, 0.125, 0.125]


def test_actions_that_the_world_does_not_understand_are_counted(codec: ChatCodec) -> None:
    batch, _ = play(run := make_run(codec, Walk()), Walk(), ["fly", "go", "swim", "stop"])
    assert run.counts.invalid_actions == 2 and run.counts.malformed == 0
    assert Status(int(batch.status[0])) is Status.DONE and not batch.success[0] and batch.reward[0] == 0.0


# -- limits --------------------------------------------------------------------------------------------------------
def test_turns_are_limited(codec: ChatCodec) -> None:
    limits = EpisodeLimits(max_turns=2, max_context=200, max_new_tokens=32)
    batch, requests = play(make_run(codec, Walk(), limits=limits), Walk(), lambda turn: "go")
    assert Status(int(batch.status[0])) is Status.MAX_TURNS and len(requests) == 2 and not batch.success[0]


def test_success_on_the_last_turn_counts(codec: ChatCodec) -> None:
    limits = EpisodeLimits(max_turns=3, max_context=200, max_new_tokens=32)
    batch, _ = play(make_run(codec, Walk(), limits=limits), Walk(), lambda turn: "go")
    assert Status(int(batch.status[0])) is Status.DONE and bool(batch.success[0])


@pytest.mark.parametrize("max_context", range(12, 60))
def test_no_trajectory_outgrows_the_context(codec: ChatCodec, max_context: int) -> None:  # invariant 4
    """At every limit, so that each way to run out is met: in the opening, in a turn, and in an observation."""
    limits = EpisodeLimits(max_turns=50, max_context=max_context, max_new_tokens=6)
    run = make_run(codec, Walk(length=40), limits=limits)
    batch, requests = play(run, Walk(length=40), lambda turn: "go go go go go" if turn % 2 else "talk 5")
    assert Status(int(batch.status[0])) is Status.MAX_CONTEXT
    assert batch.num_tokens <= max_context
    assert all(r.sampling.max_new_tokens >= 1 for r in requests)
    assert all(len(r.input_ids) + r.sampling.max_new_tokens < max_context for r in requests), "the closing token fits"
    assert Status.MAX_CONTEXT.trainable and batch.loss_mask.any() == bool(requests)


def test_an_observation_that_does_not_fit_ends_the_episode(codec: ChatCodec) -> None:
    """It is not recorded: nothing follows it, and a row must fit the trainer's micro-batch."""
    limits = EpisodeLimits(max_turns=9, max_context=100, max_new_tokens=20)
    batch, requests = play(make_run(codec, Walk(), limits=limits), Walk(), ["go", "talk 5000", "go"])
    assert Status(int(batch.status[0])) is Status.MAX_CONTEXT and len(requests) == 2
    assert batch.num_tokens < 60 and make_rows(batch).lengths.tolist() == [batch.num_tokens]


def test_an_opening_that_does_not_fit(codec: ChatCodec, tmp_path: Path) -> None:
    """A trajectory without a turn, which is still a valid record; also where nothing opens a session."""
    save_tokenizer(tmp_path, codec.tokenizer, codec.template)
    text = (tmp_path / "tokenizer.json").read_text()
    for special, other in (("<|bos|>", "<|endoftext|>"), ("<|user|>", "<|im_start|>"), ("<|end|>", "<|im_end|>")):
        text = text.replace(special, other)
    (tmp_path / "tokenizer.json").write_text(text)
    task = Task("walk/train/1", "walk", 1, "train", {"on_reset": "talk 400"})
    for one in (codec, load_codec(tmp_path, CHATML)):
        run = make_run(one, Walk(), task)
        batch, requests = play(run, Walk(), lambda turn: "go")
        assert not requests and Status(int(batch.status[0])) is Status.MAX_CONTEXT
        assert batch.ids.tolist() == one.opening() and batch.num_turns == 0 and batch.reward[0] == 0.0


def test_a_turn_that_was_cut_off_is_closed(codec: ChatCodec) -> None:
    limits = EpisodeLimits(max_turns=2, max_context=200, max_new_tokens=2)
    batch, requests = play(make_run(codec, Walk(), limits=limits), Walk(), lambda turn: "go go go")
    at = len(requests[0].input_ids)
    assert batch.ids[at + 2] == codec.end_id
    assert batch.loss_mask[at : at + 3].tolist() == [True, True, False], "the closing token was not sampled"


# -- what goes wrong outside ---------------------------------------------------------------------------------------
@pytest.mark.parametrize(("kind", "status"), [("error", Status.ENV_ERROR), ("deadline", Status.ENV_DEADLINE)])
@pytest.mark.parametrize("when", ["at the reset", "in a step"])
def test_a_failing_environment_masks_and_counts(codec: ChatCodec, kind: str, status: Status, when: str) -> None:
    run = make_run(codec, Walk())  # invariant 3
    if when == "in a step":
        world = Walk()
        request = run.on_reset(world.reset(4), world.state_hash())
        assert isinstance(request, GenerateRequest)
        assert run.on_tokens(answer(codec, request, "go")) == "go"
    run.on_environment_failure(kind, "it broke")
    assert run.finished is not None and run.finished.status is status
    batch = run.finished.batch
    assert not batch.loss_mask.any() and batch.reward[0] == 0.0 and not batch.success[0]
    assert (batch.version >= 0).any() == (when == "in a step"), "what was sampled is kept"
    assert run.counts.env_problem == "it broke" and run.counts.reward_problem == ""


@pytest.mark.parametrize("reward", [NotANumber(), Raising()])
def test_a_reward_that_is_no_number_masks_and_counts(codec: ChatCodec, reward: Reward) -> None:  # invariant 3
    task = Task("walk/train/3", "walk", 3, "train")
    run = make_run(codec, Walk(), task, rewards={"broken": reward, "success": Success()})
    batch, _ = play(run, Walk(), lambda turn: "go")
    assert Status(int(batch.status[0])) is Status.REWARD_INVALID
    assert not batch.loss_mask.any() and batch.reward[0] == 0.0 and not batch.success[0]
    assert "reward 'broken' of task 'walk/train/3'" in run.counts.reward_problem


def test_a_step_reward_that_is_no_number_masks_and_counts(codec: ChatCodec) -> None:  # invariant 3
    batch, requests = play(run := make_run(codec, Walk()), Walk(), ["go", "nan", "go"])
    assert Status(int(batch.status[0])) is Status.REWARD_INVALID and len(requests) == 2
    assert not batch.loss_mask.any() and np.isfinite(batch.turn_reward).all()
    assert run.counts.reward_problem == "environment 'walk', task 'walk/train/4': step reward nan is not finite"


def test_an_abort_keeps_what_was_sampled(codec: ChatCodec) -> None:
    def abort(result: GenerateResult) -> GenerateResult:
        return GenerateResult(
            result.request_id, result.ids[:1], result.logp[:1], result.versions[:1], FinishReason.ABORT
        )

    batch, requests = play(make_run(codec, Walk()), Walk(), lambda turn: "go", abort)
    assert Status(int(batch.status[0])) is Status.ABORTED and len(requests) == 1
    assert (batch.version >= 0).sum() == 1 and not batch.loss_mask.any()


def test_versions_may_rise_between_turns(codec: ChatCodec) -> None:
    """A rollout that goes on under newer weights says so token by token."""
    run, world = make_run(codec, Walk()), Walk()
    step = run.on_reset(world.reset(4), world.state_hash())
    version = 5
    while step is not None:
        assert isinstance(step, GenerateRequest)
        action = run.on_tokens(answer(codec, step, "go", version))
        version += 1
        assert isinstance(action, str), "invariant 2: after a turn it waits for the environment alone"
        step = run.on_step(world.step(action), world.state_hash())
    assert run.finished is not None
    batch = run.finished.batch
    assert [int(batch.version[end - 1]) for end in batch.turn_end[batch.turn_role == Role.MODEL]] == [5, 6, 7]


# -- seeds ---------------------------------------------------------------------------------------------------------
def test_seeds_depend_on_run_group_and_sample_alone() -> None:  # invariant 5
    seeds = {
        (run, group, sample): sampling_seed(run, group, sample)
        for run in (1, 2)
        for group in ("g0", "g1", "g0/1")
        for sample in range(4)
    }
    assert len(set(seeds.values())) == len(seeds)
    assert all(0 <= seed < 2**63 for seed in seeds.values())
    assert sampling_seed(1, "g0", 0) == 624050594293014917, "the same in every process and release"


def test_an_observation_before_any_turn_has_no_success(codec: ChatCodec) -> None:
    run = make_run(codec, Walk())
    run.on_reset(Observation("x", success=True), "0" * 32)
    run.on_environment_failure("error", "gone")
    assert run.finished is not None and not run.finished.batch.success[0]
