"""The configuration an engine serves. No torch here.

Invariant (``tests/rollout/test_embedded_model.py``): a configuration that the engine would compute differently from
``transformers``, or a context the model was not made for, is an ``EngineError`` before any process is started.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_ext.models.hf_config import HFConfig, HFConfigError, from_dict
from megatron_ext.rollout.engine import EngineError


def read_config(hf_config: Mapping[str, Any], max_context: int) -> HFConfig:
    """The architecture behind the dict of a ``config.json``, checked against the context that will be served."""
    try:
        config = from_dict(hf_config, "embedded engine: hf_config")
    except HFConfigError as error:
        raise EngineError(str(error)) from None
    if not 2 <= max_context <= config.max_position_embeddings:
        raise EngineError(
            f"embedded engine: max_context {max_context} must lie in 2..{config.max_position_embeddings} "
            "(max_position_embeddings of the HF config)"
        )
    return config
