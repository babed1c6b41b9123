"""Entry point of the engine process: ``python -m megatron_ext.rollout.embedded.process``, settings as JSON on stdin.

Invariants (``tests/rollout/test_embedded_process.py``):

1. The process dies with the one that started it, also when that one is killed with SIGKILL: the kernel is asked for it
   before anything slow is imported.
2. Ctrl-C in the trainer's terminal, and a scheduler's SIGTERM, do not end the engine; the trainer closes it.
"""

from __future__ import annotations

import ctypes
import faulthandler
import json
import signal
import sys

from megatron_ext.process import die_with_parent, leave_signals_to_parent

_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3  # malloc.h


def keep_freed_memory() -> None:
    """Makes glibc reuse activation buffers instead of returning them to the kernel and faulting them in again."""
    mallopt = ctypes.CDLL(None).mallopt
    for parameter, value in ((_M_MMAP_THRESHOLD, 32 << 20), (_M_TRIM_THRESHOLD, 1 << 30), (_M_TOP_PAD, 64 << 20)):
        mallopt(parameter, value)


def main() -> None:
    settings = json.load(sys.stdin)
    die_with_parent(settings.pop("parent"))
    leave_signals_to_parent()
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)  # the trainer asks a silent engine where it is
    keep_freed_memory()
    from megatron_ext.rollout.embedded.server import serve

    serve(**settings)


if __name__ == "__main__":
    main()
