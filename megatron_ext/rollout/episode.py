"""One episode: the state machine between an environment, a harness and an engine.

Invariants (``tests/rollout/test_episode.py``):

1. Token-in/token-out: the prompt of every call is the session's recorded ids; sampled ids are appended as they came.
2. An episode waits for exactly one thing at a time: its environment or its engine.
3. Whatever goes wrong in an environment or a reward ends the episode with a status that masks and counts it; nothing is
   punished.
4. No trajectory is longer than ``max_context``: what does not fit, with room to answer it, ends the episode unrecorded.
5. The sampling seed depends only on (run seed, group, sample); the engine adds the position.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from megatron_ext.environments.protocol import Action, Observation, ToolCall, ToolSpec, key_of, stable_hash
from megatron_ext.harness.protocol import Harness, Message
from megatron_ext.harness.template import ChatCodec
from megatron_ext.rewards.compose import RewardSet
from megatron_ext.rewards.protocol import Episode, EpisodeStep
from megatron_ext.rollout.engine import FinishReason, GenerateRequest, GenerateResult, SamplingParams
from megatron_ext.trajectory.builder import FinishedTrajectory, TrajectoryBuilder
from megatron_ext.trajectory.record import Status
from megatron_ext.trajectory.task import Task


@dataclass(frozen=True)
class EpisodeLimits:
    """``max_turns`` model turns, ``max_context`` tokens in all, ``max_new_tokens`` of one turn."""

    max_turns: int
    max_context: int
    max_new_tokens: int


@dataclass(frozen=True)
class Sampling:
    """How an order samples: greedy when ``temperature`` is 0; no token ends a turn when ``ignore_stop``."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    record_routing: bool = False
    ignore_stop: bool = False


@dataclass(frozen=True)
class EpisodeCounts:
    """What an episode adds to the step's counters."""

    malformed: int = 0
    invalid_actions: int = 0
    reward_problem: str = ""
    env_problem: str = ""


