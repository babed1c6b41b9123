"""The learning-rate schedule of ``megatron_ext/training/schedule.py``."""

from __future__ import annotations

import pytest

from megatron_ext.config.schema import OptimizerConfig
from megatron_ext.training.schedule import learning_rate

SCHEDULES = ("constant", "cosine", "linear")


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_warm_up_is_linear_and_reaches_the_peak(schedule: str) -> None:
    config = OptimizerConfig(lr=2.0, schedule=schedule, warmup_steps=4, min_lr_ratio=0.1)
    assert [learning_rate(config, step, 20) for step in range(5)] == pytest.approx([0.5, 1.0, 1.5, 2.0, 2.0])


@pytest.mark.parametrize(
    ("schedule", "middle", "end"), [("constant", 2.0, 2.0), ("cosine", 1.1, 0.2), ("linear", 1.1, 0.2)]
)
def test_half_way_and_the_end(schedule: str, middle: float, end: float) -> None:
    config = OptimizerConfig(lr=2.0, schedule=schedule, warmup_steps=4, min_lr_ratio=0.1)
    assert learning_rate(config, 12, 20) == pytest.approx(middle)
    assert learning_rate(config, 20, 20) == pytest.approx(end)
    assert learning_rate(config, 500, 20) == pytest.approx(end), "past the end the last rate stays"


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_never_rises_after_the_warm_up(schedule: str) -> None:
    config = OptimizerConfig(lr=1e-3, schedule=schedule, warmup_steps=3, min_lr_ratio=0.0)
    rates = [learning_rate(config, step, 30) for step in range(3, 40)]
    assert rates == sorted(rates, reverse=True) and min(rates) >= 0.0


@pytest.mark.parametrize("total", [0, 2])
def test_without_a_span_the_rate_stays_at_the_peak(total: int) -> None:
    config = OptimizerConfig(lr=1e-3, schedule="cosine", warmup_steps=2)
    assert learning_rate(config, 7, total) == 1e-3
    assert learning_rate(OptimizerConfig(lr=1e-3, warmup_steps=0), 0, 0) == 1e-3


def test_an_unknown_schedule_is_named() -> None:
    with pytest.raises(ValueError, match="optimizer.schedule='step'"):
        learning_rate(OptimizerConfig(schedule="step", warmup_steps=0), 3, 10)
