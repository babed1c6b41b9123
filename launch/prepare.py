"""From a command line to a configuration that was checked in every way that needs no device.

Invariant (``tests/launch/test_train.py``): every problem is reported, one line each, before anything is allocated.
"""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from launch.paths import MEGATRON_CORE, RECIPES
from megatron_ext.config.compose import ConfigError, compose
from megatron_ext.config.schema import Config
from megatron_ext.config.validate import problems


def prepare(argv: Sequence[str], recipes: Path = RECIPES) -> Config:
    """The checked configuration of ``argv``. Raises ``ConfigError`` with every problem."""
    cfg = compose(argv, recipes)
    found: list[str] = []
    hf = read_hf_config(Path(cfg.model.hf_config), found)
    # torchrun and srun wrappers say how many training ranks there are; alone, this is the only one.
    found += problems(cfg, hf, int(os.environ.get("WORLD_SIZE", "1")))
    if found:
        raise ConfigError(found)
    return cfg


def read_hf_config(path: Path, found: list[str]) -> dict[str, Any] | None:
    """The HF ``config.json`` at ``path`` (or in that folder); what is wrong with it is added to ``found``."""
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        found.append(f"model.hf_config: {file} does not exist; give a config.json or a folder that holds one")
        return None
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        found.append(f"model.hf_config: {file} is not JSON: {error}")
        return None
    if not isinstance(content, dict):
        found.append(f"model.hf_config: {file} holds a {type(content).__name__}, not an object")
        return None
    return content


def missing_packages() -> list[str]:
    """What must be installed by hand: pip leaves megatron-core out on Python 3.11, whose metadata it does not meet."""
    if importlib.util.find_spec("megatron") is None or importlib.util.find_spec("megatron.core") is None:
        return [
            "megatron-core is not installed: pip install --no-deps --ignore-requires-python "
            f"{MEGATRON_CORE} (or run through `bash launch/env`)"
        ]
    return []
