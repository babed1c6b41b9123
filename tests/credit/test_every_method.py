"""The generic invariants over every credit method there is, and what each declares of them (``credit/protocol.py``).

Methods are found, not listed: see ``tests/helpers/credit_methods.py``. An invariant that fails undeclared fails here;
one that is declared broken and never was, too.
"""

from __future__ import annotations

import ast
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers.credit_contract import MakeEdit, advantage, check_contract, check_ranks, never_broken
from tests.helpers.credit_methods import LIBRARY, METHODS, of_presets
from tests.helpers.records import Group, build, random_groups, with_answers

every_method = pytest.mark.parametrize("make", METHODS.values(), ids=METHODS.keys())


def agents(seed: int, groups: int = 5) -> list[Group]:
    return with_answers(random_groups(seed, groups=groups, sessions=(1, 4)), seed)


@every_method
@pytest.mark.parametrize("seed", range(3))
def test_the_invariants(make: MakeEdit, seed: int) -> None:
    check_contract(make, agents(seed), seed=seed)


@every_method
@settings(max_examples=5)
@given(seed=st.integers(0, 2**31), groups=st.integers(1, 4))
def test_the_invariants_on_random_records(make: MakeEdit, seed: int, groups: int) -> None:
    check_contract(make, agents(seed, groups), seed=seed)


@every_method
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_the_batch_held_by_several_ranks(make: MakeEdit, ranks: int) -> None:
    check_ranks(make, agents(7, groups=6), ranks, exact=True)
    check_ranks(make, agents(8, groups=2), ranks, exact=True)  # fewer groups than ranks: some hold nothing


@every_method
def test_uneven_groups_and_odd_batches(make: MakeEdit) -> None:
    one = agents(11, groups=1)[0]
    large = with_answers(random_groups(12, groups=1, samples=(9, 9)), 12)[0]
    for groups in ([one[:1]], [large, one[:1]], [large[:6], one, large[6:7], large[7:]]):
        view = advantage(make, build(groups))
        assert np.all(np.isfinite(view.advantage))
        check_contract(make, groups, seed=3)


@every_method
def test_what_is_declared_broken_is(make: MakeEdit) -> None:
    assert never_broken(make, [agents(seed) for seed in range(8)]) == set()


@every_method
def test_state_survives_a_restart(make: MakeEdit) -> None:
    batch = build(agents(3))
    one, other = make(), make()
    other.load_state_dict(one.state_dict())
    assert np.array_equal(advantage(lambda: one, batch).advantage, advantage(lambda: other, batch).advantage)


@pytest.mark.slow  # it composes every preset
def test_no_method_is_left_out(root: Path) -> None:
    """Every class of the library's edits, and every recipe that has a ``credit.py``, is among the methods."""
    made = {type(make()).__name__ for make in LIBRARY.values()}
    for file in sorted((root / "megatron_ext/credit/edits").glob("[!_]*.py")):
        tree = ast.parse(file.read_text())
        edits = [
            node.name
            for node in tree.body
            if isinstance(node, ast.ClassDef)
            and {"apply", "traits"} <= {item.name for item in node.body if isinstance(item, ast.FunctionDef)}
        ]
        assert edits and set(edits) <= made, file.name
    modules = {type(make()).__module__ for make in of_presets().values()}
    for file in sorted((root / "recipes").glob("*/credit.py")):
        if (file.parent / "recipe.yaml").is_file():
            assert any(module.startswith(f"recipes.{file.parent.name}.") for module in modules), file
