"""The endpoints of `zerobubble watch`: the page, and the state of the runs as JSON. Run folders are only read."""

from __future__ import annotations

import time
from collections.abc import Sequence
from threading import Lock
from typing import Any

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.middleware import Middleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from zerobubble.display import file_titles
from zerobubble.errors import ZeroBubbleError
from zerobubble.explorer.app import refusal
from zerobubble.explorer.guard import RequestGuard, page_response
from zerobubble.watch.figures import figures
from zerobubble.watch.page import page_parts, timeline_parts, watch_html
from zerobubble.watch.run import WatchedRun

FRESH_S = 0.5
"""Seconds for which the state of the runs is not read again, however many pages ask."""


class WatchApp:
    """The runs of a page, read when a page asks."""

    def __init__(self, runs: Sequence[WatchedRun]) -> None:
        self._runs = runs
        for run, title in zip(runs, file_titles([run.path for run in runs]), strict=True):
            run.title = title
        self._lock = Lock()
        self._read_at = 0.0
        self._states: list[dict[str, Any]] = []
        self._parts: dict[str, Any] = {}
        self._timeline: tuple[str, dict[str, Any] | None] = ("", None)

    def states(self) -> list[dict[str, Any]]:
        """Returns the figures of each run."""
        with self._lock:
            self._refresh()
            return self._states

    def parts(self, drawn: str) -> dict[str, Any]:
        """Returns the parts of the page. The timeline is left out if it is the one that the page has `drawn`."""
        with self._lock:
            self._refresh()
            key, timeline = self._timeline
            return {**self._parts, "key": key, "timeline": None if drawn == key else timeline}

    def _refresh(self) -> None:
        if time.monotonic() - self._read_at < FRESH_S:
            return
        for run in self._runs:
            run.refresh()
        self._states = [figures(run) for run in self._runs]
        self._parts = page_parts(self._runs, self._states)
        key = " ".join(f"{run.details_step}" for run in self._runs)
        if key != self._timeline[0]:
            self._timeline = key, timeline_parts(self._runs)
        self._read_at = time.monotonic()


def make_watch_app(runs: Sequence[WatchedRun], names: tuple[str, ...]) -> Starlette:
    """Returns the application, which answers requests to its address, or to one of these `names`."""
    watch = WatchApp(runs)

    async def page(request: Request) -> Response:
        return page_response(watch_html())

    async def parts(request: Request) -> Response:
        return await _answer(watch.parts, request.query_params.get("drawn", ""))

    async def states(request: Request) -> Response:
        return await _answer(watch.states)

    routes = [Route("/", page), Route("/api/parts", parts), Route("/api/state", states)]
    return Starlette(routes=routes, middleware=[Middleware(RequestGuard, names=names), Middleware(GZipMiddleware, minimum_size=10_000)])


async def _answer(read: Any, *args: Any) -> Response:
    try:
        return JSONResponse(await run_in_threadpool(read, *args), headers={"Cache-Control": "no-store"})
    except ZeroBubbleError as error:
        return refusal(error)
