"""One episode: the state machine between an environment, a harness and an engine.

Invariants (``tests/rollout/test_episode.py``):

1. Token-in/token-out: the prompt of every call is the session's recorded ids; sampled ids are appended as they came.
2. An episode waits for one thing at a time: its environment, its engine or, when it has been played, its reward.
3. Whatever goes wrong in an environment or a reward ends the episode with a status that masks and counts it; nothing is
   punished.
4. No session is longer than ``max_context``: what does not fit, with room to answer it, ends the episode unrecorded. A
   trajectory has at most ``max_turns`` turns that act, over all its sessions, and fewer compressions than that.
5. The sampling seed depends only on (run seed, group, sample); the engine adds the position.
6. A sub-agent begins and ends when the environment says so, one level deep; an environment that says so elsewhere has
   failed.
7. A summary is a model turn but no action: it costs none of ``max_turns``, and rewards do not see it as a step.

``dialogues.py`` keeps the sessions.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from megatron_ext.environments.protocol import (
    Action,
    Observation,
    SessionChange,
    ToolSpec,
    canonical_action,
    key_of,
    stable_hash,
)
from megatron_ext.harness.answers import prepared_answer
from megatron_ext.harness.protocol import Harness
from megatron_ext.harness.template import ChatCodec
from megatron_ext.rewards.compose import Grading, RewardResult, RewardSet
from megatron_ext.rewards.protocol import Episode, EpisodeStep
from megatron_ext.rollout.dialogues import Dialogues, Prompt, SessionCounts
from megatron_ext.rollout.engine import FinishReason, GenerateRequest, GenerateResult, SamplingParams
from megatron_ext.trajectory.builder import FinishedTrajectory, TrajectoryBuilder
from megatron_ext.trajectory.record import SessionKind, Status
from megatron_ext.trajectory.routed_rows import Rerun
from megatron_ext.trajectory.task import Task

if TYPE_CHECKING:
    from megatron_ext.config.schema import RolloutConfig


@dataclass(frozen=True)
class EpisodeLimits:
    """``max_turns`` model turns (summaries apart), ``max_context`` tokens a session, ``max_new_tokens`` of one turn."""

    max_turns: int
    max_context: int
    max_new_tokens: int


@dataclass(frozen=True)
class Sampling:
    """How an order samples: greedy when ``temperature`` is 0; no token ends a turn when ``ignore_stop``. ``rerun``: how
    a turn is recorded whose prompt the engine ran again on other experts."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    record_routing: bool = False
    ignore_stop: bool = False
    rerun: Rerun = Rerun.FIRST

    @classmethod
    def of(cls, rollout: RolloutConfig) -> Sampling:
        """That of training episodes."""
        # Rows that nothing replays need no segments of their own.
        rerun = Rerun(rollout.replay_rerun) if rollout.replay_routing else Rerun.FIRST
        return cls(
            rollout.temperature, rollout.top_p, rollout.top_k, rollout.record_routing, rollout.ignore_stop, rerun
        )


@dataclass(frozen=True)
class EpisodeCounts:
    """What an episode adds to the step's counters. ``missing`` says which reward parts have no value, and why;
    ``rewards`` is what the reward parts counted, by metric name."""

    malformed: int = 0
    invalid_actions: int = 0
    reward_problem: str = ""
    env_problem: str = ""
    missing: tuple[str, ...] = ()
    rewards: Mapping[str, float] = field(default_factory=dict)
    sessions: SessionCounts = SessionCounts()


