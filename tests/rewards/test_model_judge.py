"""A model as judge (``megatron_ext/rewards/model_judge.py``), over a real HTTP server that plays the remote service."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from megatron_ext.rewards.judge import Exchange, JudgeView, Verdict
from megatron_ext.rewards.model_judge import ModelJudge
from tests.helpers.judge_server import JudgeServer, Say, Script, judge_server

LABELS = {"D": "decisive", "N": "nothing"}


def views(count: int, first: int = 0) -> list[JudgeView]:
    opening = Exchange("", "find it")
    return [JudgeView(0, "find it", (), Exchange(f"go {t}", "ok"), (), opening) for t in range(first, first + count)]


Make = Callable[..., tuple[ModelJudge, JudgeServer]]


@pytest.fixture
def make() -> Iterator[Make]:
    with ExitStack() as stack:

        def build(script: Script = lambda number, body: Say(), **changes: Any) -> tuple[ModelJudge, JudgeServer]:
            server = stack.enter_context(judge_server(script))
            settings: dict[str, Any] = {"backoff_s": 0.01, "timeout_s": 60.0, "deadline_s": 60.0}
            judge = ModelJudge(server.base_url, "judge-7b", **(settings | changes))
            stack.callback(judge.close)
            return judge, server

        yield build


def test_a_request_and_its_answer(make: Make) -> None:  # invariant 1
    judge, server = make(
        lambda number, body: Say('{"label": "D", "reason": "opened it", "score": 1}'), extra={"top_k": 1}, seed=3
    )
    verdicts = judge(views(1), LABELS)
    assert verdicts == [Verdict(label="D", score=1.0, reason="opened it", calls=1)]
    (sent,) = server.requests
    assert server.paths == ["/v1/chat/completions"] and "Authorization" not in server.headers[0]
    assert {key: value for key, value in sent.items() if key != "messages"} == {
        "model": "judge-7b",
        "temperature": 0.0,
        "max_tokens": 256,
        "seed": 3,
        "top_k": 1,
    }
    assert [message["role"] for message in sent["messages"]] == ["system", "user"]
    assert "> go 0\nok" in sent["messages"][1]["content"] and "- D: decisive" in sent["messages"][1]["content"]


def test_verdicts_stand_in_the_order_of_the_views(make: Make) -> None:
    def script(number: int, body: Any) -> Say:
        at = int(body["messages"][-1]["content"].split("> go ")[1].split("\n")[0])
        return Say(f"label {at}", after_s=0.02 * (7 - at))

    judge, _ = make(script, concurrency=8)
    assert [verdict.reason for verdict in judge(views(8), LABELS)] == [f"label {t}" for t in range(8)]
    assert judge([], LABELS) == []


def test_start_returns_at_once_and_concurrency_holds(make: Make) -> None:  # invariant 2
    gate = threading.Event()

    def script(number: int, body: Any) -> Say:
        gate.wait(60.0)
        return Say(after_s=0.05)

    judge, server = make(script, concurrency=3)
    one, other = judge.start(views(5), LABELS), judge.start(views(4, 5), LABELS)
    while len(server.requests) < 3:
        time.sleep(0.01)
    assert not one.done() and not other.done()
    gate.set()
    verdicts = [*one.result(60.0), *other.result(60.0)]
    assert all(verdict == Verdict(label="D", calls=1) for verdict in verdicts) and len(verdicts) == 9
    assert server.most == 3


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        (Say(status=500, body=b"out of\nmemory"), "status 500: out of memory"),
        (Say(status=429, body=b"slow down"), "status 429: slow down"),
        (Say(body=b"<html>not json</html>"), "the body is no chat completion"),
        (Say(body=b'{"choices": []}'), "the body is no chat completion"),
        (Say(body=b"[]"), "the body is no chat completion"),
        (Say(body=b"\xff\xfe"), "the body is no chat completion"),
        (Say(body=b'{"choices": [{"message": {"content": null}}]}'), "the answer holds no text"),
        (Say(text="  "), "the answer holds no text"),
    ],
)
def test_no_answer_is_tried_again(make: Make, bad: Say, why: str) -> None:  # invariant 3
    judge, server = make(lambda number, body: bad if number < 2 else Say("N"), attempts=3)
    assert judge(views(1), LABELS) == [Verdict(label="N", calls=3)]
    judge, server = make(lambda number, body: bad, attempts=2)
    (verdict,) = judge(views(1), LABELS)
    assert verdict.calls == len(server.requests) == 2
    assert verdict.failed == f"{server.base_url}/chat/completions: {why} (2 tries)"


def test_a_refused_request_is_not_tried_again(make: Make) -> None:  # invariant 3
    judge, server = make(lambda number, body: Say(status=400, body=b"no such model"))
    (verdict,) = judge(views(1), LABELS)
    assert "status 400: no such model" in verdict.failed and verdict.calls == len(server.requests) == 1


def test_slow_and_dripping_answers_time_out(make: Make) -> None:  # invariant 3
    # A loaded machine may be late with the second answer too: there are tries left for that.
    often = {"timeout_s": 0.3, "attempts": 100, "backoff_s": 0.0}
    for slow in (Say(after_s=30.0), Say(drip_s=0.2)):
        judge, _ = make(lambda number, body, slow=slow: slow if number == 0 else Say("N"), **often)
        (verdict,) = judge(views(1), LABELS)
        assert verdict.label == "N" and verdict.calls >= 2
    judge, _ = make(lambda number, body: Say(after_s=30.0), timeout_s=0.2, attempts=1)
    assert "no answer within 0.2 s" in judge(views(1), LABELS)[0].failed


def test_a_refused_connection() -> None:  # invariant 3
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound and not listening: nobody else gets it
        judge = ModelJudge(f"http://127.0.0.1:{taken.getsockname()[1]}/v1", "m", attempts=2, backoff_s=0.01)
        (verdict,) = judge(views(1), LABELS)
        judge.close()
    assert "ConnectError" in verdict.failed and "(2 tries)" in verdict.failed and verdict.calls == 2


def test_the_deadline_bounds_everything(make: Make) -> None:  # invariant 2
    """Queued questions count too, and those that were answered in time keep their answer."""
    judge, server = make(lambda number, body: Say(after_s=0.0 if number < 3 else 30.0), deadline_s=1.0, concurrency=1)
    judge(views(1, 9), LABELS)  # the connection stands before the time runs
    began = time.monotonic()
    verdicts = judge(views(4), LABELS)
    assert time.monotonic() - began < 20.0
    assert [verdict.label for verdict in verdicts] == ["D", "D", "", ""]
    assert all("no answer within 1 s" in verdict.failed for verdict in verdicts[2:])
    assert [verdict.calls for verdict in verdicts] == [1, 1, 1, 0] and len(server.requests) == 4


def test_backoff_doubles(make: Make) -> None:
    came: list[float] = []

    def script(number: int, body: Any) -> Say:
        came.append(time.monotonic())
        return Say(status=503, body=b"")

    judge, _ = make(script, attempts=3, backoff_s=0.15)
    judge(views(1), LABELS)
    assert came[1] - came[0] >= 0.15 and came[2] - came[1] >= 0.3


def test_answers_are_kept_and_bounded(make: Make) -> None:  # invariant 4
    judge, server = make(lambda number, body: Say(status=400) if number == 0 else Say(f"{number}"), cache=2)
    said = []
    for at in (0, 0, 0, 1, 2, 0, 2):
        (verdict,) = judge(views(1, at), LABELS)
        said.append((verdict.reason, verdict.calls, bool(verdict.failed)))
    # A failure is not kept; 0 is asked again when 1 and 2 have pushed it out.
    assert said == [
        ("", 1, True),
        ("1", 1, False),
        ("1", 0, False),
        ("2", 1, False),
        ("3", 1, False),
        ("4", 1, False),
        ("3", 0, False),
    ]
    judge, server = make(cache=0)
    judge(views(1), LABELS)
    judge(views(1), LABELS)
    assert len(server.requests) == 2


def test_labels_belong_to_the_request(make: Make) -> None:
    judge, server = make()
    judge(views(1), LABELS)
    judge(views(1), {"X": "other"})
    assert len(server.requests) == 2 and server.prompts()[0] != server.prompts()[1]


def test_close_gives_up_and_ends_the_thread(make: Make) -> None:  # invariant 5
    before = threading.active_count()
    with judge_server(lambda number, body: Say(after_s=30.0)) as server:
        judge = ModelJudge(server.base_url, "m", concurrency=1)
        future = judge.start(views(2), LABELS)
        while not server.requests:
            time.sleep(0.01)
        judge.close()
        assert all("the judge was closed" in verdict.failed for verdict in future.result(60.0))
        judge.close()  # once more does nothing
        assert not any(thread.name == "judge" for thread in threading.enumerate())
    assert threading.active_count() <= before + 1  # the server's handler may still sleep


def test_a_key_is_read_from_its_file(make: Make, tmp_path: Path) -> None:
    (tmp_path / "key").write_text("not-a-real-key\n")
    judge, server = make(api_key_file=str(tmp_path / "key"))
    judge(views(1), LABELS)
    assert server.headers[0]["Authorization"] == "Bearer not-a-real-key"


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"base_url": "host:30000"}, "base_url='host:30000'"),
        ({"base_url": "ftp://host/v1"}, "needs an address such as"),
        ({"base_url": "http://[::1"}, "base_url="),
        ({"attempts": 0}, "attempts=0"),
        ({"concurrency": 0}, "concurrency=0"),
        ({"timeout_s": 0.0}, "timeout_s=0.0"),
        ({"deadline_s": -1.0}, "deadline_s=-1.0"),
        ({"backoff_s": -1.0}, "backoff_s=-1.0"),
        ({"cache": -1}, "cache=-1"),
        ({"template": "{step}"}, "no field {step}"),
        ({"extra": {"temperature": 1.0}}, "extra: temperature cannot be set there"),
        ({"extra": {"stream": True}}, "extra: stream"),
        ({"api_key_file": "/no/such/key"}, "no such file"),
    ],
)
def test_bad_settings_are_named(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        ModelJudge(**({"base_url": "http://host:1/v1", "model": "m"} | changes))
