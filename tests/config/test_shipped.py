"""Invariant of ``megatron_ext/config/shipped.py``: it is complete, and nothing else is in it."""

from __future__ import annotations

import importlib
import inspect
import re
from pathlib import Path

import pytest

from megatron_ext.config.instantiate import import_target
from megatron_ext.config.protocols import PLUG_POINTS, class_problem, members
from megatron_ext.config.shipped import SHIPPED

PACKAGES = {
    "environments": "environments",
    "harness": "harness",
    "rollout.engine": "rollout",
    "tasks.source": "rollout",
    "rewards": "rewards",
    "credit.edits": "credit",
    "loss.terms": "losses",
    "model.router": "moe",
    "tracking": "tracking",
}
BASES = {  # classes to derive from, and sets of several that are one
    "megatron_ext.rewards.compose.RewardSet",
    "megatron_ext.tracking.composite.TrackerSet",
    "megatron_ext.losses.surrogate.PolicyTerm",
    "megatron_ext.moe.loss_policy.PlainRoutingLoss",
}


def classes(root: Path, package: str) -> list[type]:
    """Public classes that the modules of a package define and that are no protocols."""
    found = []
    for file in sorted((root / "megatron_ext" / package).rglob("*.py")):
        name = ".".join(file.relative_to(root).with_suffix("").parts).removesuffix(".__init__")
        module = importlib.import_module(name)
        found += [c for _, c in inspect.getmembers(module, inspect.isclass) if c.__module__ == name]
    return [c for c in found if not c.__name__.startswith("_") and not getattr(c, "_is_protocol", False)]


@pytest.mark.parametrize("key", list(PLUG_POINTS))
def test_every_class_of_the_library_that_keeps_the_protocol_is_listed(root: Path, key: str) -> None:
    found = set()
    for c in classes(root, PACKAGES[key]):
        has = {name for base in c.__mro__[:-1] for name in (*vars(base), *base.__dict__.get("__annotations__", ()))}
        if members(PLUG_POINTS[key].protocol).keys() <= has and class_problem(key, c) is None:
            found.add(f"{c.__module__}.{c.__qualname__}")
    assert found - BASES == set(SHIPPED[key])


@pytest.mark.parametrize(("key", "target"), [(key, target) for key, targets in SHIPPED.items() for target in targets])
def test_what_is_listed_keeps_the_protocol(key: str, target: str) -> None:
    assert class_problem(key, import_target(target)) is None


def test_the_page_on_architecture_lists_the_same(root: Path) -> None:
    page = (root / "docs" / "architecture.md").read_text(encoding="utf-8")
    for key, targets in SHIPPED.items():
        row = next(line for line in page.splitlines() if line.startswith("|") and re.search(rf"`{key}(\.NAME)?`", line))
        named = re.findall(r"`(\w+)`", row.rsplit("|", 2)[1])
        bases = {base.rsplit(".", 1)[1] for base in BASES}
        assert set(named) - bases == {target.rsplit(".", 1)[1] for target in targets}, key
