"""A pool of local ranks: processes of one thread each that join one gloo process group after another.

Starting a rank costs seconds (imports), making a process group milliseconds: many layouts share one pool.

Invariants (``tests/integration/test_layouts.py``):

1. Every wait has a deadline; a rank that fails or dies is an error with its traceback, and the pool is closed.
2. No port is asked for: ranks find each other through a file.
3. Every call has a process group of its own, and what the one before made is freed: the threads and sockets of a few
   dozen layouts' groups would be thousands, and then a group no longer comes up.
"""

from __future__ import annotations

import gc
import importlib
import os
import time
import traceback
from multiprocessing.connection import Connection, wait
from pathlib import Path
from subprocess import Popen
from types import TracebackType
from typing import Any

from megatron_ext.process import log_tail, start_child

ENTRY = "launch.benches._ranks:serve"


class RankError(RuntimeError):
    """A rank failed, died or did not answer in time."""


class RankPool:
    """``size`` ranks; a call runs on the first ``world`` of them. A context manager.

    ``folder`` takes their logs and the files through which they meet. Each rank imports the module ``preload`` first,
    and calls on few ranks begin while the others still do.
    """

    def __init__(self, size: int, folder: Path, preload: str, deadline_s: float = 600.0) -> None:
        self.size, self.folder, self._deadline_s = size, folder, deadline_s
        self._world = self._worlds = 0
        self._ranks: list[tuple[Popen[bytes], Connection]] = []
        for rank in range(self.size):
            self._ranks.append(start_child(ENTRY, str(rank), preload, log=self._log(rank)))

    def call(self, entry: str, *arguments: Any, world: int) -> list[Any]:
        """What ``entry`` ("package.module:function") returned on each of ``world`` ranks, in order.

        Called with ``arguments``, which are pickled as are the results, inside a process group of ``world`` ranks.
        """
        if not 1 <= world <= self.size:
            raise ValueError(f"a call on {world} ranks, the pool has {self.size}")
        self._worlds += 1
        concerned = range(max(world, self._world))
        self._world = world
        self._ask(concerned, "join", world, str(self.folder / f"world-{self._worlds}"))
        return self._ask(range(world), "call", entry, arguments)

    def _ask(self, ranks: range, *message: Any) -> list[Any]:
        deadline = time.monotonic() + self._deadline_s
        replies: dict[int, Any] = {}
        try:
            for rank in ranks:
                self._ranks[rank][1].send(message)
            waiting = {self._ranks[rank][1]: rank for rank in ranks}
            while waiting:
                ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
                if not ready:
                    raise RankError(f"ranks {sorted(waiting.values())} did not answer in {self._deadline_s:g} s")
                for connection in ready:
                    assert isinstance(connection, Connection)
                    rank = waiting.pop(connection)
                    ok, replies[rank] = connection.recv()
                    if not ok:
                        raise RankError(f"rank {rank} failed:\n{replies[rank]}")
        except (EOFError, OSError) as error:
            dead = [rank for rank, (process, _) in enumerate(self._ranks) if process.poll() is not None]
            self.close()
            tails = "\n".join(f"rank {rank}: {log_tail(self._log(rank))}" for rank in dead)
            raise RankError(f"ranks {dead} died ({error!r})\n{tails}") from None
        except RankError:
            self.close()
            raise
        return [replies[rank] for rank in ranks]

    def _log(self, rank: int) -> Path:
        return self.folder / f"rank-{rank}.log"

    def close(self) -> None:
        """Ends the ranks; a second call does nothing."""
        for process, connection in self._ranks:
            connection.close()
            process.kill()
            process.wait()
        self._ranks = []

    def __enter__(self) -> RankPool:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def serve(connection: Connection, rank: str, preload: str) -> None:
    """What a rank does: joins process groups and runs calls until the pool goes away."""
    # gloo asks the resolver for this machine's address unless it is told; ranks of a pool are on one machine.
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    importlib.import_module(preload)
    while True:
        try:
            kind, *message = connection.recv()
        except EOFError:
            return
        try:
            if kind == "join":
                world, store = message
                if dist.is_initialized():
                    dist.destroy_process_group()
                if int(rank) < world:
                    dist.init_process_group(
                        "gloo", store=dist.FileStore(store, world), rank=int(rank), world_size=world
                    )
                reply: Any = None
            else:
                entry, arguments = message
                module, _, function = entry.partition(":")
                reply = getattr(importlib.import_module(module), function)(*arguments)
            connection.send((True, reply))
        except Exception:
            connection.send((False, traceback.format_exc()))
        gc.collect()  # a model is a circle of references, and its groups' threads go with it
