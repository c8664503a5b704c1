"""A Chromium without a window, driven over its debugging pipe: real pointer, touch and keys, sizes, themes, screenshots, console errors."""

from __future__ import annotations

import fcntl
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from base64 import b64decode
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-extensions",
    "--no-first-run",
    "--hide-scrollbars",
    "--remote-debugging-pipe",
)
WAIT = 240.0
"""Seconds after which a browser that does not answer is taken for hung."""


class Browser:
    """One page. `errors` are the exceptions, error messages of the console and failed requests since it was opened."""

    def __init__(self, inbox: int, outbox: int) -> None:
        self._inbox, self._outbox = inbox, outbox
        self._rest, self._number, self._session = b"", 0, ""
        self.errors: list[str] = []
        self._server = "file:"
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.send(f"{domain}.enable")

    def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters} | ({"sessionId": self._session} if self._session else {})
        os.write(self._outbox, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == self._number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return dict(answer["result"])

    def _read(self) -> dict[str, Any]:
        limit = time.monotonic() + WAIT
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._inbox], [], [], max(0.0, limit - time.monotonic()))
            assert ready, f"the browser said nothing for {WAIT} s; the page's errors so far: {self.errors}"
            read = os.read(self._inbox, 1 << 20)
            assert read, "the browser ended"
            self._rest += read
        text, self._rest = self._rest.split(b"\0", 1)
        message: dict[str, Any] = json.loads(text)
        self._note(message.get("method", ""), message.get("params", {}))
        return message

    def _note(self, event: str, message: dict[str, Any]) -> None:
        if event == "Runtime.exceptionThrown":
            details = message["exceptionDetails"]
            self.errors.append(details.get("exception", {}).get("description") or details["text"])
        elif event == "Log.entryAdded" and message["entry"]["level"] == "error":
            self.errors.append(message["entry"]["text"])
        elif event == "Runtime.consoleAPICalled" and message["type"] in ("error", "warning"):
            self.errors.append(json.dumps(message["args"]))
        elif event == "Network.requestWillBeSent" and not message["request"]["url"].startswith(("data:", "blob:", "about:", self._server)):
            self.errors.append(f"the page asked for {message['request']['url']}")

    def open(self, file: Path, width: int = 1280, height: int = 900, touch: bool = False) -> None:
        """Show `file` and wait until its scripts have drawn it."""
        self.visit(file.as_uri(), "file:", width, height, touch)

    def visit(self, url: str, server: str, width: int = 1280, height: int = 900, touch: bool = False) -> None:
        """Show `url`, which may ask for what begins with `server` alone, and wait until its scripts have drawn it."""
        self._server = server
        self.send("Page.navigate", url="about:blank")  # of the page before nothing is taken for this one, not even where it is the same
        self.until("location.href === 'about:blank'")
        self.errors.clear()
        self.send("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=touch)
        self.send("Emulation.setTouchEmulationEnabled", enabled=touch)
        self.send("Page.navigate", url=url)
        self.until("document.readyState === 'complete' && document.documentElement.dataset.state === 'ready'")

    def run(self, expression: str) -> Any:
        """The value of `expression` in the page."""
        found = self.send("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def until(self, expression: str) -> None:
        limit = time.monotonic() + WAIT
        while not self.run(expression):
            assert time.monotonic() < limit, f"waited {WAIT} s for {expression}; the page's errors: {self.errors}"
            time.sleep(0.02)

    def settle(self) -> None:
        """Wait until what was asked for is drawn."""
        self.run("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")

    def mouse(self, kind: str, x: float, y: float, **further: Any) -> None:
        self.send("Input.dispatchMouseEvent", type=kind, x=x, y=y, **further)

    def point(self, x: float, y: float) -> None:
        self.mouse("mouseMoved", x, y)
        self.settle()

    def drag(self, start: tuple[float, float], stop: tuple[float, float]) -> None:
        self.mouse("mousePressed", *start, button="left", clickCount=1)
        self.mouse("mouseMoved", *stop, button="left", buttons=1)
        self.mouse("mouseReleased", *stop, button="left", clickCount=1)
        self.settle()

    def touch(self, kind: str, *points: tuple[float, float]) -> None:
        self.send("Input.dispatchTouchEvent", type=kind, touchPoints=[{"x": x, "y": y, "id": n} for n, (x, y) in enumerate(points)])
        self.settle()

    def key(self, key: str) -> None:
        text = {"text": key} if len(key) == 1 else {"text": "\r"} if key == "Enter" else {}
        self.send("Input.dispatchKeyEvent", type="keyDown", key=key, **text)
        self.send("Input.dispatchKeyEvent", type="keyUp", key=key)
        self.settle()

    def click(self, selector: str) -> None:
        """Press the mouse in the middle of an element."""
        box = self.run(
            f"(() => {{ const e = document.querySelector({json.dumps(selector)}); e.scrollIntoView({{ block: 'nearest' }});"
            "const b = e.getBoundingClientRect(); return [b.left + b.width / 2, b.top + b.height / 2]; })()"
        )
        for kind in ("mousePressed", "mouseReleased"):
            self.mouse(kind, *box, button="left", clickCount=1)
        self.settle()

    def media(self, dark: bool = False, gray: bool = False) -> None:
        self.send("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}])
        self.send("Emulation.setEmulatedVisionDeficiency", type="achromatopsia" if gray else "none")

    def screenshot(self, file: Path, whole: bool = False) -> None:
        """What the window shows, or the whole page, in the format of the file's name: PNG or WebP."""
        taken = self.send("Page.captureScreenshot", format=file.suffix.removeprefix("."), captureBeyondViewport=whole)
        file.write_bytes(b64decode(taken["data"]))


@contextmanager
def chromium() -> Iterator[Browser]:
    """A browser with an empty profile, ended with the block."""
    to_read, to_write = _pipe(), _pipe()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        shell = f'exec "$@" 3<&{to_write[0]} 4>&{to_read[1]}'
        command = ["bash", "-c", shell, "bash", str(CHROMIUM), *FLAGS, f"--user-data-dir={profile}", "about:blank"]
        silent: dict[str, Any] = {"stderr": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "env": {**os.environ, "TMPDIR": profile}}
        process = subprocess.Popen(command, pass_fds=(to_write[0], to_read[1]), **silent)
        os.close(to_write[0])
        os.close(to_read[1])
        try:
            browser = Browser(to_read[0], to_write[1])
            yield browser
        finally:
            process.kill()
            process.wait()
            os.close(to_read[0])
            os.close(to_write[1])


def _pipe() -> tuple[int, int]:
    """The ends of a pipe, numbered beyond 9, where the shell that starts the browser does not put its own over them."""
    ends = os.pipe()
    moved = [fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in ends]
    for end in ends:
        os.close(end)
    return moved[0], moved[1]
