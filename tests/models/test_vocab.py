"""Invariants of ``models/vocab.py`` on one rank; over several they are in ``tests/integration/test_hf_layouts.py``."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_ext.models.hf_config import HFConfig
from megatron_ext.models.hf_map import Coordinate, Layout, check_divisible, plan, rank_plan
from megatron_ext.models.hf_tensors import WeightError, hf_shapes
from megatron_ext.models.hf_weights import assemble, join
from megatron_ext.models.parallel import ParallelContext
from megatron_ext.models.vocab import VocabRows
from tests.helpers.hf_tensors import DictReader, random_tensors
from tests.helpers.vocab_ranks import VOCAB, Order, assert_same, play


@given(vocab=st.integers(1, 5000), multiple=st.integers(1, 300), tensor=st.integers(1, 64))
def test_rows_are_the_fewest_that_fit_and_the_advice_holds(vocab: int, multiple: int, tensor: int) -> None:
    rows = VocabRows(vocab, multiple)
    assert rows.padded % multiple == 0 and 0 <= rows.padded - vocab < multiple
    assert vocab % multiple or rows.padded == vocab
    why = rows.why_not(tensor)
    assert bool(why) == bool(rows.padded % tensor)
    if why:
        advised = int(why.rsplit("model.vocab_multiple=", 1)[1])
        assert not VocabRows(vocab, advised).why_not(tensor)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    "layout",
    [
        Layout(vocab_multiple=8),
        Layout(tensor=2, vocab_multiple=8),
        Layout(tensor=2, pipeline=2, vocab_multiple=8),
        Layout(tensor=2, vocab_multiple=64),  # the second rank holds no id
    ],
)
def test_ranks_hold_every_id_once_and_zeros_behind(moe: HFConfig, layout: Layout, tied: bool) -> None:
    hf = replace(moe, vocab=59, tie_word_embeddings=tied)
    full = random_tensors(hf)
    reader = DictReader(full)
    rows = VocabRows(59, layout.vocab_multiple).padded
    names = {"embedding.word_embeddings.weight": "model.embed_tokens.weight", "output_layer.weight": "lm_head.weight"}
    for param, name in names.items():
        if tied:
            name = "model.embed_tokens.weight"
        held = {at: p for at, params in plan(hf, layout).items() for p in params if p.param == param}
        if not held:
            continue  # tied, on the stage that holds the embedding
        shards = []
        for _, p in sorted(held.items(), key=lambda item: item[0].tensor):
            assert p.shape == (rows // layout.tensor, hf.hidden)
            shard = torch.zeros(p.shape)
            for piece in assemble(p, reader.read):
                shard[: len(piece)] = piece
            shards.append(shard)
        whole = torch.cat(shards)
        assert torch.equal(whole[:59], full[name]) and not whole[59:].any() and len(whole) == rows
        pieces = [(piece, full[name][piece.start : piece.stop]) for p in held.values() for piece in p.pieces]
        assert torch.equal(join(name, hf_shapes(hf)[name], pieces), full[name])


def test_what_tensor_parallelism_cannot_share_out_is_one_line(moe: HFConfig) -> None:
    hf = replace(moe, vocab=497)
    (line,) = check_divisible(hf, Layout(tensor=2))
    assert line == (
        "model.vocab_multiple=1: fills the vocabulary of 497 up to 497 rows, which parallel.tensor=2 does not divide; "
        "set model.vocab_multiple=2"
    )
    assert check_divisible(hf, Layout(tensor=2, vocab_multiple=2)) == []
    with pytest.raises(WeightError, match="set model.vocab_multiple=2"):
        rank_plan(hf, Layout(tensor=2), Coordinate())
    assert check_divisible(hf, Layout(vocab_multiple=0)) == ["model.vocab_multiple must be >= 1, got 0"]


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("multiple", [8, 226])
def test_padding_changes_nothing_but_the_rows(rank: ParallelContext, tied: bool, multiple: int) -> None:
    """Invariants 1 and 2, over steps with weight decay."""
    plain, padded = (play(rank, Order(tied, m)) for m in (1, multiple))
    assert (plain.rows, padded.rows) == (VOCAB, VocabRows(VOCAB, multiple).padded)
    assert_same([padded], plain)
    assert padded.padding == 0.0
    moved = [name for name, values in padded.after.items() if (values != padded.before[name]).any()]
    assert moved == list(padded.after), "the steps moved everything else"


def test_a_vocabulary_that_is_a_multiple_is_left_alone(rank: ParallelContext) -> None:
    """Invariant 3, bit for bit."""
    plain, same = (play(rank, Order(True, m, vocab=120)) for m in (1, 8))
    assert same.rows == plain.rows == 120
    assert (same.losses, same.norms, same.metrics) == (plain.losses, plain.norms, plain.metrics)
    for name, values in plain.after.items():
        assert (same.after[name] == values).all(), name
