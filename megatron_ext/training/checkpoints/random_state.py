"""Random state of a rank: Python, NumPy, torch on CPU and device, and Megatron's tracker of per-group streams."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

from megatron_ext.models import cpu_platform

cpu_platform.install()
with cpu_platform.quiet_import():
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker


def random_state() -> dict[str, Any]:
    """Everything that draws numbers in this process, as torch-saveable values."""
    state: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
        "tracker": {name: stream.clone() for name, stream in get_cuda_rng_tracker().get_states().items()},
    }
    if torch.cuda.is_available():
        state["device"] = torch.cuda.get_rng_state()
    return state


def restore_random_state(state: dict[str, Any]) -> None:
    """Goes on where ``random_state`` was taken, in the same layout."""
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    get_cuda_rng_tracker().set_states(state["tracker"])
    if "device" in state:
        torch.cuda.set_rng_state(state["device"])
