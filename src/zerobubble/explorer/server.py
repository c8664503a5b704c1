"""The server of `zerobubble explore`: bound before its address is told, ended by Ctrl-C."""

from __future__ import annotations

import socket
from collections.abc import Callable
from contextlib import closing, suppress
from types import ModuleType

from zerobubble.errors import InputError

ANY_HOST = ("", "0.0.0.0", "::")
LOOPBACK = ["127.0.0.1", "localhost", "::1"]
GRACE_S = 2
"""Seconds that requests have to end when the server does."""


def serve(host: str, port: int, tell: Callable[[str], None]) -> None:
    """Serve the explorer until Ctrl-C; `tell` hears the address once it can be opened.

    Raises `InputError` for an address that cannot be used, and where the server's libraries are missing.
    """
    uvicorn = _server_library()
    from zerobubble.explorer.app import make_app

    with closing(_bound(host, port)) as listening:
        app = make_app(["*"] if host in ANY_HOST else sorted({host, *LOOPBACK}))
        settings = uvicorn.Config(app, log_level="warning", access_log=False, timeout_graceful_shutdown=GRACE_S, ws="none")
        server = uvicorn.Server(settings)
        tell(_address(host, listening.getsockname()[1]))
        with suppress(KeyboardInterrupt):  # which uvicorn raises again when it has ended
            server.run(sockets=[listening])


def _server_library() -> ModuleType:
    try:
        import starlette  # noqa: F401 - both are in one extra
        import uvicorn
    except ModuleNotFoundError as error:
        if error.name not in ("starlette", "uvicorn"):
            raise
        raise InputError("zerobubble explore needs starlette and uvicorn: pip install 'zerobubble[explore]'") from error
    return uvicorn


def _bound(host: str, port: int) -> socket.socket:
    """A socket that listens at the address."""
    try:
        family = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        listening = socket.socket(family[0], socket.SOCK_STREAM)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(family[4])
        listening.listen(128)
    except OSError as error:
        raise InputError(
            f"cannot listen on {host} port {port}: {error.strerror}; give another --port, or 0 for any that is free"
        ) from error
    return listening


def _address(host: str, port: int) -> str:
    shown = "127.0.0.1" if host in ANY_HOST else f"[{host}]" if ":" in host else host
    return f"http://{shown}:{port}/"
