"""Resolves the back-end configuration into concrete choices, before anything is allocated.

Invariants (``tests/models/test_backends.py``):

1. Nothing of a GPU back end is imported here: packages are looked up, not loaded.
2. ``auto`` means the fast choice of the device (te, fused, nccl on a GPU; local, torch, gloo on a CPU); it never falls
   back to a slower one. A missing package is one line that names it and the key to change.
3. All errors of a configuration are reported together.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch

from megatron_ext.config.schema import BackendConfig

Device = Literal["cpu", "cuda"]
LayerSpec = Literal["local", "te"]
OptimizerKind = Literal["torch", "fused"]
Communication = Literal["gloo", "nccl"]

_DTYPES: dict[str, torch.dtype] = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_CHOICES: dict[str, tuple[str, ...]] = {
    "device": ("auto", "cpu", "cuda"),
    "layer_spec": ("auto", "local", "te"),
    "optimizer": ("auto", "torch", "fused"),
    "communication": ("auto", "gloo", "nccl"),
    "dtype": tuple(_DTYPES),
}


class BackendError(ValueError):
    """The back-end configuration cannot be had here; one line per reason."""


@dataclass(frozen=True)
class ResolvedBackend:
    """Concrete back ends. ``dtype`` is the parameter type; the optimizer keeps fp32 master weights."""

    device: Device
    layer_spec: LayerSpec
    optimizer: OptimizerKind
    communication: Communication
    dtype: torch.dtype

    @property
    def torch_device(self) -> torch.device:
        """Where this rank's tensors live: the CPU, or the current CUDA device."""
        return torch.device("cpu") if self.device == "cpu" else torch.device("cuda", torch.cuda.current_device())


def has_package(name: str) -> bool:
    """Whether top-level package ``name`` is installed. Does not import it."""
    return importlib.util.find_spec(name) is not None


def wants_transformer_engine(
    config: BackendConfig, cuda_available: Callable[[], bool] = torch.cuda.is_available
) -> bool:
    """Whether ``backend.layer_spec`` is Transformer Engine's, said or meant by ``auto``; installed or not."""
    on_gpu = config.device == "cuda" or (config.device == "auto" and cuda_available())
    return config.layer_spec == "te" or (config.layer_spec == "auto" and on_gpu)


def resolve_backend(
    config: BackendConfig,
    cuda_available: Callable[[], bool] = torch.cuda.is_available,
    installed: Callable[[str], bool] = has_package,
) -> ResolvedBackend:
    """Concrete back ends of ``config`` on this machine.

    ``cuda_available`` and ``installed`` describe another machine when a configuration is checked for it. Raises
    ``BackendError`` with every reason, one a line.
    """
    given = {key: str(getattr(config, key)) for key in _CHOICES}
    errors = [
        f"backend.{key}={value!r}: choose one of {', '.join(_CHOICES[key])}"
        for key, value in given.items()
        if value not in _CHOICES[key]
    ]
    if errors:
        raise BackendError("\n".join(errors))

    device = given["device"]
    if device == "auto":
        device = "cuda" if cuda_available() else "cpu"
    elif device == "cuda" and not cuda_available():
        errors.append("backend.device=cuda: no CUDA device is visible; set backend.device=cpu")
    on_gpu = device == "cuda"
    fast = {"layer_spec": ("te", "local"), "optimizer": ("fused", "torch"), "communication": ("nccl", "gloo")}
    chosen = {key: (gpu if on_gpu else cpu) if given[key] == "auto" else given[key] for key, (gpu, cpu) in fast.items()}
    if not on_gpu:
        errors.extend(
            f"backend.{key}={gpu} needs a GPU, backend.device is cpu; set backend.{key}={cpu}"
            for key, (gpu, cpu) in fast.items()
            if chosen[key] == gpu
        )
    else:
        if chosen["layer_spec"] == "te" and not installed("transformer_engine"):
            errors.append("package transformer_engine is not installed; install it or set backend.layer_spec=local")
        if chosen["optimizer"] == "fused" and not (installed("transformer_engine") or installed("apex")):
            errors.append(
                "neither package transformer_engine nor apex is installed; install one or set backend.optimizer=torch"
            )
    if errors:
        raise BackendError("\n".join(errors))
    return ResolvedBackend(
        device="cuda" if on_gpu else "cpu",
        layer_spec="te" if chosen["layer_spec"] == "te" else "local",
        optimizer="fused" if chosen["optimizer"] == "fused" else "torch",
        communication="nccl" if chosen["communication"] == "nccl" else "gloo",
        dtype=_DTYPES[given["dtype"]],
    )
