"""Scripted demonstrations as trajectories, for a supervised warm start.

Invariant: the record is what the episode loop would have written had the model said the script's words, so that a warm
start and RL train on the same token sequences (``tests/rollout/test_demonstrations.py``).
"""

from __future__ import annotations

from collections.abc import Sequence

from megatron_ext.environments.pool import Demonstration
from megatron_ext.environments.protocol import ToolSpec
from megatron_ext.harness.protocol import Harness
from megatron_ext.harness.template import ChatCodec
from megatron_ext.trajectory.builder import TrajectoryBuilder, build_group
from megatron_ext.trajectory.record import Status, TrajectoryBatch, concat


class DemonstrationError(ValueError):
    """Demonstrations that nothing can be learned from; the message names the task and the key."""


def demonstration_batch(
    codec: ChatCodec,
    harness: Harness,
    demonstrations: Sequence[Demonstration],
    tools: Sequence[ToolSpec],
    max_context: int,
) -> TrajectoryBatch:
    """Each demonstration as a group of one. Action tokens have mask 1, version 0 and log-prob 0 (a script is certain).

    A demonstration longer than ``max_context`` tokens is cut after the last whole turn that fits, and no success then;
    one whose first turn does not fit is an error, since nothing could be learned from it.
    """
    groups = []
    for number, demo in enumerate(demonstrations):
        builder = TrajectoryBuilder(f"demo/{number}", 0, harness.harness_id)
        session = builder.open_session()
        builder.add_context(session, codec.opening())
        messages = list(harness.opening(demo.task, demo.first, tools))
        turns = 0
        for action, observation in demo.steps:
            encoded = [(m.role, codec.message(m)) for m in messages]
            prompt, turn = codec.generation_prompt(), codec.encode_turn(harness.render(action))
            closing = codec.close_turn(turn)
            size = sum(len(ids) for _, ids in encoded) + len(prompt) + len(turn) + len(closing)
            if builder.num_tokens + size > max_context:
                break
            for role, ids in encoded:
                builder.add_message(session, role, ids)
            builder.add_context(session, prompt)
            builder.add_model_turn(session, turn, [0.0] * len(turn), [0] * len(turn))
            builder.add_context(session, closing)
            messages = list(harness.reply(observation))
            turns += 1
        if not turns:
            raise DemonstrationError(
                f"demonstration of task {demo.task.task_id!r}: its first turn does not fit "
                f"model.max_context={max_context}"
            )
        whole = turns == len(demo.steps)
        status = Status.MAX_CONTEXT if not whole else Status.DONE if demo.steps[-1][1].done else Status.MAX_TURNS
        success = whole and demo.success
        finished = builder.finish(float(success), {}, success, status)
        groups.append(build_group(f"demo/{number}", demo.task.task_id, [finished]))
    return concat(groups)
