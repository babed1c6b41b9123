from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings

from megatron_ext.moe.statistics import RoutingStatistics, pairs, token_structure
from megatron_ext.trajectory.joining import select_groups
from megatron_ext.trajectory.record import Field
from tests.helpers.records import Group, build, described_batches, model, random_batch, single, user
from tests.helpers.structured import FIELDS, trained, with_operations


@settings(max_examples=30, deadline=None)
@given(described_batches())
def test_shares_of_a_unit_add_up_to_one(groups: list[Group]) -> None:
    batch = with_operations(build(groups))
    tokens = token_structure(batch, FIELDS, "op", 3)
    counted = trained(batch)
    assert (tokens.trained == counted).all() and not tokens.pair[~counted].any()
    units: dict[tuple[int, int], float] = {}
    for t in range(batch.num_tokens):
        label = int(batch.turn_labels["op"][batch.turn[t]])
        if not counted[t] or label < 0 or batch.field[t] not in FIELDS:
            assert tokens.cell[t] == -1 and tokens.share[t] == 0
            continue
        assert tokens.cell[t] == FIELDS.index(Field(int(batch.field[t]))) * 3 + label
        key = (int(batch.turn[t]), int(batch.field[t]))
        units[key] = units.get(key, 0.0) + tokens.share[t]
    assert list(units.values()) == pytest.approx([1.0] * len(units))
    counts = tokens.counts()
    assert counts[:-1].sum() == len(units) and counts[-1] == tokens.pair.sum()
    half = batch.token_trajectory() % 2 == 0
    assert (tokens.counts(half) + tokens.counts(~half)).tolist() == counts.tolist()


def test_pairs_end_at_fields_turns_and_masked_tokens() -> None:
    said = [user([1, 2]), model([3, 4, 5, 6], mask=(True, True, False, True)), model([7, 8]), user([9]), model([1])]
    batch = build([(single(said), single([user([1]), model([2, 3, 4])]))])
    field = np.zeros(batch.num_tokens, dtype=np.int8)
    assert np.flatnonzero(pairs(batch)).tolist() == [3, 7, 12, 13]
    field[13] = Field.TOOL_USE
    assert np.flatnonzero(pairs(replace(batch, field=field))).tolist() == [3, 7, 12]


def test_parts_add_up_to_the_whole() -> None:
    batch = with_operations(random_batch(2, groups=4))
    whole = token_structure(batch, FIELDS, "op", 3)
    parts = [token_structure(select_groups(batch, [g]), FIELDS, "op", 3) for g in range(4)]
    assert np.sum([part.counts() for part in parts], axis=0).tolist() == whole.counts().tolist()
    assert np.concatenate([part.cell for part in parts]).tolist() == whole.cell.tolist()


def test_a_rank_without_trajectories_needs_no_labels() -> None:
    nothing = token_structure(replace(select_groups(random_batch(1), []), turn_labels={}), FIELDS, "op", 3)
    assert nothing.counts().tolist() == [0.0] * 7


def test_means_are_over_the_fields_that_occur() -> None:
    sums = torch.zeros(1, 2, 2, 3, dtype=torch.float64)
    sums[0, 0] = torch.tensor([[1.2, 0.6, 0.2], [0.1, 0.2, 0.7]])
    turns = torch.tensor([[2.0, 1.0], [0.0, 0.0]], dtype=torch.float64)
    found = RoutingStatistics(sums, turns, torch.ones(1), torch.ones(1), 4, 0.1)
    assert found.information() == pytest.approx(0.2101309, abs=5e-8)
    assert found.layer_information().tolist() == pytest.approx([found.information()])
    assert found.linear_information(found) == pytest.approx(found.information(), abs=1e-12)
    assert (found.local_loss(), found.pulled_fraction()) == (0.25, 0.25)
    weights = found.weights(turns).view(1, 2, 2, 3)
    assert float((weights * sums).sum()) == pytest.approx(-found.information())
    nothing = RoutingStatistics(sums * 0, turns * 0, torch.zeros(1), torch.zeros(1), 0, 0.1)
    assert (nothing.information(), nothing.local_loss(), nothing.pulled_fraction()) == (0.0, 0.0, 0.0)
    assert nothing.weights(turns * 0).isfinite().all() and nothing.layer_information().tolist() == [0.0]
