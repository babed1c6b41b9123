"""The training commands that the recipes' READMEs show compose and pass every check; combined edits run in order."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from launch.prepare import prepare, prepare_elsewhere
from megatron_ext.config.compose import ConfigError
from megatron_ext.config.instantiate import instantiate, ordered
from megatron_ext.credit.pipeline import Pipeline

RECIPES = Path(__file__).resolve().parents[2] / "recipes"
SLUGS = ("adastep", "moe_expert_structuring", "triage")


def commands(slug: str) -> list[list[str]]:
    """The words of every ``launch.train`` command of a recipe's README."""
    text = (RECIPES / slug / "README.md").read_text(encoding="utf-8").replace("\\\n", " ")
    lines = "".join(re.findall(r"```bash\n(.*?)```", text, flags=re.DOTALL)).splitlines()
    words = [shlex.split(line, comments=True) for line in lines]
    return [found[found.index("launch.train") + 1 :] for found in words if "launch.train" in found]


@pytest.mark.parametrize("slug", SLUGS)
def test_every_command_composes(slug: str) -> None:
    shown = commands(slug)
    assert len(shown) >= 4
    for argv in shown:
        overrides = [word for word in argv if not word.startswith("--") and "FOLDER" not in word]
        (prepare_elsewhere if any("/paper" in word for word in overrides) else prepare)(overrides)


def test_two_recipes_edits_run_in_one_run_in_their_order() -> None:
    argv = next(words for words in commands("adastep") if any("credit.edits.triage" in word for word in words))
    config = prepare(argv)
    edits = ordered(config.credit.edits)
    assert [name for name, _ in edits] == ["adastep", "triage"] and set(config.rewards) == {"success", "role"}
    Pipeline([(name, instantiate(node, skip=("order",))) for name, node in edits])
    again = next(word for word in argv if "credit.edits.triage" in word).replace("edits.triage", "edits.again")
    with pytest.raises(ConfigError, match="triage and again each set the scale"):
        prepare([*argv, again])
