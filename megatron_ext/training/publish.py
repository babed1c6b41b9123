"""The publish path: trained weights to an engine, by HF name, under a policy version."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megatron_ext.models.forward import unwrap
from megatron_ext.models.hf_config import HFConfig
from megatron_ext.models.hf_map import export_tensors
from megatron_ext.rollout.engine import EngineControl


def publish(engine: EngineControl, chunks: Sequence[torch.nn.Module], hf: HFConfig, version: int) -> None:
    """Sends every weight once; returns when the engine samples with them."""
    engine.publish(export_tensors([unwrap(c) for c in chunks], hf), version)
