"""A reward part computed by the user's own function."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

from megatron_ext.rewards.protocol import Episode


class PythonReward:
    """Calls ``function(episode) -> float``, named as ``package.module:function`` or ``path/to/file.py:function``."""

    def __init__(self, function: str) -> None:
        """Raises ``ValueError`` when the function cannot be found or does not take one episode."""
        self.function = function
        place, separator, name = function.rpartition(":")
        if not separator or not place or not name:
            raise ValueError(
                f"PythonReward: function must be 'module:function' or 'file.py:function', got {function!r}"
            )
        module = _from_file(Path(place)) if place.endswith(".py") else _from_name(place)
        if not hasattr(module, name):
            raise ValueError(f"PythonReward: {place} has no {name!r}")
        self._call: Callable[[Episode], float] = getattr(module, name)
        try:
            inspect.signature(self._call).bind(None)
        except TypeError as error:
            raise ValueError(f"PythonReward: {function} must take one argument, the episode ({error})") from error

    def __call__(self, episode: Episode) -> float:
        return self._call(episode)


def _from_name(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise ValueError(
            f"PythonReward: cannot import {name!r} ({error}); put its folder on PYTHONPATH, "
            "or give path/to/file.py:function"
        ) from error


def _from_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise ValueError(f"PythonReward: no such file: {path.resolve()}")
    # The path is part of the name, so that two files of one name do not take each other's place.
    name = f"user_reward_{path.stem}_{hashlib.blake2b(str(path.resolve()).encode(), digest_size=6).hexdigest()}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ValueError(f"PythonReward: {path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # before running it: dataclasses look their module up
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
