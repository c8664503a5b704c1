"""The endpoints of the server: the page, and the package's functions as JSON.

Requests are bounded. A refusal has a sentence and the field at fault.
"""

from __future__ import annotations

from asyncio import CancelledError
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from anyio import CapacityLimiter
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from zerobubble.errors import ParseError, ZeroBubbleError, parsed_json
from zerobubble.explorer.answer import Answer, answer, answer_to_dict
from zerobubble.explorer.forms import FORMS, command, file_names, needed_forms, python_lines, write_form
from zerobubble.explorer.guard import RequestGuard, page_response
from zerobubble.explorer.kept import OVERHEAD_BYTES, PASS_BYTES, AnswerCache
from zerobubble.explorer.offers import offers
from zerobubble.explorer.page import explorer_html
from zerobubble.explorer.places import BusyError, Places
from zerobubble.explorer.question import BY_COMMAND, MOST_TEXT, FieldError, Question, faults_to_list, read_question
from zerobubble.explorer.searching import Searches, read_search
from zerobubble.explorer.threads import run_in_daemon
from zerobubble.explorer.workshop import (
    BLOCK_FORMS,
    BlockQuestion,
    BuiltBlock,
    block_to_dict,
    make_block,
    read_block_question,
    write_block_form,
)

MOST_BYTES = 2 * MOST_TEXT + 100_000
"""The most bytes of a request: two files and the fields."""
MOST_REQUESTS = 16
"""Questions that are read and answered at a time."""
MOST_WORKING = 2
"""The number of concurrent answers: one of the largest takes 200 MB while it is made."""

Asked = TypeVar("Asked", Question, BlockQuestion)
Endpoint = Callable[[Request], Awaitable[Response]]


class RequestTooLargeError(ZeroBubbleError):
    """A request has more bytes than the server takes."""


@dataclass
class Desk:
    """Reads and answers questions, a limited number at a time."""

    places: Places = field(
        default_factory=lambda: Places(MOST_REQUESTS, f"{MOST_REQUESTS} requests are being answered already", "wait for one of them")
    )
    working: CapacityLimiter = field(default_factory=lambda: CapacityLimiter(MOST_WORKING))


def make_app(names: tuple[str, ...]) -> Starlette:
    """The application, which answers requests to its address, or to one of these `names`, from its own page or from programs."""
    desk, searches = Desk(), Searches()
    answered = AnswerCache(answer, _answer_bytes)
    blocks = AnswerCache(make_block, _block_bytes)
    of_answers = {name: form.media_type for name, form in FORMS.items()}
    of_blocks = {name: form.media_type for name, form in BLOCK_FORMS.items()}
    post = partial(Route, methods=["POST"])
    routes = [
        Route("/", _page),
        post("/api/timeline", _answered(desk, lambda question: _shown(answered(question)), read_question)),
        post("/api/offers", _answered(desk, lambda question: _fresh({"offers": list(offers(answered(question)))}), read_question)),
        post("/api/saved/{form}", _saved(desk, answered, read_question, write_form, of_answers)),
        post("/api/workshop", _answered(desk, lambda question: _fresh(block_to_dict(blocks(question))), read_block_question)),
        post("/api/workshop/saved/{form}", _saved(desk, blocks, read_block_question, write_block_form, of_blocks)),
        post("/api/search", _searched(desk, searches)),
        post("/api/search/{number:int}/stop", _stopped(searches)),
    ]
    return Starlette(routes=routes, middleware=[Middleware(RequestGuard, names=names), Middleware(GZipMiddleware, minimum_size=10_000)])


def _answer_bytes(played: Answer) -> int:
    question = played.question
    drawn = 2 if question.versus else 1
    return OVERHEAD_BYTES + PASS_BYTES * drawn * sum(map(len, played.timeline.rows)) + len(question.file) + len(question.costs)


