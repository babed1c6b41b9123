"""What a machine without CUDA lacks, in one module: what stands in for CUDA, and an allocator setting.

Megatron-Core names CUDA devices, streams and allocators in its source. That source text is rewritten while
``megatron.core`` is imported (``rewritten_import.py``); nothing of torch is patched.

Invariants (``tests/models/test_cpu_platform.py``):

1. Inert when CUDA is available: no import is intercepted and Megatron runs its own, unchanged code.
2. Every rewrite that repairs a specific line asserts that the line is there, the expected number of times; another
   version of Megatron-Core is refused by name. A repair can never silently stop applying.
3. After rewriting no use of ``torch.cuda`` is left in the modules that are rewritten (imports excepted).
4. ``install`` is idempotent and refuses to run after ``megatron.core`` was imported without it.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.metadata
import logging
import platform
import re
import sys
import types
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_ext.models.rewritten_import import BytecodeCache, RewritingFinder

MEGATRON_VERSION = "0.19.2"
_PACKAGE = "megatron.core"
_ALIAS = "_cpu_platform"  # name under which this module is visible inside rewritten modules


class CpuPlatformError(RuntimeError):
    """The installed Megatron-Core is not the one this module knows how to run on a CPU."""


# ------------------------------------------------------------------------------------------ stand-in for torch.cuda


class Stream:
    """A CPU executes in program order, so a stream has nothing to do."""

    def __init__(self, *args: object, **kwargs: object) -> None: ...

    def wait_stream(self, stream: Stream) -> None: ...

    def wait_event(self, event: Event) -> None: ...

    def record_event(self, event: Event | None = None) -> Event:
        return Event() if event is None else event

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    @staticmethod
    def priority_range() -> tuple[int, int]:
        return (0, 0)


class Event:
    """Always complete, for the same reason."""

    def __init__(self, *args: object, **kwargs: object) -> None: ...

    def record(self, stream: Stream | None = None) -> None: ...

    def wait(self, stream: Stream | None = None) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: Event) -> float:
        return 0.0


def _nothing(*args: object, **kwargs: object) -> None:
    return None


def _zero(*args: object, **kwargs: object) -> int:
    return 0


class CpuCuda(types.ModuleType):
    """Takes the place of ``torch.cuda`` inside rewritten modules. Names it does not define come from the real one."""

    Stream = Stream
    Event = Event

    def __init__(self) -> None:
        super().__init__("cpu_cuda")
        stream = Stream()
        self.is_available = lambda: False
        self.device_count = lambda: 1
        self.current_device = lambda: torch.device("cpu")
        self.current_stream = lambda *a, **k: stream
        self.default_stream = lambda *a, **k: stream
        self.stream = lambda s: contextlib.nullcontext(s)
        self.is_current_stream_capturing = lambda: False
        for name in ("set_device", "synchronize", "empty_cache", "set_stream"):
            setattr(self, name, _nothing)
        for name in ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved"):
            setattr(self, name, _zero)
        # The CPU generator plays the part of the device generator.
        self.manual_seed = torch.manual_seed
        self.get_rng_state = lambda *a, **k: torch.get_rng_state()
        self.set_rng_state = lambda state, *a, **k: torch.set_rng_state(state)
        self.random = self
        self.nvtx = types.SimpleNamespace(
            range_push=_nothing, range_pop=_nothing, range=lambda *a, **k: contextlib.nullcontext()
        )

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cuda, name)


cuda = CpuCuda()


def all_gather_uneven(outputs: list[torch.Tensor], x: torch.Tensor, group: dist.ProcessGroup) -> None:
    """All-gather of tensors whose first dimension differs between ranks; gloo wants equal sizes, so they are padded."""
    longest = max(out.size(0) for out in outputs)
    padded = x.new_zeros(longest, *x.shape[1:])
    padded[: x.size(0)] = x
    received = [torch.empty_like(padded) for _ in outputs]
    dist.all_gather(received, padded, group=group)
    for out, buffer in zip(outputs, received, strict=True):
        out.copy_(buffer[: out.size(0)])


def reduce_scatter_uneven(output: torch.Tensor, inputs: list[torch.Tensor], group: dist.ProcessGroup) -> None:
    """Reduce-scatter of tensors whose first dimension differs between ranks, by padding to the largest."""
    longest = max(x.size(0) for x in inputs)
    padded = inputs[0].new_zeros(len(inputs), longest, *inputs[0].shape[1:])
    for row, x in zip(padded, inputs, strict=True):
        row[: x.size(0)] = x
    received = torch.empty_like(padded[0])
    dist.reduce_scatter_tensor(received, padded.flatten(0, 1), group=group)
    output.copy_(received[: output.size(0)])


# --------------------------------------------------------------------------------------------------------- rewriting


@dataclass(frozen=True)
class Rule:
    """A pattern rewritten wherever it occurs."""

    pattern: re.Pattern[str]
    replacement: str


@dataclass(frozen=True)
class Repair:
    """A line of one module that is wrong on a CPU, expected exactly ``count`` times."""

    old: str
    new: str
    count: int = 1


_RULES: tuple[Rule, ...] = tuple(
    Rule(re.compile(pattern), replacement)
    for pattern, replacement in (
        # Tensor type names as Megatron's gradient buffers print and compare them.
        (r"(['\"])torch\.cuda\.(\w+Tensor)\1", r"\1torch.\2\1"),
        (r"\btorch\.cuda\.(Float|Half|BFloat16|Double)Tensor\b", r"torch.\1Tensor"),
        (r"(?<!from )(?<!import )\btorch\.cuda\.", rf"{_ALIAS}.cuda."),
        (r"device\s*=\s*(['\"])cuda\1", r'device="cpu"'),
        (r"torch\.device\((['\"])cuda\1\)", r'torch.device("cpu")'),
        (r"\.cuda\(\)", r".cpu()"),
        (r"\.cuda\(non_blocking=True\)", r".cpu()"),
        (rf"\.cuda\({_ALIAS}\.cuda\.current_device\(\)\)", r".cpu()"),
        (r"pin_memory\s*=\s*True", r"pin_memory=False"),
    )
)

_REPAIRS: dict[str, tuple[Repair, ...]] = {
    # gloo has neither collective for uneven sizes (all-to-all dispatcher with expert tensor parallelism).
    "megatron.core.tensor_parallel.mappings": (
        Repair(
            "torch.distributed.all_gather(output_tensor_list, input_, group=group)",
            f"{_ALIAS}.all_gather_uneven(output_tensor_list, input_, group)",
        ),
        Repair(
            "torch.distributed.reduce_scatter(output, input_tensor_list, group=group)",
            f"{_ALIAS}.reduce_scatter_uneven(output, input_tensor_list, group)",
        ),
    ),
    # Loading a checkpoint into a distributed optimizer over torch.optim.Adam (the fused optimizers never reach this).
    "megatron.core.optimizer.distrib_optimizer": (
        # One step tensor shared by all parameters would be incremented once per parameter.
        Repair('                s["step"] = step\n', '                s["step"] = step.clone()\n'),
        # A fresh torch.optim.Adam has no step yet.
        Repair(
            "            assert len(steps) == 1\n            step = steps[0]\n"
            "        elif isinstance(self.optimizer, HybridDeviceOptimizer):",
            "            assert len(steps) <= 1\n            step = steps[0] if steps else 0.0\n"
            "        elif isinstance(self.optimizer, HybridDeviceOptimizer):",
        ),
        # ... and no moments: the key may be missing.
        Repair(
            "                if not isinstance(tensors[key], torch.Tensor):",
            "                if not isinstance(tensors.get(key), torch.Tensor):",
        ),
    ),
    # Split sizes of all_to_all_single must leave the tensor world, also when they are on the CPU already.
    "megatron.core.transformer.moe.moe_utils": (
        Repair("    if torch.is_tensor(tensor) and tensor.is_cuda:\n", "    if torch.is_tensor(tensor):\n"),
        Repair("            tensor.record_stream(torch.cuda.current_stream())", "            pass"),
    ),
    # torch.compile of small fusions needs a C++ compiler at run time and gains nothing here.
    "megatron.core.jit": (Repair("jit_fuser = torch.compile", "jit_fuser = noop_decorator"),),
    # The tracker swaps the state of the one CPU generator.
    "megatron.core.tensor_parallel.random": (
        Repair(
            "    if hasattr(_C, '_cuda_setRNGState') and callable(_C._cuda_setRNGState):",
            "    torch.set_rng_state(new_state); return\n    if False:",
        ),
        # "CPU RNG state changed within GPU RNG context": here they are the same generator.
        Repair("            if not torch.all(cpu_rng_state == torch.get_rng_state()).item():", "            if False:"),
    ),
}

# Modules replaced whole: Triton kernels that are imported at module level and never called on a CPU.
_REPLACED: dict[str, str] = {
    "megatron.core.transformer.moe.ops.paged_stash": (
        "GLOBAL_BLOCK_SIZE = 1024\n"
        "def _unavailable(*args, **kwargs):\n"
        "    raise RuntimeError('paged stash needs Triton and CUDA')\n"
        "paged_stash_copy_kernel = paged_stash_pop_kernel = _unavailable\n"
    )
}


def rewrite(name: str, source: str) -> str:
    """Source of module ``name`` for a CPU. Raises ``CpuPlatformError`` when a line to repair is not there."""
    if name in _REPLACED:
        return _REPLACED[name]
    for repair in _REPAIRS.get(name, ()):
        found = source.count(repair.old)
        if found != repair.count:
            raise CpuPlatformError(
                f"{name}: expected {repair.count} x {repair.old.strip()!r}, found {found}; "
                f"install megatron-core=={MEGATRON_VERSION} or update {Path(__file__).name}"
            )
        source = source.replace(repair.old, repair.new)
    for rule in _RULES:
        source = rule.pattern.sub(rule.replacement, source)
    return source


# -------------------------------------------------------------------------------------------------------- installing


def cache_root() -> Path:
    """Where rewritten bytecode is kept: under the user's cache directory, never in a clone."""
    return Path.home() / ".cache" / "megatron_ext" / "bytecode"


