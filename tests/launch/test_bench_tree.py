"""The tree bench compares equals (``launch/benches/tree.py``)."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from launch.benches.tree import DEEP, DIFFERENCE_BAR, SHALLOW, bench, make_batch, measure
from megatron_ext.training.microbatch import build_microbatch

SMALL = replace(DEEP, branches=5, shared=30, own=10, hidden=32, layers=2, experts=4, repeats=1)


def test_the_sizes_are_the_ones_asked_for() -> None:
    """16 branches sharing 75 %, and rows of an end-to-end step of short prompts."""
    assert DEEP.branches == 16 and DEEP.shared == 3 * DEEP.own
    assert (SHALLOW.shared, SHALLOW.shared + SHALLOW.own) == (24, 153)
    batch = make_batch(SMALL)
    ids = np.asarray(batch.ids).reshape(5, 40)
    assert (ids[:, :30] == ids[0, :30]).all() and (ids[1:, 30:] != ids[0, 30:]).any(1).all()
    assert batch.loss_mask.reshape(5, 40)[:, 30:].all() and batch.loss_mask.sum() == 50


def test_both_sides_predict_the_same_and_give_the_same_gradient() -> None:  # invariant 1
    with bench(SMALL) as both:
        assert both.difference() <= DIFFERENCE_BAR
        assert all(bool(gradient.any()) for gradient in both.gradients()[:3])
        micro = [
            build_microbatch(both.batch, both.rows, np.arange(5), both.rows.mask, share_prefixes=share)
            for share in (False, True)
        ]
    assert [mb.num_tokens for mb in micro] == [200, 80]
    assert micro[0].token.tolist() == micro[1].token.tolist()


def test_what_is_measured_is_seconds_and_ratios() -> None:
    rows, tree, ratio, difference = measure(SMALL)
    assert rows > 0 and tree > 0 and ratio == 200 / 80 and 0 <= difference <= DIFFERENCE_BAR
