"""A stand-in for the service behind a model judge: a real HTTP server on the loopback that speaks the chat-completion
shape. A script says what it answers to each request."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass(frozen=True)
class Say:
    """What to answer: the text of a chat completion, or a ``body`` as it is. ``after_s`` waits before it; ``drip_s``
    sends the body byte by byte, with this pause between two."""

    text: str = "D"
    status: int = 200
    body: bytes | None = None
    after_s: float = 0.0
    drip_s: float = 0.0


Script = Callable[[int, Mapping[str, Any]], Say]
"""(number of the request, its body) -> the answer. Called from several threads."""


@dataclass
class JudgeServer:
    """``requests`` holds the bodies as they came, ``headers`` theirs; ``most`` is how many were open at a time."""

    script: Script
    base_url: str = ""
    requests: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    most: int = 0
    _open: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def answer(self, path: str, headers: Mapping[str, str], body: bytes) -> Say:
        with self._lock:
            number = len(self.requests)
            self.requests.append(json.loads(body))
            self.headers.append(dict(headers))
            self.paths.append(path)
            self._open += 1
            self.most = max(self.most, self._open)
        try:
            say = self.script(number, self.requests[number])
            time.sleep(say.after_s)
            return say
        finally:
            with self._lock:
                self._open -= 1

    def prompts(self) -> list[str]:
        return [request["messages"][-1]["content"] for request in self.requests]


@contextmanager
def judge_server(script: Script) -> Iterator[JudgeServer]:
    server = JudgeServer(script)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            say = server.answer(self.path, dict(self.headers), self.rfile.read(int(self.headers["Content-Length"])))
            message = {"role": "assistant", "content": say.text}
            body = (
                json.dumps({"choices": [{"index": 0, "message": message}]}).encode() if say.body is None else say.body
            )
            try:
                self.send_response(say.status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                for piece in (body[i : i + 1] for i in range(len(body))) if say.drip_s else (body,):
                    self.wfile.write(piece)
                    self.wfile.flush()
                    time.sleep(say.drip_s)
            except OSError:  # the judge gave up waiting, which is what some tests are about
                self.close_connection = True

        def log_message(self, *args: object) -> None:
            pass

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    http.daemon_threads = True
    server.base_url = f"http://127.0.0.1:{http.server_address[1]}/v1"
    thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        http.shutdown()
        thread.join(10.0)
        # Handlers that still sleep are daemons: waiting for them would make every test as slow as its slowest answer.
        http.socket.close()
