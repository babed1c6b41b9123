"""Invariants of ``megatron_ext/config/ranges.py``."""

from __future__ import annotations

from typing import Any

import pytest
from omegaconf import OmegaConf

from megatron_ext.config import ranges
from megatron_ext.config.ranges import ABOVE_ZERO, AT_LEAST, BELOW_ONE, CHOICES, SEEDS, SHARES
from megatron_ext.config.schema import Config
from tests.helpers.configs import config

BAD: list[tuple[dict[str, Any], list[str]]] = [
    ({"credit__filter__draw_limit": 0.5}, ["draw_limit=0.5"]),
    ({"credit__std_ddof": 2}, ["std_ddof=2"]),
    ({"tokenizer__vocab_size": 4096}, ["vocab_size=4096", "2048"]),
    ({"tokenizer__vocab_size": 200}, ["vocab_size=200"]),
    ({"run__steps": -1}, ["run.steps=-1"]),
    ({"optimizer__schedule": "step"}, ["optimizer.schedule=step", "constant, cosine, linear"]),
    ({"loss__aggregation": "mean"}, ["token_mean, row_mean, session_mean, turn_mean, trajectory_mean, prompt_mean"]),
    ({"optimizer__beta2": 1.0}, ["optimizer.beta2=1.0"]),
    ({"optimizer__lr": 0.0}, ["optimizer.lr=0.0"]),
    ({"run__seed": -1}, ["run.seed=-1"]),
    ({"run__seed": 2**40}, ["run.seed=1099511627776", "at most 4294967295"]),
    ({"optimizer__lr": float("inf")}, ["optimizer.lr=inf", "finite"]),
    ({"rollout__temperature": float("inf")}, ["rollout.temperature=inf", "finite"]),
    ({"model__embedding_std": 0.0}, ["embedding_std=0.0"]),
    (
        {"rollout__replay_routing": True, "rollout__record_routing": True, "rollout__replay_missing": "guess"},
        ["replay_missing=guess", "error", "live"],
    ),
    ({"rollout__replay_rerun": "last"}, ["replay_rerun=last", "segment", "first"]),
]


@pytest.mark.parametrize(("overrides", "words"), BAD)
def test_a_value_out_of_its_range_is_one_line(overrides: dict[str, Any], words: list[str]) -> None:
    found = list(ranges.problems(config(**overrides)))
    assert found and all("\n" not in line for line in found)
    for word in words:
        assert word in "\n".join(found)


@pytest.mark.parametrize("path", [*AT_LEAST, *ABOVE_ZERO, *SHARES, *BELOW_ONE])
def test_no_number_is_nan(path: str) -> None:  # invariant 1
    found = list(ranges.problems(config(**{path.replace(".", "__"): float("nan")})))
    assert len(found) == 1 and found[0].startswith(f"{path}=nan: ")


def test_the_tables_name_keys_whose_defaults_are_inside() -> None:  # invariant 2
    schema = OmegaConf.structured(Config)
    for path in [*CHOICES, *AT_LEAST, *ABOVE_ZERO, *SHARES, *BELOW_ONE, *SEEDS]:
        assert OmegaConf.select(schema, path, throw_on_missing=False) is not None
    for path, allowed in CHOICES.items():
        assert OmegaConf.select(schema, path) in allowed
    assert list(ranges.problems(config())) == []
