"""Child processes of this project: how they start, that they die with their parent, and how a dead one is explained.

Invariants (``tests/rollout/test_process.py``, ``tests/environments/test_pool.py``):

1. A child imports nothing but its own entry point. (``multiprocessing`` would import the parent's main module again,
   and with it torch and Megatron.)
2. A child ends when the thread that started it ends, however that ends: the kernel is asked before anything slow.
3. Ctrl-C in a terminal does not reach children, and SIGTERM and SIGUSR1, which a scheduler sends to every process of a
   job, do not end them: the trainer decides when and how to stop them.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_BOOTSTRAP = """\
import json, sys
sys.path[:] = json.loads(sys.argv[1])
from megatron_ext.process import run_child
run_child(*sys.argv[2:])
"""


def die_with_parent(parent: int) -> None:
    """Asks the kernel to kill this process when the thread of ``parent`` that started it ends, however it ends.

    Linux only; elsewhere a child notices the closed connection instead.
    """
    if sys.platform != "linux":
        return
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent:  # it ended before the request was made
        os._exit(1)


def start_child(
    entry: str, *arguments: str, log: Path | None, pass_fds: Sequence[int] = ()
) -> tuple[subprocess.Popen[bytes], Connection]:
    """Starts ``entry`` ("package.module:function") in a process of its own and returns it with a connection to it.

    The function is called as ``function(connection, *arguments)``. ``log`` takes the process's output (None: the
    parent's); file descriptors ``pass_fds`` stay open in the child.
    """
    ours, theirs = socket.socketpair()
    path = json.dumps([str(Path(item).resolve()) for item in sys.path])
    command = [sys.executable, "-c", _BOOTSTRAP, path, entry, str(theirs.fileno()), str(os.getpid()), *arguments]
    output = None if log is None else log.open("ab")
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            pass_fds=(theirs.fileno(), *pass_fds),
            start_new_session=True,
        )
    finally:
        theirs.close()
        if output is not None:
            output.close()
    return process, Connection(ours.detach())


def leave_signals_to_parent() -> None:
    """What asks a job to stop is for the trainer, which still needs its children while it saves."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Handlers, because programs that a child starts would inherit that it ignores them.
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, lambda *_: None)


def run_child(entry: str, descriptor: str, parent: str, *arguments: str) -> None:
    """What a child does first; see ``start_child``."""
    die_with_parent(int(parent))
    leave_signals_to_parent()
    module, _, function = entry.partition(":")
    getattr(importlib.import_module(module), function)(Connection(int(descriptor)), *arguments)


def log_tail(path: Path, lines: int = 15) -> str:
    """Last lines of a log, for an error message."""
    if not path.exists():
        return "(no log)"
    return "\n".join(path.read_text(errors="replace").splitlines()[-lines:]) or "(empty log)"
