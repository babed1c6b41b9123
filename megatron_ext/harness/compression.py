"""Context compression of a harness: when a dialogue grows beyond its budget the model writes a summary of it, and the
dialogue goes on in a new session that holds the opening and the summary alone.

    session 0    opening, turns ...                              over the budget: ends here
    compression  all of session 0 (context), ``compress_prompt``, the model's summary
    session 1    opening, the summary (context), ``resume_prompt``, turns ...

Invariants: those of ``harness/protocol.py``; and a summary is what the turn says after its thinking.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass

from megatron_ext.harness.protocol import HarnessError, Message
from megatron_ext.harness.thinking import after_thinking
from megatron_ext.trajectory.record import Role

COMPRESS_PROMPT = "The dialogue is getting too long. Write down all that is needed to go on without it."
RESUME_PROMPT = "What was said before is gone, but for this note. Go on with the task."


@dataclass(frozen=True)
class Compressing:
    """What every harness that compresses takes.

    Attributes:
        context_budget: tokens; a call whose prompt would be longer is preceded by a compression (once the session holds
            a model turn). None: never. The longest observation, the prompt below and the summary come on top of it, and
            must fit ``model.max_context`` with it.
        summary_tokens: longest summary; None: as long as a turn may be.
        compress_prompt: asks for the summary.
        resume_prompt: stands behind the summary in the new session.
    """

    _: KW_ONLY
    context_budget: int | None = None
    summary_tokens: int | None = None
    compress_prompt: str = COMPRESS_PROMPT
    resume_prompt: str = RESUME_PROMPT

    def __post_init__(self) -> None:
        for name, value in (("context_budget", self.context_budget), ("summary_tokens", self.summary_tokens)):
            if value is not None and value < 1:
                raise HarnessError(f"harness.{name} must be >= 1 or null, got {value}")
        if self.context_budget is not None and not (self.compress_prompt and self.resume_prompt):
            raise HarnessError("harness.compress_prompt and harness.resume_prompt must say something")

    def compress(self) -> Sequence[Message]:
        """Messages that ask for the summary."""
        return (Message(Role.USER, self.compress_prompt),)

    def read_summary(self, text: str) -> str:
        """The summary in a turn; empty when it has none (nothing said, or thinking that was never closed)."""
        return after_thinking(text) or ""

    def resume(self) -> Sequence[Message]:
        """Messages behind the summary."""
        return (Message(Role.USER, self.resume_prompt),)
