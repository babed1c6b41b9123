"""What ``docs/plug_points.md`` shows of routers, run as it stands: its files are written, keep the contract, train."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from launch.prepare import prepare
from megatron_ext.config.instantiate import instantiate
from megatron_ext.models.parallel import ParallelContext
from megatron_ext.moe.policies import routers
from megatron_ext.tracking.jsonl import FILE_NAME, read_metrics
from megatron_ext.tracking.names import check
from megatron_ext.training.run import train
from tests.helpers.doc_pages import TINY_RUN, code_lines, installed_recipe, written_files
from tests.helpers.records import random_batch
from tests.helpers.routing_contract import check_loss, check_policy, check_reach, check_silence, silent, steps
from tests.helpers.structured import plain_distributions, with_operations
from tests.helpers.training import (
    gradients,
    make_trainer,
    micro_of,
    one_rank,
    parameters,
    plain_gradients,
    plain_model,
    random_inputs,
    rows_of,
)

LONGEST = 30  # lines of code of a routing loss, comments, blank lines and imports aside
BATCH = with_operations(random_batch(5, groups=2, untrainable=0.3, tokens=(2, 6)))


def files(root: Path) -> dict[str, str]:
    """Path -> content of every file that the page writes: a path in code, then the next block of code."""
    return written_files(root / "docs/plug_points.md", r"`(recipes/routers/[^`]+)`:\n")


@pytest.fixture
def page(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A recipes folder with what the page writes, on the import path as ``recipes.routers``."""
    with installed_recipe("routers", files(root), root, tmp_path, monkeypatch) as folder:
        yield folder


@pytest.fixture(scope="module")
def context() -> Iterator[ParallelContext]:
    with one_rank() as made:
        yield made


def policy(page: Path, preset: str, **arguments: Any) -> Any:
    node = prepare([f"recipe=routers/{preset}", "tracking.wandb=null"], page).model.router
    return instantiate({**node, **arguments})


def test_the_page_writes_two_short_modules(root: Path) -> None:
    written = files(root)
    assert set(written) == {
        f"recipes/routers/{name}" for name in ("last.py", "recipe.yaml", "balance.py", "balanced.yaml")
    }
    for name in ("last.py", "balance.py"):
        assert code_lines([written[f"recipes/routers/{name}"]]) <= LONGEST


def test_only_the_router_of_the_last_layer_learns(page: Path, context: ParallelContext) -> None:
    check_policy(lambda: policy(page, "recipe"), context, BATCH)
    trainer = make_trainer(context, router=policy(page, "recipe"), weight_decay=0.1)
    before = parameters(trainer)
    steps(trainer, BATCH, micro_of(BATCH, rows_of(BATCH)), random_inputs(BATCH))
    same = {name for name, value in parameters(trainer).items() if torch.equal(value, before[name])}
    *others, last = [f"{name}.weight" for name, _ in routers(trainer.chunks)]
    assert others and same == set(others)
    assert last in before


def test_the_loss_keeps_what_every_one_must(page: Path, context: ParallelContext) -> None:
    def make() -> Any:
        return policy(page, "balanced")

    for checked in (check_policy, check_loss, check_reach, check_silence):
        checked(make, context, BATCH)


def test_the_loss_is_switch_s_over_sampled_tokens(page: Path, context: ParallelContext) -> None:
    """Against the formula of the page, token by token, its shares held still."""
    chunk = plain_model(context)
    by_layer = plain_distributions(chunk, BATCH)
    want = torch.zeros(())
    for tokens in by_layer:
        p = torch.stack(tokens)
        experts = p.shape[1]
        top = p.detach().topk(int(next(r for _, r in routers([chunk])).topk)).indices
        share = torch.bincount(top.flatten(), minlength=experts) / top.numel()
        want = want + experts * (share * p.mean(0)).sum() / len(by_layer)
    want.backward()
    grads = plain_gradients(chunk)
    trainer = make_trainer(context, router=policy(page, "balanced", coefficient=1.0))
    micro = micro_of(BATCH, rows_of(BATCH), cap=60)
    said = steps(trainer, BATCH, micro, silent(BATCH), updates=1)
    assert said["moe/loss/balance"] == pytest.approx(float(want.detach()), rel=1e-5)
    for name, grad in gradients(trainer).items():
        if name.endswith(".router.weight"):
            assert grad.any() and torch.allclose(grad, grads[name], atol=1e-5 * float(grads[name].abs().max())), name


@pytest.mark.slow
@pytest.mark.parametrize("preset", ["recipe", "balanced"])
def test_it_trains(page: Path, tmp_path: Path, preset: str) -> None:
    result = train(prepare([f"recipe=routers/{preset}", *TINY_RUN, f"run.root={tmp_path / 'runs'}"], page), page)
    assert result.steps == 2
    rows = [row for row in read_metrics(result.run_dir / FILE_NAME) if "moe/router_change" in row]
    assert len(rows) == 2
    # So small a run may never have been rewarded: then nothing but a routing loss moves a router.
    assert preset == "recipe" or rows[-1]["moe/router_change"] > 0
    for row in rows:
        check(name for name in row if name.startswith("moe/"))
        assert ("moe/loss/balance" in row) == (preset == "balanced")
        assert "moe/gate" not in row and "moe/gate_entropy" not in row
