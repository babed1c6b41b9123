"""What each token of a turn is part of (``megatron_ext/harness/fields.py``), and the texts of single tokens."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_ext.harness.fields import token_fields
from megatron_ext.harness.protocol import Harness
from megatron_ext.harness.template import ChatCodec
from megatron_ext.harness.text import TextHarness
from megatron_ext.harness.thinking import after_thinking, thinking_end
from megatron_ext.harness.tools import ToolHarness
from megatron_ext.trajectory.record import Field
from tests.helpers.scripted import small_codec

CALL = '<tool_call>{"name": "go"}</tool_call>'
texts = st.lists(
    st.sampled_from(["<think>", "</think>", "<tool_call>", "</tool_call>", " ", "\n", "go", "é", "日本", "x"])
    | st.text()
).map("".join)


@pytest.fixture(scope="module")
def codec(tmp_path_factory: pytest.TempPathFactory) -> ChatCodec:
    return small_codec(tmp_path_factory.mktemp("tokenizer"))


def pieces_of(harness: Harness, text: str) -> list[tuple[Field, str]]:
    """The runs of a text, a token a character."""
    fields = token_fields(list(text), harness.fields(text)).tolist()
    return [
        (Field(field), "".join(char for char, _ in run))
        for field, run in groupby(zip(text, fields, strict=True), key=lambda pair: pair[1])
    ]


@pytest.mark.parametrize(
    ("text", "tools", "words"),
    [
        ("", [], []),
        ("go", [(Field.TEXT, "go")], [(Field.TEXT, "go")]),
        (f"a {CALL}", [(Field.TEXT, "a "), (Field.TOOL_USE, CALL)], [(Field.TEXT, f"a {CALL}")]),
        (
            f" <think>{CALL}</think>b{CALL} c",
            [
                (Field.THINKING, f" <think>{CALL}</think>"),
                (Field.TEXT, "b"),
                (Field.TOOL_USE, CALL),
                (Field.TEXT, " c"),
            ],
            [(Field.THINKING, f" <think>{CALL}</think>"), (Field.TEXT, f"b{CALL} c")],
        ),
        (f"hm</think>{CALL}", [(Field.THINKING, "hm</think>"), (Field.TOOL_USE, CALL)], None),
        ("<think>hm", [(Field.THINKING, "<think>hm")], [(Field.THINKING, "<think>hm")]),
        ("<tool_call>{", [(Field.TOOL_USE, "<tool_call>{")], [(Field.TEXT, "<tool_call>{")]),
    ],
)
def test_runs(text: str, tools: list[tuple[Field, str]], words: list[tuple[Field, str]] | None) -> None:
    assert pieces_of(ToolHarness(), text) == tools
    if words is not None:
        assert pieces_of(TextHarness(), text) == words


@given(text=texts)
def test_thinking_ends_where_the_rest_begins(text: str) -> None:
    end, rest = thinking_end(text), after_thinking(text)
    assert (end is None) == (rest is None)
    if end is not None:
        assert text[end:].strip() == rest and not rest.startswith("<think>")


@given(st.lists(st.integers(0, 329), max_size=40))
def test_as_many_fields_as_ids_whatever_was_sampled(codec: ChatCodec, ids: list[int]) -> None:
    pieces, text = codec.pieces(ids), codec.decode_turn([*ids, codec.end_id])
    assert "".join(pieces) == text
    for harness in (TextHarness(), ToolHarness()):
        runs = harness.fields(text)
        assert runs[0][0] == 0 and [begin for begin, _ in runs] == sorted({begin for begin, _ in runs})
        assert len(token_fields(pieces, runs)) == len(ids)


@given(text=texts.filter(lambda t: t.isprintable()), data=st.data())
def test_a_turn_cut_in_two_is_the_whole_turn(codec: ChatCodec, text: str, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, len(text)))
    end = data.draw(st.integers(start, len(text)))
    before, inside = codec.cut_turn(text, start, end)
    whole = codec.encode_turn(text)[:-1]
    assert [*before, *inside] == whole[: len(before) + len(inside)]
    said = codec.decode_turn(before), codec.decode_turn([*before, *inside])
    assert len(said[0]) <= start or "\ufffd" in said[0]
    assert end == start or len(said[1]) >= end or "\ufffd" in said[1]


def test_a_character_of_several_tokens_is_one_run(codec: ChatCodec, tmp_path: Path) -> None:
    ids = codec.encode_turn("<think>x</think>日")[:-1]
    fields = token_fields(codec.pieces(ids), TextHarness().fields("<think>x</think>日")).tolist()
    tail = len(codec.encode_turn("日")) - 1
    assert tail > 1 and fields[-tail:] == [Field.TEXT] * tail and Field.TEXT not in fields[:-tail]
