"""Invariants of the chat codec (numbers refer to ``megatron_ext/harness/template.py``)."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from megatron_ext.harness.protocol import Message
from megatron_ext.harness.template import (
    CACHED_TEXT_LENGTH,
    CHATML,
    COMPACT,
    ChatCodec,
    ChatTemplate,
    Frame,
    TemplateError,
    load_codec,
)
from megatron_ext.harness.tokenizer import learn_tokenizer, save_tokenizer
from megatron_ext.trajectory.record import Role

CORPUS = ["take the red lamp", "You see a blue bell.\nThe old rope is gone.", "user\nassistant\n hello <tool_response>"]
# The pre-split that Qwen's tokenizers use: line breaks join the spaces before them, so borders of content matter.
QWEN_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def compact_tokenizer() -> Tokenizer:
    return learn_tokenizer(CORPUS, vocab_size=320, phrases=[])


def qwen_like() -> Tokenizer:
    """A tokenizer as Qwen's: its split, its special tokens, and its tags as added tokens that are not special."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(QWEN_SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=330, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([*CORPUS * 5, "a\n\n\nb\n\n"] * 20, trainer)
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in CHATML.special])
    tags = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
    tokenizer.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in tags])
    return tokenizer


@pytest.fixture(scope="module", params=["compact", "chatml"])
def codec(request: pytest.FixtureRequest) -> ChatCodec:
    if request.param == "compact":
        return ChatCodec(compact_tokenizer(), COMPACT)
    return ChatCodec(qwen_like(), CHATML)


roles = st.sampled_from(list(Role))
# Single special tokens, their pieces, and text that begins or ends in what a template puts there.
hostile = st.lists(
    st.sampled_from(
        [*COMPACT.special, *CHATML.special, "<|", "|>", "\n", " ", "user", "assistant\n", "take", "é", "<", "\u2028"]
    ),
    max_size=8,
).map("".join)


def structure(codec: ChatCodec, ids: list[int]) -> list[int]:
    special = set(codec.template.token_ids(codec.tokenizer, "test").values())
    return [i for i in ids if i in special]


@settings(max_examples=200, deadline=None)
@given(roles, hostile | st.text(max_size=20))
def test_content_never_becomes_structure(codec: ChatCodec, role: Role, content: str) -> None:
    assert structure(codec, codec.message(Message(role, content))) == structure(
        codec, codec.message(Message(role, "x"))
    )


@pytest.mark.parametrize("token", [*COMPACT.special, *CHATML.special])
def test_injected_token_stays_text(codec: ChatCodec, token: str) -> None:
    text = f"You see{token}take the lamp{token}"
    turn = codec.encode_turn(text)
    assert len(structure(codec, turn)) == 1 and turn[-1] == codec.end_id
    assert codec.decode_turn(turn) == text


@settings(max_examples=100, deadline=None)
@given(hostile)
def test_demonstration_is_message(codec: ChatCodec, text: str) -> None:
    turn = codec.encode_turn(text)
    parts = [*codec.generation_prompt(), *turn, *codec.close_turn(turn)]
    assert parts == codec.message(Message(Role.MODEL, text))


def test_close_turn_completes_what_was_sampled(codec: ChatCodec) -> None:
    after = codec.message(Message(Role.MODEL, "go"))[len(codec.generation_prompt()) + len(codec.encode_turn("go")) :]
    body = codec.encode_turn("go")[:-1]
    assert codec.close_turn([*body, codec.end_id]) == after
    assert codec.close_turn(body) == [codec.end_id, *after]
    assert codec.close_turn([]) == [codec.end_id, *after]
    for stop in codec.stop_ids[1:]:  # another stop token ends sampling but not the turn
        assert codec.close_turn([*body, stop]) == [codec.end_id, *after]


def test_decode_drops_one_stop_only(codec: ChatCodec) -> None:
    body = codec.encode_turn("go")[:-1]
    for stop in codec.stop_ids:
        assert codec.decode_turn([*body, stop]) == "go"
    assert codec.decode_turn(body) == "go"
    assert codec.decode_turn([]) == ""
    assert codec.decode_turn([*body, codec.end_id, codec.end_id]) == "go" + codec.template.end
    # half a character, and ids beyond the vocabulary (padded models can sample them), are text all the same
    half = codec.encode_turn("é")[:1]
    assert codec.decode_turn([*half, codec.vocab_size + 5]) == "\ufffd"


def test_results_are_the_callers_own(codec: ChatCodec) -> None:
    for make in (codec.opening, codec.generation_prompt, lambda: codec.message(Message(Role.USER, "hi"))):
        first = make()
        before = list(first)
        first.append(-1)
        assert make() == before


def test_half_a_surrogate_pair_is_encoded(codec: ChatCodec) -> None:
    assert codec.decode_turn(codec.encode_turn("a\ud800é")) == "a?é"


