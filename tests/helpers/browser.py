"""A headless Chromium that a test looks through: opens a page, clicks, reads it, takes a picture of it.

The browser is Debian's (``apt-get install chromium``); it is spoken to over a pipe in its DevTools protocol, so that a
test needs no driver and no port.
"""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
DEADLINE_S = 60.0


class BrowserError(RuntimeError):
    """The browser did not answer, or said no."""


class Page:
    """The one tab. ``problems`` collects exceptions of scripts, console errors and every request but for the page."""

    def __init__(self, to_browser: int, from_browser: int) -> None:
        self._write, self._read = to_browser, from_browser
        self._buffer = b""
        self._count = 0
        self._session: str | None = None
        self.problems: list[str] = []

    # -- the protocol: JSON messages, each ended by a zero byte ------------------------------------------------------
    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """One command and its reply."""
        self._count += 1
        message: dict[str, Any] = {"id": self._count, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        number = self._count
        until = time.monotonic() + DEADLINE_S
        while True:
            got = self._message(until, method)
            if got.get("id") == number:
                if "error" in got:
                    raise BrowserError(f"{method}: {got['error']}")
                result: dict[str, Any] = got["result"]
                return result
            self._event(got)

    def _message(self, until: float, waiting_for: str) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._read], [], [], max(0.0, until - time.monotonic()))
            if not ready:
                raise BrowserError(f"the browser did not answer {waiting_for} within {DEADLINE_S:.0f} s")
            data = os.read(self._read, 1 << 20)
            if not data:
                raise BrowserError(f"the browser ended before it answered {waiting_for}")
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\0")
        message: dict[str, Any] = json.loads(line)
        return message

    def _event(self, event: dict[str, Any]) -> None:
        method, params = event.get("method"), event.get("params", {})
        if method == "Runtime.exceptionThrown":
            self.problems.append(str(params["exceptionDetails"].get("exception", params["exceptionDetails"])))
        elif method == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.problems.append(params["entry"]["text"])
        elif method == "Network.requestWillBeSent" and params["type"] != "Document":
            if params["request"]["url"].startswith("data:"):
                return  # a picture that the page holds itself
            self.problems.append(f"requested {params['request']['url']}")

    def attach(self) -> None:
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    # -- what a test does ---------------------------------------------------------------------------------------------
    def open(self, path: Path, *, width: int = 1280, height: int = 900, dark: bool = False) -> None:
        """Opens a file and waits until it is there."""
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.call("Page.navigate", url=path.resolve().as_uri())
        until = time.monotonic() + DEADLINE_S
        while self.run("document.readyState") != "complete" or self.run("location.href") == "about:blank":
            if time.monotonic() > until:
                raise BrowserError(f"{path} was not loaded within {DEADLINE_S:.0f} s")
            time.sleep(0.05)

    def run(self, script: str) -> Any:
        """The value of a JavaScript expression in the page."""
        reply = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in reply:
            raise BrowserError(f"{script}: {reply['exceptionDetails']}")
        return reply["result"].get("value")

    def box(self, selector: str) -> tuple[float, float, float, float]:
        """Left, top, width and height of the first element, scrolled into view."""
        found = self.run(
            f"(() => {{ const e = document.querySelector({json.dumps(selector)}); if (!e) return null;"
            "e.scrollIntoView({block: 'center', behavior: 'instant'}); const b = e.getBoundingClientRect();"
            "return [b.left, b.top, b.width, b.height]; })()"
        )
        if found is None:
            raise BrowserError(f"no element {selector}")
        left, top, width, height = found
        return left, top, width, height

    def point(self, selector: str, *, across: float = 0.5) -> None:
        """Moves the pointer onto an element."""
        left, top, width, height = self.box(selector)
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=left + across * width, y=top + height / 2)

    def click(self, selector: str) -> None:
        """A real click, at the middle of the element."""
        left, top, width, height = self.box(selector)
        where = {"x": left + width / 2, "y": top + min(height / 2, 12)}
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, button="left", clickCount=1, **where)

    def picture(self, path: Path, *, whole: bool = True) -> None:
        """Saves a PNG of the page, all of it or what is in view."""
        shot = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        if whole:
            size = self.call("Page.getLayoutMetrics")["cssContentSize"]
            clip = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
            shot = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True, clip=clip)
        path.write_bytes(base64.b64decode(shot["data"]))

    def pdf(self, path: Path) -> None:
        """Prints the page."""
        path.write_bytes(base64.b64decode(self.call("Page.printToPDF", printBackground=True)["data"]))


@contextmanager
def browser(profile: Path) -> Iterator[Page]:
    """A browser with an empty profile in the folder ``profile``; it ends with the context."""
    assert CHROMIUM is not None, "no Chromium on PATH: apt-get install chromium"
    commands, write = os.pipe()
    read, replies = os.pipe()

    process = subprocess.Popen(
        [
            # The browser reads commands from descriptor 3 and writes replies to 4; either may be one of ours.
            *("bash", "-c", f'exec "$@" 30<&{commands} 31>&{replies} 3<&30 4>&31', "browser"),
            CHROMIUM,
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--no-first-run",
            "--hide-scrollbars",
            f"--user-data-dir={profile}",
            "--remote-debugging-pipe",
        ],
        pass_fds=(commands, replies),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(commands)
    os.close(replies)
    try:
        page = Page(write, read)
        page.attach()
        yield page
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        os.close(write)
        os.close(read)