def install(cuda_available: Callable[[], bool] = torch.cuda.is_available, cache: Path | None = None) -> bool:
    """Makes ``import megatron.core`` work without CUDA; call it before the first such import.

    Returns whether the hook is active: False, having done nothing, when CUDA is available. ``cache`` defaults to
    ``cache_root()``. Raises ``CpuPlatformError`` for another version of Megatron-Core, or when it is imported already.
    """
    # Megatron-Core calls two collectives by the names that torch 2.13 gives up: two lines of warning on every rank,
    # between those of the steps, which nobody but Megatron can mend. (torch names its own logger as the caller.)
    for name in ("all_gather_into_tensor", "reduce_scatter_tensor"):
        warnings.filterwarnings("ignore", rf"`torch\.distributed\.{name}` is deprecated", FutureWarning)
    if cuda_available():
        return False
    if any(isinstance(finder, RewritingFinder) and finder.package == _PACKAGE for finder in sys.meta_path):
        return True
    if _PACKAGE in sys.modules:
        raise CpuPlatformError(
            f"{_PACKAGE} was imported before cpu_platform.install(); import megatron_ext.models first"
        )
    try:
        version = importlib.metadata.version("megatron-core")
    except importlib.metadata.PackageNotFoundError:
        raise CpuPlatformError(f"megatron-core is missing: pip install megatron-core=={MEGATRON_VERSION}") from None
    if version != MEGATRON_VERSION:
        raise CpuPlatformError(
            f"megatron-core {version} is installed, the CPU platform was written for {MEGATRON_VERSION}: install that"
        )
    rules = Path(__file__).read_bytes()  # other rules, other code
    kept = BytecodeCache(cache_root() if cache is None else cache, salt=rules)
    sys.meta_path.insert(0, RewritingFinder(_PACKAGE, rewrite, {_ALIAS: sys.modules[__name__]}, kept))
    return True


@contextlib.contextmanager
def quiet_import() -> Iterator[None]:
    """Hides the messages about missing GPU packages that Megatron prints while it is imported on a CPU."""
    previous = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(previous)


# ---------------------------------------------------------------------------------------------------------- allocator

_M_TRIM_THRESHOLD = -1  # <malloc.h>
_M_MMAP_THRESHOLD = -3
_KEEP_BYTES = 1 << 30


def tune_allocator() -> bool:
    """Keeps freed memory in the process instead of returning every large block to the kernel.

    glibc serves blocks above 128 KiB (at most 32 MiB, adaptively) by ``mmap``, and each activation of a training step
    is then page-faulted in and zeroed anew. With both thresholds at 1 GiB the step reuses its pages. Returns whether
    it was set: False on another C library, where nothing is done. Memory returns to the system when the process ends.
    """
    if platform.libc_ver()[0] != "glibc":
        return False
    libc = ctypes.CDLL(None)
    return bool(libc.mallopt(_M_MMAP_THRESHOLD, _KEEP_BYTES)) and bool(libc.mallopt(_M_TRIM_THRESHOLD, _KEEP_BYTES))
