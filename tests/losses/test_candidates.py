"""Invariants 1-3 of ``losses/candidates.py``."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_ext.losses.candidates import CandidateSets


def sets(*rows: list[int], whole: list[int] | None = None) -> CandidateSets:
    counts = torch.tensor([0, *map(len, rows)])
    ids = torch.tensor([i for row in rows for i in row], dtype=torch.int32)
    mask = None
    if whole is not None:
        mask = torch.zeros(len(rows), dtype=torch.bool)
        mask[whole] = True
    return CandidateSets(ids, counts.cumsum(0), mask)


def dense(made: CandidateSets, vocabulary: int) -> torch.Tensor:
    mask = torch.zeros(len(made), vocabulary, dtype=torch.bool)
    mask[made.rows(), made.ids.long()] = True
    mask[made.whole_rows()] = True
    return mask


@given(st.integers(0, 6), st.integers(1, 9), st.data())
def test_a_mask_survives_the_round_trip_and_take_is_per_row(n: int, vocabulary: int, data: st.DataObject) -> None:
    rows = data.draw(
        st.lists(st.lists(st.booleans(), min_size=vocabulary, max_size=vocabulary).filter(any), min_size=n)
    )
    mask = torch.tensor(rows, dtype=torch.bool).view(-1, vocabulary)
    made = CandidateSets.from_mask(mask)
    assert torch.equal(dense(made, vocabulary), mask)
    index = torch.tensor(data.draw(st.lists(st.integers(0, len(mask) - 1))) if len(mask) else [], dtype=torch.int64)
    assert torch.equal(dense(made.take(index), vocabulary), mask[index])


def test_the_sampled_token_must_be_in_its_set() -> None:
    made = sets([1, 4], [], [0, 2, 7], whole=[1])
    made.check(torch.tensor([4, 9, 0]), 10)
    with pytest.raises(ValueError, match=r"row 2: token 3 was sampled, but is not among its 3 recorded candidates"):
        made.check(torch.tensor([4, 9, 3]), 10)
    with pytest.raises(ValueError, match=r"row 2: candidate id 7: the vocabulary has 7"):
        made.check(torch.tensor([4, 5, 0]), 7)
    with pytest.raises(ValueError, match=r"targets \(2,\) and the candidate sets of 3 rows"):
        made.check(torch.tensor([4, 9]), 10)


def test_what_is_not_one_set_in_one_form_is_refused() -> None:
    with pytest.raises(ValueError, match="row 1: empty candidate set; a row drawn from the whole vocabulary is marked"):
        sets([1], [])
    with pytest.raises(ValueError, match="row 0: marked whole, yet it owns 1 candidate ids"):
        sets([1], [], whole=[0, 1])
    with pytest.raises(ValueError, match="row 1: candidate ids must ascend, 5 is followed by 5"):
        sets([3, 9], [5, 5])
    with pytest.raises(ValueError, match="row 0: candidate ids must ascend, 9 is followed by 3"):
        sets([9, 3], [1])
    with pytest.raises(ValueError, match="must ascend from 0 to 2"):
        CandidateSets(torch.tensor([1, 2]), torch.tensor([0, 1]))
    with pytest.raises(ValueError, match="must ascend from 0 to 2"):
        CandidateSets(torch.tensor([1, 2]), torch.tensor([0, 2, 1, 2]))
    with pytest.raises(ValueError, match="expected int32 or int64"):
        CandidateSets(torch.tensor([1.0]), torch.tensor([0, 1]))
    with pytest.raises(ValueError, match="expected int64"):
        CandidateSets(torch.tensor([1]), torch.tensor([0, 1], dtype=torch.int32))
    with pytest.raises(ValueError, match="one per row"):
        CandidateSets(torch.tensor([1]), torch.tensor([0, 1]), torch.zeros(2, dtype=torch.bool))


def test_no_rows() -> None:
    made = CandidateSets(torch.zeros(0, dtype=torch.int32), torch.zeros(1, dtype=torch.int64))
    made.check(torch.zeros(0, dtype=torch.int64), 5)
    assert len(made) == 0 and len(made.take(torch.zeros(0, dtype=torch.int64))) == 0
