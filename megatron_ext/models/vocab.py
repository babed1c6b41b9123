"""Rows of the embedding and of the output layer: those of the vocabulary, filled up to a multiple.

A tokenizer has as many ids as its corpus needs, and tensor-parallel ranks share rows out evenly. So Megatron's weights
have rows of zeros behind the last id. How many is a function of the vocabulary and ``model.vocab_multiple``, not of the
layout. Outside of Megatron's weights (HF folders, engine, scores) the rows do not exist.

Invariants (``tests/models/test_vocab.py``):

1. Padding rows are zero, get no gradient and stay zero, weight decay or not; no softmax and no top-k sees their logits.
2. Logits, losses, gradients and scores are those of the model without padding.
3. A vocabulary that is a multiple already gets no padding.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class VocabRows:
    """The ``true`` ids of a model, and the ``multiple`` that its rows are filled up to. Set on every model chunk."""

    true: int
    multiple: int

    @property
    def padded(self) -> int:
        """Rows of the embedding and columns of the logits, over all tensor-parallel ranks."""
        return -(-self.true // self.multiple) * self.multiple

    def why_not(self, tensor: int) -> str:
        """Why ``parallel.tensor=tensor`` cannot share the rows out; empty when it can."""
        if self.padded % tensor == 0:
            return ""
        enough = math.lcm(self.multiple, tensor)
        return (
            f"model.vocab_multiple={self.multiple}: fills the vocabulary of {self.true} up to {self.padded} rows, "
            f"which parallel.tensor={tensor} does not divide; set model.vocab_multiple={enough}"
        )
