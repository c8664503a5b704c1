"""Checks every request: refuses unknown names of the server and pages of other origins, and detects clients that disconnect.

Pages are sent with a policy that lets them run their own script only.
"""

from __future__ import annotations

import re
import socket
from base64 import b64encode
from contextlib import suppress
from hashlib import sha256
from ipaddress import ip_address
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect
from starlette.responses import HTMLResponse, JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send


class RequestGuard:
    """Refuses requests that no page of this server sends, before anything is read or begun.

    - Host: an address, `localhost`, the name of this machine or one of `names`. Any other name may be an attacker's that resolves to this
      server; an address needs no such name, and is safe.
    - Origin of a POST: the server's own. Programs send none.
    - Content-Type of a POST: application/json, which a page of another origin cannot send without asking first.
    """

    def __init__(self, app: ASGIApp, names: tuple[str, ...]) -> None:
        self._app = app
        self._names = {name.lower() for name in (*names, "localhost", socket.gethostname())}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        refused = self._refused(scope) if scope["type"] == "http" else None
        with suppress(ClientDisconnect):  # in the middle of its request: there is nobody to answer
            await (refused or self._app)(scope, receive, send)

    def _refused(self, scope: Scope) -> JSONResponse | None:
        headers = Headers(scope=scope)
        host = headers.get("host", "")
        if not self._is_own(host):
            return _refusal(400, f"this server does not answer for {host!r:.80}: open it by its address, or name it by --host")
        if scope["method"] != "POST":
            return None
        if (origin := headers.get("origin")) is not None and _netloc(origin) != host.lower():
            return _refusal(403, f"a page of {origin!r:.80} cannot ask this server: open the server's own page at http://{host:.80}/")
        if headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
            return _refusal(415, "send the request as JSON, with the header Content-Type: application/json")
        return None

    def _is_own(self, host: str) -> bool:
        try:
            name = urlsplit(f"//{host}").hostname or ""
        except ValueError:
            return False
        return name in self._names or _is_address(name)


def _netloc(origin: str) -> str:
    """Host and port of an origin; empty for `null` and for malformed ones."""
    try:
        return urlsplit(origin).netloc.lower()
    except ValueError:
        return ""


def _is_address(name: str) -> bool:
    try:
        ip_address(name)
    except ValueError:
        return False
    return True


def _refusal(status: int, sentence: str) -> JSONResponse:
    return JSONResponse({"error": sentence, "field": ""}, status_code=status)


def page_response(html: str) -> HTMLResponse:
    """The answer with a page, which a browser then lets run its own script and ask its own server, and nothing else."""
    source = re.findall(r'<script type="module">(.*?)</script>', html, re.DOTALL)[0]
    digest = b64encode(sha256(source.encode()).digest()).decode()
    sources = f"script-src 'sha256-{digest}'; style-src 'unsafe-inline'; img-src data: blob:; connect-src 'self'"
    policy = f"default-src 'none'; {sources}; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    return HTMLResponse(html, headers={"Content-Security-Policy": policy, "Cache-Control": "no-store"})
