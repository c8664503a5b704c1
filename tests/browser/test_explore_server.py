"""The server of `zerobubble explore`: which clients it answers, its limits on running work and caches, and its timeouts."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from http.client import HTTPConnection
from subprocess import PIPE
from urllib.parse import urlsplit

import pytest

from tests.browser.explorer import serving
from zerobubble.explorer import app, connections
from zerobubble.explorer.answer import Answer, answer
from zerobubble.explorer.app import make_app
from zerobubble.explorer.kept import AnswerCache
from zerobubble.explorer.places import BusyError, Places
from zerobubble.explorer.question import Question
from zerobubble.explorer.searching import MOST_SEARCHES
from zerobubble.explorer.server import make_server

EVERYWHERE = ["0.0.0.0", "::", "", "0"]
JSON = {"Content-Type": "application/json"}


@contextmanager
def in_process(host: str = "127.0.0.1") -> Iterator[int]:
    """The server in a thread, whose limits a test can change; gives its port."""
    server = make_server(make_app, host)
    with socket.create_server((host, 0)) as listening:
        thread = threading.Thread(target=server.run, args=([listening],))
        thread.start()
        yield int(listening.getsockname()[1])
        server.should_exit = True
        thread.join(60)


def status(port: int, headers: dict[str, str], path: str = "timeline", body: str = "{}") -> int:
    with closing(HTTPConnection("127.0.0.1", port, timeout=300)) as connection:
        connection.request("POST", f"/api/{path}", body, headers)
        response = connection.getresponse()
        response.read()
        return response.status


def test_only_the_own_page_and_programs_are_answered() -> None:
    with in_process() as port:
        assert status(port, JSON) == 200
        assert status(port, {**JSON, "Origin": f"http://127.0.0.1:{port}"}) == 200
        assert status(port, {"Content-Type": "application/json; charset=utf-8", "Host": f"[::1]:{port}"}) == 200
        for path in ("timeline", "workshop", "search", "search/1/stop", "saved/svg"):
            assert status(port, {**JSON, "Origin": "http://evil.example"}, path) == 403
            assert status(port, {**JSON, "Origin": f"http://127.0.0.1:{port + 1}"}, path) == 403
            assert status(port, {**JSON, "Origin": "null"}, path) == 403
            assert status(port, {"Content-Type": "text/plain"}, path) == 415
            assert status(port, {}, path) == 415
            assert status(port, {**JSON, "Host": f"evil.example:{port}"}, path) == 400


@pytest.mark.sweep
@pytest.mark.parametrize("host", [*EVERYWHERE, "::1"])
def test_every_address_can_be_opened_and_others_are_warned_of(host: str) -> None:
    if ":" in host and not socket.has_ipv6:
        pytest.skip("no IPv6 here")
    with serving("--host", host, warnings=host in EVERYWHERE) as server:
        assert server.post("timeline", "{}")[0] == 200
        assert server.post("timeline", "{}", host="evil.example")[0] == 400


def test_searches_of_one_moment_do_not_pass_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, release = [], threading.Event()

    async def events(searches: object, number: int, question: object) -> object:
        begun.append(number)
        while not release.is_set():
            yield ": waiting\n\n"
            await asyncio.sleep(0.01)

    monkeypatch.setattr("zerobubble.explorer.searching.Searches.events", events)
    with in_process() as port, ThreadPoolExecutor(20) as threads:
        asked = [threads.submit(status, port, JSON, "search") for _ in range(20)]
        while sum(each.done() for each in asked) < 20 - MOST_SEARCHES:
            time.sleep(0.01)
        release.set()
        assert sorted(each.result() for each in asked) == [200] * MOST_SEARCHES + [503] * (20 - MOST_SEARCHES)
        assert len(begun) == MOST_SEARCHES
        assert status(port, JSON, "search") == 200


def test_places_are_counted_as_they_are_taken() -> None:
    places = Places(1, "full", "wait")
    with places.one(), pytest.raises(BusyError):
        places.take()
    assert places.take() == 2


def test_questions_beyond_the_limit_are_refused_with_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    release = threading.Event()

    def waited(question: Question) -> Answer:
        release.wait(300)
        return answer(question)

    monkeypatch.setattr(app, "answer", waited)
    monkeypatch.setattr(app, "MOST_REQUESTS", 3)
    with in_process() as port, ThreadPoolExecutor(8) as threads:
        asked = [threads.submit(status, port, JSON, "saved/none") for _ in range(8)]
        while sum(each.done() for each in asked) < 5:
            time.sleep(0.01)
        release.set()
        assert sorted(each.result() for each in asked) == [422] * 3 + [503] * 5


ANSWERS_FOREVER = """
from zerobubble.cli import main
from zerobubble.explorer import app

def answer(question):
    print("begun", flush=True)
    while True:
        pass

app.answer = answer
main(["explore", "--port", "0", "--no-browser", "--json"])
"""


def test_ctrl_c_does_not_wait_for_an_answer() -> None:
    with ThreadPoolExecutor(1) as threads:
        process = subprocess.Popen([sys.executable, "-c", ANSWERS_FOREVER], stdout=PIPE, stderr=PIPE, text=True)
        assert process.stdout is not None
        port = urlsplit(json.loads(process.stdout.readline())["address"]).port
        assert port is not None
        asked = threads.submit(status, port, JSON)
        assert process.stdout.readline() == "begun\n"
        process.send_signal(signal.SIGINT)
        try:
            _, errors = process.communicate(timeout=60)
        finally:
            process.kill()
        assert asked.result() == 503
        assert process.returncode == 0
        assert "Traceback" not in errors


def test_the_oldest_answers_are_released() -> None:
    made = []
    kept = AnswerCache(lambda question: made.append(question) or question, int, most=10)
    for question in (4, 5, 4, 3, 4, 5, 11, 4):
        assert kept(question) == question
        assert kept.bytes <= 10
    assert made == [4, 5, 3, 5, 11, 4]


def test_a_request_that_does_not_arrive_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "ARRIVAL_S", 0.2)
    head = b"POST /api/timeline HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    with in_process() as port:
        for part, answer in ((b"", b""), (head, b"408"), (head + b"Content-Length: 9\r\n\r\n{", b"408")):
            with socket.create_connection(("127.0.0.1", port), 300) as client:
                client.sendall(part)
                assert client.recv(100)[9:12] == answer
        assert status(port, JSON) == 200


@pytest.mark.long
def test_a_client_that_leaves_in_its_upload_leaves_no_traceback() -> None:
    with serving() as server:
        for path in ("timeline", "search"):
            with socket.create_connection((server.host, server.port), 300) as client:
                client.sendall(f"POST /api/{path} HTTP/1.1\r\nHost: localhost\r\n".encode())
                client.sendall(b"Content-Type: application/json\r\nContent-Length: 1000\r\n\r\n{")
        assert server.post("timeline", "{}")[0] == 200
