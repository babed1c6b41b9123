"""The invariant of ``megatron_ext/report/text.py``."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from megatron_ext.report.text import pieces, run_tokenizer
from tests.helpers.scripted import small_codec


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    run = tmp_path_factory.mktemp("run")
    small_codec(run / "tokenizer")
    found = run_tokenizer(run)
    assert found is not None
    return found


@given(text=st.text(max_size=40))
def test_pieces_of_a_text_join_to_it(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    made = pieces(tokenizer, ids)
    assert len(made) == len(ids) and "".join(made) == tokenizer.decode(ids, skip_special_tokens=False)


@given(ids=st.lists(st.integers(0, 262), max_size=30))
def test_pieces_of_any_ids_join_to_what_they_decode_to(tokenizer: Tokenizer, ids: list[int]) -> None:
    made = pieces(tokenizer, ids)
    assert len(made) == len(ids) and "".join(made) == tokenizer.decode(ids, skip_special_tokens=False)


def test_a_character_stands_at_its_last_byte(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("é", add_special_tokens=False).ids
    assert pieces(tokenizer, ids) == [""] * (len(ids) - 1) + ["é"] and len(ids) == 2
    assert pieces(tokenizer, ids[:1]) == ["\ufffd"]


def test_ids_without_text(tokenizer: Tokenizer, tmp_path: Path) -> None:
    assert pieces(tokenizer, [3, 99999, 3]) == ["<|user|>", "⟨99999⟩", "<|user|>"]
    assert pieces(None, [3, 4]) == ["⟨3⟩", "⟨4⟩"] and run_tokenizer(tmp_path) is None
