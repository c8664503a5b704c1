"""The server of `zerobubble explore` and `zerobubble watch`: bound before its address is announced, stopped by Ctrl-C."""

from __future__ import annotations

import socket
from collections.abc import Callable
from contextlib import ExitStack, closing, suppress
from errno import EADDRNOTAVAIL
from importlib.util import find_spec
from ipaddress import ip_address
from typing import TYPE_CHECKING

from zerobubble.errors import InputError
from zerobubble.installing import install

if TYPE_CHECKING:
    import uvicorn
    from starlette.applications import Starlette

EXTRA = "explore"
"""The extra of this package that installs what the server imports."""
GRACE_S = 1
"""Seconds that requests have to end when the server does."""


MakeApp = Callable[[tuple[str, ...]], "Starlette"]
"""Makes an application that answers requests to its address, or to one of these names."""


def serve(make_app: MakeApp, host: str, port: int, announce: Callable[[str, bool], None]) -> None:
    """Serve an application until Ctrl-C; once it accepts connections, `announce` gets its address and whether other machines can reach it.

    Raises `InputError` for an address that cannot be used.
    """
    with closing(_bound(host, port)) as listening:
        server = make_server(make_app, host)
        announce(_address(host, listening), not ip_address(_bound_to(listening)).is_loopback)
        with suppress(KeyboardInterrupt):  # which uvicorn re-raises after it has shut down
            server.run(sockets=[listening])


def make_server(make_app: MakeApp, host: str) -> uvicorn.Server:
    """The server of an application, which answers to the name `host`, too."""
    import uvicorn

    from zerobubble.explorer.connections import TimedConnection

    app = make_app((host,) if host else ())
    settings = uvicorn.Config(
        app,
        http=TimedConnection,
        ws="none",
        log_level="error",  # warnings are about what clients send, which is no reason to write to the terminal
        access_log=False,
        timeout_graceful_shutdown=GRACE_S,
    )
    return uvicorn.Server(settings)


def require_libraries(command: str) -> None:
    """Raise `InputError` without the libraries of the server, which applications import."""
    if not (find_spec("starlette") and find_spec("uvicorn")):
        raise InputError(f"zerobubble {command} needs starlette and uvicorn", remedy=install(EXTRA))


def _bound(host: str, port: int) -> socket.socket:
    """A socket that listens at the address."""
    try:
        family = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        with ExitStack() as stack:
            listening = stack.enter_context(closing(socket.socket(family[0], socket.SOCK_STREAM)))
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listening.bind(family[4])
            listening.listen(128)
            stack.pop_all()
            return listening
    except OSError as error:
        raise InputError(
            "cannot listen on {host} port {port}: {reason}",
            host=host,
            port=port,
            reason=str(error.strerror),
            remedy=_remedy_for(error),
        ) from error


def _remedy_for(error: OSError) -> str:
    """Returns the option to change if an address cannot be used: the host if it is unknown or belongs to another machine, else the port."""
    if isinstance(error, socket.gaierror) or error.errno == EADDRNOTAVAIL:
        return "give another --host, such as 127.0.0.1"
    return "give another --port, or 0 for any that is free"


def _bound_to(listening: socket.socket) -> str:
    """The address that the socket is bound to, without the zone of an IPv6 address."""
    return str(listening.getsockname()[0]).partition("%")[0]


def _address(host: str, listening: socket.socket) -> str:
    """The address to open: that of loopback where the socket listens on all."""
    shown, port = host, listening.getsockname()[1]
    if ip_address(_bound_to(listening)).is_unspecified:
        shown = "::1" if listening.family == socket.AF_INET6 else "127.0.0.1"
    return f"http://{f'[{shown}]' if ':' in shown else shown}:{port}/"
