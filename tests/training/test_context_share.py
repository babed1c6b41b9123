"""Invariants of context-parallel shares (numbers refer to ``megatron_ext/training/context_share.py``)."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_ext.models.attention import zigzag
from megatron_ext.training.context_share import context_share


@given(st.lists(st.integers(0, 30), max_size=8), st.integers(1, 4))
def test_every_place_is_on_one_rank(lengths: list[int], size: int) -> None:  # invariants 1 and 2
    shares = [context_share(lengths, size, rank) for rank in range(size)]
    multiple = 2 * size if size > 1 else 1
    padded = np.diff(shares[0].offsets)
    assert np.all(padded % multiple == 0) and np.all(padded - lengths >= 0) and np.all(padded - lengths < multiple)
    places = np.concatenate([share.place for share in shares])
    assert sorted(places.tolist()) == list(range(int(shares[0].offsets[-1])))
    assert len({len(share.place) for share in shares}) == 1
    for rank, share in enumerate(shares):
        assert share.local[share.place].tolist() == list(range(len(share.place)))
        assert np.count_nonzero(share.local >= 0) == len(share.place)
        real = share.entry[share.entry >= 0]
        assert real.tolist() == list(range(sum(lengths)))
        if size > 1:  # the order that attention gathers keys and values in
            start = share.offsets[:-1].tolist()
            want = [s + zigzag(int(n), size, rank, torch.device("cpu")) for s, n in zip(start, padded, strict=True)]
            assert share.place.tolist() == (torch.cat(want).tolist() if want else [])


def test_one_rank_holds_everything_without_padding() -> None:  # invariant 3
    share = context_share([3, 0, 5])
    assert share.offsets.tolist() == [0, 3, 3, 8]
    for array in (share.entry, share.place, share.local):
        assert array.tolist() == list(range(8))


def test_a_row_of_five_on_two_ranks() -> None:
    first, second = (context_share([5], 2, rank) for rank in range(2))
    assert first.offsets.tolist() == [0, 8] and first.entry.tolist() == [0, 1, 2, 3, 4, -1, -1, -1]
    assert first.place.tolist() == [0, 1, 6, 7] and second.place.tolist() == [2, 3, 4, 5]


def test_a_rank_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ValueError, match="rank 2 of 2"):
        context_share([4], 2, 2)
