"""Credit methods put together: the order of edits, what is visible of it, and pairs that are refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from launch import train
from launch.prepare import prepare
from megatron_ext.config.compose import ConfigError
from megatron_ext.credit.conservation import EditReport
from megatron_ext.credit.edits.whiten import Whiten
from megatron_ext.credit.pipeline import Pipeline
from megatron_ext.credit.protocol import CreditError
from megatron_ext.training.session import credit_pipeline
from recipes.adastep.credit import StepShrinkage
from recipes.triage.credit import RoleCredit
from tests.helpers.credit_contract import check_ranks, run_edits
from tests.helpers.credit_methods import CONSTANTS, ROLES
from tests.helpers.records import build, random_groups

JUDGE = (
    "rewards.role={_target_: megatron_ext.rewards.judge_reward.JudgeReward, "
    "judge: {_target_: megatron_ext.rewards.rule_judge.NoveltyJudge, new: E, repeated: R, unchanged: N}, "
    "labels: {D: 0, E: 1, N: 2, R: 3}, default: N, before: null, state: true}"
)
BOTH = [
    "credit.edits.adastep={_target_: recipes.adastep.credit.StepShrinkage, order: 10}",
    "credit.edits.triage={_target_: recipes.triage.credit.RoleCredit, order: 20, "
    "constants: {D: 1.0, E: 0.2, N: -0.1, R: -0.5}, labels: {D: 0, E: 1, N: 2, R: 3}}",
    JUDGE,
]
WHITEN = "credit.edits.white={_target_: megatron_ext.credit.edits.whiten.Whiten, order: 30}"


def roles() -> RoleCredit:
    return RoleCredit(constants=CONSTANTS, labels=ROLES)


@pytest.mark.parametrize("seed", range(3))
def test_adastep_and_triage_run_together(seed: int) -> None:
    """Constants are added to, and whitened with, what the steps made of the advantage."""
    batch = build(random_groups(seed, groups=6))
    both, reports = run_edits([("adastep", StepShrinkage()), ("triage", roles())], batch)
    step, first = run_edits([("adastep", StepShrinkage())], batch)
    assert [report.name for report in reports] == ["adastep", "triage"] and reports[0] == first[0]
    # Each begins where the last one ended.
    assert reports[1].positive_before == pytest.approx(reports[0].positive_after)
    turns = np.unique(batch.turn[both.trained])
    mean = [both.advantage[both.trained & (batch.turn == turn)].mean() for turn in turns]
    assert (np.mean(mean), np.std(mean)) == (pytest.approx(0.0, abs=1e-9), pytest.approx(1.0))
    other, turned = run_edits([("triage", roles()), ("adastep", StepShrinkage())], batch)
    assert [report.name for report in turned] == ["triage", "adastep"]
    assert not np.allclose(both.advantage, other.advantage)  # the order matters, and is the one that is given
    assert not np.allclose(both.advantage, step.advantage)


def test_together_over_ranks() -> None:
    check_ranks(StepShrinkage, random_groups(2, groups=5), 2, exact=True)
    check_ranks(roles, random_groups(2, groups=5), 2, exact=True)


def test_the_order_is_the_configuration_s_and_is_shown(root: Path) -> None:
    given = ["recipe=quickstart", *BOTH]
    config = prepare(given)
    assert [name for name, _ in credit_pipeline(config)._edits] == ["adastep", "triage"]
    config = prepare([*given, "credit.edits.triage.order=5"])
    pipeline = credit_pipeline(config)
    assert [name for name, _ in pipeline._edits] == ["triage", "adastep"]
    metrics = [f"credit/{report.name}" for report in run_pipeline(pipeline)]
    assert metrics == ["credit/triage", "credit/adastep"]


def run_pipeline(pipeline: Pipeline) -> list[EditReport]:
    return list(run_edits(pipeline._edits, build(random_groups(1)))[1])


def test_two_that_set_the_scale_are_refused_by_name() -> None:
    with pytest.raises(CreditError, match="'triage' and 'white' both set the scale"):
        Pipeline([("adastep", StepShrinkage()), ("triage", roles()), ("white", Whiten())])
    with pytest.raises(ConfigError, match="triage and white each set the scale of the advantage"):
        prepare(["recipe=quickstart", *BOTH, WHITEN])


def test_training_refuses_them_before_anything_starts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "runs"
    assert train.main(["recipe=quickstart", *BOTH, WHITEN, f"run.root={folder}"]) == 2
    said = capsys.readouterr().err
    assert "triage and white" in said and len(said.strip().splitlines()) == 1
    assert not folder.exists()


def refused(*argv: str) -> str:
    with pytest.raises(ConfigError) as error:
        prepare([*argv, "run.name=x"])
    (line,) = error.value.problems
    return line


def test_what_nothing_in_a_recipe_writes_is_refused() -> None:
    """Recipes whose mechanism reads what a judge, a harness or an environment writes, without it."""
    assert "credit.edits.triage: reads the turn label 'role'" in refused("recipe=triage", "rewards.role=null")
    assert "credit.edits.sessions: reads the prepared ids" in refused("recipe=mosaic", "harness.answer_tool=null")
    calculator = "environments.store={_target_: megatron_ext.environments.calculator.Calculator}"
    assert "model.router: reads the turn label 'op'" in refused("recipe=moe_expert_structuring", calculator)
    for off in (
        ["recipe=triage/off", "rewards.role=null"],
        ["recipe=mosaic/micro_no_gain", "harness.answer_tool=null"],
        ["recipe=moe_expert_structuring/off", calculator],
    ):
        prepare([*off, "run.name=x"])
