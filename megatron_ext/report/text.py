"""Token ids of a run as text."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer

from megatron_ext.harness.pieces import pieces
from megatron_ext.harness.template import load_codec

__all__ = ["pieces", "run_tokenizer"]


def run_tokenizer(run: Path) -> Tokenizer | None:
    """The tokenizer in a run's folder; None before it was made. Raises ``TemplateError`` for a damaged one."""
    folder = run / "tokenizer"
    return load_codec(folder).tokenizer if (folder / "tokenizer.json").is_file() else None
