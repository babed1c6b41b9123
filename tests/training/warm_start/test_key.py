"""What decides a warm start."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from megatron_ext.config.schema import Config
from megatron_ext.training.warm_start.key import warm_start_key, warm_start_parts, warm_start_seed
from tests.helpers.run_folders import config


def seeded(path: Path, run: int, warm: int) -> Config:
    made = config(path, seed=run)
    return replace(made, warm_start=replace(made.warm_start, seed=warm))


def test_seeds_share_a_warm_start_that_has_its_own(tmp_path: Path) -> None:
    parts = {(run, warm): warm_start_parts(seeded(tmp_path, run, warm)) for run in (1, 2) for warm in (0, 1)}
    assert parts[1, 0] != parts[2, 0] and parts[1, 1] == parts[2, 1] == parts[1, 0]
    assert [warm_start_seed(seeded(tmp_path, 2, warm)) for warm in (0, 5)] == [2, 5]
    assert warm_start_key(parts[1, 1]) == warm_start_key(parts[2, 1]) != warm_start_key(parts[2, 0])


def test_what_is_trained_differently_starts_differently(tmp_path: Path) -> None:
    base = seeded(tmp_path, 1, 1)
    same = replace(base, optimizer=replace(base.optimizer, lr=0.5), credit=replace(base.credit, normalize="mean"))
    other = replace(base, environments={"walk": {"_target_": "x.Y"}})
    assert warm_start_parts(base) == warm_start_parts(same) != warm_start_parts(other)
