"""Memory of a step: the trainer's processes, the device, and the engine's process.

Invariant (``tests/training/measures/test_memory.py``): figures are of the moment they are
asked for; the peaks never fall.
"""

from __future__ import annotations

import resource
import sys

import psutil
import torch

from megatron_ext.training.ranks.ranks import Gather

GIB = float(1 << 30)
# ru_maxrss is in KiB, on macOS in bytes.
_MAXRSS_UNIT = 1 if sys.platform == "darwin" else 1024


def resident_bytes(pid: int) -> int:
    """Resident memory of a process; 0 when it is gone."""
    try:
        return int(psutil.Process(pid).memory_info().rss)
    except psutil.NoSuchProcess:
        return 0


def memory_metrics(device: torch.device, engine_bytes: int, gather: Gather) -> dict[str, float]:
    """Largest over the data-parallel ranks, in GiB; ``engine_bytes`` is known where the engine was started."""
    own = psutil.Process().memory_info().rss
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _MAXRSS_UNIT
    on_device = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0
    found = gather((own, peak, on_device, engine_bytes))
    own, peak, on_device, engine = (max(values) for values in zip(*found, strict=True))
    metrics = {"memory/rss_gib": own / GIB, "memory/rss_peak_gib": peak / GIB, "memory/engine_gib": engine / GIB}
    return metrics | ({"memory/device_peak_gib": on_device / GIB} if on_device else {})
