"""Token ids as text, piece by piece.

Invariant (``tests/report/test_text.py``): the pieces are as many as the ids, and joined they are the text that decoding
all ids at once gives; a token that ends inside a character is an empty piece, and the character stands at the last one.
"""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream


def pieces(tokenizer: Tokenizer | None, ids: Sequence[int]) -> list[str]:
    """The text of each token; without a tokenizer, and for ids that it lacks, ``⟨id⟩``."""
    if tokenizer is None:
        return [f"⟨{i}⟩" for i in ids]
    stream = DecodeStream(skip_special_tokens=False)
    made: list[str] = []
    whole: list[int] = []
    for i in (int(i) for i in ids):
        known = tokenizer.id_to_token(i) is not None
        made.append((stream.step(tokenizer, i) or "") if known else f"⟨{i}⟩")
        if known:
            whole.append(i)
    # The stream holds back a character that never became whole; decoding at once shows it as U+FFFD.
    if made and not made[-1] and len(whole) == len(made):
        made[-1] = tokenizer.decode(whole, skip_special_tokens=False)[len("".join(made)) :]
    return made
