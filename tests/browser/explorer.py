"""The explorer as its tests have it: the command that serves, and its page in a browser."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPConnection
from typing import Any
from urllib.parse import urlsplit

from tests.browser.chromium import Browser

REFUSED = "status of 4"
"""What the console says of an answer that is a refusal."""
READY = "document.documentElement.dataset.state === 'ready'"


class Server:
    """The command, serving; requests are sent to it as the page does."""

    def __init__(self, *options: str) -> None:
        command = [sys.executable, "-m", "zerobubble", "explore", "--port", "0", "--no-browser", "--json", *options]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.address: str = json.loads(self.process.stdout.readline())["address"]
        address = urlsplit(self.address)
        assert address.hostname is not None
        assert address.port is not None
        self.host, self.port = address.hostname, address.port

    def post(self, path: str, body: str, host: str | None = None) -> tuple[int, str]:
        connection = HTTPConnection(self.host, self.port, timeout=300)
        headers = {"Content-Type": "application/json"} | ({} if host is None else {"Host": host})
        connection.request("POST", f"/api/{path}", body, headers)
        response = connection.getresponse()
        status, text = response.status, response.read().decode()
        connection.close()
        return status, text

    def refuses(self, question: Any) -> tuple[int, str, str]:
        status, text = self.post("timeline", json.dumps(question))
        data = json.loads(text)
        return status, data["field"], data["error"]


@contextmanager
def serving(*options: str, warnings: int = 0) -> Iterator[Server]:
    """The server, which ends with the block as Ctrl-C ends it, after so many lines of `warnings`."""
    started = Server(*options)
    yield started
    started.process.send_signal(signal.SIGINT)
    output, errors = started.process.communicate(timeout=300)
    assert (output, len(errors.splitlines())) == ("", warnings), (output, errors)
    assert started.process.returncode == 0


class Page:
    """The page, opened with a link."""

    def __init__(self, browser: Browser, server: Server, link: str = "#link=1", width: int = 1280) -> None:
        self.browser, self.server = browser, server
        browser.visit(server.address + link, server.address, width)

    def put(self, field: str, value: str, form: str = "q") -> None:
        """Write into a field, and wait for the answer."""
        self.browser.run(
            f"(() => {{ const e = document.getElementById('{form}-{field}'); e.value = {json.dumps(value)};"
            "e.dispatchEvent(new Event(e.tagName === 'SELECT' ? 'change' : 'input')); })()"
        )
        self.browser.until(READY)

    def text(self, selector: str) -> str:
        return str(self.browser.run(f"document.querySelector({json.dumps(selector)}).innerText"))

    @property
    def boxes(self) -> int:
        self.browser.settle()
        return int(self.browser.run("document.querySelector('.stage').dataset.boxes"))

    @property
    def link(self) -> str:
        return str(self.browser.run("location.hash"))

    @property
    def errors(self) -> list[str]:
        return [error for error in self.browser.errors if REFUSED not in error]
