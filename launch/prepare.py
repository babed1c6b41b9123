"""From a command line to a configuration that was checked in every way that needs no device.

Invariant (``tests/launch/test_train.py``): every problem is reported, one line each, before anything is allocated.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from launch.paths import MEGATRON_CORE, RECIPES
from megatron_ext.config.compose import ConfigError, collect
from megatron_ext.config.schema import Config
from megatron_ext.config.validate import problems
from megatron_ext.models.backends import BackendError, resolve_backend
from megatron_ext.models.hf_config import HFConfigError, load_hf_config


def prepare(argv: Sequence[str], recipes: Path = RECIPES) -> Config:
    """The checked configuration of ``argv``. Raises ``ConfigError`` with every problem."""
    cfg, found = collect(argv, recipes)
    if cfg is not None:
        # torchrun and srun wrappers say how many training ranks there are; alone, this is the only one.
        found += problems(cfg, _model_problems(cfg, found), int(os.environ.get("WORLD_SIZE", "1")))
        try:
            resolve_backend(cfg.backend)
        except BackendError as error:
            found += str(error).splitlines()
    if cfg is None or found:
        raise ConfigError(found)
    return cfg


def _model_problems(cfg: Config, found: list[str]) -> dict[str, Any] | None:
    """The model's HF ``config.json`` when it can be used; otherwise what is wrong with it is added to ``found``."""
    try:
        return load_hf_config(cfg.model.hf_config).to_dict()
    except HFConfigError as error:
        found += str(error).splitlines()
        return None


def missing_packages() -> list[str]:
    """What must be installed by hand: pip leaves megatron-core out on Python 3.11, whose metadata it does not meet."""
    if importlib.util.find_spec("megatron") is None or importlib.util.find_spec("megatron.core") is None:
        return [
            "megatron-core is not installed: pip install --no-deps --ignore-requires-python "
            f"{MEGATRON_CORE} (or run through `bash launch/env`)"
        ]
    return []
