"""Every credit method there is: those of the library, and each edit that a recipe's presets name.

A new recipe joins by existing: its presets are composed, and what their ``credit.edits`` say is what is tested.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from megatron_ext.config.compose import compose, recipes
from megatron_ext.config.instantiate import instantiate
from megatron_ext.credit.edits.length_penalty import LengthPenalty
from megatron_ext.credit.edits.whiten import Whiten
from megatron_ext.credit.protocol import CreditEdit
from recipes.adastep.credit import StepShrinkage
from recipes.mosaic.credit import SessionCredit
from recipes.triage.credit import RoleCredit
from tests.helpers.credit_contract import MakeEdit

RECIPES = Path(__file__).resolve().parents[2] / "recipes"
ROLES = {"D": 0, "E": 1, "N": 2, "R": 3}
CONSTANTS = {"D": 1.0, "E": 0.2, "N": -0.1, "R": -0.5}

LIBRARY: Mapping[str, MakeEdit] = {
    "whiten_tokens": lambda: Whiten(over="tokens"),
    "whiten_tokens_centred": lambda: Whiten(over="tokens", center=True),
    "whiten_turns": lambda: Whiten(over="turns", ddof=1),
    "whiten_turns_centred": lambda: Whiten(over="turns", center=True),
    "whiten_trajectories": lambda: Whiten(over="trajectories"),
    "whiten_trajectories_centred": lambda: Whiten(over="trajectories", center=True),
    "length_tokens": lambda: LengthPenalty(coefficient=0.5, free=3, limit=12),
    "length_turns": lambda: LengthPenalty(coefficient=0.5, free=1, limit=6, unit="turns", successes_only=True),
}
# Options that a preset may leave at their default.
OPTIONS: Mapping[str, MakeEdit] = {
    "adastep": StepShrinkage,
    "adastep_zero_steps": lambda: StepShrinkage(fallback="zero", returns="steps", discount=1.0),
    "adastep_mean_both": lambda: StepShrinkage(fallback="mean", returns="both"),
    "adastep_fixed": lambda: StepShrinkage(weight="fixed", coefficient=0.5, step_std=True),
    "adastep_action_means": lambda: StepShrinkage(estimator="action_means"),
    "mosaic": SessionCredit,
    "mosaic_rank_only": lambda: SessionCredit(eta=0.0),
    "mosaic_harden_prob": lambda: SessionCredit(fail_direction="harden", space="prob", fallback="zero"),
    "mosaic_pooled_short": lambda: SessionCredit(beta=0.0, normalize="pooled", max_tokens=20),
    "triage": lambda: RoleCredit(constants=CONSTANTS, labels=ROLES),
    "triage_weak": lambda: RoleCredit(constants=CONSTANTS, labels=ROLES, weight=0.3),
}


def of_presets(root: Path = RECIPES) -> dict[str, MakeEdit]:
    """Each distinct edit of the presets of all recipes, called by the first preset that has it."""
    found: dict[str, tuple[str, Mapping[str, Any]]] = {}
    for slug, presets in recipes(root).items():
        for preset in sorted(presets, key=lambda name: name != "recipe"):
            config = compose([f"recipe={slug}/{preset}"], root)
            for name, node in config.credit.edits.items():
                content = {key: value for key, value in node.items() if key != "order"}
                found.setdefault(json.dumps(content, sort_keys=True), (f"{slug}_{preset}_{name}", node))
    return {name: partial(_make, node) for name, node in found.values()}


def _make(node: Mapping[str, Any]) -> CreditEdit:
    made: CreditEdit = instantiate(node, skip=("order",))
    return made


METHODS: Mapping[str, MakeEdit] = {**LIBRARY, **OPTIONS, **of_presets()}
