"""A reward part computed by the user's own function."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from megatron_ext.config.functions import load_function
from megatron_ext.rewards.protocol import Episode, RewardValue


class PythonReward:
    """Calls ``function(episode)``, named as ``package.module:function`` or ``path/to/file.py:function``. It gives a
    number, or a ``RewardValue`` whose labels are among ``labels``."""

    def __init__(self, function: str, labels: Sequence[str] = ()) -> None:
        """Raises ``ValueError`` when the function cannot be found or does not take one episode."""
        self._call: Callable[[Episode], float | RewardValue] = load_function(function, "episode")
        self._labels = frozenset(labels)

    @property
    def written_labels(self) -> frozenset[str]:
        return self._labels

    def __call__(self, episode: Episode) -> float | RewardValue:
        return self._call(episode)
