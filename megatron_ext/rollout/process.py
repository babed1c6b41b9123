"""Child processes: they die with their parent, leave Ctrl-C to it; a dead one is explained by the end of its log."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import sys
from pathlib import Path

_PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """Asks the kernel to kill this process (made by ``multiprocessing``) when its parent dies, so that ``kill -9`` of a
    trainer leaves no orphan.

    Linux only; elsewhere a child notices the closed pipe instead. Ctrl-C in a terminal reaches the whole process group:
    children ignore it, since the trainer decides when and how to stop them.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if sys.platform != "linux":
        return
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    parent = multiprocessing.parent_process()
    if parent is not None and os.getppid() != parent.pid:  # it died before the call
        raise SystemExit(1)


def log_tail(path: Path, lines: int = 15) -> str:
    """Last lines of a log, for an error message."""
    if not path.exists():
        return "(no log)"
    return "\n".join(path.read_text(errors="replace").splitlines()[-lines:]) or "(empty log)"