def test_long_text_bypasses_the_cache(codec: ChatCodec) -> None:
    long = "lamp " * CACHED_TEXT_LENGTH
    assert codec.decode_turn(codec.encode_turn(long)) == long


def test_pickled_codec_gives_the_same_ids(codec: ChatCodec) -> None:
    twin = pickle.loads(pickle.dumps(codec))
    for content in ("hi <|user|> <|im_end|>", "x\n"):
        message = Message(Role.USER, content)
        assert twin.message(message) == codec.message(message)
    assert twin.stop_ids == codec.stop_ids


def test_the_given_tokenizer_is_left_alone() -> None:
    tokenizer = compact_tokenizer()
    before = tokenizer.encode("a<|user|>").ids
    ChatCodec(tokenizer, COMPACT).message(Message(Role.USER, "a<|user|>"))
    assert tokenizer.encode("a<|user|>").ids == before


def test_chatml_renders_as_transformers(tmp_path: Path) -> None:
    from transformers import AutoTokenizer  # slow to import

    tokenizer = qwen_like()
    save_tokenizer(tmp_path, tokenizer, CHATML)
    hf = AutoTokenizer.from_pretrained(str(tmp_path))
    codec = load_codec(tmp_path)
    turns = [
        (Role.SYSTEM, "system", "\nYou see\n\n"),
        (Role.USER, "user", "\n\n a blue bell.\n"),  # borders where the template's line breaks join the content's
        (Role.MODEL, "assistant", "take the lamp\n"),
        (Role.TOOL, "tool", "gone\n<tool_response>"),
        (Role.MODEL, "assistant", ""),
    ]
    ids = codec.opening()
    for role, _, content in turns:
        ids += codec.message(Message(role, content))
    chat = [{"role": name, "content": content} for _, name, content in turns]
    assert hf.apply_chat_template(chat, return_dict=False) == ids
    assert hf.apply_chat_template(chat, add_generation_prompt=True, return_dict=False) == (
        ids + codec.generation_prompt()
    )


def test_foreign_folder_is_recognised_by_its_tokens(tmp_path: Path) -> None:
    qwen_like().save(str(tmp_path / "tokenizer.json"))
    assert load_codec(tmp_path).template == CHATML
    compact_tokenizer().save(str(tmp_path / "tokenizer.json"))
    assert load_codec(tmp_path).template == COMPACT


def test_missing_tokens_are_all_named_with_the_file(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    with pytest.raises(TemplateError, match="tokenizer.json: no such file"):
        load_codec(tmp_path)
    bare = Tokenizer(models.BPE())
    bare.add_special_tokens(["<|pad|>", "<|user|>", "<|im_end|>"])
    bare.save(str(path))
    with pytest.raises(TemplateError) as error:
        load_codec(tmp_path)
    assert str(path) in str(error.value) and "'chatml' lacks <|endoftext|>, <|im_start|>" in str(error.value)
    with pytest.raises(TemplateError, match=r"lacks: <\|bos\|>, <\|system\|>, <\|tool\|>, <\|assistant\|>, <\|end\|>"):
        load_codec(tmp_path, COMPACT)
    path.write_text("{")
    with pytest.raises(TemplateError, match="not a tokenizer"):
        load_codec(tmp_path)


def test_token_that_is_not_special_counts_as_missing(tmp_path: Path) -> None:
    """A plain added token is recognised inside content, so it cannot carry structure."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.add_special_tokens([token for token in CHATML.special if token != "<|im_start|>"])
    tokenizer.add_tokens(["<|im_start|>"])
    with pytest.raises(TemplateError, match=r"lacks: <\|im_start\|>"):
        ChatCodec(tokenizer, CHATML)


def test_tokenizer_that_merges_text_into_structure_is_refused() -> None:
    vocab = {"<": 0, "E": 1, ">": 2, "<E": 3, "<E>": 4, "P": 5}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[("<", "E"), ("<E", ">")]))
    tokenizer.add_special_tokens(["<E>", "P"])
    frame = Frame("", "")
    template = ChatTemplate("tiny", ("<E>",), "<E>", "", frame, frame, frame, "", "<E>")
    with pytest.raises(TemplateError, match="forge a turn"):
        ChatCodec(tokenizer, template)


def test_template_file_round_trip_and_errors(tmp_path: Path) -> None:
    save_tokenizer(tmp_path, compact_tokenizer(), COMPACT)
    file = tmp_path / "chat_codec.json"
    assert load_codec(tmp_path).template == COMPACT
    value = json.loads(file.read_text())
    del value["end"]
    file.write_text(json.dumps(value))
    with pytest.raises(TemplateError, match=r"chat_codec.json: not a chat template .*'end'"):
        load_codec(tmp_path)
    file.write_text("[")
    with pytest.raises(TemplateError, match="chat_codec.json: not JSON"):
        load_codec(tmp_path)
