"""Fresh weights, tensor by tensor under their HF names.

Invariants (``tests/models/test_fresh.py``):

1. A tensor's values depend on the seed and its name alone: every layout of the same seed starts from the same model.
2. ``fan_in``: every linear layer, experts and routers included, has std 1/sqrt(fan-in), embeddings ``embedding_std``
   (std 0.02 at hidden size 128 hardly trains); ``normal``: every one of them has the config's ``initializer_range``.
   Norm weights are 1, biases 0.
"""

from __future__ import annotations

import hashlib
import math

import torch

from megatron_ext.config.schema import ModelConfig
from megatron_ext.models.hf_config import HFConfig
from megatron_ext.models.hf_tensors import hf_shapes

_EMBEDDING = "model.embed_tokens.weight"


class FreshReader:
    """A ``TensorReader`` that draws what it is asked for. The last few tensors are kept: slices come in runs."""

    def __init__(self, hf: HFConfig, model: ModelConfig, seed: int) -> None:
        if model.init not in ("fan_in", "normal"):
            raise ValueError(f"model.init={model.init!r}: choose fan_in or normal")
        self._shapes = hf_shapes(hf)
        self._normal = hf.initializer_range if model.init == "normal" else None
        self._embedding_std = model.embedding_std
        self._seed = seed
        self._held: dict[str, torch.Tensor] = {}

    def std(self, name: str) -> float:
        """Standard deviation of the weights of matrix ``name`` [out, in]."""
        if self._normal is not None:
            return self._normal
        return self._embedding_std if name == _EMBEDDING else 1.0 / math.sqrt(self._shapes[name][1])

    def read(self, name: str, dim: int, start: int, stop: int) -> torch.Tensor:
        if name not in self._held:
            if len(self._held) == 3:  # q, k and v of one layer
                self._held.pop(next(iter(self._held)))
            self._held[name] = self._draw(name)
        return self._held[name].narrow(dim, start, stop - start)

    def _draw(self, name: str) -> torch.Tensor:
        shape = self._shapes[name]
        if len(shape) == 1:
            return torch.zeros(shape) if name.endswith("bias") else torch.ones(shape)
        digest = hashlib.sha256(f"{self._seed}/{name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
        return torch.empty(shape).normal_(0.0, self.std(name), generator=generator)