def sampling_seed(run_seed: int, group_id: str, sample: int) -> int:
    """63-bit request seed keyed by (run seed, group, sample); stable across processes."""
    digest = hashlib.blake2b(f"{run_seed}/{group_id}/{sample}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def _state_key(state_hash: str) -> int:
    """0 for a state that is not known (a demonstration's)."""
    return key_of(state_hash) if state_hash else 0


@dataclass
class EpisodeRun:
    """A running episode. The driver feeds it replies and carries out what it returns: an action for the environment, a
    request for the engine, or the finished trajectory.

    ``least(summary)``: tokens that the next answer must have room for, so that the call is made (a script knows it).
    """

    episode_id: str
    task: Task
    sample: int
    seed: int
    sampling: Sampling
    limits: EpisodeLimits
    harness: Harness
    codec: ChatCodec
    rewards: RewardSet
    tools: tuple[ToolSpec, ...] = ()
    least: Callable[[bool], int] = lambda summary: 1
    turns: int = 0
    calls: int = 0
    malformed: int = 0
    invalid_actions: int = 0
    state: str = ""
    first_state: str = ""
    state_key: int = 0
    model_turn: int = -1
    steps: list[EpisodeStep] = field(default_factory=list)
    first: Observation | None = None
    pending: tuple[str, Action | None] = ("", None)
    ended: Status | None = None
    grading: Grading | None = None
    finished: FinishedTrajectory | None = None
    counts: EpisodeCounts = EpisodeCounts()

    def __post_init__(self) -> None:
        self.builder = TrajectoryBuilder(self.episode_id, self.sample, self.harness.harness_id, self.sampling.rerun)
        self.dialogues = Dialogues(
            self.builder, self.codec, self.harness, max_context=self.limits.max_context, least=self.least
        )
        self.prompt: Prompt | None = None

    # -- environment ----------------------------------------------------------------------------------------------
    def on_reset(self, observation: Observation, state_hash: str) -> GenerateRequest | None:
        """First observation arrived; returns the first engine request, or None when the episode is over already."""
        self.first = observation
        self.state = self.first_state = state_hash
        self.state_key = _state_key(state_hash)
        answer = self.harness.answer_call(self.task, self.tools)
        if answer is not None:
            for name, ids in prepared_answer(self.codec, answer).items():
                self.builder.set_prepared(name, ids)
        if observation.session is not SessionChange.STAY:
            return self._misplaced(observation.session)
        opening = self.harness.opening(self.task, observation, self.tools)
        return self._request(self.dialogues.open(opening, self.state_key))

    def on_step(self, observation: Observation, state_hash: str) -> GenerateRequest | None:
        """The environment answered an action; returns the next engine request, or None when the episode ended."""
        text, action = self.pending
        self.steps.append(EpisodeStep(text, action, observation, self.model_turn, state_hash))
        if not math.isfinite(observation.reward):
            return self._finish(Status.REWARD_INVALID, reward_problem=self._not_finite(observation.reward))
        self.builder.set_turn_reward(self.model_turn, observation.reward)
        if observation.action:
            self.builder.set_action_key(self.model_turn, key_of(stable_hash(observation.action)))
        for name, value in observation.labels.items():
            self.builder.label_turn(self.model_turn, name, value)
        self.invalid_actions += not observation.valid
        self.state, self.state_key = state_hash, _state_key(state_hash)
        if observation.done:
            return self._finish(Status.DONE)
        if self.turns >= self.limits.max_turns:
            return self._finish(Status.MAX_TURNS)
        if observation.session is SessionChange.OPEN and self.dialogues.depth == 0:
            opening = self.harness.opening(self.task, observation, self.tools, SessionKind.SUBAGENT)
            return self._request(self.dialogues.open(opening, self.state_key))
        if observation.session is SessionChange.CLOSE and self.dialogues.depth > 0:
            self.dialogues.close()
        elif observation.session is not SessionChange.STAY:
            return self._misplaced(observation.session)
        return self._request(self.dialogues.say(self.harness.reply(observation), self.state_key))

    def on_environment_failure(self, kind: str, error: str) -> None:
        self._finish(Status.ENV_DEADLINE if kind == "deadline" else Status.ENV_ERROR, env_problem=error)

    # -- engine ---------------------------------------------------------------------------------------------------
    def on_tokens(self, result: GenerateResult) -> Action | GenerateRequest | None:
        """A model turn arrived; returns the action to play, a further engine request (malformed turn), or None."""
        text = self.codec.decode_turn(result.ids.tolist())
        if self.prompt is not None and self.prompt.summary:
            return self._on_summary(result, text)
        parsed = self.harness.parse(text, self.tools)
        action_key = 0 if parsed.action is None else key_of(stable_hash(canonical_action(parsed.action)))
        self.model_turn = self.dialogues.answered(result, text, self.state_key, action_key)
        self.turns += 1
        self.pending = (text, parsed.action)
        if result.finish is FinishReason.ABORT:
            return self._finish(Status.ABORTED)
        if parsed.action is not None:
            return parsed.action
        self.malformed += 1
        observation = Observation(parsed.error, valid=False)
        self.steps.append(EpisodeStep(text, None, observation, self.model_turn, self.state))
        if self.turns >= self.limits.max_turns:
            return self._finish(Status.MAX_TURNS)
        return self._request(self.dialogues.say(self.harness.malformed(parsed.error), self.state_key))

    # -- reward ---------------------------------------------------------------------------------------------------
    def on_reward(self) -> None:
        """The reward is there, or the time for it is over: ends the trajectory."""
        assert self.grading is not None and self.ended is not None
        result, self.grading = self.grading.result(), None
        taken = {name for step in self.steps for name in step.observation.labels} & result.labels.keys()
        problem = result.problem
        if taken:
            problem = f"a reward part labels turns as {min(taken)!r}, which environment {self.task.environment!r} does"
        if problem:
            counted = RewardResult(0.0, counts=result.counts)
            self._close(counted, Status.REWARD_INVALID, reward_problem=problem)
            return
        for name, numbers in result.labels.items():
            for step, number in zip(self.steps, numbers, strict=True):
                if number >= 0:
                    self.builder.label_turn(step.turn, name, number)
        self._close(result, self.ended)

    # -- inside ---------------------------------------------------------------------------------------------------
    def _on_summary(self, result: GenerateResult, text: str) -> GenerateRequest | None:
        """The dialogue was summed up; it goes on in a new session."""
        self.dialogues.answered(result, text, self.state_key, 0)
        if result.finish is FinishReason.ABORT:
            return self._finish(Status.ABORTED)
        return self._request(self.dialogues.resume(result.ids.tolist(), text, self.state_key))

    def _request(self, prompt: Prompt | None) -> GenerateRequest | None:
        """Asks the engine for what follows the prompt; without one (it did not fit) the episode ends."""
        self.prompt = prompt
        if prompt is None:
            return self._finish(Status.MAX_CONTEXT)
        s = self.sampling
        request_id = f"{self.episode_id}#{self.calls}"
        self.calls += 1
        return GenerateRequest(
            request_id=request_id,
            session_id=prompt.session,
            input_ids=np.array(prompt.ids, dtype=np.int32),
            sampling=SamplingParams(
                max_new_tokens=min(prompt.room, self.limits.max_new_tokens),
                temperature=s.temperature,
                top_p=s.top_p,
                top_k=s.top_k,
                stop_ids=() if s.ignore_stop else tuple(self.codec.stop_ids),
                seed=self.seed,
            ),
            return_routed=s.record_routing,
        )

    def _misplaced(self, change: SessionChange) -> GenerateRequest | None:
        what = "began" if change is SessionChange.OPEN else "ended"
        where = (
            "inside a sub-agent" if self.dialogues.depth > 0 else "in the main dialogue" if self.turns else "on reset"
        )
        problem = f"environment {self.task.environment!r}, task {self.task.task_id!r}: a sub-agent {what} {where}"
        return self._finish(Status.ENV_ERROR, env_problem=problem)

    def _not_finite(self, reward: float) -> str:
        return f"environment {self.task.environment!r}, task {self.task.task_id!r}: step reward {reward} is not finite"

    def _finish(self, status: Status, *, env_problem: str = "", reward_problem: str = "") -> GenerateRequest | None:
        """Ends the play, and the trajectory unless a part of its reward is still out (``grading``). Returns None, as
        what calls it must: there is nothing to ask an engine for any more."""
        self.ended = status
        self.dialogues.end()
        if status.trainable and self.first is not None:
            episode = Episode(self.task, self.first, tuple(self.steps), status, self.first_state)
            self.grading = self.rewards.start(episode)
            if self.grading.done:
                self.on_reward()
        else:
            self._close(RewardResult(0.0), status, env_problem, reward_problem)
        return None

    def _close(self, result: RewardResult, status: Status, env_problem: str = "", reward_problem: str = "") -> None:
        success = status.trainable and bool(self.steps and self.steps[-1].observation.success)
        self.counts = EpisodeCounts(
            self.malformed,
            self.invalid_actions,
            reward_problem,
            env_problem,
            tuple(result.missing.values()),
            result.counts,
            self.dialogues.counts,
        )
        self.finished = self.builder.finish(result.total, result.parts, success, status, result.missing)