def _block_bytes(block: BuiltBlock) -> int:
    layouts = () if block.steps is None else block.steps
    passes = sum(len(row) for layout in layouts for row in layout.timeline.rows)
    return OVERHEAD_BYTES + PASS_BYTES * passes + len(block.question.text)


async def _page(request: Request) -> Response:
    return page_response(explorer_html())


def _shown(played: Answer) -> Response:
    lines = {"command": command(played), "python": python_lines(played), "needs": needed_forms(played), "files": file_names(played)}
    return _fresh({**answer_to_dict(played), **lines})


def _fresh(content: dict[str, Any]) -> Response:
    return JSONResponse(content, headers={"Cache-Control": "no-store"})


def _answered(desk: Desk, respond: Callable[[Asked], Response], read: Callable[[Any], Asked]) -> Endpoint:
    """An endpoint that reads a question and has it answered in a thread; a refusal is JSON with its field."""

    async def endpoint(request: Request) -> Response:
        try:
            with desk.places.one():
                question = read(await read_json(request))
                return await run_in_daemon(desk.working, respond, question)
        except ZeroBubbleError as error:
            return refusal(error)
        except CancelledError:  # Ctrl-C
            return refusal(BusyError("the server ends before it has answered", remedy="start it again"))

    return endpoint


def _saved(
    desk: Desk,
    make: Callable[[Asked], Any],
    read: Callable[[Any], Asked],
    write: Callable[[Any, str], str],
    media_types: dict[str, str],
) -> Endpoint:
    """An endpoint that answers a question in the form that its path names; `write` refuses an unknown form."""

    async def endpoint(request: Request) -> Response:
        name = request.path_params["form"]

        def respond(question: Asked) -> Response:
            text = write(make(question), name)
            return Response(text, media_type=media_types[name], headers={"Cache-Control": "no-store"})

        return await _answered(desk, respond, read)(request)

    return endpoint


def _searched(desk: Desk, searches: Searches) -> Endpoint:
    """An endpoint that starts a search and streams its news until it ends or the client disconnects."""

    async def endpoint(request: Request) -> Response:
        try:
            with desk.places.one():
                question = read_search(await read_json(request))
            number = searches.places.take()
        except ZeroBubbleError as error:
            return refusal(error)
        return News(searches, number, question)

    return endpoint


class News(StreamingResponse):
    """Streams the progress of a search. The search ends and frees its place when this response ends, even if the response never began."""

    def __init__(self, searches: Searches, number: int, question: dict[str, Any]) -> None:
        self._events, self._places, self._number = searches.events(number, question), searches.places, number
        super().__init__(self._events, media_type="text/event-stream", headers={"Cache-Control": "no-store"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with aclosing(self._events):
                await super().__call__(scope, receive, send)
        finally:
            self._places.leave(self._number)


def _stopped(searches: Searches) -> Endpoint:
    async def endpoint(request: Request) -> Response:
        return JSONResponse({"stopped": await searches.stop(request.path_params["number"])})

    return endpoint


async def read_json(request: Request) -> Any:
    """The JSON in the body of the request; raises `RequestTooLargeError` beyond `MOST_BYTES`, and `ParseError` for what is no JSON."""
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > MOST_BYTES:
            raise RequestTooLargeError(
                "the request has more than {most:,} bytes, which is the most that the server takes", most=MOST_BYTES, remedy=BY_COMMAND
            )
    try:
        return parsed_json(body.decode())
    except UnicodeDecodeError:
        raise ParseError("the request is not UTF-8 text") from None


def refusal(error: ZeroBubbleError) -> JSONResponse:
    """The answer to a question that cannot be answered."""
    statuses = {RequestTooLargeError: 413, FieldError: 422, BusyError: 503}
    faults = faults_to_list([error if isinstance(error, FieldError) else FieldError("", str(error), str(error.fields.get("remedy", "")))])
    return JSONResponse(
        {"error": faults[0]["error"], "field": faults[0]["field"], "faults": faults}, status_code=statuses.get(type(error), 400)
    )
