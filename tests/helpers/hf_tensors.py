"""Random HF tensors of a configuration, and a reader of them that counts what it read."""

from __future__ import annotations

import torch

from megatron_ext.models.hf_config import HFConfig
from megatron_ext.models.hf_tensors import hf_shapes

Tensors = dict[str, torch.Tensor]


class DictReader:
    def __init__(self, tensors: Tensors) -> None:
        self.tensors = tensors
        self.elements = 0

    def read(self, name: str, dim: int, start: int, stop: int) -> torch.Tensor:
        part = self.tensors[name].narrow(dim, start, stop - start)
        self.elements += part.numel()
        return part


def random_tensors(hf: HFConfig) -> Tensors:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator) for name, shape in hf_shapes(hf).items()}
