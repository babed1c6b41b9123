"""Scripted demonstrations as trajectories, for a supervised warm start.

Invariant: the record is what the episode loop would have written had the model said the script's words, compressions
and sub-agents included, so that a warm start and RL train on the same token sequences
(``tests/rollout/test_demonstrations.py``). The same state machine writes both.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megatron_ext.environments.pool import Demonstration
from megatron_ext.environments.protocol import ToolSpec
from megatron_ext.harness.protocol import Harness
from megatron_ext.harness.template import ChatCodec
from megatron_ext.rewards.compose import RewardPart, RewardSet
from megatron_ext.rewards.outcome import Success
from megatron_ext.rollout.engine import FinishReason, GenerateRequest, GenerateResult
from megatron_ext.rollout.episode import EpisodeLimits, EpisodeRun, Sampling
from megatron_ext.trajectory.builder import FinishedTrajectory, build_group
from megatron_ext.trajectory.joining import concat
from megatron_ext.trajectory.record import TrajectoryBatch

SOLVED = RewardSet([RewardPart("success", Success())])


class DemonstrationError(ValueError):
    """Demonstrations that nothing can be learned from; the message names the task and the key."""


def demonstration_batch(
    codec: ChatCodec,
    harness: Harness,
    demonstrations: Sequence[Demonstration],
    tools: Sequence[ToolSpec],
    max_context: int,
) -> TrajectoryBatch:
    """Each demonstration as a group of one. Model tokens have mask 1, version 0 and log-prob 0 (a script is certain).

    A session longer than ``max_context`` tokens is cut after the last whole turn that fits, and the demonstration with
    it, which is no success then; one whose first turn does not fit is an error, since nothing could be learned from it.
    So is one that has to be compressed by an environment that is no ``Summarizer``.
    """
    groups = []
    for number, demo in enumerate(demonstrations):
        finished = _Playback(codec, harness, demo, tools, max_context).play(f"demo/{number}")
        groups.append(build_group(f"demo/{number}", demo.task.task_id, [finished]))
    return concat(groups)


class _Playback:
    """The environment and the engine of one demonstration: they say what the script did."""

    def __init__(
        self, codec: ChatCodec, harness: Harness, demo: Demonstration, tools: Sequence[ToolSpec], max_context: int
    ) -> None:
        self._codec, self._harness, self._demo = codec, harness, demo
        self._tools, self._max_context = tuple(tools), max_context
        self._next = 0  # step of the script

    def play(self, episode_id: str) -> FinishedTrajectory:
        demo = self._demo
        run = EpisodeRun(
            episode_id=episode_id,
            task=demo.task,
            sample=0,
            seed=0,
            sampling=Sampling(),
            limits=EpisodeLimits(len(demo.steps), self._max_context, self._max_context),
            harness=self._harness,
            codec=self._codec,
            rewards=SOLVED,
            tools=self._tools,
            least=lambda summary: len(self._words(summary)),
        )
        request = run.on_reset(demo.first, "") if demo.steps else None
        while request is not None:
            assert run.prompt is not None
            summary = run.prompt.summary
            answer = run.on_tokens(self._answer(request, summary))
            if summary:
                assert answer is None or isinstance(answer, GenerateRequest)
                request = answer
                continue
            action, observation = demo.steps[self._next]
            if answer is None or isinstance(answer, GenerateRequest):
                raise self._error(f"the harness does not read the script's action {action!r} as one")
            self._next += 1
            request = run.on_step(observation, "")
        if run.finished is None or not run.turns:
            raise self._error(f"its first turn does not fit model.max_context={self._max_context}")
        return run.finished

    def _words(self, summary: bool) -> list[int]:
        """Ids of what the script says next."""
        if not summary:
            return self._codec.encode_turn(self._harness.render(self._demo.steps[self._next][0]))
        if not self._demo.summaries:
            raise self._error(
                f"its dialogue outgrows harness.context_budget={self._harness.context_budget}, but environment "
                f"{self._demo.task.environment!r} has no expert_summary; give it one or raise the budget"
            )
        return self._codec.encode_turn(self._demo.summaries[self._next])

    def _answer(self, request: GenerateRequest, summary: bool) -> GenerateResult:
        ids = np.array(self._words(summary), dtype=np.int32)
        certain, version = np.zeros(len(ids), dtype=np.float32), np.zeros(len(ids), dtype=np.int64)
        return GenerateResult(request.request_id, ids, certain, version, FinishReason.STOP)

    def _error(self, problem: str) -> DemonstrationError:
        return DemonstrationError(f"demonstration of task {self._demo.task.task_id!r}: {problem}")
