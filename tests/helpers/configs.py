"""A good configuration with values changed, for what judges configurations."""

from __future__ import annotations

from typing import Any

from megatron_ext.config.schema import Config, ModelConfig, RunConfig, TasksConfig

HERE = "tests.helpers.plug_points"


def config(**overrides: Any) -> Config:
    """``overrides`` are keys, a double underscore for each dot."""
    cfg = Config(
        recipe="alpha",
        run=RunConfig(name="x"),
        model=ModelConfig(hf_config="x"),
        tasks=TasksConfig(environment="game"),
        environments={"game": {"_target_": f"{HERE}.Game", "level": 1}},
    )
    for path, value in overrides.items():
        at: Any = cfg
        *above, last = path.split("__")
        for part in above:
            at = getattr(at, part)
        setattr(at, last, value)
    return cfg
