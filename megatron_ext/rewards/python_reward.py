"""A reward part computed by the user's own function."""

from __future__ import annotations

from collections.abc import Callable

from megatron_ext.config.functions import load_function
from megatron_ext.rewards.protocol import Episode


class PythonReward:
    """Calls ``function(episode) -> float``, named as ``package.module:function`` or ``path/to/file.py:function``."""

    def __init__(self, function: str) -> None:
        """Raises ``ValueError`` when the function cannot be found or does not take one episode."""
        self._call: Callable[[Episode], float] = load_function(function, "episode")

    def __call__(self, episode: Episode) -> float:
        return self._call(episode)
