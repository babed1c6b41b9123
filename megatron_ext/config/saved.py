"""Writes a run's resolved configuration, and reads it back.

Invariant (``tests/config/test_saved.py``): ``load_resolved(save_resolved(cfg))`` equals ``cfg``, the recipe's own
dataclass included.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf

from megatron_ext.config.compose import ConfigError, build
from megatron_ext.config.schema import Config


def as_tree(cfg: Config) -> dict[str, Any]:
    """Plain maps, lists and scalars; ``method`` carries the import path of its dataclass in ``_schema_``."""
    tree = dataclasses.asdict(cfg)
    if cfg.method is not None:
        schema = type(cfg.method)
        tree["method"] = {"_schema_": f"{schema.__module__}.{schema.__qualname__}", **tree["method"]}
    return tree


def save_resolved(cfg: Config, path: Path) -> None:
    """Writes ``cfg`` as YAML, with every value spelt out."""
    path.write_text(OmegaConf.to_yaml(OmegaConf.create(as_tree(cfg))), encoding="utf-8")


def load_resolved(path: Path) -> Config:
    """The configuration in a run's ``config.yaml``. Raises ``ConfigError`` naming the file."""
    if not path.is_file():
        raise ConfigError([f"{path}: no such file; a run folder holds config.yaml"])
    try:
        tree = OmegaConf.to_container(OmegaConf.load(path), resolve=False)
    except yaml.YAMLError as error:
        raise ConfigError([f"{path}: {' '.join(str(error).split())}"]) from error
    if not isinstance(tree, dict):
        raise ConfigError([f"{path}: needs a map of keys, got {type(tree).__name__}"])
    try:
        return build({str(key): value for key, value in tree.items()})
    except ConfigError as error:
        raise ConfigError([f"{path}: {line}" for line in error.problems]) from error
