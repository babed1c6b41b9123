"""A reward part that the environment computed: a number in what it says about the end of an episode."""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Real

from megatron_ext.rewards.protocol import Episode


@dataclass(frozen=True)
class LastInfo:
    """``info[key]`` of the last observation.

    Attributes:
        key: a number that the environment gives when an episode ends (see the environment).
        absent: the value of an episode that was cut off before, so that nothing says it.
    """

    key: str
    absent: float = 0.0

    def __call__(self, episode: Episode) -> float:
        """Raises ``ValueError`` when a finished episode does not have the number."""
        last = episode.last
        if not last.done:
            return self.absent
        value = last.info.get(self.key)
        if isinstance(value, bool) or not isinstance(value, Real):
            raise ValueError(
                f"environment {episode.task.environment!r} ended without the number {self.key!r}; "
                f"it says {', '.join(sorted(last.info)) or 'nothing'}"
            )
        return float(value)
