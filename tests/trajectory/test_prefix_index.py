"""Invariants of ``trajectory/prefix_index.py``, against comparing every sequence with every other."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings

from megatron_ext.trajectory.calls import Call
from megatron_ext.trajectory.prefix_index import PrefixIndex
from tests.helpers.recorded_calls import rollouts


@settings(max_examples=200, deadline=None)
@given(rollouts())
def test_the_index_finds_what_comparing_everything_finds(calls: list[Call]) -> None:
    index = PrefixIndex()
    whole: list[list[int]] = []
    continued: set[int] = set()
    for number, c in enumerate(calls):
        found = index.add(number, c.prompt_ids, c.ids)
        prompt = c.prompt_ids.tolist()
        common = [
            next((i for i, (a, b) in enumerate(zip(w, prompt, strict=False)) if a != b), min(len(w), len(prompt)))
            for w in whole
        ]
        ends = [n for n, w in enumerate(whole) if len(w) <= len(prompt) and common[n] == len(w)]
        assert found.shared == max(common, default=0)
        assert (found.holder in [n for n, k in enumerate(common) if k == found.shared]) or found.shared == 0
        longest = max((len(whole[n]) for n in ends), default=0)
        equal_ends = [n for n in ends if len(whole[n]) == longest]
        free = [n for n in equal_ends if n not in continued]
        assert found.parent_end == longest and found.free == bool(free)
        assert found.parent == max(free or equal_ends, default=-1)
        if free:
            continued.add(found.parent)
        others = [n for n, k in enumerate(common) if k == found.shared and k < min(len(prompt), len(whole[n]))]
        assert (found.against >= 0) == bool(others)
        if others:
            assert found.against in others and whole[found.against][found.shared] == found.other_id
            sampled = [n for n in others if len(calls[n].prompt_ids) <= found.shared]
            assert found.against == max(sampled) if sampled else True
        whole.append([*prompt, *c.ids.tolist()])


def test_a_sequence_is_split_without_copying_it() -> None:
    """Short prompts that leave one long sequence early, each at another place, must not cost its length each."""
    index = PrefixIndex()
    long = np.arange(100_000, dtype=np.int32)
    index.add(0, long, np.array([7], np.int32))
    edge = index._root.children[0]
    buffer = edge.ids
    for i in range(1, 100):
        found = index.add(i, np.append(long[:i], [-1]).astype(np.int32), np.array([3], np.int32))
        assert (found.shared, found.other_id, found.parent) == (i, i, -1)
        edge = edge.children[i]
        assert np.shares_memory(edge.ids, buffer) and edge.size == len(long) + 1 - i
    extended = np.concatenate([long, [7, 8]]).astype(np.int32)
    assert index.add(100, extended, np.array([9], np.int32)).parent == 0