def sampling_seed(run_seed: int, group_id: str, sample: int) -> int:
    """63-bit request seed keyed by (run seed, group, sample); stable across processes."""
    digest = hashlib.blake2b(f"{run_seed}/{group_id}/{sample}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def canonical_action(action: Action) -> str:
    """Text under which equal actions have equal ``turn_action_key``."""
    if isinstance(action, ToolCall):
        return f"{action.name}({', '.join(f'{k}={action.arguments[k]!r}' for k in sorted(action.arguments))})"
    return " ".join(action.split())


@dataclass
class EpisodeRun:
    """A running episode. The driver feeds it replies and carries out what it returns: an action for the environment, a
    request for the engine, or the finished trajectory."""

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
    turns: int = 0
    malformed: int = 0
    invalid_actions: int = 0
    state_key: int = 0
    model_turn: int = -1
    steps: list[EpisodeStep] = field(default_factory=list)
    first: Observation | None = None
    pending: tuple[str, Action | None] = ("", None)
    finished: FinishedTrajectory | None = None
    counts: EpisodeCounts = EpisodeCounts()

    def __post_init__(self) -> None:
        self.builder = TrajectoryBuilder(self.episode_id, self.sample, self.harness.harness_id)
        self.session = self.builder.open_session()

    # -- environment ----------------------------------------------------------------------------------------------
    def on_reset(self, observation: Observation, state_hash: str) -> GenerateRequest | None:
        """First observation arrived; returns the first engine request, or None when the episode is over already."""
        self.first = observation
        self.state_key = key_of(state_hash)
        self.builder.add_context(self.session, self.codec.opening())
        return self._next_call(self.harness.opening(self.task, observation, self.tools))

    def on_step(self, observation: Observation, state_hash: str) -> GenerateRequest | None:
        """The environment answered an action; returns the next engine request, or None when the episode ended."""
        text, action = self.pending
        self.steps.append(EpisodeStep(text, action, observation))
        if not math.isfinite(observation.reward):
            return self._finish(Status.REWARD_INVALID, reward_problem=self._not_finite(observation.reward))
        self.builder.set_turn_reward(self.model_turn, observation.reward)
        self.invalid_actions += not observation.valid
        self.state_key = key_of(state_hash)
        if observation.done:
            return self._finish(Status.DONE)
        if self.turns >= self.limits.max_turns:
            return self._finish(Status.MAX_TURNS)
        return self._next_call(self.harness.reply(observation))

    def on_environment_failure(self, kind: str, error: str) -> None:
        self._finish(Status.ENV_DEADLINE if kind == "deadline" else Status.ENV_ERROR, env_problem=error)

    # -- engine ---------------------------------------------------------------------------------------------------
    def on_tokens(self, result: GenerateResult) -> Action | GenerateRequest | None:
        """A model turn arrived; returns the action to play, a further engine request (malformed turn), or None."""
        builder = self.builder
        text = self.codec.decode_turn(result.ids.tolist())
        parsed = self.harness.parse(text, self.tools)
        action_key = 0 if parsed.action is None else key_of(stable_hash(canonical_action(parsed.action)))
        self.model_turn = builder.add_model_turn(
            self.session,
            result.ids,
            result.logp,
            result.versions,
            state_key=self.state_key,
            action_key=action_key,
            routed=result.routed,
            routed_from=result.routed_from,
        )
        builder.add_context(self.session, self.codec.close_turn(result.ids.tolist()))
        self.turns += 1
        self.pending = (text, parsed.action)
        if result.finish is FinishReason.ABORT:
            return self._finish(Status.ABORTED)
        if parsed.action is not None:
            return parsed.action
        self.malformed += 1
        observation = Observation(parsed.error, valid=False)
        self.steps.append(EpisodeStep(text, None, observation))
        if self.turns >= self.limits.max_turns:
            return self._finish(Status.MAX_TURNS)
        return self._next_call(self.harness.malformed(parsed.error))

    # -- inside ---------------------------------------------------------------------------------------------------
    def _next_call(self, messages: Sequence[Message]) -> GenerateRequest | None:
        """Records the messages and asks the engine to answer them, if they fit with an answer of one token."""
        encoded = [(message.role, self.codec.message(message)) for message in messages]
        opener = self.codec.generation_prompt()
        # What stands after a turn that was cut off needs room too.
        taken = self.builder.num_tokens + len(opener) + len(self.codec.close_turn([]))
        room = self.limits.max_context - taken - sum(len(ids) for _, ids in encoded)
        if room < 1:
            return self._finish(Status.MAX_CONTEXT)
        for role, ids in encoded:
            self.builder.add_message(self.session, role, ids, state_key=self.state_key)
        self.builder.add_context(self.session, opener)
        prompt = self.builder.prompt_ids(self.session)
        s = self.sampling
        return GenerateRequest(
            request_id=f"{self.episode_id}#{self.turns}",
            session_id=self.episode_id,
            input_ids=np.array(prompt, dtype=np.int32),
            sampling=SamplingParams(
                max_new_tokens=min(room, self.limits.max_new_tokens),
                temperature=s.temperature,
                top_p=s.top_p,
                top_k=s.top_k,
                stop_ids=() if s.ignore_stop else tuple(self.codec.stop_ids),
                seed=self.seed,
            ),
            return_routed=s.record_routing,
        )

    def _not_finite(self, reward: float) -> str:
        return f"environment {self.task.environment!r}, task {self.task.task_id!r}: step reward {reward} is not finite"

    def _finish(self, status: Status, *, env_problem: str = "", reward_problem: str = "") -> GenerateRequest | None:
        """Ends the episode. Returns None, as what calls it must: there is nothing to wait for any more."""
        reward, parts, success = 0.0, {}, False
        if status.trainable and self.first is not None:
            result = self.rewards(Episode(self.task, self.first, tuple(self.steps), status))
            if result.valid:
                reward, parts = result.total, dict(result.parts)
                success = bool(self.steps and self.steps[-1].observation.success)
            else:
                status, reward_problem = Status.REWARD_INVALID, result.problem
        self.counts = EpisodeCounts(self.malformed, self.invalid_actions, reward_problem, env_problem)
        self.finished = self.builder.finish(reward, parts, success, status)
        return None
