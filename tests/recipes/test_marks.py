"""Constants that are the project's own, not a paper's, are marked so in the recipe, where ``show`` reads the marks."""

from __future__ import annotations

from pathlib import Path

import pytest

from launch.recipes_about import constants

RECIPES = Path(__file__).resolve().parents[2] / "recipes"
OURS = {
    "adastep": {"credit.edits.adastep.ddof", "credit.edits.adastep.returns"},
    "mosaic": {f"credit.edits.sessions.{key}" for key in ("beta", "eta", "space", "fail_direction", "fallback")},
    "triage": {f"credit.edits.triage.{key}" for key in ("constants.D", "constants.N", "weight")},
}


@pytest.mark.parametrize("slug", OURS)
def test_what_no_source_gives_is_marked(slug: str) -> None:
    found = {constant.key for constant in constants(slug, "recipe", RECIPES) if constant.ours}
    assert OURS[slug] <= found
    others = {"credit.edits.adastep.discount", "credit.edits.triage.constants.R", "credit.edits.triage.constants.E"}
    assert not found & others
