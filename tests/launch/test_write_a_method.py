"""What ``docs/write_a_method.md`` shows, run as it stands: its files are written, its test passes, its recipe trains"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from launch.prepare import prepare
from megatron_ext.config.instantiate import instantiate
from megatron_ext.tracking.jsonl import FILE_NAME, read_metrics
from megatron_ext.tracking.names import check
from megatron_ext.training.run import train
from tests.helpers.credit_contract import check_contract, check_ranks
from tests.helpers.doc_pages import TINY_RUN, code_lines, installed_recipe, written_files
from tests.helpers.records import random_groups

LONGEST = 30  # lines of code from the formula to the recipe, comments, blank lines and imports aside


def files(root: Path) -> dict[str, str]:
    """Path -> content of every file that the page writes: a path in code, then the next block of code."""
    return written_files(root / "docs/write_a_method.md", r"^`((?:tests/)?recipes/late/[^`]+)`.*?")


@pytest.fixture
def page(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A recipes folder with what the page writes, on the import path as ``recipes.late``."""
    with installed_recipe("late", files(root), root, tmp_path, monkeypatch) as folder:
        yield folder


def test_the_page_writes_three_short_files_and_a_test(root: Path) -> None:
    written = files(root)
    assert set(written) == {
        "recipes/late/credit.py",
        "recipes/late/recipe.yaml",
        "recipes/late/off.yaml",
        "tests/recipes/late/test_numbers.py",
    }
    assert code_lines([written[f"recipes/late/{name}"] for name in ("credit.py", "recipe.yaml")]) <= LONGEST


def test_its_numbers_hold(page: Path) -> None:
    module = importlib.util.spec_from_file_location("late_numbers", page.parent / "tests/recipes/late/test_numbers.py")
    assert module is not None and module.loader is not None
    numbers = importlib.util.module_from_spec(module)
    module.loader.exec_module(numbers)
    tests = [function for name, function in vars(numbers).items() if name.startswith("test_")]
    assert tests
    for test in tests:
        test()


def test_it_keeps_the_invariants_that_it_declares(page: Path) -> None:
    node = prepare(["recipe=late", "tracking.wandb=null"], page).credit.edits["late"]
    for seed in range(3):
        check_contract(lambda: instantiate(node, skip=("order",)), random_groups(seed, groups=4), seed=seed)
    check_ranks(lambda: instantiate(node, skip=("order",)), random_groups(5, groups=5), 2, exact=True)


def test_the_off_arm_is_without_it(page: Path) -> None:
    assert not prepare(["recipe=late/off", "tracking.wandb=null"], page).credit.edits


@pytest.mark.slow
def test_it_trains(page: Path, tmp_path: Path) -> None:
    result = train(prepare(["recipe=late", *TINY_RUN, f"run.root={tmp_path / 'runs'}"], page), page)
    assert result.steps == 2
    rows = [row for row in read_metrics(result.run_dir / FILE_NAME) if "credit/late/mean/weight" in row]
    assert len(rows) == 2
    for row in rows:
        check(name for name in row if name.startswith("credit/"))
        assert 0.0 < row["credit/late/mean/weight"] <= 1.0


def test_the_page_names_what_there_is(root: Path) -> None:
    for page in ("write_a_method.md", "plug_points.md"):
        text = (root / "docs" / page).read_text()
        for path in re.findall(r"`((?:recipes|tests|megatron_ext|credit|edits)/[\w/]+\.(?:py|yaml))`", text):
            if "/late/" in path or "/routers/" in path:  # what the pages write
                continue
            places = (root / path, root / "megatron_ext" / path, root / "megatron_ext/credit" / path)
            assert any(place.exists() for place in places), path
        for link in re.findall(r"\]\(([^):]+)\)", text):
            assert (root / "docs" / link).exists(), link
    assert "docs/write_a_method.md" in (root / "README.md").read_text()
