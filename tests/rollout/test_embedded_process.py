"""The embedded engine as a process: who may talk to it, and what is said when it dies, hangs or never comes up."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from multiprocessing.connection import wait
from pathlib import Path

import numpy as np
import pytest

from megatron_ext.rollout.embedded.client import EmbeddedClient
from megatron_ext.rollout.embedded.engine import EmbeddedEngine
from megatron_ext.rollout.engine import EngineError
from tests.helpers.engines import MOE, Twin, ask, prompt, request

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedEngine]:
    log = tmp_path_factory.mktemp("process") / "sub" / "engine.log"
    with EmbeddedEngine(hf_config=MOE.to_dict(), max_context=64, threads=1, slots=4, log_path=log) as started:
        started.publish(Twin(MOE, 1).tensors(), 1)
        yield started


def alive(pid: int) -> bool:
    """Whether the process runs (a zombie, which nobody has waited for yet, does not)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_the_driver_side_imports_no_torch(root: Path) -> None:
    code = (
        "import sys, megatron_ext.rollout.embedded.client, megatron_ext.rollout.embedded.wire, "
        "megatron_ext.rollout.embedded.engine; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], cwd=root, check=True, timeout=300)


def test_killing_the_trainer_ends_the_engine(tmp_path: Path, root: Path) -> None:
    code = (
        "import json, sys, time\n"
        "from pathlib import Path\n"
        "from megatron_ext.rollout.embedded.engine import EmbeddedEngine\n"
        "config, log = json.loads(sys.argv[1]), Path(sys.argv[2])\n"
        "engine = EmbeddedEngine(hf_config=config, max_context=64, threads=1, log_path=log)\n"
        "print(engine.pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    arguments = [sys.executable, "-c", code, json.dumps(MOE.to_dict()), str(tmp_path / "engine.log")]
    with subprocess.Popen(arguments, cwd=root, stdout=subprocess.PIPE, text=True) as trainer:
        assert trainer.stdout is not None
        pid = int(trainer.stdout.readline())
        assert alive(pid)
        trainer.kill()
    deadline = time.monotonic() + 60
    while alive(pid):
        assert time.monotonic() < deadline, "the engine outlived its trainer"
        time.sleep(0.02)


def test_a_client_without_the_key_is_refused(engine: EmbeddedEngine) -> None:
    with pytest.raises(EngineError, match=f"pid {engine.pid}.*handshake"):
        replace(engine.connect(), key=b"not the key").open()
    assert engine.version() == 1
    assert engine.connect().key.hex() not in repr(engine.connect())


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_what_asks_to_stop_is_left_to_the_trainer(engine: EmbeddedEngine, number: signal.Signals) -> None:
    os.kill(engine.pid, number)
    time.sleep(0.1)
    assert engine.health().version == 1


@pytest.mark.slow
def test_a_hanging_engine_is_named_and_may_come_back(engine: EmbeddedEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    client = engine.connect().open()
    os.kill(engine.pid, signal.SIGSTOP)
    try:
        # Only while it hangs: what the engine does otherwise may take as long as a loaded machine needs.
        monkeypatch.setattr(engine, "_timeout", 0.5)
        monkeypatch.setattr(client, "_stall", 0.5)
        start = time.monotonic()
        with pytest.raises(EngineError, match=rf"pid {engine.pid}.*'health'.*hangs"):
            engine.version()
        client.submit([request("r", np.array([1, 2], dtype=np.int32))])
        with pytest.raises(EngineError, match=rf"pid {engine.pid}.*1 request.*hangs"):
            client.poll(30.0)
        with pytest.raises(EngineError, match=rf"pid {engine.pid}.*handshake"):
            EmbeddedClient(engine.connect(), stall_timeout=0.5)
        assert time.monotonic() - start < 25, "long before the 30 s that were allowed"
    finally:
        monkeypatch.undo()
        os.kill(engine.pid, signal.SIGCONT)
    assert engine.version() == 1, "the late answer to the first call is passed over"
    assert [r.request_id for r in client.poll(60.0)] == ["r"]
    assert client.poll(0.0) == []
    client.close()


def test_an_idle_engine_is_not_taken_for_a_hanging_one(engine: EmbeddedEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    client = engine.connect().open()  # a handshake may take longer
    monkeypatch.setattr(client, "_stall", 0.1)
    assert client.poll(0.5) == []
    client.close()


def test_handles_become_readable_with_the_results(engine: EmbeddedEngine) -> None:
    client = engine.connect().open()
    assert wait(client.handles(), 0.0) == []
    client.submit([request("w", prompt(np.random.default_rng(0), 4))])
    assert wait(client.handles(), 60.0) == client.handles()
    assert len(client.poll(0.0)) == 1
    client.close()


def test_a_process_that_does_not_come_up_says_why(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="(?s)exit status 1.*engine.log.*nonsense"):
        EmbeddedEngine(
            hf_config=MOE.to_dict(), max_context=64, threads=1, device="nonsense", log_path=tmp_path / "engine.log"
        )


def test_bad_settings_fail_before_anything_starts() -> None:
    with pytest.raises(EngineError, match="max_context"):
        EmbeddedEngine(hf_config=MOE.to_dict(), max_context=9999, threads=1)
    with pytest.raises(EngineError, match="threads 0"):
        EmbeddedEngine(hf_config=MOE.to_dict(), max_context=64, threads=0)


def test_a_dead_engine_is_named_with_its_log(engine: EmbeddedEngine) -> None:  # the last: it ends the engine
    client = engine.connect().open()
    assert len(ask(client, [request("before", np.array([1], dtype=np.int32))])) == 1
    os.kill(engine.pid, signal.SIGKILL)
    with pytest.raises(EngineError, match=rf"(?s)pid {engine.pid}\) was killed by SIGKILL.*Log.*ends"):
        engine.version()
    with pytest.raises(EngineError, match="SIGKILL"):
        engine.publish(Twin(MOE, 2).tensors(), 2)
    with pytest.raises(EngineError, match=rf"(?s)pid {engine.pid}.*died.*{engine.log_path}"):
        client.poll(60.0)
    with pytest.raises(EngineError, match="does not listen"):
        engine.connect().open()
    engine.close()
    engine.close()
