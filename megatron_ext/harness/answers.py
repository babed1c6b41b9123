"""The gold answer of a task as ids, prepared for scoring: how likely is it, said now?

``answer_prefix`` is what comes between the end of a session and the answer: the generation prompt, and the tool call up
to its value. ``answer`` are the answer's ids. Both are cut out of one tokenised call, so that they are the tokens of a
model that says the whole call; a token that holds the answer's first character belongs to the answer.
"""

from __future__ import annotations

from collections.abc import Mapping

from megatron_ext.harness.protocol import AnswerCall
from megatron_ext.harness.template import ChatCodec

ANSWER_PREFIX, ANSWER = "answer_prefix", "answer"
PREPARED = frozenset({ANSWER_PREFIX, ANSWER})


def prepared_answer(codec: ChatCodec, call: AnswerCall) -> Mapping[str, list[int]]:
    """``prepared`` ids by name; empty ones when the task has no gold answer."""
    if not call.end:
        return {ANSWER_PREFIX: [], ANSWER: []}
    before, answer = codec.cut_turn(call.text, call.start, call.end)
    return {ANSWER_PREFIX: [*codec.generation_prompt(), *before], ANSWER: answer}
