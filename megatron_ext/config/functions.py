"""The user's own functions, named in the configuration as ``package.module:function`` or ``path/to/file.py:function``.

Invariant (``tests/rewards/test_compose.py``, ``tests/environments/test_single_turn.py``): what is wrong with a name, a
file or the number of arguments is one ``ValueError`` that says so; two files of one name stay apart.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any


def load_function(name: str, *takes: str) -> Callable[..., Any]:
    """The function that ``name`` names, which must accept ``takes`` as positional arguments.

    Raises ``ValueError``; what the user's module raises while it is imported passes through.
    """
    place, separator, function_name = name.rpartition(":")
    if not separator or not place or not function_name:
        raise ValueError(f"{name!r}: name a function as package.module:function or path/to/file.py:function")
    module = _from_file(Path(place)) if place.endswith(".py") else _from_name(place)
    function = vars(module).get(function_name)
    if not callable(function):
        raise ValueError(f"{name!r}: {place} has no function {function_name!r}")
    try:
        inspect.signature(function).bind(*takes)
    except TypeError as error:
        raise ValueError(f"{name!r}: must take the arguments ({', '.join(takes)}): {error}") from error
    found: Callable[..., Any] = function
    return found


def _from_name(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise ValueError(
            f"cannot import {name!r} ({error}); put its folder on PYTHONPATH, or give path/to/file.py:function"
        ) from error


def _from_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise ValueError(f"no such file: {path.resolve()}")
    # The path is part of the name, so that two files of one name do not take each other's place.
    name = f"user_function_{path.stem}_{hashlib.blake2b(str(path.resolve()).encode(), digest_size=6).hexdigest()}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ValueError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # before running it: dataclasses look their module up
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
