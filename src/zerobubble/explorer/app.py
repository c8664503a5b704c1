"""What the server answers: the page, and the package's functions as JSON. Requests are bounded; a refusal is a sentence with its field."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import lru_cache
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.middleware import Middleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from zerobubble.errors import ParseError, ZeroBubbleError, parsed_json
from zerobubble.explorer.answer import Answer, answer, answer_to_dict
from zerobubble.explorer.forms import FORMS, command, python_lines, write_form
from zerobubble.explorer.page import content_policy, explorer_html
from zerobubble.explorer.question import MOST_TEXT, FieldError, Question, read_question
from zerobubble.explorer.searching import BusyError, Searches, read_search
from zerobubble.explorer.workshop import BLOCK_FORMS, BlockQuestion, Made, made_to_dict, make_block, read_block_question, write_block_form

MOST_BYTES = 2 * MOST_TEXT + 100_000
"""The most bytes of a request: two files and the fields."""
KEPT = 16
"""Answers that are kept, for what is saved of them."""

Asked = TypeVar("Asked", Question, BlockQuestion)
Endpoint = Callable[[Request], Awaitable[Response]]


class RequestTooLargeError(ZeroBubbleError):
    """A request has more bytes than the server takes."""


def make_app(hosts: list[str]) -> Starlette:
    """The application, which answers requests to these `hosts` alone, so that no page of another name can reach it."""
    answered = lru_cache(KEPT)(answer)
    made = lru_cache(KEPT)(make_block)
    searches = Searches()
    of_answers = {name: form.media_type for name, form in FORMS.items()}
    of_blocks = {name: form.media_type for name, form in BLOCK_FORMS.items()}
    routes = [
        Route("/", _page),
        Route("/api/timeline", _told(lambda question: _shown(answered(question)), read_question), methods=["POST"]),
        Route("/api/saved/{form}", _saved(answered, read_question, write_form, of_answers), methods=["POST"]),
        Route("/api/workshop", _told(lambda question: _block_shown(made(question)), read_block_question), methods=["POST"]),
        Route("/api/workshop/saved/{form}", _saved(made, read_block_question, write_block_form, of_blocks), methods=["POST"]),
        Route("/api/search", _searched(searches), methods=["POST"]),
        Route("/api/search/{number:int}/stop", _stopped(searches), methods=["POST"]),
    ]
    middleware = [Middleware(TrustedHostMiddleware, allowed_hosts=hosts), Middleware(GZipMiddleware, minimum_size=10_000)]
    return Starlette(routes=routes, middleware=middleware)


async def _page(request: Request) -> Response:
    html = explorer_html()
    return HTMLResponse(html, headers={"Content-Security-Policy": content_policy(html), "Cache-Control": "no-store"})


def _shown(made: Answer) -> Response:
    lines = {"command": command(made), "python": python_lines(made)}
    return JSONResponse({**answer_to_dict(made), **lines}, headers={"Cache-Control": "no-store"})


def _block_shown(made: Made) -> Response:
    return JSONResponse(made_to_dict(made), headers={"Cache-Control": "no-store"})


def _told(respond: Callable[[Asked], Response], read: Callable[[Any], Asked]) -> Endpoint:
    """An endpoint that reads a question and has it answered beside the other requests; a refusal is JSON with its field."""

    async def endpoint(request: Request) -> Response:
        try:
            question = read(await read_json(request))
            return await run_in_threadpool(respond, question)
        except ZeroBubbleError as error:
            return refusal(error)

    return endpoint


def _saved(
    made: Callable[[Asked], Any], read: Callable[[Any], Asked], write: Callable[[Any, str], str], media_types: dict[str, str]
) -> Endpoint:
    """An endpoint that writes what is made of a question in the form that its path names; `write` refuses a form that there is not."""

    async def endpoint(request: Request) -> Response:
        name = request.path_params["form"]

        def respond(question: Asked) -> Response:
            text = write(made(question), name)
            return Response(text, media_type=media_types[name], headers={"Cache-Control": "no-store"})

        return await _told(respond, read)(request)

    return endpoint


def _searched(searches: Searches) -> Endpoint:
    """An endpoint that begins a search and tells its news until it ends, or nobody listens."""

    async def endpoint(request: Request) -> Response:
        try:
            question = read_search(await read_json(request))
            searches.require_room()
        except ZeroBubbleError as error:
            return refusal(error)
        return StreamingResponse(searches.events(question), media_type="text/event-stream", headers={"Cache-Control": "no-store"})

    return endpoint


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
            raise RequestTooLargeError(f"the request has more than {MOST_BYTES:,} bytes, which is the most that the server takes")
    try:
        return parsed_json(body.decode())
    except UnicodeDecodeError:
        raise ParseError("the request is not UTF-8 text") from None


def refusal(error: ZeroBubbleError) -> JSONResponse:
    """The answer to a question that cannot be answered."""
    statuses = {RequestTooLargeError: 413, FieldError: 422, BusyError: 503}
    status = statuses.get(type(error), 400)
    field = error.field if isinstance(error, FieldError) else ""
    return JSONResponse({"error": " ".join(str(error).split()), "field": field}, status_code=status)
