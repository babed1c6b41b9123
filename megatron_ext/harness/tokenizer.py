"""A byte-level BPE tokenizer learned on a small corpus, and its folder in the Hugging Face layout.

Invariants (``tests/harness/test_tokenizer.py`` asserts each):

1. The special tokens have ids 0..6, in the order of ``SPECIAL_TOKENS``.
2. Every text encodes without an unknown token and decodes to itself, whatever its bytes.
3. Text that a phrase matched in the corpus is one token wherever the pre-split finds it, with and without the space
   before it (two tokens, when both occur).
4. The same corpus, vocabulary size and phrases give the same tokenizer, in any process and in any order of the texts.
5. ``save_tokenizer`` writes a folder whose ``apply_chat_template`` renders the ids that ``ChatCodec`` makes.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from megatron_ext.harness.template import TEMPLATE_FILE, ChatTemplate

SPECIAL_TOKENS = ("<|pad|>", "<|bos|>", "<|system|>", "<|user|>", "<|tool|>", "<|assistant|>", "<|end|>")
BYTE_TOKENS = 256

# Pieces that BPE never merges across: words with the space before them, single digits, single punctuation marks with
# the space before them, line breaks, and what is left of a run of spaces.
_PIECES = (
    r" ?[\p{L}\p{M}]+",
    r"\p{N}",
    r" ?[^\s\p{L}\p{M}\p{N}]",
    r"\s*[\r\n]+",
    r"\s+(?!\S)",
    r"\s",
)


class TokenizerError(ValueError):
    """A tokenizer cannot be learned from what was given; the message names the cause and the fix."""


def learn_tokenizer(corpus: Iterable[str], *, vocab_size: int, phrases: Sequence[str]) -> Tokenizer:
    """Learns a byte-level BPE (Sennrich et al., arXiv:1508.07909, on bytes) whose stock phrases are single tokens.

    Args:
        corpus: texts to learn from; held-out tasks do not belong here.
        vocab_size: most tokens, special tokens, 256 bytes and phrases included; a small corpus may need fewer.
        phrases: regular expressions (Oniguruma, no back-references). Each distinct text that one matches in the corpus
            becomes one token, so an expression must match few texts ("You are in the [a-z]+", not ".*").

    Raises:
        TokenizerError: empty corpus, an expression that is not one or matches a special token, or a vocabulary too
            small for the phrases.
    """
    texts = [text for text in corpus if text]
    if not texts:
        raise TokenizerError("the tokenizer corpus holds no text: set tokenizer.corpus_tasks above 0")
    for phrase in phrases:
        _check_phrase(phrase)
    split = _split(phrases)
    found = _phrase_texts(texts, split, phrases)
    room = vocab_size - len(SPECIAL_TOKENS) - BYTE_TOKENS - len(found)
    if room < 0:
        raise TokenizerError(
            f"vocabulary of {vocab_size} is too small: {len(SPECIAL_TOKENS)} special tokens, {BYTE_TOKENS} bytes and "
            f"{len(found)} distinct phrase texts need {vocab_size - room}; raise tokenizer.vocab_size or narrow "
            "tokenizer.phrases"
        )
    vocab, merges = _train(texts, split, phrases, vocab_size - len(found))
    for piece in found:
        vocab.setdefault(piece, len(vocab))
    # ignore_merges: a piece that is in the vocabulary is that token; this is what makes a phrase one token without
    # spending merges on its inside.
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, _bytes()])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    return tokenizer


def save_tokenizer(folder: Path, tokenizer: Tokenizer, template: ChatTemplate) -> None:
    """Writes ``tokenizer.json``, ``tokenizer_config.json`` (with the chat template), ``special_tokens_map.json`` and
    ``chat_codec.json`` (what ``load_codec`` reads the template from).

    Raises:
        TemplateError: the tokenizer lacks a token of the template.
    """
    template.token_ids(tokenizer, str(folder))
    folder.mkdir(parents=True, exist_ok=True)
    names = {"eos_token": template.end, "pad_token": template.pad}
    if template.bos:
        names["bos_token"] = template.bos
    config: dict[str, object] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 1 << 30,
        "additional_special_tokens": [token for token in template.special if token not in names.values()],
        **names,
        "chat_template": template.jinja(),
    }
    tokenizer.save(str(folder / "tokenizer.json"))
    _write_json(folder / "tokenizer_config.json", config)
    _write_json(folder / "special_tokens_map.json", names)
    _write_json(folder / TEMPLATE_FILE, template.to_json())


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False) + "\n", encoding="utf-8")


def _any_phrase(phrases: Sequence[str]) -> str:
    return "|".join(f" ?(?:{phrase})" for phrase in phrases)


def _split(phrases: Sequence[str]) -> pre_tokenizers.Split:
    pattern = "|".join([*([_any_phrase(phrases)] if phrases else []), *_PIECES])
    return pre_tokenizers.Split(Regex(pattern), "isolated")


def _bytes() -> pre_tokenizers.ByteLevel:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)


def _whole_phrase(phrases: Sequence[str], *, keep: bool) -> pre_tokenizers.Split:
    """After ``_split``: keeps only the pieces that are a phrase, or only the others."""
    return pre_tokenizers.Split(Regex(rf"\A(?:{_any_phrase(phrases)})\z"), "removed", invert=keep)


def _check_phrase(phrase: str) -> None:
    try:
        splitter = pre_tokenizers.Split(Regex(rf"\A ?(?:{phrase})\z"), "removed")
    except Exception as error:  # the regex library raises nothing narrower
        raise TokenizerError(f"tokenizer.phrases: {phrase!r} is not a regular expression: {error}") from error
    if not pre_tokenizers.Split(Regex(rf"\Ax(?:{phrase})\z"), "removed").pre_tokenize_str("x"):
        raise TokenizerError(f"tokenizer.phrases: {phrase!r} matches the empty text, so it would cut every word apart")
    for token in SPECIAL_TOKENS:
        if not splitter.pre_tokenize_str(token):
            raise TokenizerError(f"tokenizer.phrases: {phrase!r} matches the special token {token}")


def _phrase_texts(texts: Sequence[str], split: pre_tokenizers.Split, phrases: Sequence[str]) -> list[str]:
    """Distinct phrase texts of the corpus as byte-level strings, the frequent ones first."""
    if not phrases:
        return []
    pieces = pre_tokenizers.Sequence([split, _whole_phrase(phrases, keep=True), _bytes()])
    counts: Counter[str] = Counter()
    for text, repeats in Counter(texts).items():  # observations repeat a lot
        for piece, _ in pieces.pre_tokenize_str(text):
            counts[piece] += repeats
    return sorted(counts, key=lambda piece: (-counts[piece], piece))


def _train(
    texts: Sequence[str], split: pre_tokenizers.Split, phrases: Sequence[str], vocab_size: int
) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Vocabulary (special tokens and bytes first) and merges, learned on what no phrase covers."""
    stages: list[pre_tokenizers.PreTokenizer] = [split]
    if phrases:
        stages.append(_whole_phrase(phrases, keep=False))
    learner = Tokenizer(models.BPE())
    learner.pre_tokenizer = pre_tokenizers.Sequence([*stages, _bytes()])
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    learner.train_from_iterator(texts, trainer)
    model = json.loads(learner.to_str())["model"]
    vocab: dict[str, int] = model["vocab"]
    return vocab, [(left, right) for left, right in model["merges"]]
