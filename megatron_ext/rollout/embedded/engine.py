"""The trainer's side of the embedded engine: starts the process, publishes weights, puts it to sleep, ends it.

Invariants (``tests/rollout/test_engine_contract.py``, ``test_embedded_process.py``):

1. ``publish`` returns when the new weights are being served; when it raises, the old ones still are.
2. Every call has a deadline; an engine that died or hangs is an ``EngineError`` with its pid, exit status and log.
3. The engine does not outlive the trainer, however that ends.

The process is started with ``subprocess`` rather than ``multiprocessing``: spawning would import the trainer's main
module again, Megatron and all.
"""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from megatron_ext.rollout.embedded.served import read_config
from megatron_ext.rollout.embedded.wire import Address, Channel, try_connect
from megatron_ext.rollout.engine import EngineError

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Health:
    """State of an engine: policy ``version`` (-1 before the first publish), requests ``running`` and ``waiting``,
    ``idle_sessions`` that keep a cache."""

    version: int
    asleep: bool
    running: int
    waiting: int
    idle_sessions: int


class EmbeddedEngine:
    """``EngineControl`` of an embedded engine in a process of its own.

    Start it from a thread that lives as long as the engine should: the kernel ties the engine to that thread.

    Args:
        hf_config: dict of an HF ``config.json`` (Qwen3-MoE or Qwen3).
        max_context: tokens of prompt and output together.
        threads: CPU threads of large forwards (see ``model.THREADED_WORK``).
        slots: sessions that hold a cache at once; requests beyond wait.
        log_path: file that takes the process's output; None makes one in a temporary folder.
        start_timeout: seconds to wait until the engine listens.
        call_timeout: seconds for any other call but ``publish``.
        device: torch device of weights and cache.
        batch_invariant: a request's tokens and log-probs do not depend, to the last bit, on what runs beside it.
            Slower; CPU only, and float32 only.
        dtype: float32, or bfloat16: weights are rounded to it and layers compute in it; the router's scores, norms and
            logits stay fp32.

    Raises:
        EngineError: a configuration that cannot be served, or a process that did not come up.
    """

    def __init__(
        self,
        *,
        hf_config: Mapping[str, Any],
        max_context: int,
        threads: int,
        slots: int = 128,
        log_path: Path | None = None,
        start_timeout: float = 120.0,
        call_timeout: float = 60.0,
        device: str = "cpu",
        batch_invariant: bool = False,
        dtype: str = "float32",
    ) -> None:
        config = read_config(hf_config, max_context)
        if batch_invariant and device != "cpu":
            raise EngineError(f"embedded engine: batch_invariant=true needs device=cpu, got {device}")
        if dtype not in ("float32", "bfloat16"):
            raise EngineError(f"embedded engine: dtype={dtype} must be float32 or bfloat16")
        if batch_invariant and dtype != "float32":
            raise EngineError(f"embedded engine: batch_invariant=true needs dtype=float32, got {dtype}")
        if threads < 1 or slots < 1:
            raise EngineError(f"embedded engine: threads {threads} and slots {slots} must be at least 1")
        if log_path is None:
            log_path = Path(tempfile.mkdtemp(prefix="embedded-engine-")) / "engine.log"
        log_path.parent.mkdir(parents=True, exist_ok=True)
        self._timeout, self._call = call_timeout, 0
        settings = {
            "parent": os.getpid(),
            "socket_name": f"megatron-ext-engine-{secrets.token_hex(8)}",
            "key": secrets.token_hex(32),
            "hf_config": dict(hf_config),
            "max_context": max_context,
            "slots": slots,
            "threads": threads,
            "device": device,
            "batch_invariant": batch_invariant,
            "dtype": dtype,
        }
        with log_path.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "megatron_ext.rollout.embedded.process"],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=_environment(threads),
            )
        self._address = Address(
            socket=str(settings["socket_name"]),
            key=bytes.fromhex(str(settings["key"])),
            pid=self._process.pid,
            log=log_path,
            max_context=max_context,
            vocab=config.vocab,
        )
        try:
            assert self._process.stdin is not None
            with self._process.stdin as stdin:
                stdin.write(json.dumps(settings).encode())
            self._channel = self._wait_until_ready(start_timeout)
        except BaseException:
            self._process.kill()
            self._process.wait()
            raise

    # -- EngineControl ---------------------------------------------------------------------------------------------
    def publish(self, tensors: Iterable[tuple[str, torch.Tensor]], version: int, timeout: float = 600.0) -> None:
        """Streams all weights and returns when they are served. ``version`` must not be below the one being served.

        Raises ``EngineError`` naming the first weight that is missing, unknown, repeated or misshapen; then the weights
        and version served before stay.
        """
        deadline = time.monotonic() + timeout
        call = self._next_call()
        self._send(("publish", call, version))
        try:
            for name, tensor in tensors:
                flat = tensor.detach().cpu().contiguous()
                self._send(("tensor", name, str(flat.dtype).removeprefix("torch."), tuple(flat.shape)))
                self._send_bytes(_bytes(flat))
                if time.monotonic() > deadline:
                    raise self._address.failure(f"did not take all weights in {timeout:g} s (at {name!r})")
        except BaseException:
            self._abandon_publish(call)
            raise
        self._send(("publish_end", call))
        self._answer(call, "publish", deadline)

    def version(self) -> int:
        """Policy version being served; -1 before the first ``publish`` and while asleep."""
        return self.health().version

    def sleep(self) -> None:
        """Aborts running requests and releases cache and weights."""
        self._ask("sleep")

    def wake(self) -> None:
        """Ends the sleep; ``publish`` must follow before anything is generated."""
        self._ask("wake")

    def connect(self) -> Address:
        """Address from which any process of this machine opens its client: ``address.open()``."""
        return self._address

    def pids(self) -> list[int]:
        return [self._process.pid]

    def close(self) -> None:
        """Stops the process. Can be called twice, and on an engine that died."""
        if self._process.poll() is None:
            self._process.kill()  # it has nothing to save
            self._process.wait()
        self._channel.close()

    # -- beyond the protocol ---------------------------------------------------------------------------------------
    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def log_path(self) -> Path:
        return self._address.log

    def health(self) -> Health:
        """Asks the computing thread, so the answer shows that it is alive."""
        return self._ask("health")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- messages --------------------------------------------------------------------------------------------------
    def _wait_until_ready(self, timeout: float) -> Channel:
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            channel = try_connect(self._address, self._timeout)
            if channel is not None:
                return channel
            if self._process.poll() is not None:
                raise self._died()
            time.sleep(0.02)
        raise self._address.failure(f"did not listen within {timeout:g} s of its start")

    def _next_call(self) -> int:
        self._call += 1
        return self._call

    def _ask(self, kind: str) -> Health:
        call = self._next_call()
        self._send((kind, call))
        return self._answer(call, kind, time.monotonic() + self._timeout)

    def _answer(self, call: int, kind: str, deadline: float) -> Health:
        while (left := deadline - time.monotonic()) > 0:
            try:
                message = self._channel.receive(left)
            except EngineError:
                raise self._died() from None
            if message is None or message[1] != call:  # a late answer to a call that had given up
                continue
            if message[0] == "error":
                raise EngineError(f"embedded engine (pid {self.pid}): {message[2]}")
            return Health(*message[2])
        self._process.send_signal(signal.SIGUSR1)  # prints the stacks of its threads to the log
        time.sleep(0.2)
        raise self._address.failure(f"did not answer {kind!r} before its deadline: it hangs")

    def _send(self, message: tuple[Any, ...]) -> None:
        try:
            self._channel.send(message)
        except EngineError:
            raise self._died() from None

    def _send_bytes(self, data: memoryview) -> None:
        try:
            self._channel.send_bytes(data)
        except EngineError:
            raise self._died() from None

    def _abandon_publish(self, call: int) -> None:
        """Tells a living engine to forget the weights it has so far."""
        if self._process.poll() is None:
            self._send(("publish_drop", call))
            self._answer(call, "publish_drop", time.monotonic() + self._timeout)

    def _died(self) -> EngineError:
        """Names how the process ended; a connection that closed gives it a moment to be reaped."""
        try:
            status = self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            return self._address.failure("does not read what is sent to it: it hangs")
        how = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended with exit status {status}"
        return self._address.failure(how)


def _environment(threads: int) -> dict[str, str]:
    """The child imports what this process imports. Its OpenMP threads sleep while they wait: spinning ones would take
    the cores from the environments and the driver, and stall whenever they lose theirs."""
    path = os.pathsep.join(str(Path.cwd()) if entry == "" else entry for entry in sys.path)
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "passive"}


def _bytes(flat: torch.Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor; as bytes, because NumPy has no bfloat16."""
    import torch

    return memoryview(flat.reshape(-1).view(torch.uint8).numpy())
