"""Invariants of the learned tokenizer (numbers refer to ``megatron_ext/harness/tokenizer.py``)."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from megatron_ext.harness.protocol import Message
from megatron_ext.harness.template import CHATML, COMPACT, ChatCodec, TemplateError, load_codec
from megatron_ext.harness.tokenizer import SPECIAL_TOKENS, TokenizerError, learn_tokenizer, save_tokenizer
from megatron_ext.trajectory.record import Role

PHRASES = ["You are in the [a-z]+, and you see a", "on top of the table there is a"]


def corpus() -> list[str]:
    rng = random.Random(3)
    things = ["red lamp", "blue bell", "old rope", "tiny vase", "warm coat"]
    texts = []
    for _ in range(300):
        room = rng.choice(["kitchen", "cellar"])
        texts.append(
            f"You are in the {room}, and you see a {rng.choice(things)}. There, on top of the table there is a "
            f"{rng.choice(things)} worth {rng.randrange(100)} coins.\nWhat now?"
        )
        texts.append(f"take {rng.choice(things)}")
    return texts


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return learn_tokenizer(corpus(), vocab_size=512, phrases=PHRASES)


def test_special_tokens_come_first(tokenizer: Tokenizer) -> None:
    assert [tokenizer.token_to_id(token) for token in SPECIAL_TOKENS] == list(range(7))
    assert 7 + 256 < tokenizer.get_vocab_size() <= 512
    assert sorted(tokenizer.get_vocab().values()) == list(range(tokenizer.get_vocab_size()))


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=40))
def test_every_text_survives(tokenizer: Tokenizer, text: str) -> None:
    codec = ChatCodec(tokenizer, COMPACT)
    assert codec.decode_turn(codec.encode_turn(text)) == text


def test_phrases_words_and_digits_are_single_tokens(tokenizer: Tokenizer) -> None:
    def pieces(text: str) -> list[str]:
        return [tokenizer.decode([i]) for i in tokenizer.encode(text).ids]

    first = corpus()[0]
    got = pieces(first)
    room = first[len("You are in the ") :].split(",")[0]
    assert got[0] == f"You are in the {room}, and you see a"
    assert " on top of the table there is a" in got
    assert pieces("take red lamp") == ["take", " red", " lamp"]
    assert pieces("a 123.") == ["a", " ", "1", "2", "3", "."]
    # a phrase that the corpus does not hold is several tokens
    assert len(pieces("You are in the attic, and you see a")) > 1


def test_rare_phrase_is_one_token() -> None:
    """A phrase seen once among 10,000 words still gets its token: not left to merge counts."""
    texts = ["go north then go south"] * 2000 + ["Behind the waterfall hides an ancient, forgotten door"]
    learned = learn_tokenizer(texts, vocab_size=300, phrases=["Behind the waterfall hides an ancient, forgotten door"])
    assert len(learned.encode(texts[-1]).ids) == 1


def test_deterministic_in_another_process_and_order(tokenizer: Tokenizer, tmp_path: Path) -> None:
    script = (
        "import importlib.util, sys\n"
        "spec = importlib.util.spec_from_file_location('t', sys.argv[1])\n"
        "t = importlib.util.module_from_spec(spec); spec.loader.exec_module(t)\n"
        "texts = t.corpus()[::-1]\n"
        "sys.stdout.write(t.learn_tokenizer(iter(texts), vocab_size=512, phrases=t.PHRASES).to_str())\n"
    )
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", script, __file__], cwd=root, capture_output=True, text=True, check=True, timeout=300
    )
    assert done.stdout == tokenizer.to_str()


def test_bad_input_is_named() -> None:
    with pytest.raises(TokenizerError, match="corpus_tasks"):
        learn_tokenizer([], vocab_size=512, phrases=[])
    with pytest.raises(TokenizerError, match=r"'\(' is not a regular expression"):
        learn_tokenizer(["a"], vocab_size=512, phrases=["("])
    with pytest.raises(TokenizerError, match=r"special token <\|user\|>"):
        learn_tokenizer(["a"], vocab_size=512, phrases=[r"<\|us.*\|>"])
    with pytest.raises(TokenizerError, match="matches the empty text"):
        learn_tokenizer(["a"], vocab_size=512, phrases=["a*"])
    with pytest.raises(TokenizerError, match="101 distinct phrase texts"):
        learn_tokenizer([f"x{'i' * n}x" for n in range(101)], vocab_size=300, phrases=["x[i]*x"])


def test_saved_folder_renders_as_the_codec(tokenizer: Tokenizer, tmp_path: Path) -> None:
    from transformers import AutoTokenizer  # slow to import

    save_tokenizer(tmp_path, tokenizer, COMPACT)
    hf = AutoTokenizer.from_pretrained(str(tmp_path))
    codec = load_codec(tmp_path)
    assert codec.template == COMPACT
    assert (hf.pad_token_id, hf.bos_token_id, hf.eos_token_id) == (codec.pad_id, 1, codec.end_id)
    turns = [
        Message(Role.SYSTEM, "Play well."),
        Message(Role.USER, corpus()[0]),
        Message(Role.MODEL, "take red lamp"),
        Message(Role.TOOL, "  You take\n\n it.\n"),
        Message(Role.MODEL, ' say "hi" {{ x }} \\n'),
        Message(Role.USER, ""),
    ]
    ids = codec.opening()
    for turn in turns:
        ids += codec.message(turn)
    names = {Role.SYSTEM: "system", Role.USER: "user", Role.TOOL: "tool", Role.MODEL: "assistant"}
    chat = [{"role": names[turn.role], "content": turn.content} for turn in turns]
    assert hf.apply_chat_template(chat, return_dict=False) == ids
    prompted = hf.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
    assert prompted == ids + codec.generation_prompt()
    assert hf.decode(codec.encode_turn(corpus()[0])[:-1]) == corpus()[0]


def test_saving_is_deterministic_and_checked(tokenizer: Tokenizer, tmp_path: Path) -> None:
    save_tokenizer(tmp_path / "a", tokenizer, COMPACT)
    save_tokenizer(tmp_path / "b", load_codec(tmp_path / "a").tokenizer, COMPACT)
    for file in sorted((tmp_path / "a").iterdir()):
        assert file.read_bytes() == (tmp_path / "b" / file.name).read_bytes(), file.name
    with pytest.raises(TemplateError, match=r"chatml.*<\|endoftext\|>, <\|im_start\|>, <\|im_end\|>"):
        save_tokenizer(tmp_path / "c", tokenizer, CHATML)
    assert not (tmp_path / "c").exists()
