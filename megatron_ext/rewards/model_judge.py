"""A judge that is a model behind an OpenAI-compatible address (``POST <base_url>/chat/completions``).

Invariants (``tests/rewards/test_model_judge.py`` asserts each against a real HTTP server):

1. A request holds the view, as ``judge_prompt`` writes it, and the configuration: equal views give equal bytes.
2. ``start`` returns at once; all verdicts are there within ``deadline_s``, queueing and retries included. At most
   ``concurrency`` requests are out at a time.
3. No answer (refused connection, 408, 429, 5xx, a time-out, a body of another shape, no text) is tried again,
   ``attempts`` times in all; any other status is not. What stays without an answer is a verdict that failed, with why.
4. A request that was answered is not sent again as long as its answer is among the last ``cache`` ones; only answers
   are kept.
5. ``close`` ends thread and connections; what is still asked then fails.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx

from megatron_ext.rewards.judge import JudgeView, Verdict
from megatron_ext.rewards.judge_prompt import SYSTEM, TEMPLATE, check_template, fill, read_answer

AGAIN = frozenset({408, 429, 500, 502, 503, 504, 529})
"""Status codes after which a server may answer the same request."""
QUESTION = "question"
"""Name of the tasks that ``close`` cancels; what waits for them then ends by itself."""


class _NoAnswer(Exception):
    """Why an attempt gave no answer; ``again`` if another may."""

    def __init__(self, why: str, again: bool = True) -> None:
        super().__init__(why)
        self.again = again


@dataclass
class _Worker:
    """The thread whose event loop does the waiting, and what lives in it. ``client`` is made there, at the first
    question: reading certificates takes long enough to hold up who asks."""

    thread: threading.Thread
    loop: asyncio.AbstractEventLoop
    slots: asyncio.Semaphore
    client: httpx.AsyncClient | None = None


class ModelJudge:
    """Asks a model about every view. Its thread starts with the first question and ends with ``close``."""

    def __init__(
        self,
        base_url: str,
        model: str,
        *,
        template: str = TEMPLATE,
        system: str = SYSTEM,
        max_tokens: int = 256,
        temperature: float = 0.0,
        seed: int = 0,
        extra: Mapping[str, Any] | None = None,
        api_key_file: str | None = None,
        attempts: int = 3,
        backoff_s: float = 1.0,
        timeout_s: float = 60.0,
        deadline_s: float = 300.0,
        concurrency: int = 32,
        cache: int = 4096,
    ) -> None:
        """
        Args:
            base_url: up to and without ``/chat/completions``, such as ``http://host:30000/v1``.
            model: the name the server knows the model by.
            template: the user's message, with the fields of ``judge_prompt.FIELDS``.
            system: the system message; "" sends none.
            max_tokens: of an answer.
            temperature, seed: sent as they are.
            extra: further keys of the request body (``chat_template_kwargs``, ``response_format``).
            api_key_file: a file with a bearer token; null sends none.
            attempts: tries of one question.
            backoff_s: wait after the first failed try, doubled after each further one.
            timeout_s: of one try.
            deadline_s: for all questions of one episode together; what is open then has no answer.
            concurrency: requests out at a time.
            cache: answers kept; 0 keeps none.

        Raises:
            ValueError: an address without http(s), a limit out of range, a template that does not fit, no key file.
        """
        try:
            url = httpx.URL(base_url)
        except httpx.InvalidURL as error:
            raise ValueError(f"base_url={base_url!r}: {error}") from error
        if url.scheme not in ("http", "https") or not url.host:
            raise ValueError(f"base_url={base_url!r}: needs an address such as http://host:30000/v1")
        limits = {"max_tokens": max_tokens, "attempts": attempts, "concurrency": concurrency}
        for name, whole in limits.items():
            if whole < 1:
                raise ValueError(f"{name}={whole}: must be >= 1")
        for name, seconds in {"timeout_s": timeout_s, "deadline_s": deadline_s}.items():
            if not seconds > 0:
                raise ValueError(f"{name}={seconds}: must be > 0")
        for name, number in {"backoff_s": backoff_s, "cache": cache, "temperature": temperature}.items():
            if not number >= 0:
                raise ValueError(f"{name}={number}: must be >= 0")
        if api_key_file is not None and not Path(api_key_file).is_file():
            raise ValueError(f"api_key_file={api_key_file}: no such file")
        check_template(template)
        body = {"model": model, "temperature": temperature, "max_tokens": max_tokens, "seed": seed}
        both = sorted({*body, "messages", "stream"} & set(extra or {}))
        if both:
            raise ValueError(f"extra: {', '.join(both)} cannot be set there")
        self._body = {**body, **(extra or {})}
        self._url = base_url.rstrip("/") + "/chat/completions"
        self._template, self._system = template, system
        self._key_file = api_key_file
        self._attempts, self._backoff_s = attempts, backoff_s
        self._timeout_s, self._deadline_s = timeout_s, deadline_s
        self._concurrency, self._kept = concurrency, cache
        self._cache: OrderedDict[str, str] = OrderedDict()
        self._lock = threading.Lock()
        self._worker: _Worker | None = None

    @property
    def deadline_s(self) -> float:
        return self._deadline_s

    def request(self, view: JudgeView, labels: Mapping[str, str]) -> bytes:
        """The body sent for a view."""
        messages = [{"role": "user", "content": fill(self._template, view, labels)}]
        if self._system:
            messages.insert(0, {"role": "system", "content": self._system})
        return json.dumps({**self._body, "messages": messages}, sort_keys=True, ensure_ascii=False).encode()

    def __call__(self, views: Sequence[JudgeView], labels: Mapping[str, str]) -> Sequence[Verdict]:
        return self.start(views, labels).result()

    def start(self, views: Sequence[JudgeView], labels: Mapping[str, str]) -> Future[Sequence[Verdict]]:
        with self._lock:
            if self._worker is None:
                self._worker = self._open()
            worker = self._worker
            return asyncio.run_coroutine_threadsafe(self._ask_all(worker, list(views), dict(labels)), worker.loop)

    def close(self) -> None:
        """Gives up what is still asked (those verdicts fail) and ends the thread."""
        with self._lock:
            worker, self._worker = self._worker, None
        if worker is not None:
            asyncio.run_coroutine_threadsafe(_end(worker), worker.loop).result(30.0)
            worker.loop.call_soon_threadsafe(worker.loop.stop)
            worker.thread.join(30.0)
            worker.loop.close()

    def _open(self) -> _Worker:
        loop = asyncio.new_event_loop()
        thread = threading.Thread(target=loop.run_forever, name="judge", daemon=True)
        thread.start()
        return _Worker(thread, loop, asyncio.Semaphore(self._concurrency))

    # -- in the worker's thread -----------------------------------------------------------------------------------
    def _connect(self) -> httpx.AsyncClient:
        headers = {"Content-Type": "application/json"}
        if self._key_file is not None:
            headers["Authorization"] = f"Bearer {Path(self._key_file).read_text().strip()}"
        return httpx.AsyncClient(
            headers=headers,
            timeout=self._timeout_s,
            limits=httpx.Limits(max_connections=self._concurrency, max_keepalive_connections=self._concurrency),
            trust_env=False,  # proxies of the shell would steer where episodes are sent
        )

    async def _ask_all(self, worker: _Worker, views: Sequence[JudgeView], labels: Mapping[str, str]) -> list[Verdict]:
        if not views:
            return []
        if worker.client is None:
            worker.client = self._connect()
        tries = [0] * len(views)
        tasks = [
            asyncio.create_task(self._ask(worker, worker.client, view, labels, tries, at), name=QUESTION)
            for at, view in enumerate(views)
        ]
        try:
            await asyncio.wait(tasks, timeout=self._deadline_s)
        finally:
            late = {task for task in tasks if not task.done()}
            for task in late:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        return [self._verdict(task, calls) for task, calls in zip(tasks, tries, strict=True)]

    def _verdict(self, task: asyncio.Task[Verdict], calls: int) -> Verdict:
        if task.cancelled():
            closed = "" if self._worker is not None else " (the judge was closed)"
            return Verdict(failed=f"{self._url}: no answer within {self._deadline_s:g} s{closed}", calls=calls)
        error = task.exception()
        if isinstance(error, _NoAnswer):
            return Verdict(failed=f"{self._url}: {error}", calls=calls)
        if error is not None:
            raise error
        return replace(task.result(), calls=calls)

    async def _ask(
        self,
        worker: _Worker,
        client: httpx.AsyncClient,
        view: JudgeView,
        labels: Mapping[str, str],
        tries: list[int],
        at: int,
    ) -> Verdict:
        """The verdict on one view; counts its requests in ``tries[at]``. Raises ``_NoAnswer``."""
        body = self.request(view, labels)
        digest = hashlib.sha256(body).hexdigest()
        async with worker.slots:
            text = self._cache.get(digest)
            if text is not None:
                self._cache.move_to_end(digest)
                return read_answer(text, labels)
            text = await self._answer(client, body, tries, at)
        if self._kept:
            self._cache[digest] = text
            while len(self._cache) > self._kept:
                self._cache.popitem(last=False)
        return read_answer(text, labels)

    async def _answer(self, client: httpx.AsyncClient, body: bytes, tries: list[int], at: int) -> str:
        for attempt in range(self._attempts):
            if attempt:
                await asyncio.sleep(self._backoff_s * 2 ** (attempt - 1))
            tries[at] += 1
            try:
                return await self._send(client, body)
            except _NoAnswer as error:
                if not error.again:
                    raise
                last = error
        raise _NoAnswer(f"{last} ({self._attempts} tries)")

    async def _send(self, client: httpx.AsyncClient, body: bytes) -> str:
        """The text that the server answers with."""
        try:
            # The client's own time-out is for each read: a server that drips would never meet it.
            response = await asyncio.wait_for(client.post(self._url, content=body), self._timeout_s)
        except (TimeoutError, httpx.TimeoutException):
            raise _NoAnswer(f"no answer within {self._timeout_s:g} s") from None
        except (httpx.TransportError, httpx.DecodingError) as error:
            raise _NoAnswer(f"{type(error).__name__}: {error}") from error
        if response.status_code != 200:
            said = " ".join(response.text[:200].split())
            raise _NoAnswer(f"status {response.status_code}: {said}", response.status_code in AGAIN)
        try:
            text = response.json()["choices"][0]["message"]["content"]
        except (ValueError, LookupError, TypeError, RecursionError):
            raise _NoAnswer("the body is no chat completion") from None
        if not isinstance(text, str) or not text.strip():
            raise _NoAnswer("the answer holds no text")
        return text


async def _end(worker: _Worker) -> None:
    """Ends the questions still open, and the connections."""
    current = asyncio.current_task()
    while others := asyncio.all_tasks() - {current}:
        for task in others:
            if task.get_name() == QUESTION:
                task.cancel()
        await asyncio.wait(others, timeout=0.05)
    if worker.client is not None:
        await worker.client.aclose()
